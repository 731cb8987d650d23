"""Operators of torch for the C++ functions of the decoding step.

Each has the bits of the step for every number of tokens. Their decompositions into operators of torch's core are the
functions that call them: `linear`, `low_rank_linear`, `rms_norm`, `rotate` and `gated`, which have their gradients too.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from funrl.compiled_kernels.arguments import check_tensor, kernel_bits, real_of
from funrl.compiled_kernels.exact.aligned import aligned_kernels
from funrl.compiled_kernels.exact.dispatch import is_aligned
from funrl.compiled_kernels.exact.packs import packed_weight
from funrl.compiled_kernels.exact.registration import kernel_operator
from funrl.compiled_kernels.kernel_library import library
from funrl.compiled_kernels.packed import packed_linear

_ACTIVATIONS = 3  # `Activation` of operators.hpp


def _like(x: Tensor, *_: object) -> Tensor:
    return torch.empty_like(x)


def _product_meta(x: Tensor, weight: Tensor, bias: Tensor | None, parts: int, wide: bool) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[0], dtype=real_of(x.dtype) if wide else None)


@kernel_operator("exact_linear(Tensor x, Tensor weight, Tensor? bias, int parts, bool wide) -> Tensor", _product_meta)
def exact_linear(x: Tensor, weight: Tensor, bias: Tensor | None, parts: int, wide: bool) -> Tensor:
    """x weight^T + bias of x [M, K] and weight [N, K]; see `packed_linear`."""
    if is_aligned(x):  # a weight's shape says in how many parts its sums are taken
        return aligned_kernels().launch_product(x, weight, bias, wide)
    return packed_linear(x, packed_weight(weight, parts), None, bias, wide)


@kernel_operator(
    "exact_low_rank(Tensor x, Tensor weight, Tensor? bias, Tensor[] factors, float scale, int parts)"
    " -> (Tensor, Tensor)",
    lambda x, weight, bias, factors, scale, parts: (
        x.new_empty(x.shape[0], weight.shape[0]),
        x.new_empty(x.shape[0], factors[0].shape[0]),
    ),
)
def exact_low_rank(
    x: Tensor, weight: Tensor, bias: Tensor | None, factors: Sequence[Tensor], scale: float, parts: int
) -> tuple[Tensor, Tensor]:
    """x weight^T + bias + u b^T with u = scale x a^T, [M, R], which comes with it; rounded after each product.

    Args:
      x, weight, bias, parts: as in `exact_linear`, with [M, K] and [N, K].
      factors: a [R, K] and b [N, R].
    """
    a, b = factors
    if not is_aligned(x):
        kernel_bits("x", x, 2)
        kernel_bits("weight", weight, 2)
        kernel_bits("the first factor", a, 2)
        check_tensor("the first factor", a, x.dtype, (len(a), x.shape[1]))
        check_tensor("the second factor", b, x.dtype, (len(weight), len(a)))
    out = exact_linear(x, weight, bias, parts, False)
    inner = exact_linear(x, a, None, parts, False).mul_(scale)
    return out.add_(exact_linear(inner, b, None, 1, False)), inner


@kernel_operator("exact_norm(Tensor x, Tensor weight, float eps, float offset) -> Tensor", _like)
def exact_norm(x: Tensor, weight: Tensor, eps: float, offset: float) -> Tensor:
    """`rms_norm` of rows."""
    if is_aligned(x):
        return aligned_kernels().launch_norm(x, weight, eps, offset)
    bits = kernel_bits("x", x, least=1)
    D = x.shape[-1]
    check_tensor("weight", weight, x.dtype, (D,))
    x = x.contiguous()
    weight = weight.contiguous()
    out = torch.empty_like(x)
    pointers = (x.data_ptr(), weight.data_ptr(), out.data_ptr())
    sizes = (x.numel() // max(D, 1), D, eps, offset)
    library().funrl_norm(bits, *pointers, *sizes, torch.get_num_threads())
    return out


@kernel_operator(
    "exact_norm_backward(Tensor grad, Tensor x, Tensor weight, float eps, float offset) -> (Tensor, Tensor)",
    lambda grad, x, weight, eps, offset: (torch.empty_like(x), torch.empty_like(weight)),
)
def exact_norm_backward(grad: Tensor, x: Tensor, weight: Tensor, eps: float, offset: float) -> tuple[Tensor, Tensor]:
    """Gradients of `exact_norm` by x and weight."""
    if is_aligned(x):
        return aligned_kernels().launch_norm_backward(grad, x, weight, eps, offset)
    bits = kernel_bits("x", x, least=1)
    D = x.shape[-1]
    check_tensor("grad", grad, x.dtype, x.shape)
    check_tensor("weight", weight, x.dtype, (D,))
    grad = grad.contiguous()
    x = x.contiguous()
    weight = weight.contiguous()
    d_x = torch.empty_like(x)
    d_weight = torch.empty_like(weight)
    pointers = (y.data_ptr() for y in (grad, x, weight, d_x, d_weight))
    sizes = (x.numel() // max(D, 1), D, eps, offset, torch.get_num_threads())
    library().funrl_norm_backward(bits, *pointers, *sizes)
    return d_x, d_weight


@kernel_operator("exact_rotate(Tensor x, Tensor cos, Tensor sin, int sign) -> Tensor", _like)
def exact_rotate(x: Tensor, cos: Tensor, sin: Tensor, sign: int) -> Tensor:
    """`rotate` of heads [..., H, N]; with sign -1 back."""
    if is_aligned(x):
        return aligned_kernels().launch_rotate(x, cos, sin, sign)
    bits = kernel_bits("x", x, least=2)
    H, N = x.shape[-2:]
    M = x.numel() // max(H * N, 1)
    shape = cos.shape
    turned = shape[-1] if shape else 0
    rows = cos.numel() // max(turned, 1)
    check_tensor("cos", cos, x.dtype, shape)
    check_tensor("sin", sin, x.dtype, shape)
    if not 0 < turned <= N or turned % 2:
        raise ValueError(f"cos has {turned} numbers of a position, it must be an even number of the {N} of a head")
    if M and (not rows or M % rows):
        raise ValueError(f"cos has {rows} positions, they must divide the {M} positions of x")
    if sign not in (1, -1):
        raise ValueError(f"the sign is {sign}, it must be 1 or -1")
    x = x.contiguous()
    cos = cos.contiguous()
    sin = sin.contiguous()
    out = torch.empty_like(x)
    pointers = (y.data_ptr() for y in (x, cos, sin, out))
    sizes = (M, H, N, turned, max(rows, 1), sign, torch.get_num_threads())
    library().funrl_rotate(bits, *pointers, *sizes)
    return out


@kernel_operator("exact_gate(Tensor gate, Tensor up, int activation) -> Tensor", _like)
def exact_gate(gate: Tensor, up: Tensor, activation: int) -> Tensor:
    """`gated`."""
    if is_aligned(gate):
        return aligned_kernels().launch_gated(gate, up, activation)
    bits = _gate_bits(gate, up, activation)
    gate = gate.contiguous()
    up = up.contiguous()
    out = torch.empty_like(gate)
    pointers = (gate.data_ptr(), up.data_ptr(), out.data_ptr())
    library().funrl_gate(bits, *pointers, gate.numel(), activation, torch.get_num_threads())
    return out


@kernel_operator(
    "exact_gate_backward(Tensor grad, Tensor gate, Tensor up, int activation) -> (Tensor, Tensor)",
    lambda grad, gate, up, activation: (torch.empty_like(gate), torch.empty_like(up)),
)
def exact_gate_backward(grad: Tensor, gate: Tensor, up: Tensor, activation: int) -> tuple[Tensor, Tensor]:
    """Gradients of `exact_gate` by gate and up."""
    if is_aligned(gate):
        return aligned_kernels().launch_gated_backward(grad, gate, up, activation)
    bits = _gate_bits(gate, up, activation)
    check_tensor("grad", grad, gate.dtype, gate.shape)
    grad = grad.contiguous()
    gate = gate.contiguous()
    up = up.contiguous()
    d_gate = torch.empty_like(gate)
    d_up = torch.empty_like(up)
    pointers = (y.data_ptr() for y in (grad, gate, up, d_gate, d_up))
    library().funrl_gate_backward(bits, *pointers, gate.numel(), activation, torch.get_num_threads())
    return d_gate, d_up


def _gate_bits(gate: Tensor, up: Tensor, activation: int) -> int:
    """Bits of the numbers of a gate, after its arguments have been checked."""
    bits = kernel_bits("gate", gate)
    check_tensor("up", up, gate.dtype, gate.shape)
    if not 0 <= activation < _ACTIVATIONS:
        raise ValueError(f"the activation is {activation}, it must be below {_ACTIVATIONS}")
    return bits
