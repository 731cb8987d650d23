"""Products with a weight that has a product of two thin factors added to it, which is never made whole."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from funrl.autograd import AutogradFunction
from funrl.compiled_kernels.exact.dispatch import computes_exactly
from funrl.compiled_kernels.exact.operators import exact_low_rank
from funrl.compiled_kernels.linear import linear, product, sum_of_products


class ThinFactors(NamedTuple):
    """The matrix scale B A of low rank: A [R, K], B [N, R] and a number."""

    a_RK: Tensor
    b_NR: Tensor
    scale: float


def low_rank_linear(
    x: Tensor, weight_NK: Tensor, factors: ThinFactors, bias_N: Tensor | None = None, parts: int = 1
) -> Tensor:
    """W x + bias + B (scale A x), for x [..., K]; differentiable.

    16-bit numbers are rounded after each product, after the factor and after the sum. On a CPU a row of the result has
    the bits of the decoding step, whatever other rows there are.

    Args:
      parts: where it computes exactly, equal parts in which the sums over K are taken, as in `linear_in_parts`.
    """
    a_RK, b_NR, scale = factors
    if not computes_exactly(x, weight_NK, a_RK, b_NR):
        return linear(x, weight_NK, bias_N) + linear(scale * linear(x, a_RK), b_NR)
    rows = x.flatten(0, -2)
    if torch.is_grad_enabled():
        out_MN, _ = _ExactLowRank.apply(rows, weight_NK, bias_N, a_RK, b_NR, (scale, parts))
    else:
        out_MN, _ = exact_low_rank(rows, weight_NK, bias_N, [a_RK, b_NR], scale, parts)
    return out_MN.view(*x.shape[:-1], weight_NK.shape[0])


class _ExactLowRank(AutogradFunction):
    """`exact_low_rank`.

    With g the gradient of the result, u = scale A x and h = scale B^T g: dx = W^T g + A^T h, dA = h x^T, dB = g u^T and
    dW = g x^T; these sums are of no fixed order.
    """

    @staticmethod
    def forward(x_MK, weight_NK, bias_N, a_RK, b_NR, options):
        return exact_low_rank(x_MK, weight_NK, bias_N, [a_RK, b_NR], *options)

    @staticmethod
    def setup_context(ctx, inputs, output):
        x_MK, weight_NK, _, a_RK, b_NR, (ctx.scale, _) = inputs
        _, inner_MR = output
        ctx.mark_non_differentiable(inner_MR)
        ctx.save_for_backward(x_MK, weight_NK, a_RK, b_NR, inner_MR)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_MN, _):
        x_MK, weight_NK, a_RK, b_NR, inner_MR = ctx.saved_tensors
        needs_x, needs_weight, needs_bias, needs_a, needs_b, *_ = ctx.needs_input_grad
        d_x = d_weight = d_bias = d_a = d_b = None
        if needs_x or needs_a:
            d_inner_MR = ctx.scale * product(grad_MN, b_NR.T)
            d_x = product(grad_MN, weight_NK.T).addmm_(d_inner_MR, a_RK) if needs_x else None
            d_a = sum_of_products(d_inner_MR, x_MK) if needs_a else None
        if needs_weight:
            d_weight = sum_of_products(grad_MN, x_MK)
        if needs_bias:
            d_bias = grad_MN.sum(0)
        if needs_b:
            d_b = sum_of_products(grad_MN, inner_MR)
        return d_x, d_weight, d_bias, d_a, d_b, None
