"""Dtypes of weights: which are cast for computing or for an engine, and which stay wide; and copies that save casts.

The bias by which experts are chosen moves in steps that are small beside it, and tells nearly equal scores apart.

Weights that learn in a wider dtype than they compute in have a copy in the narrow one. An update writes it, and every
pass until the next update reads it. A copy is found by the memory and the version of its weight, torch's count of
changes in place. A weight that has been changed otherwise, or is in other memory, has none, and is cast. What a program
writes through `x.data`, numpy or a storage torch does not count: the copy is that of before until the next update.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from funrl import trees
from funrl.autograd import AutogradFunction
from funrl.compiled_kernels.nf4 import NF4_DTYPES

TORCH_DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16}  # as flags name them
WIDE = ("router_bias",)  # last parts of the names of weights that are never narrower than float32


class WeightCopy(NamedTuple):
    """Copy of a weight in the dtype to compute in, and the version of the weight that it was made from."""

    copy: Tensor
    version: int


_COPIES = weakref.WeakKeyDictionary[torch.UntypedStorage, dict[tuple, WeightCopy]]()  # by memory and place in it


def weight_dtype(name: str, dtype: torch.dtype) -> torch.dtype:
    """The dtype of a weight where weights are in `dtype`."""
    if name.endswith(tuple(NF4_DTYPES)):
        return next(fixed for end, fixed in NF4_DTYPES.items() if name.endswith(end))
    return torch.promote_types(dtype, torch.float32) if name.rsplit("/", 1)[-1] in WIDE else dtype


def weight_dtypes(tree: trees.Tree, dtype: torch.dtype) -> trees.Tree:
    """`weight_dtype` of every leaf of a tree like a model's weights."""
    return trees.map_named(lambda name, _: weight_dtype(name, dtype), tree)


def cast_weights(params: trees.Tree, dtype: torch.dtype) -> trees.Tree:
    """Weights in `dtype`, except weights that stay wide; of each its copy where it has one."""
    return trees.map_named(
        lambda name, x: cast_weight(x, weight_dtype(name, dtype)) if x.is_floating_point() else x, params
    )


def cast_weight(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """A weight in a dtype: itself, its copy, or a cast. The gradient reaches the weight in its own dtype."""
    copy = narrow_weight(weight, dtype)
    if copy is not weight and weight.requires_grad:
        return _FromWeight.apply(weight, copy)
    return copy.to(dtype)


class _FromWeight(AutogradFunction):
    """The copy of a weight, as its cast."""

    @staticmethod
    def forward(weight, copy):
        return copy.view_as(copy)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.dtype = inputs[0].dtype

    @staticmethod
    def backward(ctx, grad):
        return grad.to(ctx.dtype), None


def narrow_weight(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """The copy of a weight in a dtype; the weight itself, in its own dtype, where it has none."""
    held = _held(weight) if _COPIES else None
    if held is None or held.version != weight._version or held.copy.dtype != dtype:
        return weight
    return held.copy


def narrow_weights(params: trees.Tree, dtype: torch.dtype) -> trees.Tree:
    """`narrow_weight` of every weight, except weights that stay wide."""
    return trees.map_named(lambda name, x: narrow_weight(x, weight_dtype(name, dtype)), params)


def renew_copies(params: trees.Tree, dtype: torch.dtype) -> None:
    """Write the copies that weights lack: those that their optimizer has not written.

    Args:
      params: weights that learn, which nothing but an update changes.
      dtype: to compute in; weights that are in it already need no copy.
    """
    stale: list[Tensor] = []
    copies: list[Tensor] = []
    for name, x in trees.named(params):
        narrow = weight_dtype(name, dtype)
        held = _held(x)
        if x.dtype == narrow or not x.is_floating_point() or x.is_inference():
            continue
        if held is None or held.copy.dtype != narrow:
            held = WeightCopy(torch.empty_like(x, dtype=narrow), -1)
        if held.version != x._version:
            stale.append(x.detach())
            copies.append(held.copy)
    if stale:
        torch._foreach_copy_(copies, stale)
        mark_written(stale, copies)


def mark_written(weights: Iterable[Tensor], copies: Iterable[Tensor | None]) -> None:
    """Take the copies as those of the weights as they are now."""
    for x, copy in zip(weights, copies, strict=True):
        if copy is not None:
            _COPIES.setdefault(x.untyped_storage(), {})[_place(x)] = WeightCopy(copy, x._version)


def copy_to_write(weight: Tensor) -> Tensor | None:
    """Memory of a weight's copy, for an optimizer that writes both; None: it has no copy."""
    held = _held(weight)
    return None if held is None else held.copy


def _held(weight: Tensor) -> WeightCopy | None:
    if weight.is_inference() or torch._C._are_functorch_transforms_active():  # of a wrapper there is no memory
        return None
    return _COPIES.get(weight.untyped_storage(), {}).get(_place(weight))


def _place(weight: Tensor) -> tuple:
    return weight.dtype, weight.storage_offset(), weight.shape, weight.stride()
