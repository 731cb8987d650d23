"""Count bytes, FLOPs and messages of a program while it runs on tensors without memory.

`Tracer` intercepts every operator of the program. Weights, and everything computed from them, are fake tensors, which
have a shape but no values. Token ids, masks and row numbers are real, because the program reads them; operators that
read the values of fake tensors get stand-in answers. The tracer counts live bytes (every storage from its first tensor
to its last), FLOPs, and traffic of collectives. With `real=True` nothing is faked: it counts a program that really
computes.

Results on fake tensors are cached by the shapes of the arguments: the layers and micro-batches of a trace repeat the
same few hundred operators tens of thousands of times. What is not cached yet is computed on the device "meta", which
takes a tenth of the milliseconds of a fake tensor's own dispatch.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

# These imports register their operators.
import funrl.compiled_kernels.delta_rule.gated_delta  # noqa: F401
import funrl.compiled_kernels.grouped_linear  # noqa: F401
import funrl.compiled_kernels.varlen_attention  # noqa: F401
import funrl.models.decoder.routing  # noqa: F401  (which registers its operator)
import funrl.optim.fused  # noqa: F401
import funrl.optim.gradients  # noqa: F401
from funrl import trees
from funrl.compiled_kernels.delta_rule.net_pass import pass_bytes, pass_flops
from funrl.compiled_kernels.delta_rule.operators import (
    rule_flops,
    rule_gradient_flops,
    rule_gradient_room,
    rule_room,
)
from funrl.compiled_kernels.gpu_kernels.trials import assume_kernels
from funrl.compiled_kernels.latent_paged_attention import latent_paged_bytes, latent_paged_flops
from funrl.compiled_kernels.paged_attention import paged_bytes, paged_flops
from funrl.cost.tracing.costs import MEMORY_KINDS, UPDATES, Costs, add_traffic, after
from funrl.cost.tracing.hardware import Hardware, KernelWork, kernel_seconds
from funrl.data.packing import UNIT, RowCost
from funrl.models.decoder.ring_attention import Half, seen_pairs
from funrl.optim.base import Transformation, within

_aten = torch.ops.aten


class Operator(NamedTuple):
    """Facts of an operator.

    Attributes:
      func: the operator.
      namespace, name: its namespace and name.
      mutable: whether it writes to an argument.
      by_shapes: whether the shapes of results do not depend on values of tensors.
      idle: whether its results are views of its arguments.
      flops: (arguments, `out_val`) -> FLOPs; None: it has no matrix product.
      kind: of its work, as in `KernelWork`.
    """

    func: Any
    namespace: str
    name: str
    mutable: bool
    by_shapes: bool
    idle: bool
    flops: Callable | None
    kind: str


@functools.cache
def _known_facts() -> dict[int, Operator]:
    """Cache of the facts of operators by their ids, which no other object takes while the cache holds the operators."""
    return {}


def operator_facts(func: Any) -> Operator:
    """Facts of an operator, cached: the hash of an operator is slow, its id is not."""
    facts = _known_facts()
    known = facts.get(id(func))
    return facts.setdefault(id(func), _facts_of(func)) if known is None else known


def _facts_of(func: Any) -> Operator:
    namespace, _, name = func._schema.name.partition("::")
    own = _FORMULAS.get(func.overloadpacket)
    packet = func.overloadpacket
    flops = flop_registry.get(packet) if own is None else lambda *args, out_val, **_: own(*args)
    returns = func._schema.returns
    idle = func.is_view or (bool(returns) and all(r.alias_info and not r.alias_info.is_write for r in returns))
    by_shapes = torch.Tag.pointwise in func.tags or func in _BY_SHAPES or namespace == "funrl"
    by_shapes |= name.startswith("_foreach_")
    mutable = func._schema.is_mutable
    kind = _KINDS.get(packet, "product")
    if flops is None:
        fuses = namespace == "aten" and (torch.Tag.pointwise in func.tags or name in _FUSED)
        kind = "elementwise" if fuses else "memory"
    return Operator(func, namespace, name, mutable=mutable, by_shapes=by_shapes, idle=idle, flops=flops, kind=kind)


def work_of(
    func: Any, operator: Operator, args: tuple, kwargs: dict, out: Any, outs: Sequence[Tensor]
) -> KernelWork | None:
    """Work of one call; None: no work."""
    flops = 0 if operator.flops is None else operator.flops(*args, **kwargs, out_val=out)
    if not flops and (operator.idle or operator.name in _UNWRITTEN):
        return None
    packet = func.overloadpacket
    if packet in _BYTES:
        nbytes = _BYTES[packet](*args)
    elif packet in _GATHERS:  # of their source they read the chosen rows alone
        nbytes = nbytes_of((args[1:], *outs)) + min(nbytes_of(args[:1]), nbytes_of(outs))
    else:
        nbytes = nbytes_of((args, tuple(outs)))
    if func in _ROOMS:  # written and read
        nbytes += 2 * _ROOMS[func](*args)
    if operator.mutable and not func._schema.returns and packet not in _BYTES:
        written = zip(args, func._schema.arguments, strict=False)
        nbytes += nbytes_of(x for x, argument in written if argument.alias_info and argument.alias_info.is_write)
    tile = _TILES[packet](*args) if packet in _TILES else 0.0
    return KernelWork(flops, nbytes, outs[0].dtype if outs else torch.float32, operator.kind, tile)


def nbytes_of(values: Any) -> int:
    """Bytes of all tensors in nested tuples and lists."""
    return sum(x.numel() * x.element_size() for x in _tensors(values))


def _tensors(values: Any) -> Iterator[Tensor]:
    for x in values:
        if isinstance(x, Tensor):
            yield x
        elif isinstance(x, (tuple, list)):
            yield from _tensors(x)


def _attended(q: Tensor, offsets: Tensor, window: int) -> float:
    """FLOPs of the two matrix products of `varlen_attention`: over pairs of a token and one it attends to."""
    pairs = int(RowCost(1.0, window or None).work(offsets.diff().numpy()).sum()) / UNIT - int(offsets[-1])
    return 4 * q.shape[1] * q.shape[2] * pairs


def _tile_flops(q: Tensor, offsets: Tensor, window: int) -> float:
    """FLOPs of one tile of queries of the longest row."""
    longest = int(offsets.diff().max())
    return 4.0 * ATTENTION_TILE * q.shape[2] * min(longest, window or longest)


def _ringed(q: Tensor, k: Tensor, offsets: Tensor, first: int, source: int, window: int, *_: float) -> float:
    """FLOPs of the two matrix products of a pair of halves: over pairs of a token and one it attends to."""
    pairs = seen_pairs(offsets, Half(first, q.shape[0]), Half(source, k.shape[0]), window)
    return 4.0 * q.shape[1] * q.shape[2] * pairs


def _grouped_flops(x: Tensor, columns: int, ends: Tensor) -> float:
    """FLOPs of the rows that belong to a group; of all rows if that is unknown."""
    rows = x.shape[0] if isinstance(ends, FakeTensor) else int(ends[-1])
    return 2.0 * rows * x.shape[1] * columns


_FORMULAS = {  # of operators for which torch has no formula, or a wrong one
    _aten.mm: lambda a, b, *_: 2 * a.numel() * b.shape[-1],  # torch's fails where the result has another dtype
    _aten.addmm: lambda _, a, b, *__: 2 * a.numel() * b.shape[-1],
    _aten._scaled_dot_product_flash_attention_for_cpu: lambda q, k, v, *_, **__: sdpa_flop_count(
        q.shape, (q.shape[0], q.shape[1], *k.shape[2:]), (q.shape[0], q.shape[1], *v.shape[2:])
    ),
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: lambda g, q, k, v, *_, **__: sdpa_backward_flop_count(
        g.shape, q.shape, (q.shape[0], q.shape[1], *k.shape[2:]), (q.shape[0], q.shape[1], *v.shape[2:])
    ),
    torch.ops.funrl.varlen_attention: lambda q, k, v, offsets, window, *_: _attended(q, offsets, window),
    torch.ops.funrl.varlen_attention_backward: lambda g, q, k, v, out, lse, offsets, window, *_: (
        2.5 * _attended(q, offsets, window)
    ),
    torch.ops.funrl.ring_part: lambda q, k, v, offsets, *how: _ringed(q, k, offsets, *how),
    torch.ops.funrl.ring_part_backward: lambda g, q, k, v, out, lse, offsets, *how: 2.5 * _ringed(q, k, offsets, *how),
    torch.ops.funrl.grouped_linear: lambda x, weight, ends: _grouped_flops(x, weight.shape[1], ends),
    torch.ops.funrl.grouped_weight: lambda grad, x, ends: _grouped_flops(x, grad.shape[1], ends),
    torch.ops.funrl.chunk_states: lambda updates, readers, *_, **__: 4 * updates.numel() * readers.shape[-1],
    torch.ops.funrl.chunk_states_backward: lambda grad, states, *_, **__: 4 * grad.numel() * states.shape[-2],
    torch.ops.funrl.delta_net_pass: lambda channels, decay, beta, filters, states, *rest: pass_flops(
        states, rest[3], rest[4]
    ),
    torch.ops.funrl.delta_rule: lambda q, k, v, *_: rule_flops(q, v),
    torch.ops.funrl.delta_rule_backward: lambda d_out, d_end, q, k, v, *_: rule_gradient_flops(q, v),
    _aten.addmm: lambda total, a, b, *_: 2 * a.numel() * b.shape[1],  # with a dtype of the result too
    _aten.linalg_solve_triangular: lambda triangle, sides, **_: triangle.shape[-1] * sides.numel(),
    torch.ops.funrl.paged_attention: lambda q, k, v, keys, *rest: paged_flops(q, rest[6], keys.shape[1]),
    torch.ops.funrl.latent_paged_attention: lambda q, latent, up, cache, *rest: latent_paged_flops(
        up, cache, rest[5], rest[6]
    ),
}
_ROOMS = {  # bytes that operators allocate and free
    torch.ops.funrl.delta_rule.default: lambda q, k, v, *_: rule_room(q, v),
    torch.ops.funrl.delta_rule_backward.default: lambda d_out, d_end, q, k, v, *_: rule_gradient_room(q, v),
}
ATTENTION_TILE = 128  # queries of a tile of attention
_TILES = {  # (arguments) -> FLOPs of the longest row's tile
    torch.ops.funrl.varlen_attention: lambda q, k, v, offsets, window, *_: _tile_flops(q, offsets, window),
    torch.ops.funrl.varlen_attention_backward: lambda g, q, k, v, out, lse, offsets, window, *_: (
        2.5 * _tile_flops(q, offsets, window)
    ),
}
_KINDS = {  # of operators whose products reach a share of their own; see `Efficiency`
    torch.ops.funrl.varlen_attention: "attention",
    torch.ops.funrl.varlen_attention_backward: "attention_backward",
    torch.ops.funrl.ring_part: "attention",
    torch.ops.funrl.ring_part_backward: "attention_backward",
    torch.ops.funrl.grouped_linear: "grouped",
    torch.ops.funrl.grouped_weight: "grouped_backward",
}
# Operators that a compiled layer joins with elementwise ones; reductions over a row read what the row's kernel has.
_FUSED = ("_to_copy", "clone", "copy_", "mean", "sum", "amax", "cat", "fill_", "zeros_like", "expand", "slice_backward")
_UNWRITTEN = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")  # operators that only allocate
_BYTES = {  # of operators that do not read all of their arguments, or write to some that they read
    torch.ops.funrl.adamw_leaves: lambda grads, mu, nu, *rest: nbytes_of((grads, mu, mu, nu, nu, rest)),
    torch.ops.funrl.add_leaves: lambda *leaves: nbytes_of(leaves),
    torch.ops.funrl.paged_attention: lambda q, k, v, keys, *rest: paged_bytes(q, keys, rest[6]),
    torch.ops.funrl.delta_net_pass: lambda channels, decay, beta, filters, states, tails, *rest: pass_bytes(
        channels, states, tails, rest[2]
    ),
    torch.ops.funrl.latent_paged_attention: lambda q, latent, up, cache, *rest: latent_paged_bytes(
        q, latent, up, cache, rest[5]
    ),
}
_GATHERS = (_aten.index_select, _aten.index, _aten.gather, _aten.embedding)
_BY_SHAPES = frozenset(
    (  # beside those that are elementwise; indices are positions then, and no masks
        _aten.index.Tensor,
        _aten.index_select.default,
        _aten.index_put.default,
        _aten.index_put_.default,
        _aten.index_copy.default,
        _aten.index_add_.default,
        _aten.embedding.default,
        _aten.gather.default,
        _aten.scatter_add.default,
    )
)


def assumed(func: Any, args: tuple, kwargs: dict) -> Any | None:
    """Stand-in result of an operator that reads a fake tensor's values; None: it reads none.

    Raises:
      RuntimeError: it reads a whole number.
    """
    if func in _CONSTANT and not (kwargs.get("dtype") or args[0].dtype).is_floating_point:
        like = torch.empty(args[0].shape, dtype=args[0].dtype)  # never written: it takes no memory
        return func(like, *args[1:], **kwargs)
    special = _SPECIAL.get(func)
    return None if special is None else special(*args, **kwargs)


def of_peers(func: Any, args: tuple) -> Tensor | None:
    """Stand-in result of a collective that exchanges choices of experts: this rank's own; None: another collective."""
    return _ALIKE[func](*args) if func in _ALIKE else None


