"""Products of activations and weights.

On a CPU the forward pass is the decoding step's: a row of a product has the same bits however many rows there are.
What has no such promise, gradients above all, is computed in float32 on x86 by oneDNN instead of the BLAS that torch
calls: MKL has no AVX-512 code for processors that are not Intel's; oneDNN, which torch brings along, has, and takes
half the time there.
"""

from __future__ import annotations

import functools
import platform

import torch
import torch.nn.functional as F
from torch import Tensor

from funrl.autograd import AutogradFunction
from funrl.compiled_kernels.exact.dispatch import computes_exactly, is_plain
from funrl.compiled_kernels.exact.operators import exact_linear

SMALLEST = 128 * 128  # elements of a weight; below it a call to oneDNN costs more than it gains
_CHUNK = 1024  # tokens that are summed in one call
_X86 = platform.machine().lower() in ("x86_64", "amd64")
ONEDNN = torch.ops.mkldnn._linear_pointwise if _X86 and torch.backends.mkldnn.is_available() else None  # the operator


def linear(x: Tensor, weight_NK: Tensor, bias_N: Tensor | None = None) -> Tensor:
    """x weight^T + bias, for x [..., K]; differentiable.

    Which code computes it depends on the weight and not on the number of rows of x.
    """
    if computes_exactly(x, weight_NK):
        return linear_in_parts(x, weight_NK, 1, bias_N=bias_N)
    if not _is_for_onednn(x, weight_NK):
        return F.linear(x, weight_NK, bias_N)
    rows = x.reshape(-1, x.shape[-1])
    out = _Product.apply(rows, weight_NK) if torch.is_grad_enabled() else _onednn(rows, weight_NK)
    out = out.view(*x.shape[:-1], -1)
    return out if bias_N is None else out + bias_N


def linear_in_parts(
    x: Tensor, weight_NK: Tensor, parts: int, bias_N: Tensor | None = None, wide: bool = False
) -> Tensor:
    """`linear` where `computes_exactly`, the terms of its sums in equal parts that are added by a binary tree.

    Args:
      parts: a power of two, at most 8, that divides K.
      wide: return the sums as they are, in float32 or wider; there is no bias then.
    """
    rows = x.flatten(0, -2)
    compute = _ExactProduct.apply if torch.is_grad_enabled() else exact_linear
    return compute(rows, weight_NK, bias_N, parts, wide).view(*x.shape[:-1], weight_NK.shape[0])


def product(a_MK: Tensor, b_NK: Tensor) -> Tensor:
    """a b^T, [M, N], by the code that `linear` would take; for use inside of autograd functions."""
    return _onednn(a_MK, b_NK) if _is_for_onednn(a_MK, b_NK) else a_MK @ b_NK.T


def sum_of_products(a_MN: Tensor, b_MK: Tensor) -> Tensor:
    """a^T b, [N, K]: the gradient of a weight, summed over M tokens; for use inside of autograd functions."""
    if torch.is_grad_enabled() or a_MN.shape[1] * b_MK.shape[1] < SMALLEST or not _is_for_onednn(a_MN, b_MK):
        return a_MN.T @ b_MK
    total, *more = (_onednn(a.T, b.T) for a, b in zip(a_MN.split(_CHUNK), b_MK.split(_CHUNK), strict=True))
    return functools.reduce(torch.Tensor.add_, more, total)


def add_products_(total_NK: Tensor, a_MN: Tensor, b_MK: Tensor) -> None:
    """Add a^T b to a sum, in place; for use inside of autograd functions."""
    if total_NK.dtype == a_MN.dtype and not _is_for_onednn(a_MN, b_MK):
        total_NK.addmm_(a_MN.T, b_MK)  # reads and writes the sum once, and nothing beside it
    else:
        total_NK += sum_of_products(a_MN, b_MK)


class _ExactProduct(AutogradFunction):
    """`exact_linear`; its gradients are of no fixed order."""

    @staticmethod
    def forward(x_MK, weight_NK, bias_N, parts, wide):
        return exact_linear(x_MK, weight_NK, bias_N, parts, wide)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs[:2])

    @staticmethod
    def backward(ctx, grad_MN):
        x_MK, weight_NK = ctx.saved_tensors
        grad_MN = grad_MN.to(x_MK.dtype)
        d_x = d_weight = d_bias = None
        if ctx.needs_input_grad[0]:
            d_x = grad_MN @ weight_NK if torch.is_grad_enabled() else product(grad_MN, weight_NK.T)
        if ctx.needs_input_grad[1]:
            d_weight = sum_of_products(grad_MN, x_MK)
        if ctx.needs_input_grad[2]:
            d_bias = grad_MN.sum(0)
        return d_x, d_weight, d_bias, None, None


class _Product(AutogradFunction):
    """a b^T of matrices."""

    @staticmethod
    def forward(ctx, a_MK, b_NK):
        ctx.save_for_backward(a_MK, b_NK)
        return _onednn(a_MK, b_NK)

    @staticmethod
    def backward(ctx, grad_MN):
        a_MK, b_NK = ctx.saved_tensors
        d_a = linear(grad_MN, b_NK.T) if ctx.needs_input_grad[0] else None
        return d_a, sum_of_products(grad_MN, a_MK) if ctx.needs_input_grad[1] else None


def _is_for_onednn(x: Tensor, weight: Tensor) -> bool:
    """Plain tensors only: all others see operators of torch's core."""
    return (
        ONEDNN is not None
        and is_plain(x, weight)
        and x.dtype == weight.dtype == torch.float32
        and weight.numel() >= SMALLEST
        and x.numel() > 0
    )


def _onednn(a_MK: Tensor, b_NK: Tensor) -> Tensor:
    assert ONEDNN is not None
    return ONEDNN(a_MK, b_NK, None, "none", [], "")
