"""Products with matrices in NF4: 4 bits for each number, which is one of 16 levels times the scale of its block.

A block is 64 numbers of a row, end to end. Its scale is their largest magnitude, in float32, and each number becomes
the nearest of 16 levels between -1 and 1, quantiles of a normal distribution: 4.5 bits a number. bitsandbytes rounds
them on a CPU, and expands them where they are, on a GPU or a CPU. A product expands its matrix, multiplies by it in the
dtype of the activations and drops it; the backward pass expands it again.

References: Dettmers et al., 2023, https://arxiv.org/abs/2305.14314
"""

from __future__ import annotations

import functools
import importlib
import logging
import math
import sys
from collections.abc import Mapping
from types import ModuleType
from typing import NamedTuple, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from funrl.autograd import AutogradFunction
from funrl.compiled_kernels.exact.registration import kernel_operator
from funrl.compiled_kernels.gpu_kernels.trials import exception_text
from funrl.compiled_kernels.linear import linear, product

NF4_BLOCK = 64  # numbers that share a scale
NF4_CODES = "_codes"  # behind the name of a matrix, that of its 4-bit numbers
NF4_SCALES = "_scales"
NF4_DTYPES = {NF4_CODES: torch.uint8, NF4_SCALES: torch.float32}
NF4_LIBRARY = "bitsandbytes"
_HUB = "kernels"  # the package that downloads compiled code
_EXPANDED = (torch.float32, torch.bfloat16, torch.float16)  # by the library
_WIDEST_STEP = 0.16  # half the distance of neighbouring levels, in scales, is below it


class Nf4Weight(NamedTuple):
    """A weight [*out, *in] in 4 bits.

    Attributes:
      codes: uint8 [*out, *in] with half the last dim: two numbers a byte, the first in the upper half.
      scales: float32 [*out, prod(in) / 64].
      dtype: in which it is computed with.

    Example:
      >>> weight = Nf4Weight(torch.zeros(4, 32, dtype=torch.uint8), torch.ones(4, 1), torch.float32)
      >>> weight.shape  # 64 numbers a row, in 32 bytes and a scale
      torch.Size([4, 64])
    """

    codes: Tensor
    scales: Tensor
    dtype: torch.dtype

    @property
    def shape(self) -> torch.Size:
        return torch.Size((*self.codes.shape[:-1], 2 * self.codes.shape[-1]))

    @property
    def device(self) -> torch.device:
        return self.codes.device

    @property
    def plain(self) -> Tensor:
        """The weight that it stands for."""
        return nf4_values(self.codes, self.scales, self.dtype, False)

    def to(self, dtype: torch.dtype) -> Nf4Weight:
        """The same, to be computed with in another dtype."""
        return self._replace(dtype=dtype)

    def rows(self, index: Tensor) -> Nf4Weight:
        """Some rows of the first out dim."""
        return Nf4Weight(self.codes.index_select(0, index), self.scales.index_select(0, index), self.dtype)


def can_quantize_nf4(shape: tuple[int, ...], out_dims: int) -> bool:
    """True if blocks of 64 divide the rows of a weight of this shape."""
    return len(shape) > out_dims > 0 and math.prod(shape[out_dims:]) % NF4_BLOCK == 0 and shape[-1] % 2 == 0


def quantize_nf4(weight: Tensor, out_dims: int) -> Nf4Weight:
    """A weight [*out, *in] with so many out dims in 4 bits; float64 is rounded to float32 first.

    The codes do not depend on the device. The library's GPU kernels, which are compiled with fast arithmetic, divide by
    scales inexactly: a number near the middle of two levels may get the other one.
    """
    _library()
    narrow = weight.cpu() if weight.dtype in _EXPANDED else weight.cpu().float()
    parts = torch.ops.bitsandbytes.quantize_4bit(narrow.contiguous(), NF4_BLOCK, "nf4", torch.uint8)
    codes, scales = (x.to(weight.device) for x in parts)
    out = weight.shape[:out_dims]
    return Nf4Weight(codes.view(*weight.shape[:-1], -1), scales.view(*out, -1), weight.dtype)