def without_masks(func: Any, args: tuple) -> tuple | None:
    """Arguments of an indexing operator with positions instead of masks; None: it does not index."""
    return (args[0], [p for i in args[1] for p in _positions(i)], *args[2:]) if func in _INDEXING else None


_WHOLE = ("arange", "randperm", "randint", "promote_types")  # prefixes of operators that create whole numbers


def makes_floats(func: Any, args: tuple, kwargs: dict) -> bool:
    """True for an operator that creates a tensor of floating point numbers."""
    dtype = kwargs.get("dtype")
    if dtype is not None:
        return dtype.is_floating_point
    name = func._schema.name.split("::")[1]
    return isinstance(args[1], float) if name == "full" else not name.startswith(_WHOLE)


def _positions(index: Tensor | None) -> list[Tensor | None]:
    """Positions where a mask is true; an unknown mask is true everywhere."""
    if index is None or index.dtype not in (torch.bool, torch.uint8):
        return [index]
    known = torch.ones(index.shape, dtype=torch.bool) if isinstance(index, FakeTensor) else index
    return list(known.nonzero().unbind(1))


def _scalar(x: Tensor) -> bool | float:
    if x.dtype != torch.bool and not x.is_floating_point():
        raise RuntimeError("the program asks for a whole number that a dry run does not compute")
    return True if x.dtype == torch.bool else 1.0


