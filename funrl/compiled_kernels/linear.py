"""Products of activations and weights; in float32 on an x86 CPU by oneDNN instead of the BLAS that torch calls.

MKL has no AVX-512 code for processors that are not Intel's; oneDNN, which torch brings along, has, and takes half the
time there. With it a row of a product has the same bits however many rows there are, from two on.
"""

from __future__ import annotations

import functools
import platform

import torch
import torch.nn.functional as F
from torch import Tensor

SMALLEST = 128 * 128  # elements of a weight; below it a call to oneDNN costs more than it gains
_CHUNK = 1024  # tokens that are summed in one call
_X86 = platform.machine().lower() in ("x86_64", "amd64")
ONEDNN = torch.ops.mkldnn._linear_pointwise if _X86 and torch.backends.mkldnn.is_available() else None  # the operator


def linear(x: Tensor, weight_NK: Tensor, bias_N: Tensor | None = None) -> Tensor:
    """x weight^T + bias, for x [..., K]; differentiable.

    Which code computes it depends on the weight and not on the number of rows of x.
    """
    if not _is_for_onednn(x, weight_NK):
        return F.linear(x, weight_NK, bias_N)
    rows = x.reshape(-1, x.shape[-1])
    out = _Product.apply(rows, weight_NK) if torch.is_grad_enabled() else _onednn(rows, weight_NK)
    out = out.view(*x.shape[:-1], -1)
    return out if bias_N is None else out + bias_N


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


class _Product(torch.autograd.Function):
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


def is_plain(x: Tensor) -> bool:
    """True of a plain tensor on a CPU, and not of what is simulated, traced, compiled or in `torch.func`."""
    return (
        type(x) is Tensor
        and x.device.type == "cpu"
        and not torch.compiler.is_compiling()
        and not torch._C._are_functorch_transforms_active()
        and not torch._C._len_torch_dispatch_stack()  # nor where operators are counted, which are to be the core's
    )


def _is_for_onednn(x: Tensor, weight: Tensor) -> bool:
    """Plain tensors only: all others see operators of torch's core."""
    return (
        ONEDNN is not None
        and is_plain(x)
        and type(weight) is Tensor
        and x.dtype == weight.dtype == torch.float32
        and weight.numel() >= SMALLEST
        and x.numel() > 0
    )


def _onednn(a_MK: Tensor, b_NK: Tensor) -> Tensor:
    assert ONEDNN is not None
    return ONEDNN(a_MK, b_NK, None, "none", [], "")
