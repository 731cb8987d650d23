"""Baselines of outcomes: what a row's score is compared with. Pieces on [B], each before `to_tokens`.

The two rules of `advantages` hold: a group of one row and a group of equal rewards get exactly 0.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from funrl.algos.core import Advantage, Signal, check_rank, stateless
from funrl.algos.groups import group_max, group_mean, group_std, group_sum, groups_of
from funrl.batch import Batch


def leave_one_out() -> Advantage:
    """Takes off the mean of the other rows of the group: x_i - mean_{j != i} x_j = (x_i - mean_G x) n / (n - 1).

    Needs: score, group [B].
    References: Kool et al., 2019; RLOO, Ahmadian et al., 2024, https://arxiv.org/abs/2402.14740

    Warning: a group of one row gets 0. verl's rloo gives its raw reward, verl's rloo_vectorized 0.
    """

    def compare(x_B: Tensor, batch: Batch) -> Tensor:
        groups = groups_of(batch.group)
        return (x_B - group_mean(x_B, groups)) * groups.size / (groups.size - 1).clamp_min(1)

    return stateless(compare, "score", "group", per="row")


def win_rate() -> Advantage:
    """How often a row beats another of its group, less one half: mean_{j != i} (1[x_i > x_j] + 1[x_i = x_j] / 2) - 1/2.

    A row is not compared with itself, so the rates of a group have a mean of 1/2 whatever its size. From -1/2 to 1/2,
    and 0 for a group of one row or of equal scores. Memory grows with the square of the rows.

    Needs: score, group [B].
    References: SPPO, Wu et al., 2024, https://arxiv.org/abs/2405.00675

    Warning: the paper's estimate is the mean over all rows of the group, the row itself included as a draw, which
    pulls the rate towards 1/2 by the factor (n - 1) / n.
    """

    def compare(x_B: Tensor, batch: Batch) -> Tensor:
        groups = groups_of(batch.group)
        same_BB = groups.index[:, None] == groups.index
        lead_B = (torch.sign(x_B[:, None] - x_B) * same_BB).sum(1)
        return lead_B / (2 * (groups.size - 1).clamp_min(1))

    return stateless(compare, "score", "group", per="row")


def greedy_baseline() -> Advantage:
    """Takes off the score of a greedy completion of the same prompt: x_i - b_i. Needs: score, greedy_score [B].

    References: ReMax, Li et al., 2024, https://arxiv.org/abs/2310.10505
    """

    def compare(x_B: Tensor, batch: Batch) -> Tensor:
        assert batch.greedy_score is not None
        return x_B - batch.greedy_score.to(x_B.dtype)

    return stateless(compare, "score", "greedy_score", per="row")


def length_weighted_center() -> Advantage:
    """Takes off the group's mean weighted by length: x_i - sum_G l x / sum_G l.

    The baseline of least variance when a completion's gradient has a squared norm that grows with its length l, the
    number of its sampled tokens, those included that a correction has rejected.

    Needs: score, group [B].
    References: OPO, Hao et al., 2025, https://arxiv.org/abs/2505.23585

    Warning: a group of one row gets 0; verl's opo gives its raw reward.
    """

    def update(signal: Signal, state: Any, batch: Batch) -> tuple[Signal, Any]:
        check_rank(signal, "row")
        length_B = batch.mask.sum(1).to(signal.x.dtype)
        return signal._replace(x=signal.x - group_mean(signal.x, groups_of(batch.group), length_B)), state

    return Advantage(lambda: (), update, frozenset({"score", "group"}))


def informative_rescale() -> Advantage:
    """Multiplies by rows / (rows of groups whose x are not all 0), so that groups that teach nothing do not dilute.

    Comes after `group_center`, which makes x exactly 0 in a group of equal rewards.

    Needs: score, group [B].
    References: GPG, Chu et al., 2025, https://arxiv.org/abs/2504.02546

    Warning: as in the paper, the rows that count are those of groups with unequal rewards. verl counts the rows whose
    reward is not 0, which is another number.
    """

    def rescale(x_B: Tensor, batch: Batch) -> Tensor:
        teaches_B = group_max(x_B.abs(), groups_of(batch.group)) > 0
        return x_B * (x_B.shape[0] / teaches_B.sum().clamp_min(1).to(x_B.dtype))

    return stateless(rescale, "score", "group", per="row")


def best_of_group(eps: float | None = 1e-6) -> Advantage:
    """Only the best row of a group gets an advantage, its lead over the second best: trains pass@k.

    A_i = x_1 - x_2 for the best row i of the group, divided by the group's standard deviation plus eps; else 0.

    Args:
      eps: in the unit of x; None: no division.
    Needs: score, group [B].
    References: Tang et al., 2025, https://arxiv.org/abs/2503.19595

    Warning: a group of one row gets 0; verl's grpo_passk raises. Of two rows that are equally best neither gets any.
    """

    def lead(x_B: Tensor, batch: Batch) -> Tensor:
        groups = groups_of(batch.group)
        best_B = x_B == group_max(x_B, groups)
        alone_B = best_B & (group_sum(best_B.to(x_B.dtype), groups) == 1) & (groups.size > 1)
        second_B = group_max(torch.where(best_B, -torch.inf, x_B), groups)
        lead_B = torch.where(alone_B, x_B - second_B, torch.zeros_like(x_B))
        return lead_B if eps is None else lead_B / (group_std(x_B, groups) + eps)

    return stateless(lead, "score", "group", per="row")


def decoupled_groups(weights: Sequence[float] | None = None, eps: float = 1e-6) -> Advantage:
    """Each reward function centred and scaled in the group by itself, then summed: sum_k w_k (s_k - mean_G) / std_G.

    The signal's x is replaced. A reward function that does not tell the rows of a group apart adds exactly 0, while in
    a sum of raw rewards it would still set the scale of the others. What pieces before it have changed in the score, a
    penalty for example, is centred in the group and added to the sum as it is: 1 of it then counts as much as one
    deviation of a reward function of weight 1.

    Args:
      weights: one number a reward function; None: all 1.
      eps: in the unit of the rewards.
    Needs: score [B], scores [B, K], group [B].
    Raises:
      ValueError: there are not as many weights as reward functions.
    References: GDPO, Liu et al., 2026, https://arxiv.org/abs/2601.05242
    """

    def decouple(x_B: Tensor, batch: Batch) -> Tensor:
        assert batch.score is not None and batch.scores is not None
        groups, shaped_B = groups_of(batch.group), x_B - batch.score.to(x_B.dtype)
        total_B = shaped_B - group_mean(shaped_B, groups)
        for weight, s_B in zip(_weights(weights, batch.scores), batch.scores.to(x_B.dtype).unbind(1), strict=True):
            std_B = group_std(s_B, groups)
            total_B = total_B + weight * (s_B - group_mean(s_B, groups)) / torch.where(std_B > 0, std_B + eps, 1)
        return total_B

    return stateless(decouple, "score", "scores", "group", per="row")


def weighted_scores(weights: Sequence[float] | None = None) -> Advantage:
    """Several reward functions as one score, sum_k w_k s_k. The signal's x is replaced: put it first.

    Args:
      weights: one number a reward function; None: all 1.
    Needs: scores [B, K].
    Raises:
      ValueError: there are not as many weights as reward functions.
    """

    def combine(x_B: Tensor, batch: Batch) -> Tensor:
        assert batch.scores is not None
        factors = torch.tensor(_weights(weights, batch.scores), dtype=x_B.dtype, device=x_B.device)
        return (batch.scores.to(x_B.dtype) * factors).sum(1)

    return stateless(combine, "scores", per="row")


def parse_weights(text: str) -> tuple[float, ...]:
    """Numbers with commas between, as in "1,0.5".

    Raises:
      ValueError: something between commas is no finite number.
    """
    try:
        weights = tuple(float(part) for part in text.split(","))
    except ValueError:
        weights = (math.nan,)
    if not all(map(math.isfinite, weights)):
        raise ValueError(f"reward_weights={text}: give numbers with commas between, such as 1,0.5")
    return weights


def _weights(weights: Sequence[float] | None, scores_BK: Tensor) -> Sequence[float]:
    K = scores_BK.shape[1]
    if weights is not None and len(weights) != K:
        raise ValueError(f"{len(weights)} weights for {K} reward functions: batch.scores is {list(scores_BK.shape)}")
    return [1.0] * K if weights is None else weights