_SPECIAL: dict[Any, Callable] = {  # stand-in results for values that do not exist
    _aten._local_scalar_dense.default: _scalar,
    _aten.equal.default: lambda *_: True,
    _aten.nonzero.default: lambda x: torch.ones(x.shape, dtype=torch.bool).nonzero(),
    _aten.masked_select.default: lambda x, mask: x[mask],
    torch.ops.funrl.choose_experts.default: lambda probs, k: (
        torch.arange(probs.shape[0] * k).view(-1, k) % probs.shape[1]  # the same for all tokens
    ),
    _aten.searchsorted.Tensor: lambda ordered, x, **_: torch.arange(x.numel()).view(x.shape),  # each at its own index
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


_ALIKE: dict[Any, Callable] = {  # absent ranks choose experts as this rank does
    torch.ops._c10d_functional.all_gather_into_tensor.default: _choices_of_all,
    torch.ops._c10d_functional.all_to_all_single.default: _arrived,
}
_CONSTANT = (  # the values of whole numbers and masks are known
    _aten.new_zeros.default,
    _aten.new_ones.default,
    _aten.new_full.default,
    _aten.zeros_like.default,
    _aten.ones_like.default,
    _aten.full_like.default,
)
_INDEXING = (_aten.index.Tensor, _aten.index_put.default, _aten.index_put_.default)


HOST = torch.device("cpu")
META = torch.device("meta")
IN_PLACE = "in place"  # entry of an operator that writes to its first argument and changes no shape
RETURNS_NOTHING = "nothing"  # entry of an operator that writes to its arguments, changes no shape and returns nothing
RESHAPES = ("resize", "set_", "squeeze_", "transpose_", "swap", "t_")  # prefixes of those that change shapes


class _Known(NamedTuple):
    """A result: a new tensor without numbers, or a view of the first argument.

    Attributes:
      shape, stride, dtype, offset: of the tensor.
      view: whether it is a view.
    """

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    offset: int
    view: bool


class _Several(NamedTuple):
    """Results of an operator that returns a list or a tuple."""

    kind: type
    results: tuple[_Known, ...]


_Result = _Known | _Several | torch.dtype | str | None
_UNKNOWN = object()  # what a cache returns for a call that it has not seen


class ShapeMemo:
    """Runner of operators in a fake mode, once for each combination of argument shapes.

    Args:
      fake: the fake mode.
      known: the cache, which modes may share, since it holds shapes and no tensors.
    """

    def __init__(self, fake: FakeTensorMode, known: dict[Any, _Result] | None = None) -> None:
        self.fake = fake
        self.known = {} if known is None else known
        with fake:
            self._of_every = dict(torch.empty(0).__dict__)  # attributes of every fake tensor of the mode

    def run(self, func: Any, args: tuple, kwargs: dict, key: Any) -> Any:
        """The result of an operator with at least one fake tensor among its arguments.

        Args:
          key: key from `scan`; None: do not cache.
        """
        if key is None:
            return self._fake_run(func, args, kwargs)
        known = self.known.get(key, _UNKNOWN)
        if known is _UNKNOWN:
            known = self.known[key] = _result_of(func, args, kwargs)
        if isinstance(known, _Known):
            return self._again(known, args)
        if known == IN_PLACE:
            return args[0]
        if isinstance(known, _Several):
            return known.kind(self._again(result, args) for result in known.results)
        if isinstance(known, torch.dtype):
            return known
        return None if known == RETURNS_NOTHING else self._fake_run(func, args, kwargs)

    def _fake_run(self, func: Any, args: tuple, kwargs: dict) -> Any:
        with self.fake:
            return func(*args, **kwargs)

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A contiguous fake tensor."""
        return self._faked(torch.empty(shape, dtype=dtype, device="meta"))

    def _again(self, known: _Known, args: tuple) -> Tensor:
        if not known.view:
            return self._faked(_empty(known))
        out = torch.empty(0, dtype=known.dtype, device="meta")
        out.set_(args[0].untyped_storage(), known.offset, known.shape, known.stride)
        return self._faked(out)

    def _faked(self, out: Tensor) -> Tensor:
        # As FakeTensor(self.fake, out, HOST) does, in a quarter of its time.
        fake = Tensor._make_subclass(FakeTensor, out, False, dispatch_device=True, device_for_backend_keys=HOST)
        torch._C._set_throw_on_mutable_data_ptr(fake)
        vars(fake).update(self._of_every)
        return fake


def _empty(known: _Known) -> Tensor:
    return torch.empty_strided(known.shape, known.stride, dtype=known.dtype, device="meta")


def _result_of(func: Any, args: tuple, kwargs: dict) -> _Result:
    """Description of a call's result, computed on the device "meta"; None: only the fake mode can run it."""
    if func._schema.is_mutable and func._schema.name.split("::")[1].startswith(RESHAPES):
        return None
    metas = tuple(map(_on_meta, args))
    options = {name: META if isinstance(value, torch.device) else _on_meta(value) for name, value in kwargs.items()}
    try:
        out = func(*metas, **options)
    except (NotImplementedError, RuntimeError):
        return None
    return _described(func, metas, out)


def _on_meta(value: Any) -> Any:
    """An argument with tensors of the device "meta" instead of its own, which keep the storages of fake ones."""
    if type(value) is FakeTensor:
        out = torch.empty(0, dtype=value.dtype, device=META)
        return out.set_(value.untyped_storage(), value.storage_offset(), value.shape, value.stride())
    if isinstance(value, Tensor):
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=META)
    return type(value)(map(_on_meta, value)) if type(value) in (list, tuple) else value