# `again` is true in a backward pass. It changes no result: a compiler that saw the same call in the forward pass would
# keep the expanded matrix for the backward pass.
@kernel_operator(
    "nf4_values(Tensor codes, Tensor scales, ScalarType dtype, bool again) -> Tensor",
    lambda codes, scales, dtype, again: codes.new_empty((*codes.shape[:-1], 2 * codes.shape[-1]), dtype=dtype),
)
def nf4_values(codes: Tensor, scales: Tensor, dtype: torch.dtype, again: bool) -> Tensor:
    """Numbers of 4-bit weights in a dtype; float64 are those of float32."""
    _library()
    rows = [2 * codes.numel() // (NF4_BLOCK * scales.shape[-1]), NF4_BLOCK * scales.shape[-1]]  # of whole blocks
    kind = dtype if dtype in _EXPANDED else torch.float32
    expand = torch.ops.bitsandbytes.dequantize_4bit
    values_NK = expand(codes.contiguous(), scales.flatten(), NF4_BLOCK, "nf4", rows, kind).to(dtype)
    return values_NK.view(*codes.shape[:-1], -1)


def nf4_linear(x: Tensor, weight: Nf4Weight, bias: Tensor | None = None) -> Tensor:
    """W x + bias, [..., out], for x [..., in]; differentiable by x and the bias."""
    codes_NC = weight.codes.reshape(-1, x.shape[-1] // 2)
    rows = x.flatten(0, -2)
    multiply = _Nf4Product.apply if torch.is_grad_enabled() else _multiply
    out = multiply(rows, codes_NC, weight.scales).view(*x.shape[:-1], len(codes_NC))
    return out if bias is None else out + bias


def weight_of(weights: Mapping[str, Tensor], name: str, dtype: torch.dtype) -> Tensor | Nf4Weight:
    """A weight of a name, by which there is the weight itself, or its codes and scales.

    Args:
      dtype: to compute in with 4-bit numbers.
    """
    if name + NF4_CODES in weights:
        return Nf4Weight(weights[name + NF4_CODES], weights[name + NF4_SCALES], dtype)
    return weights[name]


def with_records(part: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor | Nf4Weight]:
    """Weights of a part of a layer, each by its own name; `dtype` as in `weight_of`."""
    names = [name.removesuffix(NF4_CODES) for name in part if name.removesuffix(NF4_SCALES) + NF4_CODES not in part]
    return {name: weight_of(part, name, dtype) for name in names}


@functools.cache
def nf4_problem(device: str) -> str | None:
    """Reason why a type of devices has no matrices in 4 bits; None: it has."""
    try:
        error = _nf4_error(device)
    except Exception as problem:  # of a library without code for the device
        return f"{NF4_LIBRARY} has no NF4 on {device}: {exception_text(problem)}"
    return None if error < _WIDEST_STEP else f"{NF4_LIBRARY} on {device} is {error:.2g} scales off"


def _nf4_error(device: str) -> float:
    """Largest error of small rounded matrices, in scales of their blocks."""
    weight_NK = torch.randn(8, 2 * NF4_BLOCK, generator=torch.Generator().manual_seed(0)).to(device)
    rounded = quantize_nf4(weight_NK, 1)
    errors_NSB = (rounded.plain - weight_NK).abs().unflatten(-1, (-1, NF4_BLOCK))
    return (errors_NSB / rounded.scales.unsqueeze(-1)).max().item()


@functools.cache
def _library() -> None:
    """Import the library, which registers its operators."""
    logging.getLogger(f"{NF4_LIBRARY}.backends.cpu.ops").setLevel(logging.ERROR)
    modules = cast(dict[str, ModuleType | None], sys.modules)
    hub = modules.get(_HUB)
    modules[_HUB] = None  # the library would download further kernels by it, which nothing here calls
    try:
        importlib.import_module(NF4_LIBRARY)
    finally:
        modules.pop(_HUB)
        if hub is not None:
            modules[_HUB] = hub


def _multiply(x_MK: Tensor, codes_NC: Tensor, scales: Tensor) -> Tensor:
    """x W^T."""
    return linear(x_MK, nf4_values(codes_NC, scales, x_MK.dtype, False))


class _Nf4Product(AutogradFunction):
    """`_multiply`; what it keeps of the weight are its codes and scales."""

    @staticmethod
    def forward(x_MK, codes_NC, scales):
        return _multiply(x_MK, codes_NC, scales)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.dtype = inputs[0].dtype
        ctx.save_for_backward(*inputs[1:])

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_MN):
        codes_NC, scales = ctx.saved_tensors
        weight_NK = nf4_values(codes_NC, scales, ctx.dtype, True)
        return product(grad_MN.to(ctx.dtype), weight_NK.T), None, None
