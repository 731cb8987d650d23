"""Products in 8 bits: weights with a scale for each row, activations with one for each token.

A row w of a weight is s_w q_w, with s_w = max |w| / 448 and q_w rounded to float8_e4m3fn, whose largest number is 448,
and so is a token x. GPUs of AMD before gfx950 have float8_e4m3fnuz instead, up to 240. The product is

    y = s_x s_w sum_k q_x[k] q_w[k]

summed in float32: on a GPU by `torch._scaled_mm`, on a CPU by the same sum over the same rounded numbers in float32,
which has the bits of its row alone. Nothing here has a gradient.

References: Micikevicius et al., 2022, https://arxiv.org/abs/2209.05433
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import torch
from torch import Tensor

from funrl.compiled_kernels.decode_slots import SMALLEST_SCALE
from funrl.compiled_kernels.gpu_kernels.trials import largest_error, trial_problem
from funrl.compiled_kernels.linear import linear

FLOAT8 = torch.float8_e4m3fn
MULTIPLE = 16  # of rows and columns of a weight, which the GPU's products need
_GPU_FORMATS = (FLOAT8, torch.float8_e4m3fnuz)


class RowScaled(NamedTuple):
    """A weight [*out, *in] in 8 bits.

    Attributes:
      values: of its shape: float8 on a GPU; the same numbers in float32 on a CPU.
      scales: [*out] float32.

    Example:
      >>> weight = quantize_rows(torch.tensor([[896.0, 1.0], [0.0, 0.0]]), 1)
      >>> weight.values.tolist(), weight.scales.tolist()
      ([[448.0, 0.5], [0.0, 0.0]], [2.0, 1.1754943508222875e-38])
    """

    values: Tensor
    scales: Tensor

    @property
    def shape(self) -> torch.Size:
        return self.values.shape

    @property
    def device(self) -> torch.device:
        return self.values.device

    @property
    def form(self) -> torch.dtype:
        """8-bit format of tokens that it multiplies."""
        return self.values.dtype if self.values.dtype in _GPU_FORMATS else FLOAT8

    @property
    def plain(self) -> Tensor:
        """The weight that it stands for, in float32."""
        return self.values.float() * self.scales.view(*self.scales.shape, *(1,) * (self.values.ndim - self.scales.ndim))

    def rows(self, index: Tensor) -> RowScaled:
        """Some rows of the first out dim."""
        return RowScaled(self.values.index_select(0, index), self.scales.index_select(0, index))


def quantize_rows(weight: Tensor, out_dims: int, form: torch.dtype = FLOAT8) -> RowScaled:
    """A weight [*out, *in] with so many out dims, each of its rows with a scale.

    Args:
      form: 8-bit format of the numbers.
    """
    values, scales = round_rows(weight.flatten(out_dims), form)
    held = values if weight.is_cuda else values.float()
    return RowScaled(held.view(weight.shape), scales.view(weight.shape[:out_dims]))


def can_quantize(shape: tuple[int, ...], out_dims: int) -> bool:
    """True if products with a weight of this shape can be taken in 8 bits on every device."""
    return math.prod(shape[:out_dims]) % MULTIPLE == 0 and math.prod(shape[out_dims:]) % MULTIPLE == 0


def float8_linear(x: Tensor, weight: RowScaled, bias: Tensor | None = None) -> Tensor:
    """W x + bias, [..., out], for x [..., in]; the weight's in and out dims count as one each."""
    out = scaled_product(*round_rows(x.flatten(0, -2), weight.form), weight, x.dtype).view(*x.shape[:-1], -1)
    return out if bias is None else out + bias


def scaled_product(q_MK: Tensor, scale_M: Tensor, weight: RowScaled, dtype: torch.dtype) -> Tensor:
    """Products [M, N] in `dtype` of tokens in 8 bits, each with its scale, with the rows of a weight."""
    values_NK = weight.values.reshape(-1, q_MK.shape[-1])
    scales_N = weight.scales.flatten()
    if values_NK.dtype == q_MK.dtype:
        scales = scale_M.unsqueeze(1), scales_N.unsqueeze(0)
        return torch._scaled_mm(q_MK, values_NK.T, *scales, out_dtype=dtype, use_fast_accum=False)
    return (linear(q_MK.float(), values_NK) * scale_M.unsqueeze(1) * scales_N).to(dtype)


def float8_problem(device: torch.device, dtype: torch.dtype) -> str | None:
    """Reason why products cannot be taken in 8 bits here; None: they can.

    Args:
      dtype: of activations.
    """
    if device.type != "cpu" and dtype != torch.bfloat16:
        return f"products in 8 bits have results in bfloat16, not in {dtype}"
    form = float8_format(device.type)
    return form if isinstance(form, str) else None


@functools.cache
def float8_format(device: str) -> torch.dtype | str:
    """The 8-bit format in which a type of devices multiplies, or the reason why it does not."""
    if device == "cpu":
        return FLOAT8
    problems = {form: trial_problem(functools.partial(_float8_error, form)) for form in _GPU_FORMATS}
    works = next((form for form, problem in problems.items() if problem is None), None)
    return f"this {device} device does not multiply in 8 bits: {problems[FLOAT8]}" if works is None else works


def round_rows(x: Tensor, form: torch.dtype) -> tuple[Tensor, Tensor]:
    """Rows [..., K] in 8 bits, and the scale of each, [...] float32."""
    wide = x.float()
    scale = (wide.abs().amax(-1) / torch.finfo(form).max).clamp_min(SMALLEST_SCALE)
    return (wide / scale.unsqueeze(-1)).to(form), scale


def _float8_error(form: torch.dtype, device: str) -> float:
    """Largest error of a small product, beside the one on the host, less what rounding to bfloat16 explains."""
    generator = torch.Generator().manual_seed(0)
    x_MK, weight_NK = (torch.randn(rows, 64, generator=generator).bfloat16() for rows in (5, 32))
    here = float8_linear(x_MK.to(device), quantize_rows(weight_NK.to(device), 1, form))
    values_NK, x_values_MK = (quantize_rows(x, 1, form).plain for x in (weight_NK, x_MK))
    there = x_values_MK.double() @ values_NK.double().T
    return max(0.0, largest_error([(here, there)]) - 2**-8 * there.abs().max().item())
