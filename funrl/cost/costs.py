"""Costs of a part of the trainer, counted while it runs on tensors without memory.

`Tracer` stands between the program and its kernels. Weights are fake tensors: they have a shape and no numbers, and so
has whatever is computed of them. Token ids, masks and row numbers are real, because the program looks at them. The
tracer counts live bytes (every storage from its first tensor to its last), FLOPs, and what collectives send.

With `real=True` nothing is faked: the same count of a run that really computes.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

import funrl.compiled_kernels.grouped_linear
import funrl.compiled_kernels.varlen_attention
import funrl.models.routing  # noqa: F401  (these register their operators)
from funrl import trees
from funrl.compiled_kernels.latent_paged_attention import latent_paged_bytes, latent_paged_flops
from funrl.compiled_kernels.paged_attention import paged_bytes, paged_flops
from funrl.cost.hardware import Hardware, op_seconds
from funrl.cost.shape_memo import ShapeMemo, scan
from funrl.data.packing import UNIT, RowCost
from funrl.models.ring_attention import seen_pairs
from funrl.optim.base import Transformation

aten = torch.ops.aten
MEMORY_KINDS = ("weights", "optimizer", "gradients", "activations", "logits", "cache", "staging", "batch")
UPDATES = "update_"  # how the names of phases that learn begin


@functools.cache
def _results() -> dict:
    """Results of operators that all traces of this process remember: meshes and depths repeat most of them."""
    return {}


@functools.cache
def _works() -> dict:
    """Work of operators by what they are given, likewise."""
    return {}


class _Operator(NamedTuple):
    """Facts of an operator.

    Attributes:
      namespace, name: of it.
      mutable: it writes to an argument.
      by_shapes: results have shapes that no numbers of a tensor change.
      idle: what it gives are views of what it is given.
      flops: of its arguments and `out_val`; None: it has no matrix product.
    """

    namespace: str
    name: str
    mutable: bool
    by_shapes: bool
    idle: bool
    flops: Callable | None


class OperatorWork(NamedTuple):
    """Work of one call of an operator; `dtype` is that of its first result."""

    flops: float
    nbytes: float
    dtype: torch.dtype


@functools.cache
def _operator(func: Any) -> _Operator:
    namespace, _, name = func._schema.name.partition("::")
    own, packet = _FORMULAS.get(func.overloadpacket), func.overloadpacket
    flops = flop_registry.get(packet) if own is None else lambda *args, out_val, **_: own(*args)
    idle = func.is_view or all(r.alias_info and not r.alias_info.is_write for r in func._schema.returns)
    by_shapes = torch.Tag.pointwise in func.tags or func in _BY_SHAPES or namespace == "funrl"
    return _Operator(namespace, name, func._schema.is_mutable, by_shapes, idle, flops)


def _attended(q: Tensor, offsets: Tensor, window: int) -> float:
    """FLOPs of the two matrix products of `varlen_attention`: of the pairs of a token and one that it sees."""
    pairs = int(RowCost(1.0, window or None).work(offsets.diff().numpy()).sum()) / UNIT - int(offsets[-1])
    return 4 * q.shape[1] * q.shape[2] * pairs


def _ringed(q: Tensor, offsets: Tensor, first: int, source: int, window: int, *_: float) -> float:
    """FLOPs of the two matrix products of a part of ring attention: of the pairs of a token and one that it sees."""
    return 4.0 * q.shape[1] * q.shape[2] * seen_pairs(offsets, first, source, q.shape[0], window)


_FORMULAS = {  # of operators that torch has none of, or a wrong one
    aten._scaled_dot_product_flash_attention_for_cpu: lambda q, k, v, *_, **__: sdpa_flop_count(
        q.shape, (q.shape[0], q.shape[1], *k.shape[2:]), (q.shape[0], q.shape[1], *v.shape[2:])
    ),
    aten._scaled_dot_product_flash_attention_for_cpu_backward: lambda g, q, k, v, *_, **__: sdpa_backward_flop_count(
        g.shape, q.shape, (q.shape[0], q.shape[1], *k.shape[2:]), (q.shape[0], q.shape[1], *v.shape[2:])
    ),
    torch.ops.funrl.varlen_attention: lambda q, k, v, offsets, window, *_: _attended(q, offsets, window),
    torch.ops.funrl.varlen_attention_backward: lambda g, q, k, v, out, lse, offsets, window, *_: (
        2.5 * _attended(q, offsets, window)
    ),
    torch.ops.funrl.ring_part: lambda q, k, v, offsets, *how: _ringed(q, offsets, *how),
    torch.ops.funrl.ring_part_backward: lambda g, q, k, v, out, lse, offsets, *how: 2.5 * _ringed(q, offsets, *how),
    torch.ops.funrl.grouped_linear: lambda x, weight, ends: _grouped_flops(x, weight.shape[1], ends),
    torch.ops.funrl.grouped_weight: lambda grad, x, ends: _grouped_flops(x, grad.shape[1], ends),
    torch.ops.funrl.paged_attention: lambda q, k, v, keys, *rest: paged_flops(q, rest[6], keys.shape[1]),
    torch.ops.funrl.latent_paged_attention: lambda q, latent, up, cache, *rest: latent_paged_flops(
        up, cache, rest[5], rest[6]
    ),
}
_BYTES = {  # of operators that read less than all that they are given
    torch.ops.funrl.paged_attention: lambda q, k, v, keys, *rest: paged_bytes(q, keys, rest[6]),
    torch.ops.funrl.latent_paged_attention: lambda q, latent, up, cache, *rest: latent_paged_bytes(
        q, latent, up, cache, rest[5]
    ),
}


def _grouped_flops(x: Tensor, columns: int, ends: Tensor) -> float:
    """FLOPs of the rows that belong to a group; of all where it is not known which do."""
    rows = x.shape[0] if isinstance(ends, FakeTensor) else int(ends[-1])
    return 2.0 * rows * x.shape[1] * columns


class Traffic(NamedTuple):
    """Traffic of one kind of collective in one group; `nbytes` are of the larger side: the input or the result."""

    count: float
    nbytes: float


class _Message(NamedTuple):
    """A collective that is under way; `begun`: after so many seconds of kernels of the phase."""

    key: tuple[str, str]
    nbytes: float
    begun: float


@dataclass
class Costs:
    """Costs of one phase on one rank.

    Attributes:
      peaks: for each part of the phase (forward, backward, optimizer, other) the bytes by kind at the moment when their
        sum was the largest.
      flops: of matrix products and attention.
      seconds: of all kernels, each bound by arithmetic, memory or its launch; without collectives.
      traffic: by (collective, name of the process group).
      early: of `traffic`, what is begun before it is needed, so that kernels run meanwhile.
      cover: of `seconds`, those of kernels that run while some collective is under way.
    """

    peaks: dict[str, dict[str, float]] = field(default_factory=dict)
    flops: float = 0.0
    seconds: float = 0.0
    traffic: dict[tuple[str, str], Traffic] = field(default_factory=dict)
    early: dict[tuple[str, str], Traffic] = field(default_factory=dict)
    cover: float = 0.0

    @property
    def peak(self) -> dict[str, float]:
        """Bytes by kind at the worst moment of all."""
        return max(self.peaks.values(), key=lambda held: sum(held.values()), default={})

    @property
    def total(self) -> float:
        """Bytes at the worst moment."""
        return sum(self.peak.values())


def along(first: Costs, *ways: tuple[Costs, float]) -> Costs:
    """Costs extrapolated from `first`, along one line or several.

    Args:
      ways: costs one step from `first` in some direction, and how many such steps are taken.
    """
    seconds, steps = [second for second, _ in ways], [n for _, n in ways]

    def line(a: float, *ends: float) -> float:
        return a + sum((b - a) * n for b, n in zip(ends, steps, strict=True))

    def lines(*points: dict[str, float]) -> dict[str, float]:
        return {k: line(*(point.get(k, 0) for point in points)) for k in dict.fromkeys(itertools.chain(*points))}

    every = (first, *seconds)
    shared = [part for part in first.peaks if all(part in costs.peaks for costs in seconds)]

    def sent(*points: dict[tuple[str, str], Traffic]) -> dict[tuple[str, str], Traffic]:
        keys, none = dict.fromkeys(itertools.chain(*points)), Traffic(0, 0)
        return {key: Traffic(*map(line, *(point.get(key, none) for point in points))) for key in keys}

    return Costs(
        peaks={part: lines(*(costs.peaks[part] for costs in every)) for part in shared},
        flops=line(*(costs.flops for costs in every)),
        seconds=line(*(costs.seconds for costs in every)),
        traffic=sent(*(costs.traffic for costs in every)),
        early=sent(*(costs.early for costs in every)),
        cover=line(*(costs.cover for costs in every)),
    )


def times(costs: Costs, n: float) -> Costs:
    """The same phase `n` times one after the other: the peak stays."""
    traffic, early = (
        {k: Traffic(t.count * n, t.nbytes * n) for k, t in sent.items()} for sent in (costs.traffic, costs.early)
    )
    return Costs(costs.peaks, costs.flops * n, costs.seconds * n, traffic, early, costs.cover * n)


def after(first: Costs, second: Costs) -> Costs:
    """One phase after the other, as one: the higher peak and the sums."""
    peaks = {**first.peaks, **second.peaks}
    for part in peaks:
        peaks[part] = max(first.peaks.get(part, {}), second.peaks.get(part, {}), key=lambda held: sum(held.values()))
    traffic, early = dict(first.traffic), dict(first.early)
    for sent, added in ((traffic, second.traffic), (early, second.early)):
        for key, more in added.items():
            add_traffic(sent, key, *more)
    flops, seconds = first.flops + second.flops, first.seconds + second.seconds
    return Costs(peaks, flops, seconds, traffic, early, first.cover + second.cover)


def add_traffic(sent: dict[tuple[str, str], Traffic], key: tuple[str, str], count: float, nbytes: float) -> None:
    """Add messages to those of a collective and a group, in place."""
    old = sent.get(key, Traffic(0, 0))
    sent[key] = Traffic(old.count + count, old.nbytes + nbytes)


def plus(costs: Costs, kept: Mapping[str, float]) -> Costs:
    """The same phase with more bytes held all the time."""
    peaks = {part: {k: held.get(k, 0) + kept.get(k, 0) for k in {**held, **kept}} for part, held in costs.peaks.items()}
    return replace(costs, peaks=peaks)


class Tracer(TorchDispatchMode):
    """Counts what runs inside it. `phase` has the shape of `Clock.phase`: the trainer's own functions mark the phases.

    Args:
      hardware: whose seconds are counted.
      weights: shapes of parameters: by them gradients, and weights in another dtype, are known.
      logits: sizes of the vocabulary, of a rank and of all; [tokens, vocabulary] are logits.
      cache: the shape of a layer's keys.
      real: compute instead of faking.
    """

    def __init__(
        self,
        hardware: Hardware,
        weights: Iterable[tuple[int, ...]] = (),
        logits: Sequence[int] = (),
        cache: tuple[int, ...] | None = None,
        real: bool = False,
    ):
        super().__init__()
        self.fake = None if real else FakeTensorMode(allow_non_fake_inputs=True)
        if self.fake is not None:
            self.fake.cache_enabled = False  # what repeats is remembered by shapes
        self.memo = None if self.fake is None else ShapeMemo(self.fake, _results())
        self.hardware, self.logits, self.cache = hardware, frozenset(logits), cache
        self.shapes = frozenset(tuple(s) for s in weights if len(s) > 1)
        self.live: dict[int, tuple[int, str, Any]] = {}
        self.held: dict[str, float] = dict.fromkeys(MEMORY_KINDS, 0.0)
        self.sum = 0.0
        self.phases: dict[str, Costs] = {}
        self.now, self.highest, self.part = Costs(), {}, "other"
        self.under_way: dict[int, _Message] = {}  # by the storage of what will arrive
        self.learns, self.optimizes = False, False

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled under it, and the guard costs more than what it guards

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs, operator = kwargs or {}, _operator(func)
        if operator.namespace == "prim":
            fake = operator.name == "device" and isinstance(args[0], FakeTensor)
            return args[0].device if fake else func(*args, **kwargs)
        if func is aten.detach.default and isinstance(args[0], FakeTensor):
            return func(*args, **kwargs) if self.memo is None else self._run(func, operator, args, kwargs)[0]
        self.part = "optimizer" if self.optimizes or operator.name.startswith("_foreach_") else "other"
        out, key = self._run(func, operator, args, kwargs)
        outs = [x for x in (out if isinstance(out, (tuple, list)) else (out,)) if isinstance(x, Tensor)]
        if operator.namespace == "_c10d_functional":
            self._count_message(func, operator, args, outs)
        else:
            self._count(func, operator, key, args, kwargs, out, outs)
        if self._is_free(func, args, outs):
            return out
        for x in outs:
            storage = x.untyped_storage()
            if storage._cdata not in self.live:
                self._hold(storage, self._kind(func, x))
        return out

    def _is_free(self, func: Any, args: tuple, outs: Sequence[Tensor]) -> bool:
        """True for a copy that an accelerator does not make: a CPU multiplies 16-bit weights through one in float32."""
        if func is not aten._to_copy.default or self.fake is None or not self.hardware.accelerator:
            return False
        source = self.live.get(args[0].untyped_storage()._cdata)
        widens = args[0].element_size() == 2 and outs[0].dtype == torch.float32
        return widens and source is not None and source[1] == "weights" and args[0].dim() == 2

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        before, self.now, self.highest, self.learns = self.now, Costs(), {}, name.startswith(UPDATES)
        self.under_way = {}
        self._look()
        try:
            yield
        finally:
            self.phases[name] = after(self.phases[name], self.now) if name in self.phases else self.now
            self.now, self.highest, self.learns = before, {}, False

    def marked(self, optimizer: Transformation) -> Transformation:
        """The same optimizer; what its update makes is of the kind "optimizer"."""

        def update(grads: trees.Tree, *args: Any, **kwargs: Any) -> Any:
            self.hold_tree(grads, "gradients")
            self.optimizes = True
            try:
                return optimizer.update(grads, *args, **kwargs)
            finally:
                self.optimizes = False

        return optimizer._replace(update=update)

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A fake tensor; a real one of zeros where the tracer is real, and of whole numbers."""
        if self.fake is None or not dtype.is_floating_point:
            return torch.zeros(tuple(shape), dtype=dtype)
        with self.fake:
            return torch.empty(tuple(shape), dtype=dtype)

    def hold_tree(self, tree: trees.Tree, kind: str) -> None:
        """Note the kind of a tree's tensors."""
        for x in trees.leaves(tree):
            if isinstance(x, Tensor):
                self.hold(x, kind, overwrite=True)

    def hold(self, x: Tensor, kind: str, overwrite: bool = False) -> None:
        """Count the storage of a tensor from now until it is gone."""
        storage = x.untyped_storage()
        key = storage._cdata
        if key not in self.live:
            self._hold(storage, kind)
        elif overwrite:
            nbytes, old, ref = self.live[key]
            self.live[key] = nbytes, kind, ref
            self.held[old] -= nbytes
            self.held[kind] += nbytes

    def _hold(self, storage: torch.UntypedStorage, kind: str) -> None:
        key, nbytes = storage._cdata, storage.nbytes()
        self.live[key] = nbytes, kind, weakref.ref(storage, lambda _: self._drop(key))
        self.held[kind] += nbytes
        self.sum += nbytes
        self._look()

    def _drop(self, key: int) -> None:
        nbytes, kind, _ = self.live.pop(key)
        self.held[kind] -= nbytes
        self.sum -= nbytes

    def _look(self) -> None:
        backward = torch._C._current_graph_task_id() != -1  # type: ignore[attr-defined]
        part = "backward" if backward else "forward" if torch.is_grad_enabled() else self.part
        if self.sum > self.highest.get(part, -1.0):
            self.highest[part] = self.sum
            self.now.peaks[part] = dict(self.held)

    def _kind(self, func: Any, x: Tensor) -> str:
        if not x.is_floating_point():
            return "batch"
        if func.namespace == "_c10d_functional":
            if x.dim() > 2:  # hidden states of a row, that tensor ranks gather or sum
                return "activations"
            summed = self.learns and func is torch.ops._c10d_functional.reduce_scatter_tensor.default
            return "gradients" if summed else "staging"
        if func is aten.cat.default and x.dim() == 1:
            return "staging"
        if self.optimizes:
            return "optimizer"
        shape = tuple(x.shape)
        if shape in self.shapes:
            backward = torch._C._current_graph_task_id() != -1  # type: ignore[attr-defined]
            summed = self.learns and not torch.is_grad_enabled()
            return "gradients" if backward or summed else "weights"
        if shape == self.cache:
            return "cache"
        if func in _ROOM:
            return "staging"
        return "logits" if x.dim() == 2 and shape[1] in self.logits else "activations"

    def _run(self, func: Any, operator: _Operator, args: tuple, kwargs: dict) -> tuple[Any, Any]:
        """The result, and what calls of as much work have alike; None: it is not known."""
        if self.memo is None:
            return func(*args, **kwargs), None
        key, faked, real = scan(func, args, kwargs, operator.by_shapes)
        if not faked and (real or not _floating(func, args, kwargs)):
            found = None if func not in _ALIKE else _ALIKE[func](*args)
            return (func(*args, **kwargs) if found is None else found), None
        if func in _CONSTANT and not (kwargs.get("dtype") or args[0].dtype).is_floating_point:
            like = torch.empty(args[0].shape, dtype=args[0].dtype)  # never written: it takes no memory
            return func(like, *args[1:], **kwargs), None
        special = _SPECIAL.get(func)
        if special is not None:
            return special(*args, **kwargs), None
        if func in _INDEXING:
            args = (args[0], [p for i in args[1] for p in _positions(i)], *args[2:])
            key = scan(func, args, kwargs, operator.by_shapes).key
        out = self.memo.run(func, args, kwargs, key)
        # A real tensor that was written to stays the tensor that the program goes on with.
        if operator.mutable and args and not isinstance(args[0], (FakeTensor, list)):
            return args[0], None
        return out, None if real and operator.flops is not None else key  # whose numbers may decide how much there is

    def _count_message(self, func: Any, operator: _Operator, args: tuple, outs: Sequence[Tensor]) -> None:
        if func is torch.ops._c10d_functional.wait_tensor.default:
            message = self.under_way.pop(args[0].untyped_storage()._cdata, None)
            if message is not None and self.now.seconds > message.begun:
                add_traffic(self.now.early, message.key, 1, message.nbytes)
            return
        key = operator.name, next(a for a in reversed(args) if isinstance(a, str))
        nbytes = max(_nbytes(args[:1]), _nbytes(outs))
        add_traffic(self.now.traffic, key, 1, nbytes)
        for x in outs:
            self.under_way[x.untyped_storage()._cdata] = _Message(key, nbytes, self.now.seconds)

    def _count(
        self, func: Any, operator: _Operator, key: Any, args: tuple, kwargs: dict, out: Any, outs: Sequence[Tensor]
    ) -> None:
        """
        Args:
          key: what calls of as much work have alike; None: this one is counted by itself.
        """
        works = _works()
        if key is None:
            work = _work(func, operator, args, kwargs, out, outs)
        elif key in works:
            work = works[key]
        else:
            work = works[key] = _work(func, operator, args, kwargs, out, outs)
        if work is not None:
            seconds = op_seconds(self.hardware, work.flops, work.nbytes, work.dtype)
            self.now.flops += work.flops
            self.now.seconds += seconds
            self.now.cover += seconds * bool(self.under_way)


