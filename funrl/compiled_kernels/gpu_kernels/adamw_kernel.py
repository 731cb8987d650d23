"""Triton kernels of an update: sums of gradients, and an AdamW step. Each reads and writes a number of a leaf once.

NVIDIA and ROCm compile it, and Triton's interpreter runs it on a CPU.
"""

# A kernel is in Triton's language, whose types a checker of Python's does not know.
# pyright: reportGeneralTypeIssues=false, reportArgumentType=false, reportReturnType=false
# pyright: reportCallIssue=false, reportAttributeAccessIssue=false
from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton  # type: ignore[import-not-found]
import triton.language as tl  # type: ignore[import-not-found]
from torch import Tensor

_WIDTH = 2048  # numbers of a program
_WARPS = 4
_ALIGNED = 16  # bytes of the largest load
_TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
_COPY_TYPES = _TYPES | {torch.float64: tl.float64}


class AdamLeaf(NamedTuple):
    """Tensors of one leaf, of equally many numbers that stand end to end.

    Attributes:
      grad: of any floating-point dtype.
      mu, nu: moments, updated in place; `nu` is float32.
      param: the weights.
      target: takes the update; it may be the memory of `grad`. In place it is `param`.
      copy: takes what `target` takes, in its own dtype; None: there is no copy.
    """

    grad: Tensor
    mu: Tensor
    nu: Tensor
    param: Tensor
    target: Tensor
    copy: Tensor | None = None


class GradientLeaf(NamedTuple):
    """Tensors of one leaf; `total`, which takes the sum of the others, may be one of these."""

    total: Tensor
    first: Tensor
    second: Tensor


@triton.jit
def _pointer(address_ptr, kind: tl.constexpr, aligned: tl.constexpr):
    pointer = tl.load(address_ptr).to(tl.pointer_type(kind))
    return tl.multiple_of(pointer, aligned)


@triton.jit
def _adamw(
    addresses_ptr,
    decays_ptr,
    leaf_ptr,
    facts_ptr,
    b1,
    b2,
    rest1,
    rest2,
    eps,
    grad_type: tl.constexpr,
    mu_type: tl.constexpr,
    param_type: tl.constexpr,
    target_type: tl.constexpr,
    copy_type: tl.constexpr,
    in_place: tl.constexpr,
    aligned: tl.constexpr,
    width: tl.constexpr,
):
    leaf = tl.load(leaf_ptr + tl.program_id(0))
    row_ptr = addresses_ptr + leaf * 8  # of an `AdamLeaf`, then its number of elements and its first program
    grad_ptr = _pointer(row_ptr, grad_type, aligned)
    mu_ptr = _pointer(row_ptr + 1, mu_type, aligned)
    nu_ptr = _pointer(row_ptr + 2, tl.float32, aligned)
    param_ptr = _pointer(row_ptr + 3, param_type, aligned)
    target_ptr = _pointer(row_ptr + 4, target_type, aligned)
    size = tl.multiple_of(tl.load(row_ptr + 6), aligned)
    first = tl.load(row_ptr + 7)
    decay = tl.load(decays_ptr + leaf)
    entry = (tl.program_id(0) - first) * width + tl.arange(0, width)
    inside = entry < size
    c1 = tl.load(facts_ptr)
    c2 = tl.load(facts_ptr + 1)
    rate = tl.load(facts_ptr + 2)
    factor = tl.load(facts_ptr + 3)
    grad = tl.load(grad_ptr + entry, mask=inside, other=0.0).to(tl.float32) * factor
    mu = tl.load(mu_ptr + entry, mask=inside, other=0.0).to(tl.float32) * b1 + grad * rest1
    nu = tl.load(nu_ptr + entry, mask=inside, other=0.0) * b2 + grad * grad * rest2
    param = tl.load(param_ptr + entry, mask=inside, other=0.0).to(tl.float32)
    update = -rate * ((mu / c1) / (tl.sqrt(nu / c2) + eps) + decay * param)
    tl.store(mu_ptr + entry, mu.to(mu_type), mask=inside)
    tl.store(nu_ptr + entry, nu, mask=inside)
    if in_place:
        update += param
    target = update.to(target_type)
    tl.store(target_ptr + entry, target, mask=inside)
    if copy_type is not None:
        copy_ptr = _pointer(row_ptr + 5, copy_type, aligned)
        tl.store(copy_ptr + entry, target.to(copy_type), mask=inside)


