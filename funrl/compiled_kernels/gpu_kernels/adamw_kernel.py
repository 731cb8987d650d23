"""Triton kernel of an AdamW step: each number of a leaf is read once and written once.

NVIDIA and ROCm compile it, and Triton's interpreter runs it on a CPU.
"""

# A kernel is in Triton's language, whose types a checker of Python's does not know.
# pyright: reportGeneralTypeIssues=false, reportArgumentType=false, reportReturnType=false
# pyright: reportCallIssue=false, reportAttributeAccessIssue=false
from __future__ import annotations

from typing import NamedTuple

import triton  # type: ignore[import-not-found]
import triton.language as tl  # type: ignore[import-not-found]
from torch import Tensor

_WIDTH = 2048  # numbers of a program
_WARPS = 4


class AdamLeaf(NamedTuple):
    """Tensors of one leaf, of equally many numbers that stand end to end.

    Attributes:
      grad: of any floating-point dtype.
      mu, nu: moments, updated in place; `nu` is float32.
      param: the weights.
      update: takes the update; it may be the memory of `grad`.
    """

    grad: Tensor
    mu: Tensor
    nu: Tensor
    param: Tensor
    update: Tensor


@triton.jit
def _adamw(
    grad_ptr,
    mu_ptr,
    nu_ptr,
    param_ptr,
    update_ptr,
    facts_ptr,
    size,
    b1,
    b2,
    rest1,
    rest2,
    eps,
    decay,
    width: tl.constexpr,
):
    at = tl.program_id(0).to(tl.int64) * width + tl.arange(0, width)
    inside = at < size
    c1 = tl.load(facts_ptr)
    c2 = tl.load(facts_ptr + 1)
    rate = tl.load(facts_ptr + 2)
    grad = tl.load(grad_ptr + at, mask=inside, other=0.0).to(tl.float32)
    mu = tl.load(mu_ptr + at, mask=inside, other=0.0).to(tl.float32) * b1 + grad * rest1
    nu = tl.load(nu_ptr + at, mask=inside, other=0.0) * b2 + grad * grad * rest2
    param = tl.load(param_ptr + at, mask=inside, other=0.0).to(tl.float32)
    update = (mu / c1) / (tl.sqrt(nu / c2) + eps) + decay * param
    tl.store(mu_ptr + at, mu.to(mu_ptr.dtype.element_ty), mask=inside)
    tl.store(nu_ptr + at, nu, mask=inside)
    tl.store(update_ptr + at, -rate * update, mask=inside)


def adamw_leaf(
    leaf: AdamLeaf, facts_3: Tensor, betas: tuple[float, float], eps: float, weight_decay: float = 0.0
) -> None:
    """Update the moments of a leaf and write its update, in one pass.

    Args:
      leaf: its tensors.
      facts_3: float32 corrections of both moments, and the learning rate.
      betas: decays of the moments.
      eps: added to the root.
      weight_decay: 0 for a leaf that does not decay.
    """
    size = leaf.grad.numel()
    if size:
        b1, b2 = betas
        _adamw[(triton.cdiv(size, _WIDTH),)](
            *leaf, facts_3, size, b1, b2, 1.0 - b1, 1.0 - b2, eps, weight_decay, _WIDTH, num_warps=_WARPS
        )
