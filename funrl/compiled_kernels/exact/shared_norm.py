"""A norm over numbers that ranks share, in two steps with a sum over the ranks between them; on a CPU only.

    totals = sum of x^2 over all ranks        y = x s (offset + weight), s = 1 / sqrt(totals / size + eps)

Both are differentiable where `computes_exactly`; the decomposition is `Attention._norm_all_heads`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from funrl.autograd import AutogradFunction
from funrl.compiled_kernels.exact.norm_operators import exact_scale_rows, exact_square_sums


class NormNumbers(NamedTuple):
    """Sizes of a norm.

    Attributes:
      size: of all numbers whose mean square is taken.
      eps: added to that.
      offset: added to the weight.
    """

    size: int
    eps: float
    offset: float


def square_sums(x_MD: Tensor, parts: int) -> Tensor:
    """Sum of squares of each row in `parts` equal parts and a binary tree, [M] in float32 or wider."""
    compute = _SquareSums.apply if torch.is_grad_enabled() else exact_square_sums
    return compute(x_MD, parts)


def scale_rows(x_MD: Tensor, totals_M: Tensor, weight_D: Tensor, numbers: NormNumbers) -> Tensor:
    """Rows divided by the root of the mean square and multiplied by the weight."""
    compute = _ScaleRows.apply if torch.is_grad_enabled() else exact_scale_rows
    return compute(x_MD, totals_M, weight_D, *numbers)


class _SquareSums(AutogradFunction):
    @staticmethod
    def forward(x, parts):
        return exact_square_sums(x, parts)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(inputs[0])

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return (2 * grad.unsqueeze(1) * x).to(x.dtype), None


class _ScaleRows(AutogradFunction):
    @staticmethod
    def forward(x, totals, weight, size, eps, offset):
        return exact_scale_rows(x, totals, weight, size, eps, offset)

    @staticmethod
    def setup_context(ctx, inputs, output):
        *tensors, ctx.size, ctx.eps, ctx.offset = inputs
        ctx.save_for_backward(*tensors)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        x, totals, weight = ctx.saved_tensors
        wide_x, wide_grad, factor = (y.to(totals.dtype) for y in (x, grad, weight))
        factor = factor + ctx.offset
        mean_M1 = (totals / ctx.size + ctx.eps).unsqueeze(1)
        scale_M1 = mean_M1.rsqrt()
        along = wide_grad * wide_x
        d_x = wide_grad * factor * scale_M1
        d_weight = (along * scale_M1).sum(0)
        d_totals = (along * factor).sum(1) * (-0.5 / ctx.size * scale_M1 / mean_M1).squeeze(1)
        return d_x.to(x.dtype), d_totals, d_weight.to(weight.dtype), None, None, None
