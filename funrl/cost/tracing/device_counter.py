"""Count kernel launches and copies of a program that runs on a pretended device, "meta", beside a real host.

Tensors of the device have no numbers. What the host reads of them is what it has copied there before, else 1.
"""

from __future__ import annotations

import contextlib
import functools
from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakTensorKeyDictionary

from funrl.cost.tracing.operators import operator_facts
from funrl.cost.tracing.shape_memo import DeviceMemo

DEVICE = torch.device("meta")
_aten = torch.ops.aten
_NO_KERNEL = ("empty", "new_empty", "_unsafe_view", "lift_fresh", "detach_")  # prefixes of those that compute nothing


@functools.cache
def _is_composite(func: Any) -> bool:
    """True for an operator that is a program of others on every device."""
    keys = ("CompositeImplicitAutograd", "CPU")
    composite, own = (torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), key) for key in keys)
    return composite and not own


@functools.cache
def _results() -> DeviceMemo:
    """Cache of operator results shared by all counters of this process."""
    return DeviceMemo()


class DeviceCalls(NamedTuple):
    """Launches and copies of a program.

    Attributes:
      launches: calls of operators that compute on the device; a few, such as a sort, are several kernels.
      to_device, to_host: bytes that are copied.
    """

    launches: float = 0.0
    to_device: float = 0.0
    to_host: float = 0.0


def calls_along(first: DeviceCalls, *ways: tuple[DeviceCalls, float]) -> DeviceCalls:
    """Calls extrapolated from `first`, as `funrl.cost.tracing.costs.along`."""
    columns = zip(first, *(way for way, _ in ways), strict=True)
    steps = [n for _, n in ways]
    return DeviceCalls(*(a + sum((b - a) * n for b, n in zip(more, steps, strict=True)) for a, *more in columns))


class DeviceCounter(TorchDispatchMode):
    """Dispatch mode that counts the calls of a program whose mesh is on `DEVICE`.

    Attributes:
      phases: calls by phase, as `TracedClock` marks them.
      operators: number of calls by type of the device, "cpu" or "meta", and name of the operator.
    """

    def __init__(self) -> None:
        super().__init__()
        self.phases: dict[str, DeviceCalls] = {}
        self.operators: Counter[tuple[str, str]] = Counter()
        self._now = DeviceCalls()
        self._on_host = WeakTensorKeyDictionary()  # tensor of the device -> the numbers that were copied there

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled under it, and the guard costs more than the call

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count what runs inside the context to the phase `name` too."""
        before = self._now
        try:
            yield
        finally:
            old = self.phases.get(name, DeviceCalls())
            self.phases[name] = DeviceCalls(*(a + b - c for a, b, c in zip(old, self._now, before, strict=True)))

    def put(self, x: Tensor) -> Tensor:
        """A tensor on the device whose numbers the host knows; it is not counted."""
        there = x.to(DEVICE)
        self._on_host[there] = x
        return there

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if _is_composite(func):
            with self:  # inference mode does not take it apart
                parts = func.decompose(*args, **kwargs)
            if parts is not NotImplemented:
                return parts
        if func is _aten._local_scalar_dense.default and args[0].is_meta:
            return self._read(args[0], args[0].dtype).item()
        if func is _aten._to_copy.default and kwargs.get("device") is not None:
            there = torch.device(kwargs["device"]).type
            if args[0].is_meta and there == "cpu":
                return self._read(args[0], kwargs.get("dtype") or args[0].dtype)
            if args[0].device.type == "cpu" and there == DEVICE.type:
                out = func(*args, **kwargs)
                self._written(out, args[0])
                return out
        if func is _aten.copy_.default and args[0].device != args[1].device:
            if args[1].is_meta:
                return args[0].copy_(self._read(args[1], args[0].dtype))
            self._written(args[0], args[1])
            return args[0]
        operator = operator_facts(func)
        own = not operator.mutable and not operator.idle
        out = _results().run(func, args, kwargs) if own else func(*args, **kwargs)
        tensors = [x for x in (out if isinstance(out, (tuple, list)) else (out,)) if isinstance(x, Tensor)]
        if tensors and not operator.idle and not operator.name.startswith(_NO_KERNEL):
            there = "meta" if any(x.is_meta for x in tensors) else "cpu"
            self.operators[there, operator.name] += 1
            self._add(launches=there == "meta")
        return out

    def _read(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """The numbers of a tensor of the device."""
        self._add(to_host=x.nbytes)
        known = self._on_host.get(x)
        return torch.ones(x.shape, dtype=dtype) if known is None else known.to(dtype).clone()

    def _written(self, there: Tensor, x: Tensor) -> None:
        self._add(to_device=x.nbytes)
        if there.shape == x.shape:
            self._on_host[there] = x.clone()

    def _add(self, launches: float = 0, to_device: float = 0, to_host: float = 0) -> None:
        now = self._now
        self._now = DeviceCalls(now.launches + launches, now.to_device + to_device, now.to_host + to_host)