def _described(func: Any, metas: tuple, out: Any) -> _Result:
    """Description of a result of arguments on the device "meta"; None: it cannot be recreated from one."""
    if isinstance(out, torch.dtype):
        return out
    if func._schema.is_mutable:
        return RETURNS_NOTHING if out is None else IN_PLACE if out is metas[0] else None
    if isinstance(out, (list, tuple)):
        results = tuple(_described(func, metas, x) for x in out)
        known = tuple(result for result in results if isinstance(result, _Known))
        if not known or len(known) < len(results):
            return None
        storages = [x.untyped_storage()._cdata for x, result in zip(out, known, strict=True) if not result.view]
        return _Several(type(out), known) if len(set(storages)) == len(storages) else None
    if not isinstance(out, Tensor) or not out.is_meta or out.layout != torch.strided:
        return None
    offset = out.storage_offset()
    storage = out.untyped_storage()
    # An operator that copies only if needed decides so by shapes, strides and dtypes.
    view = isinstance(metas[0], Tensor) and storage._cdata == metas[0].untyped_storage()._cdata
    if not view and (
        func.is_view or offset or _may_alias(out, metas) or storage.nbytes() != out.numel() * out.element_size()
    ):
        return None
    return _Known(out.shape, out.stride(), out.dtype, int(offset), view)


