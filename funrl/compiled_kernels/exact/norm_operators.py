"""Operators of torch for a norm over numbers that ranks share: sums of squares in fixed parts, and scaled rows."""

from __future__ import annotations

import torch
from torch import Tensor

from funrl.compiled_kernels.arguments import check_parts, check_tensor, kernel_bits, real_of
from funrl.compiled_kernels.exact.registration import kernel_operator
from funrl.compiled_kernels.kernel_library import library


@kernel_operator(
    "exact_square_sums(Tensor x, int parts) -> Tensor",
    lambda x, parts: x.new_empty(x.shape[0], dtype=real_of(x.dtype)),
)
def exact_square_sums(x: Tensor, parts: int) -> Tensor:
    """Sum of squares of each row [M, D], in equal parts that are added by a binary tree: [M] float32 or float64."""
    bits = kernel_bits("x", x, 2)
    M, D = x.shape
    check_parts(parts, D)
    x = x.contiguous()
    out = x.new_empty(M, dtype=real_of(x.dtype))
    sizes = (M, D, parts, torch.get_num_threads())
    library().funrl_square_sums(bits, x.data_ptr(), out.data_ptr(), *sizes)
    return out


@kernel_operator(
    "exact_scale_rows(Tensor x, Tensor totals, Tensor weight, int size, float eps, float offset) -> Tensor",
    lambda x, totals, weight, size, eps, offset: torch.empty_like(x),
)
def exact_scale_rows(x: Tensor, totals: Tensor, weight: Tensor, size: int, eps: float, offset: float) -> Tensor:
    """Rows x [M, D] / sqrt(totals / size + eps) * (offset + weight); `totals` [M] float32 or float64."""
    bits = kernel_bits("x", x, 2)
    M, D = x.shape
    check_tensor("totals", totals, real_of(x.dtype), (M,))
    check_tensor("weight", weight, x.dtype, (D,))
    x = x.contiguous()
    totals = totals.contiguous()
    weight = weight.contiguous()
    out = torch.empty_like(x)
    pointers = (y.data_ptr() for y in (x, totals, weight, out))
    numbers = (size, eps, offset, torch.get_num_threads())
    library().funrl_scale_rows(bits, *pointers, *x.shape, *numbers)
    return out
