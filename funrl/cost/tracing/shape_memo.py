"""Results of operators on fake tensors, cached by the shapes of their arguments.

The layers and micro-batches of a trace repeat the same few hundred operators tens of thousands of times. What is not
cached yet is computed on the device "meta", which takes a tenth of the milliseconds of a fake tensor's own dispatch.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

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
