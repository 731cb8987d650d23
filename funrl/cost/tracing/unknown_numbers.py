"""Stand-in answers of data-dependent operators during a dry run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

import funrl.models.decoder.routing  # noqa: F401  (which registers its operator)

_aten = torch.ops.aten


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
