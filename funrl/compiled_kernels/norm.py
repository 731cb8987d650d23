"""Root-mean-square normalisation; on a CPU by the decoding step's function, whose bits it has."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from funrl.autograd import AutogradFunction
from funrl.compiled_kernels.exact.dispatch import computes_exactly
from funrl.compiled_kernels.exact.operators import exact_norm, exact_norm_backward


def rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * (offset + weight) over the last dim, the mean taken in float32 or wider.

    Args:
      x: [..., D] any float dtype.
      weight: [D].
      eps: in units of x squared.
      offset: added to the weight in float32 or wider.

    Returns: [..., D] in the dtype of x; 16-bit inputs are rounded once before the weight, and with an offset once
      after it, as in transformers.
    """
    if computes_exactly(x, weight):
        compute = _ExactNorm.apply if torch.is_grad_enabled() else exact_norm
        return compute(x, weight, eps, offset)
    if offset:
        wide = torch.promote_types(x.dtype, torch.float32)
        return F.rms_norm(x.to(wide), weight.shape, offset + weight.to(wide), eps).to(x.dtype)
    if x.dtype in (torch.float32, torch.float64):
        return F.rms_norm(x, weight.shape, weight, eps)
    return F.rms_norm(x.float(), weight.shape, None, eps).to(x.dtype) * weight


class _ExactNorm(AutogradFunction):
    @staticmethod
    def forward(x, weight, eps, offset):
        return exact_norm(x, weight, eps, offset)

    @staticmethod
    def setup_context(ctx, inputs, output):
        x, weight, *ctx.numbers = inputs
        ctx.save_for_backward(x, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        return *exact_norm_backward(grad, *ctx.saved_tensors, *ctx.numbers), None, None


def rms_norm_reference(x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
    """`rms_norm` as it is written in the formula."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    unit = wide / (wide.square().mean(-1, keepdim=True) + eps).sqrt()
    return (unit * (offset + weight.to(wide.dtype))).to(x.dtype) if offset else unit.to(x.dtype) * weight
