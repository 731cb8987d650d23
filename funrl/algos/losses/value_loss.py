"""The critic's loss."""

from __future__ import annotations

import torch
from torch import Tensor

from funrl.algos.terms import Term
from funrl.batch import Batch


def clipped_value_loss(value_clip: float | None = 0.5) -> Term:
    """Clipped squared error of values to returns, per token.

    L = max((v - R)^2, (clip(v, v_old - c, v_old + c) - R)^2) / 2, with values instead of log-probabilities.

    Args:
      value_clip: c, in units of reward; None: L = (v - R)^2 / 2.
    Needs: returns [B, T]; value [B, T] where there is a clip.
    Returns: a term; loss in squared reward; metrics "critic/vpred_mean", "critic/vf_clipfrac".

    Raises:
      ValueError: value_clip is below 0.
    References: Schulman et al., 2017, https://arxiv.org/abs/1707.06347; verl's default c is 0.5, TRL's 0.2.
    """
    if value_clip is not None and value_clip < 0:
        raise ValueError(f"clipped_value_loss({value_clip}): the clip must be at least 0, or None for no clip")

    def term(value_BT: Tensor, batch: Batch):
        returns_BT = batch.returns
        plain_BT = (value_BT - returns_BT).square()
        if value_clip is None:
            return plain_BT / 2, {"critic/vpred_mean": value_BT}
        old_BT = batch.value
        near_BT = torch.maximum(torch.minimum(value_BT, old_BT + value_clip), old_BT - value_clip)
        clipped_BT = (near_BT - returns_BT).square()
        metrics = {"critic/vpred_mean": value_BT, "critic/vf_clipfrac": (clipped_BT > plain_BT).to(value_BT.dtype)}
        return torch.maximum(plain_BT, clipped_BT) / 2, metrics

    return term
