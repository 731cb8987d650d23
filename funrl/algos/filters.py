"""Filters: which rows are worth training on. Each is batch -> [B] bool; the loop samples more prompts for the others.

A filter judges whole groups by their scores, or single rows. It runs before advantages.
"""

from __future__ import annotations

import torch
from torch import Tensor

from funrl.algos.core import Filter, needs, needs_of
from funrl.algos.groups import group_mean, group_std, groups_of
from funrl.batch import Batch, select


def unequal_scores() -> Filter:
    """Keeps the groups whose scores differ; from the others a group-relative advantage learns nothing.

    Needs: score, group [B].
    References: DAPO's dynamic sampling, Yu et al., 2025, https://arxiv.org/abs/2503.14476

    Warning: a group of one row is dropped, since its advantage would be 0; verl keeps it.
    """

    @needs("score", "group")
    def keep(batch: Batch) -> Tensor:
        return group_std(_scores(batch), groups_of(batch.group)) > 0

    return keep


def mean_between(low: float, high: float) -> Filter:
    """Keeps the groups whose mean score lies strictly between low and high: neither too hard nor too easy.

    Args:
      low, high: in units of reward.
    Needs: score, group [B].
    References: PRIME, Cui et al., 2025, https://arxiv.org/abs/2502.01456; OpenRLHF's dynamic_filtering_range, which
      moves both ends inwards by 1e-6.
    """

    @needs("score", "group")
    def keep(batch: Batch) -> Tensor:
        mean_B = group_mean(_scores(batch), groups_of(batch.group))
        return (mean_B > low) & (mean_B < high)

    return keep


def not_truncated() -> Filter:
    """Keeps the rows that ended by themselves; groups lose the others. Needs: truncated [B].

    `corrections.mask_truncated` keeps them in the group's statistics instead.
    """

    @needs("truncated")
    def keep(batch: Batch) -> Tensor:
        assert batch.truncated is not None
        return ~batch.truncated

    return keep


def complete_groups(size: int) -> Filter:
    """Keeps the groups of exactly `size` rows, where others are still being sampled or were lost. Needs: group [B]."""

    @needs("group")
    def keep(batch: Batch) -> Tensor:
        return groups_of(batch.group).size == size

    return keep


def every(*filters: Filter) -> Filter:
    """Keeps the rows that all filters keep.

    Filters that read no groups judge single rows and come first: those that judge groups then see what these have left
    of them, so that a group that lost its only different row is not taken for an unequal one.
    """
    of_groups = [one for one in filters if "group" in needs_of(one)]
    of_rows = [one for one in filters if "group" not in needs_of(one)]

    @needs(*needs_of(*filters))
    def keep(batch: Batch) -> Tensor:
        kept_B = torch.ones_like(batch.mask[:, 0])
        for one in of_rows:
            kept_B = kept_B & one(batch)
        left = kept_B.nonzero().squeeze(1)
        rest = select(batch, left)
        for one in of_groups if len(left) else ():
            kept_B = kept_B.index_put((left,), kept_B[left] & one(rest))
        return kept_B

    return keep


def _scores(batch: Batch) -> Tensor:
    assert batch.score is not None
    return batch.score
