"""Operators of torch for the C++ functions of routers and experts.

A row of a result depends on no other row. `grouped_linear`, `softmax`, `sigmoid` and `funrl::choose_experts` call them,
with their decompositions and gradients.
"""

from __future__ import annotations

import torch
from torch import Tensor

from funrl.compiled_kernels.arguments import check_tensor, kernel_bits, real_of
from funrl.compiled_kernels.exact.packs import packed_rows, packed_weight
from funrl.compiled_kernels.exact.registration import kernel_operator
from funrl.compiled_kernels.kernel_library import library


def _grouped_meta(x: Tensor, weight: Tensor, ends: Tensor, parts: int, wide: bool) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[1], dtype=real_of(x.dtype) if wide else None)


@kernel_operator(
    "exact_grouped_linear(Tensor x, Tensor weight, Tensor ends, int parts, bool wide) -> Tensor", _grouped_meta
)
def exact_grouped_linear(x: Tensor, weight: Tensor, ends: Tensor, parts: int, wide: bool) -> Tensor:
    """Rows of x [M, K], sorted by group, times the matrix of their group in weight [E, N, K]; 0 after the last end.

    Args:
      ends: int32 [E], the number of rows up to each group, itself included.
      parts, wide: as in `packed_linear`.
    """
    bits = kernel_bits("x", x, 2)
    kernel_bits("weight", weight, 3)
    E, N, K = weight.shape
    check_tensor("weight", weight, x.dtype, (E, N, x.shape[1]))
    check_tensor("ends", ends, torch.int32, (E,))
    x = x.contiguous()
    ends = ends.contiguous()
    packed = packed_weight(weight, parts)
    out = x.new_empty(x.shape[0], N, dtype=real_of(x.dtype) if wide else None)
    pointers = (y.data_ptr() for y in (x, packed.panels, ends, out))
    sizes = (wide, E, x.shape[0], N, K // parts, parts, torch.get_num_threads())
    if library().funrl_grouped_linear(bits, *pointers, *sizes):
        raise ValueError(f"ends {ends.tolist()} do not ascend from 0 to at most the {len(x)} rows of x")
    return out


def _heads_meta(x: Tensor, weight: Tensor, low: int, high: int, transposed: bool) -> Tensor:
    return x.new_empty(*x.shape[:2], weight.shape[2] if transposed else high - low)


@kernel_operator(
    "exact_head_products(Tensor x, Tensor weight, int low, int high, bool transposed) -> Tensor", _heads_meta
)
def exact_head_products(x: Tensor, weight: Tensor, low: int, high: int, transposed: bool) -> Tensor:
    """Heads x [M, H, K] times rows `low` to `high` of their own matrix in weight [H, N, K], or their transpose."""
    bits = kernel_bits("x", x, 3)
    kernel_bits("weight", weight, 3)
    M, H, K = x.shape
    _, N, inputs = weight.shape
    if not 0 <= low < high <= N:
        raise ValueError(f"there are no rows {low} to {high} of the {N} rows of a matrix")
    check_tensor("weight", weight, x.dtype, (H, N, inputs))
    check_tensor("x", x, x.dtype, (M, H, high - low if transposed else inputs))
    packed = packed_rows(weight, low, high, transposed)
    rows = x.transpose(0, 1).contiguous()
    ends = torch.arange(M, M * H + 1, M, dtype=torch.int32) if M else torch.zeros(H, dtype=torch.int32)
    out = x.new_empty(H, M, packed.outputs)
    pointers = (y.data_ptr() for y in (rows, packed.panels, ends, out))
    sizes = (False, H, M * H, packed.outputs, K, 1, torch.get_num_threads())
    library().funrl_grouped_linear(bits, *pointers, *sizes)
    return out.transpose(0, 1).contiguous()


@kernel_operator("exact_softmax(Tensor x) -> Tensor", torch.empty_like)
def exact_softmax(x: Tensor) -> Tensor:
    """Softmax over the last dim, of float32 or float64."""
    bits = kernel_bits("x", x, least=1, wide=True)
    x = x.contiguous()
    out = torch.empty_like(x)
    N = x.shape[-1]
    rows = x.numel() // max(N, 1)
    library().funrl_softmax(bits, x.data_ptr(), out.data_ptr(), rows, N, torch.get_num_threads())
    return out


@kernel_operator("exact_sigmoid(Tensor x) -> Tensor", torch.empty_like)
def exact_sigmoid(x: Tensor) -> Tensor:
    """1 / (1 + e^-x), number by number."""
    bits = kernel_bits("x", x)
    x = x.contiguous()
    out = torch.empty_like(x)
    library().funrl_sigmoid(bits, x.data_ptr(), out.data_ptr(), x.numel(), torch.get_num_threads())
    return out


@kernel_operator(
    "exact_largest(Tensor x, int count) -> Tensor",
    lambda x, count: x.new_empty(*x.shape[:-1], count, dtype=torch.int64),
)
def exact_largest(x: Tensor, count: int) -> Tensor:
    """Indices of the largest numbers of the last dim, the largest first; the first of equal ones comes first.

    Args:
      x: float32 or float64.
    """
    bits = kernel_bits("x", x, least=1, wide=True)
    N = x.shape[-1]
    if not 1 <= count <= N:
        raise ValueError(f"count is {count}, it must be from 1 to the {N} numbers of a row")
    x = x.contiguous()
    out = torch.empty(*x.shape[:-1], count, dtype=torch.int64)
    sizes = (x.numel() // N, N, count, torch.get_num_threads())
    library().funrl_largest(bits, x.data_ptr(), out.data_ptr(), *sizes)
    return out