def _may_alias(out: Tensor, args: tuple) -> bool:
    """True if a result shares the storage of an argument, as with an operator that copies only if needed."""
    storage = out.untyped_storage()._cdata
    return any(isinstance(x, Tensor) and x.untyped_storage()._cdata == storage for x in args)


class Scan(NamedTuple):
    """Arguments of an operator.

    Attributes:
      key: shapes, strides and types of tensors, and other values; None: a value cannot be compared.
      fake, real: whether there are fake tensors, and real ones.
    """

    key: Any
    fake: bool
    real: bool


def scan(func: Any, args: tuple, kwargs: dict, by_shapes: bool) -> Scan:
    """Key of a call, and the kinds of its tensors.

    Args:
      func: the operator, which `operator_facts` keeps, so that its id stands for it.
      args: of the call.
      kwargs: of the call.
      by_shapes: whether the shapes of its results do not depend on values of tensors.
    """
    parts: list[Any] = [id(func)]
    kinds = _scan((*args, *kwargs.items()) if kwargs else args, parts)
    comparable = kinds & _COMPARABLE and (by_shapes or not kinds & _REAL)
    return Scan(tuple(parts) if comparable else None, bool(kinds & _FAKE), bool(kinds & _REAL))


_COMPARABLE = 1
_FAKE = 2
_REAL = 4
_PLAIN = (int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout)