def _work(
    func: Any, operator: _Operator, args: tuple, kwargs: dict, out: Any, outs: Sequence[Tensor]
) -> OperatorWork | None:
    """Work of one call; None: there is none."""
    flops = 0 if operator.flops is None else operator.flops(*args, **kwargs, out_val=out)
    if not flops and operator.idle:
        return None
    packet = func.overloadpacket
    nbytes = _BYTES[packet](*args) if packet in _BYTES else _nbytes((args, tuple(outs)))
    return OperatorWork(flops, nbytes, outs[0].dtype if outs else torch.float32)


def _tensors(values: Any) -> Iterator[Tensor]:
    for x in values:
        if isinstance(x, Tensor):
            yield x
        elif isinstance(x, (tuple, list)):
            yield from _tensors(x)


def _nbytes(values: Any) -> int:
    return sum(x.numel() * x.element_size() for x in _tensors(values))


_WHOLE = ("arange", "randperm", "randint", "promote_types")  # how the names of those begin that create no such


def _floating(func: Any, args: tuple, kwargs: dict) -> bool:
    """True for an operator that creates a tensor of floating point numbers."""
    dtype = kwargs.get("dtype")
    if dtype is not None:
        return dtype.is_floating_point
    name = func._schema.name.split("::")[1]
    return isinstance(args[1], float) if name == "full" else not name.startswith(_WHOLE)


