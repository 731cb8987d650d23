"""Sums of gradients that come in the dtype to compute in."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from funrl import trees
from funrl.compiled_kernels.exact.registration import operator
from funrl.compiled_kernels.gpu_kernels.trials import kernels_take, largest_error


@torch.no_grad()
def add_gradients(total: trees.Tree, more: trees.Tree, params: trees.Tree) -> trees.Tree:
    """The sum of two gradients in the dtypes of the weights, in the memory of `total` where that has them already.

    On CUDA and ROCm one Triton kernel reads gradients in a lower dtype and writes their sum.

    Args:
      total: a gradient, or a sum of some; donated.
      more: the next gradient.
      params: the weights.
    """
    firsts, seconds, weights = (trees.leaves(tree) for tree in (total, more, params))
    wide = all(x.dtype == weight.dtype for x, weight in zip(seconds, weights, strict=True))
    wide |= any(weight.dtype == torch.float64 for weight in weights)  # in which the kernel does not add
    if wide or not kernels_take((*firsts, *seconds), gradient_sum_error):
        sums = widened(total, params)
        torch._foreach_add_(trees.leaves(sums), seconds)
        return sums
    sums = trees.map(lambda x, w: x if x.dtype == w.dtype else torch.empty_like(x, dtype=w.dtype), total, params)
    _add_leaves(trees.leaves(sums), firsts, seconds)
    return sums


@torch.no_grad()
def widened(grads: trees.Tree, params: trees.Tree) -> trees.Tree:
    """Gradients in the dtypes of the weights."""
    return trees.map(lambda grad, weight: grad.to(weight.dtype), grads, params)


@operator("funrl::add_leaves", mutates_args=("sums",))
def _add_leaves(sums: Sequence[Tensor], firsts: Sequence[Tensor], seconds: Sequence[Tensor]) -> None:
    from funrl.compiled_kernels.gpu_kernels.adamw_kernel import GradientLeaf, add_leaves

    add_leaves([GradientLeaf(*row) for row in zip(sums, firsts, seconds, strict=True)])


def gradient_sum_error(device: str) -> float:
    """Largest error of small sums by the kernel, on a device: of whole vectors and others, new and in place."""
    generator = torch.Generator().manual_seed(0)
    firsts, seconds = ([torch.randn(n, generator=generator).bfloat16() for n in (70, 4096)] for _ in range(2))
    expected = [x.double() + 2 * y.double() for x, y in zip(firsts, seconds, strict=True)]
    firsts, seconds = ([x.to(device) for x in column] for column in (firsts, seconds))
    sums = [torch.empty_like(x, dtype=torch.float32) for x in firsts]
    _add_leaves(sums, firsts, seconds)
    _add_leaves(sums, sums, seconds)
    return largest_error(zip(sums, expected, strict=True))
