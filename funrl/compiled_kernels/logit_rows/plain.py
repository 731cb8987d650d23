"""Passes over rows of logits by torch's operators: what a CPU computes, and the reference of the kernels beside it."""

from __future__ import annotations

import torch
from torch import Tensor


def cap_slope(capped: Tensor, cap: float) -> Tensor:
    """Derivative of cap tanh(x / cap) by x, from its value."""
    return 1 - (capped / cap).square_()


def row_sums_(x_RV: Tensor, row_RN: Tensor, extras: tuple[str, ...]) -> list[Tensor]:
    """Sums over the columns of tempered logits, which are used up.

    Args:
      x_RV: logits.
      row_RN: picked columns.
      extras: some of "entropy" and "sum_pi_squared", in this order.

    Returns: the maximum m; of x = logit - m: x[picked], sum e^x; of the extras sum x e^x, sum e^2x.
    """
    top_R = x_RV.amax(-1)
    x_RV.sub_(top_R.unsqueeze(-1))
    picked_RN = x_RV.gather(1, row_RN)
    e_RV = x_RV.exp() if "entropy" in extras else x_RV.exp_()
    sums = [top_R, picked_RN, e_RV.sum(-1)]
    if "entropy" in extras:
        sums.append(torch.linalg.vecdot(e_RV, x_RV))
    if "sum_pi_squared" in extras:
        sums.append(torch.linalg.vecdot(e_RV, e_RV))
    return sums


def to_d_logits_(logp_CV: Tensor, row_CN: Tensor, mine_CN: Tensor, result: dict, grad: dict) -> None:
    """Make log-probabilities into the gradient of this rank's logits, in place.

    With p = e^logp: d logp[t] / dz_j = [j = t] - p_j; d entropy / dz_j = -p_j (logp_j + entropy);
    d sum p^2 / dz_j = 2 p_j (p_j - sum p^2).

    Args:
      logp_CV: log-probabilities.
      row_CN: picked columns.
      mine_CN: whether a picked column is one of this rank's.
      result: by name [C, 1] "entropy" and "sum_pi_squared", where they have a gradient.
      grad: by name the gradient of "logp" [C, N] and of the extras [C, 1].
    """
    if len(grad) == 1 and "logp" in grad:
        logp_CV.exp_().mul_(-grad["logp"].sum(-1, keepdim=True))
    else:
        p_CV = logp_CV.exp()
        factor_CV = logp_CV.add_(result["entropy"]).mul_(-grad["entropy"]) if "entropy" in grad else logp_CV.zero_()
        if "logp" in grad:
            factor_CV.sub_(grad["logp"].sum(-1, keepdim=True))
        if "sum_pi_squared" in grad:
            factor_CV.add_(2 * grad["sum_pi_squared"] * (p_CV - result["sum_pi_squared"]))
        factor_CV.mul_(p_CV)
    if "logp" in grad:
        logp_CV.scatter_add_(1, row_CN, torch.where(mine_CN, grad["logp"], 0))