def _scan(values: Any, parts: list[Any]) -> int:
    """Append the parts of the key; return the flags of the values, as a sum."""
    kinds = _COMPARABLE
    for value in values:
        kind = type(value)
        if kind is FakeTensor:
            kinds |= _FAKE
            parts.append((value.shape, value.stride(), value.dtype, value.storage_offset()))
        elif kind in _PLAIN:
            parts += (kind, value)
        elif isinstance(value, Tensor):
            kinds |= _REAL
            parts.append(("real", value.shape, value.stride(), value.dtype))
        elif isinstance(value, (list, tuple)):
            inner: list[Any] = []
            within = _scan(value, inner)
            kinds = (kinds | within) & (within | ~_COMPARABLE)
            parts.append(tuple(inner))
        elif isinstance(value, torch.memory_format):
            parts += (torch.memory_format, str(value))
        else:
            kinds &= ~_COMPARABLE
    return kinds


_DEVICE = torch.ops.prim.device.default
_SUMS = (
    torch.ops._c10d_functional.reduce_scatter_tensor.default,
    torch.ops._c10d_functional.reduce_scatter_tensor_coalesced.default,
)
_ROTATIONS = (_aten.cos.default, _aten.sin.default)  # of positions, which are real: no program reads them
_ROOM = (_aten.empty.memory_format, _aten.new_empty.default, _aten.zeros.default)  # used to pack and unpack messages
_UNCOUNTED = KernelWork(0.0, 0.0, torch.float32)  # what a cache returns for a call that it has not seen


@functools.cache
def _results() -> dict:
    """Cache of operator results shared by all traces of this process: meshes and depths repeat most of them."""
    return {}


@functools.cache
def _works() -> dict:
    """Cache of the work of operators by their arguments, shared in the same way."""
    return {}


class _Message(NamedTuple):
    """A collective, or a group of them, that has begun; `begun`: seconds of the phase's kernels before it started."""

    key: tuple[str, str]
    nbytes: float
    begun: float


