"""Several reward functions in one chain: pieces on [B] that read `batch.scores` [B, K].

A NaN score says that the reward function does not apply to the row: the row counts in the other functions only.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from funrl.algos.advantages.baselines import check_eps
from funrl.algos.advantages.groups import group_mean, group_std, groups_of
from funrl.algos.core import Advantage, stateless
from funrl.algos.reading import CountError
from funrl.batch import Batch


def decoupled_groups(weights: Sequence[float] | None = None, eps: float = 1e-6, deviation: bool = True) -> Advantage:
    """Standardise each reward function within the group, then sum: sum_k w_k (s_k - mean_G) / std_G.

    The signal's x is replaced. A reward function that is constant over a group adds exactly 0. Changes that earlier
    pieces made to the score, such as a penalty, are centred in the group and added unscaled: 1 unit of them counts as
    much as one deviation of a reward function of weight 1. A function that does not apply to a row (NaN) adds 0 to that
    row and leaves it out of its mean and deviation.

    Args:
      weights: one number per reward function; None: all 1.
      eps: in the unit of the rewards, at least 0.
      deviation: divide by the group's deviation; False: sum_k w_k (s_k - mean_G).
    Needs: score [B], scores [B, K], group [B].

    Raises:
      ValueError: eps is below 0; in a run, the number of weights is not the number of reward functions.
    References: GDPO, Liu et al., 2026, https://arxiv.org/abs/2601.05242
    """
    check_eps("decoupled_groups", eps)

    def decouple(x_B: Tensor, batch: Batch) -> Tensor:
        groups = groups_of(batch.group)
        shaped_B = x_B - batch.score.to(x_B.dtype)
        total_B = shaped_B - group_mean(shaped_B, groups)
        alone_B = groups.count + torch.arange(len(x_B), device=x_B.device)
        for weight, s_B in zip(_weights(weights, batch.scores), batch.scores.to(x_B.dtype).unbind(1), strict=True):
            applies_B = ~s_B.isnan()
            own = groups_of(torch.where(applies_B, groups.index, alone_B))
            s_B = torch.where(applies_B, s_B, torch.zeros_like(s_B))
            centred_B = s_B - group_mean(s_B, own)
            std_B = group_std(s_B, own)
            if deviation:
                centred_B = centred_B / torch.where(std_B > 0, std_B + eps, 1)
            total_B = total_B + weight * centred_B
        return total_B

    return stateless(decouple, per="row")


def weighted_scores(weights: Sequence[float] | None = None) -> Advantage:
    """Weighted sum of the rewards that apply, sum_k w_k s_k. It replaces x: put it first.

    Args:
      weights: one number per reward function; None: all 1.
    Needs: scores [B, K].

    Raises:
      ValueError: in a run, the number of weights is not the number of reward functions.
    """

    def combine(x_B: Tensor, batch: Batch) -> Tensor:
        factors = torch.tensor(_weights(weights, batch.scores), dtype=x_B.dtype, device=x_B.device)
        return (batch.scores.to(x_B.dtype) * factors).nansum(1)

    return stateless(combine, per="row")


def parse_weights(text: str) -> tuple[float, ...]:
    """Parse numbers separated by commas, as in "1,0.5".

    Raises:
      ValueError: an entry is not a finite number.
    """
    try:
        weights = tuple(float(part) for part in text.split(","))
    except ValueError:
        weights = (math.nan,)
    if not all(map(math.isfinite, weights)):
        raise ValueError(f"reward_weights={text}: give numbers separated by commas, such as 1,0.5")
    return weights


def _weights(weights: Sequence[float] | None, scores_BK: Tensor) -> Sequence[float]:
    K = scores_BK.shape[1]
    if weights is not None and len(weights) != K:
        raise CountError(
            f"{len(weights)} weights for {K} reward functions: batch.scores is {list(scores_BK.shape)}", len(weights)
        )
    return [1.0] * K if weights is None else weights
