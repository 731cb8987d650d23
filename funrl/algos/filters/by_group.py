"""Filters of whole groups, by their scores or sizes. Each is batch -> [B] bool; a filter runs before advantages."""

from __future__ import annotations

from torch import Tensor

from funrl.algos.advantages.groups import group_mean, group_std, groups_of
from funrl.algos.terms import Filter
from funrl.batch import Batch


def unequal_scores() -> Filter:
    """Keep groups whose scores differ.

    Needs: score, group [B].
    References: DAPO's dynamic sampling, Yu et al., 2025, https://arxiv.org/abs/2503.14476

    Warning: a group of one row is dropped, since its advantage would be 0; verl keeps it.
    """

    def chosen(batch: Batch) -> Tensor:
        return group_std(batch.score, groups_of(batch.group)) > 0

    return chosen


def mean_between(low: float, high: float) -> Filter:
    """Keep groups with a mean score strictly between low and high.

    Args:
      low, high: in units of reward.
    Needs: score, group [B].
    References: PRIME, Cui et al., 2025, https://arxiv.org/abs/2502.01456; OpenRLHF's dynamic_filtering_range, which
      moves both ends inwards by 1e-6.
    """

    def chosen(batch: Batch) -> Tensor:
        mean_B = group_mean(batch.score, groups_of(batch.group))
        return (mean_B > low) & (mean_B < high)

    return chosen


def complete_groups(size: int) -> Filter:
    """Keep groups of exactly `size` rows; smaller ones lost rows or are still being sampled. Needs: group [B]."""

    def chosen(batch: Batch) -> Tensor:
        return groups_of(batch.group).size == size

    return chosen