class Tracer(TorchDispatchMode):
    """Dispatch mode that counts memory, FLOPs and traffic. Phases are marked through `phase`, as by `Clock.phase`.

    Args:
      hardware: the device for which seconds are counted.
      weights: shapes of parameters, which identify gradients and weights in another dtype.
      logits: sizes of the vocabulary, of a rank and of all ranks; [tokens, vocabulary] are logits.
      cache: shapes of the tensors of a layer's cache.
      real: compute instead of faking.
    """

    def __init__(
        self,
        hardware: Hardware,
        weights: Iterable[tuple[int, ...]] = (),
        logits: Sequence[int] = (),
        cache: Collection[tuple[int, ...]] = (),
        real: bool = False,
    ):
        super().__init__()
        self.fake = None if real else FakeTensorMode(allow_non_fake_inputs=True)
        if self.fake is not None:
            self.fake.cache_enabled = False  # repeated results are cached by shapes
        self.memo = None if self.fake is None else ShapeMemo(self.fake, _results())
        self.hardware = hardware
        self.logits = frozenset(logits)
        self.cache = cache
        self.shapes = frozenset(tuple(s) for s in weights if len(s) > 1)
        self.times: dict[KernelWork, tuple[float, str]] = {}
        self.live: dict[int, tuple[int, str, Any]] = {}
        self.held: dict[str, float] = dict.fromkeys(MEMORY_KINDS, 0.0)
        self.sum = 0.0
        self.phases: dict[str, Costs] = {}
        self.now = Costs()
        self.highest = {}
        self.part = "other"
        self.under_way: dict[int, _Message] = {}  # by the storage of each result
        self.learns = False
        self.optimizes = False

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled under it, and the guard costs more than the call

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is _DEVICE and type(args[0]) is FakeTensor:  # half of all calls
            return args[0].device
        kwargs = kwargs or {}
        operator = operator_facts(func)
        if operator.namespace == "prim":
            return func(*args, **kwargs)
        if func is _aten.detach.default and isinstance(args[0], FakeTensor):
            return func(*args, **kwargs) if self.memo is None else self._run(func, operator, args, kwargs)[0]
        self.part = "optimizer" if self.optimizes or operator.name.startswith("_foreach_") else "other"
        out, key = self._run(func, operator, args, kwargs)
        outs = [x for x in (out if isinstance(out, (tuple, list)) else (out,)) if isinstance(x, Tensor)]
        if operator.namespace == "_c10d_functional":
            self._count_message(func, operator, args, outs)
        else:
            work = self._count(key, lambda: work_of(func, operator, args, kwargs, out, outs))
            if work is not None and self.learns and not work.flops and self._on_weights(func, args, outs):
                written = self.now.weight_bytes
                written[operator.name] = written.get(operator.name, 0.0) + work.nbytes
        if self._is_free(func, args, outs):
            return out
        for x in outs:
            storage = x.untyped_storage()
            if storage._cdata not in self.live:
                self._hold(storage, self._kind(func, x))
        if func in _ROOMS and self.memo is not None:
            self._pass_through(_ROOMS[func](*args))
        return out

    def _is_free(self, func: Any, args: tuple, outs: Sequence[Tensor]) -> bool:
        """True for a copy that an accelerator does not make: a CPU multiplies 16-bit weights through a float32 copy."""
        if func is not _aten._to_copy.default or self.fake is None or not self.hardware.accelerator:
            return False
        source = self.live.get(args[0].untyped_storage()._cdata)
        widens = args[0].element_size() == 2 and outs[0].dtype == torch.float32
        return widens and source is not None and source[1] == "weights" and args[0].dim() == 2

    def _on_weights(self, func: Any, args: tuple, outs: Sequence[Tensor]) -> bool:
        """True for an operator whose matrices all have shapes of weights, and which an accelerator runs."""
        shapes = {tuple(x.shape) for x in _tensors((args, tuple(outs))) if x.dim() > 1}
        return bool(shapes) and shapes <= self.shapes and not self._is_free(func, args, outs)

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        before, self.now, self.highest, self.learns = self.now, Costs(), {}, name.startswith(UPDATES)
        self.under_way = {}
        self._record_peak()
        try:
            with assume_kernels(self.hardware.gpu if self.hardware.accelerator and self.fake is not None else None):
                yield
        finally:
            self.phases[name] = after(self.phases[name], self.now) if name in self.phases else self.now
            self.now = before
            self.highest = {}
            self.learns = False

    def marked(self, optimizer: Transformation) -> Transformation:
        """The same optimizer; tensors that its update makes get the kind "optimizer"."""

        @contextlib.contextmanager
        def optimizing(grads: trees.Tree) -> Iterator[None]:
            self.hold_tree(grads, "gradients")
            self.optimizes = True
            try:
                yield
            finally:
                self.optimizes = False

        return within(optimizer, optimizing)

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A fake tensor; real zeros if the tracer is real or for whole numbers."""
        if self.memo is None or not dtype.is_floating_point:
            return torch.zeros(tuple(shape), dtype=dtype)
        return self.memo.empty(tuple(shape), dtype)

    def hold_tree(self, tree: trees.Tree, kind: str) -> None:
        """Set the kind of a tree's tensors."""
        for x in trees.leaves(tree):
            if isinstance(x, Tensor):
                self.hold(x, kind, overwrite=True)

    def hold(self, x: Tensor, kind: str, overwrite: bool = False) -> None:
        """Count the storage of a tensor until it is freed."""
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
        key = storage._cdata
        nbytes = storage.nbytes()
        self.live[key] = nbytes, kind, weakref.ref(storage, lambda _: self._drop(key))
        self.held[kind] += nbytes
        self.sum += nbytes
        self._record_peak()

    def _pass_through(self, nbytes: int) -> None:
        """Count activations that an operator without memory would hold while it runs."""
        self.sum += nbytes
        self.held["activations"] += nbytes
        self._record_peak()
        self.sum -= nbytes
        self.held["activations"] -= nbytes

    def _drop(self, key: int) -> None:
        nbytes, kind, _ = self.live.pop(key)
        self.held[kind] -= nbytes
        self.sum -= nbytes

    def _record_peak(self) -> None:
        backward = torch._C._current_graph_task_id() != -1  # type: ignore[attr-defined]
        part = "backward" if backward else "forward" if torch.is_grad_enabled() else self.part
        moments = {part: self.sum}
        if backward:
            moments["activations"] = self.sum - self.held["gradients"]
        for moment, nbytes in moments.items():
            if nbytes > self.highest.get(moment, -1.0):
                self.highest[moment] = nbytes
                self.now.peaks[moment] = dict(self.held)

    def _kind(self, func: Any, x: Tensor) -> str:
        if not x.is_floating_point():
            return "batch"
        if func.namespace == "_c10d_functional":
            if x.dim() > 2:  # hidden states of a row, which tensor ranks gather or sum
                return "activations"
            summed = self.learns and func in _SUMS
            return "gradients" if summed else "staging"
        if func is _aten.cat.default and x.dim() == 1:
            return "staging"
        if self.optimizes:
            return "optimizer"
        shape = tuple(x.shape)
        if shape in self.shapes:
            backward = torch._C._current_graph_task_id() != -1  # type: ignore[attr-defined]
            summed = self.learns and not torch.is_grad_enabled()
            return "gradients" if backward or summed else "weights"
        if shape in self.cache:
            return "cache"
        if func is _aten.mm.dtype:  # of 16 bits in float32: logits of some columns
            return "logits"
        if func in _ROOM:
            return "staging"
        return "logits" if x.dim() == 2 and shape[1] in self.logits else "activations"

    def _run(self, func: Any, operator: Operator, args: tuple, kwargs: dict) -> tuple[Any, Any]:
        """The result, and a key shared by calls with the same work; None: the work is unknown."""
        if self.memo is None:
            return func(*args, **kwargs), None
        key, faked, real = scan(func, args, kwargs, operator.by_shapes)
        known = not faked and func not in _ROTATIONS
        if known and (real or not makes_floats(func, args, kwargs)):
            choices = of_peers(func, args)
            return (func(*args, **kwargs) if choices is None else choices), None
        answer = assumed(func, args, kwargs)
        if answer is not None:
            return answer, None
        positions = without_masks(func, args)
        if positions is not None:
            args = positions
            key = scan(func, positions, kwargs, operator.by_shapes).key
        out = self.memo.run(func, args, kwargs, key)
        # A real tensor that was written to must stay the program's own tensor.
        if operator.mutable and args and not isinstance(args[0], (FakeTensor, list)):
            return args[0], None
        return out, None if real and operator.flops is not None else key  # the amount of work may depend on its values

    def _count_message(self, func: Any, operator: Operator, args: tuple, outs: Sequence[Tensor]) -> None:
        if func is torch.ops._c10d_functional.wait_tensor.default:
            message = self.under_way.get(args[0].untyped_storage()._cdata)
            if message is None:
                return
            self.under_way = {key: other for key, other in self.under_way.items() if other is not message}
            if self.now.seconds > message.begun:
                add_traffic(self.now.early, message.key, 1, message.nbytes)
            return
        key = operator.name.removesuffix("_coalesced"), next(a for a in reversed(args) if isinstance(a, str))
        nbytes = max(nbytes_of(args[:1]), nbytes_of(outs))
        add_traffic(self.now.traffic, key, 1, nbytes)
        message = _Message(key, nbytes, self.now.seconds)
        self.under_way |= {x.untyped_storage()._cdata: message for x in outs}

    def _count(self, key: Any, count_work: Callable[[], KernelWork | None]) -> KernelWork | None:
        """Add the work of a call to the phase, and return it.

        Args:
          key: shared by calls with the same work; None: count the work of this call.
          count_work: () -> work.
        """
        works = _works()
        work = _UNCOUNTED if key is None else works.get(key, _UNCOUNTED)
        if work is _UNCOUNTED:
            work = count_work()
            if key is not None:
                works[key] = work
        if work is not None:
            known = self.times.get(work)
            if known is None:
                known = self.times[work] = kernel_seconds(self.hardware, work)
            seconds, bound = known
            self.now.flops += work.flops
            self.now.bounds[bound] = self.now.bounds.get(bound, 0.0) + seconds
            self.now.seconds += seconds
            self.now.cover += seconds * bool(self.under_way)
        return work