def _positions(index: Tensor | None) -> list[Tensor | None]:
    """A mask among indices as the positions where it is true; one that is not known is true everywhere."""
    if index is None or index.dtype not in (torch.bool, torch.uint8):
        return [index]
    known = torch.ones(index.shape, dtype=torch.bool) if isinstance(index, FakeTensor) else index
    return list(known.nonzero().unbind(1))


def _scalar(x: Tensor) -> bool | float:
    if x.dtype != torch.bool and not x.is_floating_point():
        raise RuntimeError("the program asks for a whole number that a dry run does not compute")
    return True if x.dtype == torch.bool else 1.0


_SPECIAL: dict[Any, Callable] = {  # what the program asks about numbers that are not there
    aten._local_scalar_dense.default: _scalar,
    aten.equal.default: lambda *_: True,
    aten.nonzero.default: lambda x: torch.ones(x.shape, dtype=torch.bool).nonzero(),
    aten.masked_select.default: lambda x, mask: x[mask],
    torch.ops.funrl.choose_experts.default: lambda probs, k: (
        torch.arange(probs.shape[0] * k).view(-1, k) % probs.shape[1]  # all alike
    ),
    aten.searchsorted.Tensor: lambda ordered, x, **_: torch.arange(x.numel()).view(x.shape),  # each its own place
}


