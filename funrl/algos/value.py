"""The critic's loss."""

from __future__ import annotations

import torch
from torch import Tensor

from funrl.algos.core import Term, needs
from funrl.batch import Batch


def clipped_value_loss(clip: float | None = 0.5) -> Term:
    """Half the squared error to the returns, pessimistic about moves beyond `clip` of the old estimate, per token.

    L = max((v - R)^2, (clip(v, v_old - c, v_old + c) - R)^2) / 2, with values in the place of log-probabilities.

    Args:
      clip: c, in units of reward; None: L = (v - R)^2 / 2.
    Needs: value, returns [B, T].
    Returns: a term; loss in squared reward; metrics "critic/vpred_mean", "critic/vf_clipfrac".
    Raises:
      ValueError: clip is below 0.
    References: Schulman et al., 2017, https://arxiv.org/abs/1707.06347; verl's default c is 0.5, TRL's 0.2.
    """
    if clip is not None and clip < 0:
        raise ValueError(f"clipped_value_loss({clip}): the clip must be at least 0, or None for no clip")

    @needs("value", "returns")
    def term(value_BT: Tensor, batch: Batch):
        assert batch.value is not None and batch.returns is not None
        old_BT, returns_BT = batch.value.detach(), batch.returns.detach()
        plain_BT = (value_BT - returns_BT).square()
        if clip is None:
            return plain_BT / 2, {"critic/vpred_mean": value_BT}
        near_BT = torch.maximum(torch.minimum(value_BT, old_BT + clip), old_BT - clip)
        clipped_BT = (near_BT - returns_BT).square()
        metrics = {"critic/vpred_mean": value_BT, "critic/vf_clipfrac": (clipped_BT > plain_BT).to(value_BT.dtype)}
        return torch.maximum(plain_BT, clipped_BT) / 2, metrics

    return term
