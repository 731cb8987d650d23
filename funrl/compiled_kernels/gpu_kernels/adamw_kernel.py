"""Triton kernel of an AdamW step: each number of all leaves is read once and written once.

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


class AdamLeaf(NamedTuple):
    """Tensors of one leaf, of equally many numbers that stand end to end.

    Attributes:
      grad: of any floating-point dtype.
      mu, nu: moments, updated in place; `nu` is float32.
      param: the weights.
      target: takes the update; it may be the memory of `grad`. In place it is `param`.
    """

    grad: Tensor
    mu: Tensor
    nu: Tensor
    param: Tensor
    target: Tensor


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
    in_place: tl.constexpr,
    aligned: tl.constexpr,
    width: tl.constexpr,
):
    leaf = tl.load(leaf_ptr + tl.program_id(0))
    row_ptr = addresses_ptr + leaf * 7  # of an `AdamLeaf`, then its number of elements and its first program
    grad_ptr = _pointer(row_ptr, grad_type, aligned)
    mu_ptr = _pointer(row_ptr + 1, mu_type, aligned)
    nu_ptr = _pointer(row_ptr + 2, tl.float32, aligned)
    param_ptr = _pointer(row_ptr + 3, param_type, aligned)
    target_ptr = _pointer(row_ptr + 4, target_type, aligned)
    size = tl.multiple_of(tl.load(row_ptr + 5), aligned)
    first = tl.load(row_ptr + 6)
    decay = tl.load(decays_ptr + leaf)
    at = (tl.program_id(0) - first) * width + tl.arange(0, width)
    inside = at < size
    c1 = tl.load(facts_ptr)
    c2 = tl.load(facts_ptr + 1)
    rate = tl.load(facts_ptr + 2)
    factor = tl.load(facts_ptr + 3)
    grad = tl.load(grad_ptr + at, mask=inside, other=0.0).to(tl.float32) * factor
    mu = tl.load(mu_ptr + at, mask=inside, other=0.0).to(tl.float32) * b1 + grad * rest1
    nu = tl.load(nu_ptr + at, mask=inside, other=0.0) * b2 + grad * grad * rest2
    param = tl.load(param_ptr + at, mask=inside, other=0.0).to(tl.float32)
    update = -rate * ((mu / c1) / (tl.sqrt(nu / c2) + eps) + decay * param)
    tl.store(mu_ptr + at, mu.to(mu_type), mask=inside)
    tl.store(nu_ptr + at, nu, mask=inside)
    if in_place:
        update += param
    tl.store(target_ptr + at, update.to(target_type), mask=inside)


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
    for _, group in itertools.groupby(sorted(pairs, key=_kinds), key=_kinds):
        chosen, decays_of_chosen = zip(*group, strict=True)
        sizes = tuple(leaf.grad.numel() for leaf in chosen)
        leaf_of_program, firsts = _programs(sizes, facts_4.device)
        rows = [
            (*(x.data_ptr() for x in leaf), size, first)
            for leaf, size, first in zip(chosen, sizes, firsts, strict=True)
        ]
        _adamw[(len(leaf_of_program),)](
            torch.tensor(rows, dtype=torch.int64).to(facts_4.device, non_blocking=True),
            torch.tensor(decays_of_chosen, dtype=torch.float32).to(facts_4.device, non_blocking=True),
            leaf_of_program,
            facts_4,
            b1,
            b2,
            1.0 - b1,
            1.0 - b2,
            eps,
            *(_TYPES[chosen[0][i].dtype] for i in (0, 1, 3, 4)),
            in_place,
            _ALIGNED if _is_aligned(chosen[0]) else 1,
            _WIDTH,
            num_warps=_WARPS,
        )


def _kinds(pair: tuple[AdamLeaf, float]) -> tuple[object, ...]:
    """Key of the leaves that share a launch: dtypes, and whether numbers are read several at a time."""
    return (_is_aligned(pair[0]), *(str(x.dtype) for x in pair[0]))


def _is_aligned(leaf: AdamLeaf) -> bool:
    return leaf.grad.numel() % _ALIGNED == 0 and all(x.data_ptr() % _ALIGNED == 0 for x in leaf)


@functools.cache
def _programs(sizes: tuple[int, ...], device: torch.device) -> tuple[Tensor, tuple[int, ...]]:
    """The leaf of each program, int32 on the device, and the first program of each leaf."""
    counts = torch.tensor([triton.cdiv(size, _WIDTH) for size in sizes])
    leaf_of_program = torch.repeat_interleave(torch.arange(len(sizes), dtype=torch.int32), counts)
    return leaf_of_program.to(device), tuple((counts.cumsum(0) - counts).tolist())
