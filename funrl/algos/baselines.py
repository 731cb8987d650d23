"""Baselines of outcomes: what a row's score is compared with. Pieces on [B], each before `to_tokens`.

The two rules of `advantages` hold: a group of one row and a group of equal rewards get exactly 0.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from funrl.algos.core import Advantage, stateless
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

    return stateless(compare, "score", "group")


def win_rate() -> Advantage:
    """How often a row beats another of its group, less one half: mean_{j != i} (1[x_i > x_j] + 1[x_i = x_j] / 2) - 1/2.

    From -1/2 to 1/2, and 0 for a group of one row or of equal scores. Memory grows with the square of the rows.

    Needs: score, group [B].
    References: SPPO, Wu et al., 2024, https://arxiv.org/abs/2405.00675
    """

    def compare(x_B: Tensor, batch: Batch) -> Tensor:
        groups = groups_of(batch.group)
        same_BB = groups.index[:, None] == groups.index
        lead_B = (torch.sign(x_B[:, None] - x_B) * same_BB).sum(1)
        return lead_B / (2 * (groups.size - 1).clamp_min(1))

    return stateless(compare, "score", "group")


def greedy_baseline() -> Advantage:
    """Takes off the score of a greedy completion of the same prompt: x_i - b_i. Needs: score, greedy_score [B].

    References: ReMax, Li et al., 2024, https://arxiv.org/abs/2310.10505
    """

    def compare(x_B: Tensor, batch: Batch) -> Tensor:
        assert batch.greedy_score is not None
        return x_B - batch.greedy_score.to(x_B.dtype)

    return stateless(compare, "score", "greedy_score")


def length_weighted_center() -> Advantage:
    """Takes off the group's mean weighted by length: x_i - sum_G l x / sum_G l.

    The baseline of least variance when a completion's gradient has a squared norm that grows with its length l, the
    number of its sampled tokens.

    Needs: score, group [B].
    References: OPO, Hao et al., 2025, https://arxiv.org/abs/2505.23585

    Warning: a group of one row gets 0; verl's opo gives its raw reward.
    """

    def compare(x_B: Tensor, batch: Batch) -> Tensor:
        return x_B - group_mean(x_B, groups_of(batch.group), batch.mask.sum(1).to(x_B.dtype))

    return stateless(compare, "score", "group")


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

    return stateless(rescale, "score", "group")


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

    return stateless(lead, "score", "group")


def decoupled_groups(weights: Sequence[float] | None = None, eps: float = 1e-6) -> Advantage:
    """Each reward function centred and scaled in the group by itself, then summed: sum_k w_k (s_k - mean_G) / std_G.

    The signal's x is replaced. A reward function that does not tell the rows of a group apart adds exactly 0, while in
    a sum of raw rewards it would still set the scale of the others.

    Args:
      weights: one number a reward function; None: all 1.
      eps: in the unit of the rewards.
    Needs: scores [B, K], group [B].
    Raises:
      ValueError: there are not as many weights as reward functions.
    References: GDPO, Liu et al., 2026, https://arxiv.org/abs/2601.05242
    """

    def decouple(x_B: Tensor, batch: Batch) -> Tensor:
        assert batch.scores is not None
        groups, total_B = groups_of(batch.group), torch.zeros_like(x_B)
        for weight, s_B in zip(_weights(weights, batch.scores), batch.scores.to(x_B.dtype).unbind(1), strict=True):
            std_B = group_std(s_B, groups)
            total_B = total_B + weight * (s_B - group_mean(s_B, groups)) / torch.where(std_B > 0, std_B + eps, 1)
        return total_B

    return stateless(decouple, "scores", "group")


def weighted_scores(weights: Sequence[float] | None = None) -> Advantage:
    """Several reward functions as one score, sum_k w_k s_k. The signal's x is replaced.

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

    return stateless(combine, "scores")


def _weights(weights: Sequence[float] | None, scores_BK: Tensor) -> Sequence[float]:
    K = scores_BK.shape[1]
    if weights is not None and len(weights) != K:
        raise ValueError(f"{len(weights)} weights for {K} reward functions: batch.scores is {list(scores_BK.shape)}")
    return [1.0] * K if weights is None else weights
