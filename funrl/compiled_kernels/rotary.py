"""Rotary positions: each pair (x_i, x_{i + N/2}) of a head is turned by position times frequency i."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from funrl.autograd import AutogradFunction
from funrl.compiled_kernels.exact.dispatch import computes_exactly
from funrl.compiled_kernels.exact.operators import exact_rotate


class Rotary(NamedTuple):
    """The turns of some positions; the leading dims are those of the positions."""

    cos: Tensor  # [..., 1, N], the second half repeats the first
    sin: Tensor  # [..., 1, N], the first half negated
    growth: Tensor | None = None  # [..., 1, 1], factor of rotated queries; None: 1


def frequencies(head: int, theta: float, scaling=None, dtype=torch.float32, device=None) -> Tensor:
    """theta^(-2 i / N) for i < N / 2, stretched by `scaling` (a RopeScaling), in radians per token: [N / 2]."""
    exponent = torch.arange(0, head, 2, dtype=torch.int64, device=device).to(dtype) / head
    frequency = 1.0 / theta**exponent
    if scaling is None:
        return frequency
    if scaling.kind == "dynamic":
        return frequency
    if scaling.kind == "linear":
        return frequency / scaling.factor
    if scaling.kind == "longrope":
        return frequency / frequency.new_tensor(scaling.short)
    if scaling.kind == "yarn":
        return _yarn(frequency, theta, scaling)
    # llama3: turns over the original length decide; below `low` stretched, above `high` kept, linear between.
    turns = scaling.original * frequency / (2 * math.pi)
    keep = ((turns - scaling.low) / (scaling.high - scaling.low)).clamp(0, 1)
    return (1 - keep) * frequency / scaling.factor + keep * frequency


def _yarn(frequency: Tensor, theta: float, scaling) -> Tensor:
    """Frequencies below a band divided by the factor, those above it kept, and a ramp between, even in their numbers.

    References: Peng et al., 2023, https://arxiv.org/abs/2309.00071
    """
    half = len(frequency)

    def number(turns: float) -> float:  # of the frequency that turns so often over the original length
        return half * math.log(scaling.original / (turns * 2 * math.pi)) / math.log(theta)

    first = number(scaling.high)
    last = number(scaling.low)
    if scaling.truncate:
        first = math.floor(first)
        last = math.ceil(last)
    low = max(first, 0)
    high = min(last, 2 * half - 1)
    numbers = torch.arange(half, dtype=frequency.dtype, device=frequency.device)
    stretched = ((numbers - low) / max(high - low, 0.001)).clamp(0, 1)
    return (1 - stretched) * frequency + stretched * frequency / scaling.factor


def rotary(
    positions: Tensor, frequency: Tensor, dtype: torch.dtype, amplitude: float = 1.0, axes: tuple[int, ...] = ()
) -> Rotary:
    """The turns of integer positions [...], computed in the dtype of `frequency` and given in `dtype`.

    Args:
      amplitude: factor of what is turned.
      axes: for each frequency which of several positions [..., A] it takes; (): there is one.
    """
    turning = positions[..., torch.tensor(axes, device=positions.device)] if axes else positions.unsqueeze(-1)
    angle = turning.to(frequency.dtype) * frequency
    cos = angle.cos()
    sin = angle.sin()
    if amplitude != 1:
        cos = cos * amplitude
        sin = sin * amplitude
    both = (torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1))
    return Rotary(*(x.unsqueeze(-2).to(dtype) for x in both))


def with_query_growth(rope: Rotary, positions: Tensor, original: int, rate: float) -> Rotary:
    """The turns with a factor of queries at these positions: 1 + rate log(1 + floor(position / original))."""
    lengths = positions.div(original, rounding_mode="floor").to(torch.promote_types(rope.cos.dtype, torch.float32))
    growth = 1 + rate * torch.log(1 + lengths)
    return rope._replace(growth=growth.unsqueeze(-1).unsqueeze(-1).to(rope.cos.dtype))


def halves_of_pairs(x: Tensor, size: int) -> Tensor:
    """Heads [..., N] whose first `size` numbers are pairs of neighbours: the first of all pairs, then the second."""
    paired = x[..., :size].unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
    return paired if size == x.shape[-1] else torch.cat((paired, x[..., size:]), -1)


def rotate(x: Tensor, rope: Rotary) -> Tensor:
    """Turn heads x [..., H, N] by `rope`; where it has fewer numbers than a head, the first ones of each."""
    if computes_exactly(x, rope.cos):
        compute = _ExactRotate.apply if torch.is_grad_enabled() else exact_rotate
        return compute(x, rope.cos, rope.sin, 1)
    size = rope.cos.shape[-1]
    if size < x.shape[-1]:
        return torch.cat((rotate(x[..., :size], rope), x[..., size:]), -1)
    # Rolling by half a head swaps the two of each pair; the sign is already in the sine.
    return torch.addcmul(x * rope.cos, x.roll(x.shape[-1] // 2, -1), rope.sin)


class _ExactRotate(AutogradFunction):
    @staticmethod
    def forward(x, cos, sin, sign):
        return exact_rotate(x, cos, sin, sign)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs[1:3])

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        return exact_rotate(grad, *ctx.saved_tensors, -1), None, None, None


def rotate_reference(x: Tensor, positions: Tensor, frequency: Tensor) -> Tensor:
    """`rotate` as a product of complex numbers."""
    first, second = x.double().chunk(2, -1)
    angle = (positions.unsqueeze(-1).double() * frequency.double()).unsqueeze(-2)
    turned = torch.complex(first, second) * torch.polar(torch.ones_like(angle), angle)
    return torch.cat((turned.real, turned.imag), -1).to(x.dtype)
