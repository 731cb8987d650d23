"""Count bytes, FLOPs and messages of a program while it runs on tensors without memory.

`Tracer` intercepts every operator of the program. Weights, and everything computed from them, are fake tensors, which
have a shape but no values. Token ids, masks and row numbers are real, because the program reads them. The tracer counts
live bytes (every storage from its first tensor to its last), FLOPs, and traffic of collectives.

With `real=True` nothing is faked: it counts a program that really computes.
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

from funrl import trees
from funrl.cost.tracing.costs import MEMORY_KINDS, UPDATES, Costs, add_traffic, after
from funrl.cost.tracing.hardware import Hardware, op_seconds
from funrl.cost.tracing.operators import Operator, OperatorWork, nbytes_of, operator_facts, work_of
from funrl.cost.tracing.shape_memo import ShapeMemo, scan
from funrl.cost.tracing.unknown_numbers import assumed, makes_floats, of_peers, without_masks
from funrl.optim.base import Transformation

_aten = torch.ops.aten
_DEVICE = torch.ops.prim.device.default
_SUMS = (
    torch.ops._c10d_functional.reduce_scatter_tensor.default,
    torch.ops._c10d_functional.reduce_scatter_tensor_coalesced.default,
)
_ROTATIONS = (_aten.cos.default, _aten.sin.default)  # of positions, which are real: no program reads them
_ROOM = (_aten.empty.memory_format, _aten.new_empty.default, _aten.zeros.default)  # used to pack and unpack messages
_UNCOUNTED = OperatorWork(0.0, 0.0, torch.float32)  # what a cache returns for a call that it has not seen


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
            self._count(key, lambda: work_of(func, operator, args, kwargs, out, outs))
        if self._is_free(func, args, outs):
            return out
        for x in outs:
            storage = x.untyped_storage()
            if storage._cdata not in self.live:
                self._hold(storage, self._kind(func, x))
        return out

    def _is_free(self, func: Any, args: tuple, outs: Sequence[Tensor]) -> bool:
        """True for a copy that an accelerator does not make: a CPU multiplies 16-bit weights through a float32 copy."""
        if func is not _aten._to_copy.default or self.fake is None or not self.hardware.accelerator:
            return False
        source = self.live.get(args[0].untyped_storage()._cdata)
        widens = args[0].element_size() == 2 and outs[0].dtype == torch.float32
        return widens and source is not None and source[1] == "weights" and args[0].dim() == 2

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        before, self.now, self.highest, self.learns = self.now, Costs(), {}, name.startswith(UPDATES)
        self.under_way = {}
        self._record_peak()
        try:
            yield
        finally:
            self.phases[name] = after(self.phases[name], self.now) if name in self.phases else self.now
            self.now = before
            self.highest = {}
            self.learns = False

    def marked(self, optimizer: Transformation) -> Transformation:
        """The same optimizer; tensors that its update makes get the kind "optimizer"."""

        def update(grads: trees.Tree, *args: Any, **kwargs: Any) -> Any:
            self.hold_tree(grads, "gradients")
            self.optimizes = True
            try:
                return optimizer.update(grads, *args, **kwargs)
            finally:
                self.optimizes = False

        return optimizer._replace(update=update)

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

    def _drop(self, key: int) -> None:
        nbytes, kind, _ = self.live.pop(key)
        self.held[kind] -= nbytes
        self.sum -= nbytes

    def _record_peak(self) -> None:
        backward = torch._C._current_graph_task_id() != -1  # type: ignore[attr-defined]
        part = "backward" if backward else "forward" if torch.is_grad_enabled() else self.part
        if self.sum > self.highest.get(part, -1.0):
            self.highest[part] = self.sum
            self.now.peaks[part] = dict(self.held)

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

    def _count(self, key: Any, count_work: Callable[[], OperatorWork | None]) -> None:
        """Add the work of a call to the phase.

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
            seconds = op_seconds(self.hardware, work.flops, work.nbytes, work.dtype)
            self.now.flops += work.flops
            self.now.seconds += seconds
            self.now.cover += seconds * bool(self.under_way)
