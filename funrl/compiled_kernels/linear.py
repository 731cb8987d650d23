"""Products of activations and weights.

On a CPU the forward pass is the decoding step's: a row of a product has the same bits however many rows there are.
Gradients of weights in float32 are sums over tokens by the same tiles. What else has no such promise, gradients of
activations above all, is computed in float32 on x86 by oneDNN instead of the BLAS that torch calls: MKL has no AVX-512
code for processors that are not Intel's; oneDNN, which torch brings along, has, and takes half the time where the
processor adds 16 numbers at once.
"""

from __future__ import annotations

import functools
import logging
import platform
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from funrl.autograd import AutogradFunction
from funrl.compiled_kernels.arguments import check_tensor, kernel_bits
from funrl.compiled_kernels.exact.dispatch import computes_exactly, is_plain, kernels_work
from funrl.compiled_kernels.exact.operators import exact_linear
from funrl.compiled_kernels.gpu_kernels.trials import assumed_gpu
from funrl.compiled_kernels.kernel_library import library

_PROBED = "cuda"  # where products are tried
_TOLERANCE = 1e-3  # of sums of 64 products of size 1 that are not rounded to 16 bits
log = logging.getLogger(__name__)
SMALLEST = 128 * 128  # elements of a weight; below it a call to oneDNN or to a kernel costs more than it gains
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


def sum_of_products(a_MN: Tensor, b_MK: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """a^T b, [N, K]: the gradient of a weight, summed over M tokens; for use inside of autograd functions.

    Args:
      dtype: of the result, to which a GPU need not round; None: that of a.
    """
    if dtype is not None and dtype != a_MN.dtype:
        if sums_wide(a_MN):
            return torch.mm(a_MN.T, b_MK, out_dtype=dtype)
        return sum_of_products(a_MN, b_MK).to(dtype)
    if torch.is_grad_enabled() or not _has_transposed_product(a_MN, b_MK):
        return a_MN.T @ b_MK
    total_NK = a_MN.new_empty(a_MN.shape[1], b_MK.shape[1])
    _transposed_product(a_MN, b_MK, total_NK, add=False)
    return total_NK


def add_products_(total_NK: Tensor, a_MN: Tensor, b_MK: Tensor) -> None:
    """Add a^T b to a sum, in place; for use inside of autograd functions."""
    if total_NK.dtype != a_MN.dtype and sums_wide(a_MN):
        torch.addmm(total_NK, a_MN.T, b_MK, out_dtype=total_NK.dtype, out=total_NK)
    elif total_NK.dtype != a_MN.dtype:
        total_NK += sum_of_products(a_MN, b_MK)
    elif total_NK.is_contiguous() and _has_transposed_product(a_MN, b_MK):
        _transposed_product(a_MN, b_MK, total_NK, add=True)
    else:
        total_NK.addmm_(a_MN.T, b_MK)  # reads and writes the sum once, and nothing beside it


def sums_wide(a: Tensor) -> bool:
    """True of 16 bits on a GPU that adds their products to sums in float32."""
    return a.element_size() == 2 and (assumed_gpu() is not None or (a.is_cuda and has_wide_sums(a.dtype)))


def multiplies_wide(a: Tensor) -> bool:
    """True of 16 bits on a GPU whose products of them are in float32."""
    return a.element_size() == 2 and (assumed_gpu() is not None or (a.is_cuda and has_wide_products(a.dtype)))


@functools.cache
def has_wide_products(dtype: torch.dtype) -> bool:
    """True if this machine's GPU sums products of 16-bit numbers in float32 results; a small one is tried."""
    problem = _wide_problem(lambda a, b: torch.mm(a, b.T, out_dtype=torch.float32), dtype)
    if problem is not None:
        log.warning(
            "logits are products in float32, which is slow: the GPU has none of %s in float32: %s", dtype, problem
        )
    return problem is None


@functools.cache
def has_wide_sums(dtype: torch.dtype) -> bool:
    """True if this machine's GPU adds such products to float32 numbers in place; a small one is tried."""

    def add(a: Tensor, b: Tensor) -> Tensor:
        total = torch.ones(len(a), len(b), dtype=torch.float32, device=a.device)
        return torch.addmm(total, a, b.T, out_dtype=torch.float32, out=total) - 1

    problem = _wide_problem(add, dtype)
    if problem is not None:
        log.warning(
            "sums of gradients of %s take another pass: the GPU adds no products to float32: %s", dtype, problem
        )
    return problem is None


def _wide_problem(multiply: Callable[[Tensor, Tensor], Tensor], dtype: torch.dtype) -> str | None:
    """Reason why a b^T in float32 is not to be had on this machine's GPU; None: it is."""
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(32, 64, generator=generator).to(dtype) for _ in range(2))
    try:
        wide = multiply(a.to(_PROBED), b.to(_PROBED)).cpu()
    except (RuntimeError, NotImplementedError, TypeError) as refusal:
        return str(refusal).partition("\n")[0]
    error = (wide - a.double() @ b.double().T).abs().max().item()
    return None if error < _TOLERANCE else f"results differ by {error:.2g} from the reference's"


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


def _has_transposed_product(a_MN: Tensor, b_MK: Tensor) -> bool:
    """Plain tensors of float32 only, where a call costs less than it gains."""
    M, N = a_MN.shape
    return (
        is_plain(a_MN, b_MK)
        and a_MN.dtype == b_MK.dtype == torch.float32
        and N * b_MK.shape[1] >= SMALLEST
        and M > 0
        and kernels_work()
    )


def _transposed_product(a_MN: Tensor, b_MK: Tensor, total_NK: Tensor, add: bool) -> None:
    """total = a^T b, or total += a^T b, in float32; its bits depend on no thread."""
    kernel_bits("a_MN", a_MN, 2)
    M, N = a_MN.shape
    K = b_MK.shape[-1]
    check_tensor("a_MN", a_MN, torch.float32, (M, N))
    check_tensor("b_MK", b_MK, torch.float32, (M, K))
    check_tensor("total_NK", total_NK, torch.float32, (N, K))
    if not total_NK.is_contiguous():
        raise ValueError("total_NK is not contiguous")
    a_MN = a_MN.contiguous()
    b_MK = b_MK.contiguous()
    pointers = (x.data_ptr() for x in (a_MN, b_MK, total_NK))
    library().funrl_transposed_product(*pointers, M, N, K, add, torch.get_num_threads())


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
