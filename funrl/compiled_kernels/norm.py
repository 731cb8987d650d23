"""Root-mean-square normalisation."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


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
    if offset:
        wide = torch.promote_types(x.dtype, torch.float32)
        return F.rms_norm(x.to(wide), weight.shape, offset + weight.to(wide), eps).to(x.dtype)
    if x.dtype in (torch.float32, torch.float64):
        return F.rms_norm(x, weight.shape, weight, eps)
    return F.rms_norm(x.float(), weight.shape, None, eps).to(x.dtype) * weight


def rms_norm_reference(x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
    """`rms_norm` as it is written in the formula."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    unit = wide / (wide.square().mean(-1, keepdim=True) + eps).sqrt()
    return (unit * (offset + weight.to(wide.dtype))).to(x.dtype) if offset else unit.to(x.dtype) * weight