def _choices_of_all(x: Tensor, size: int, _: str) -> Tensor | None:
    return x.repeat(size, 1) if x.dim() == 2 and not x.is_floating_point() else None


def _counts_of_all(x: Tensor, received: Sequence[int], sent: Sequence[int], _: str) -> Tensor | None:
    return x[: sent[0]].repeat(len(sent)) if x.dim() == 1 and not x.is_floating_point() else None


def _arrived(x: Tensor, receive: Sequence[int], *rest: Any) -> Tensor | None:
    """As `_counts_of_all`; zeros where this rank receives and has nothing to send, which the fake group refuses."""
    if not x.numel() and sum(receive):
        return x.new_zeros(sum(receive), *x.shape[1:])
    return _counts_of_all(x, receive, *rest)


_ALIKE: dict[Any, Callable] = {  # the experts that ranks choose which are not there: as this rank does; None: not these
    torch.ops._c10d_functional.all_gather_into_tensor.default: _choices_of_all,
    torch.ops._c10d_functional.all_to_all_single.default: _arrived,
}
_CONSTANT = (  # whole numbers and masks that are known, whatever they are shaped like
    aten.new_zeros.default, aten.new_ones.default, aten.new_full.default,
    aten.zeros_like.default, aten.ones_like.default, aten.full_like.default,
)  # fmt: skip
_ROOM = (aten.empty.memory_format, aten.new_empty.default, aten.zeros.default)  # to pack and unpack what is sent
_BY_SHAPES = frozenset((  # beside those that are elementwise; indices are positions then, and no masks
    aten.index.Tensor, aten.index_put.default, aten.index_put_.default, aten.index_copy.default,
    aten.index_add_.default, aten.embedding.default, aten.gather.default, aten.scatter_add.default,
))  # fmt: skip
_INDEXING = (aten.index.Tensor, aten.index_put.default, aten.index_put_.default)