@triton.jit
def _add(
    addresses_ptr,
    leaf_ptr,
    total_type: tl.constexpr,
    first_type: tl.constexpr,
    second_type: tl.constexpr,
    aligned: tl.constexpr,
    width: tl.constexpr,
):
    leaf = tl.load(leaf_ptr + tl.program_id(0))
    row_ptr = addresses_ptr + leaf * 5  # of a `GradientLeaf`, then its number of elements and its first program
    total_ptr = _pointer(row_ptr, total_type, aligned)
    first_ptr = _pointer(row_ptr + 1, first_type, aligned)
    second_ptr = _pointer(row_ptr + 2, second_type, aligned)
    size = tl.multiple_of(tl.load(row_ptr + 3), aligned)
    columns = (tl.program_id(0) - tl.load(row_ptr + 4)) * width + tl.arange(0, width)
    inside = columns < size
    first = tl.load(first_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(second_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(total_ptr + columns, (first + second).to(total_type), mask=inside)


def adamw_leaves(
    leaves: Sequence[AdamLeaf],
    decays: Sequence[float],
    facts_4: Tensor,
    betas: tuple[float, float],
    eps: float,
    *,
    in_place: bool = False,
) -> None:
    """Update the moments of all leaves and write their updates or new weights, in one pass and one launch.

    Leaves of other dtypes, and those whose size is no multiple of 16, have launches of their own.

    Args:
      leaves: on one device.
      decays: weight decay of each, 0 for one that does not decay.
      facts_4: float32 corrections of both moments, the learning rate, and the factor of the gradients.
      betas: decays of the moments.
      eps: added to the root.
      in_place: write param + update into `target` instead of the update.
    """
    b1, b2 = betas
    pairs = [(leaf, decay) for leaf, decay in zip(leaves, decays, strict=True) if leaf.grad.numel()]
    for _, group in itertools.groupby(sorted(pairs, key=lambda pair: _kind(pair[0])), key=lambda pair: _kind(pair[0])):
        chosen, decays_of_chosen = zip(*group, strict=True)
        addresses, leaf_of_program = _table(chosen, facts_4.device)
        _adamw[(len(leaf_of_program),)](
            addresses,
            torch.tensor(decays_of_chosen, dtype=torch.float32).to(facts_4.device, non_blocking=True),
            leaf_of_program,
            facts_4,
            b1,
            b2,
            1.0 - b1,
            1.0 - b2,
            eps,
            *(_TYPES[chosen[0][i].dtype] for i in (0, 1, 3, 4)),
            None if chosen[0].copy is None else _COPY_TYPES[chosen[0].copy.dtype],
            in_place,
            _ALIGNED if _is_aligned(chosen[0]) else 1,
            _WIDTH,
            num_warps=_WARPS,
        )


def add_leaves(leaves: Sequence[GradientLeaf]) -> None:
    """Write the sums of two gradients of all leaves, taken in float32, in one launch for leaves of the same dtypes."""
    for _, group in itertools.groupby(sorted((x for x in leaves if x.total.numel()), key=_kind), key=_kind):
        chosen = tuple(group)
        addresses, leaf_of_program = _table(chosen, chosen[0].total.device)
        types = (_TYPES[x.dtype] for x in chosen[0])
        aligned = _ALIGNED if _is_aligned(chosen[0]) else 1
        _add[(len(leaf_of_program),)](addresses, leaf_of_program, *types, aligned, _WIDTH, num_warps=_WARPS)


def _table(leaves: Sequence[AdamLeaf] | Sequence[GradientLeaf], device: torch.device) -> tuple[Tensor, Tensor]:
    """Addresses, size and first program of each leaf, and the leaf of each program, on the device."""
    sizes = tuple(leaf[0].numel() for leaf in leaves)
    leaf_of_program, firsts = _programs(sizes, device)
    rows = [
        (*(0 if x is None else x.data_ptr() for x in leaf), size, first)
        for leaf, size, first in zip(leaves, sizes, firsts, strict=True)
    ]
    return torch.tensor(rows, dtype=torch.int64).to(device, non_blocking=True), leaf_of_program


def _kind(leaf: AdamLeaf | GradientLeaf) -> tuple[object, ...]:
    """Key of the leaves that share a launch: dtypes, and whether numbers are read several at a time."""
    return (_is_aligned(leaf), *(str(None if x is None else x.dtype) for x in leaf))


def _is_aligned(leaf: AdamLeaf | GradientLeaf) -> bool:
    return leaf[0].numel() % _ALIGNED == 0 and all(x.data_ptr() % _ALIGNED == 0 for x in leaf if x is not None)


@functools.cache
def _programs(sizes: tuple[int, ...], device: torch.device) -> tuple[Tensor, tuple[int, ...]]:
    """The leaf of each program, int32 on the device, and the first program of each leaf."""
    counts = torch.tensor([triton.cdiv(size, _WIDTH) for size in sizes])
    leaf_of_program = torch.repeat_interleave(torch.arange(len(sizes), dtype=torch.int32), counts)
    return leaf_of_program.to(device), tuple((counts.cumsum(0) - counts).tolist())
