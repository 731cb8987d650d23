"""Filters of single rows, and several filters as one. Each is batch -> [B] bool; a filter runs before advantages."""

from __future__ import annotations

import torch
from torch import Tensor

from funrl.across import Across
from funrl.algos.reading import reads
from funrl.algos.terms import Filter
from funrl.batch import Batch, as_dict, kind_of, map_kinds, with_across


def not_truncated() -> Filter:
    """Keep rows that were not truncated. Needs: truncated [B].

    `mask_truncated` keeps them in the group's statistics instead.
    """

    def chosen(batch: Batch) -> Tensor:
        return ~batch.truncated

    return chosen


def rewarded() -> Filter:
    """Keep rows on which no reward function failed. Needs: failed [B]."""

    def chosen(batch: Batch) -> Tensor:
        return ~batch.failed

    return chosen


def every(*filters: Filter) -> Filter:
    """Keep the rows that all filters keep.

    Filters that do not read groups run first. Group filters then see only the remaining rows, so a group that lost its
    only different row no longer counts as unequal.
    """
    of_groups = [rule for rule in filters if "group" in reads(rule).required]
    of_rows = [rule for rule in filters if rule not in of_groups]

    def chosen(batch: Batch) -> Tensor:
        row = next(x for name, x in as_dict(batch).items() if kind_of(batch, name).everywhere)
        kept_B = torch.ones(len(row), dtype=torch.bool, device=row.device)
        for rule in of_rows:
            kept_B = kept_B & rule(batch)
        left = kept_B.nonzero().squeeze(1)
        rest = _rows_left(batch, kept_B, left)
        for rule in of_groups if len(left) else ():
            kept_B = kept_B.index_put((left,), kept_B[left] & rule(rest))
        return kept_B

    return chosen


def _rows_left(batch: Batch, kept_B: Tensor, left: Tensor) -> Batch:
    """Select rows of a batch, on ranks that hold only a part of their tokens.

    Args:
      kept_B: [B] bool, the selected rows; left: their numbers.
    """
    across = batch.across
    own_b = batch.across.own(kept_B)
    here = own_b.nonzero().squeeze(1)

    def among(x: Tensor, at: Tensor, like: Tensor) -> Tensor:
        return x.new_zeros(len(like), *x.shape[1:]).index_copy(0, at, x)

    def sums(x: Tensor) -> Tensor:
        return across.sums(among(x, here, own_b))[left]

    def own(x: Tensor) -> Tensor:
        return across.own(among(x, left, kept_B))[here]

    part = map_kinds(lambda kind, x: kind.select(x, left if kind.everywhere else here), batch)
    return with_across(part, Across(sums, own, across.kth_largest))
