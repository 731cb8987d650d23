"""Filters of single rows, and several filters as one. Each is batch -> [B] bool; a filter runs before advantages."""

from __future__ import annotations

import torch
from torch import Tensor

from funrl.algos.core import Filter, reads
from funrl.batch import Batch, as_dict, row_fields, select


def not_truncated() -> Filter:
    """Keep the rows that ended by themselves; groups lose the others. Needs: truncated [B].

    `mask_truncated` keeps them in the group's statistics instead.
    """

    def chosen(batch: Batch) -> Tensor:
        return ~batch.truncated

    return chosen


def every(*filters: Filter) -> Filter:
    """Keep the rows that all filters keep.

    Filters that read no groups are of single rows and come first: those of groups then see what these have left
    of them, so that a group that lost its only different row is not taken for an unequal one.
    """
    of_groups = [one for one in filters if "group" in reads(one).required]
    of_rows = [one for one in filters if one not in of_groups]
    of_kind = frozenset(row_fields())

    def chosen(batch: Batch) -> Tensor:
        row = next(x for name, x in as_dict(batch).items() if name in of_kind)
        kept_B = torch.ones(len(row), dtype=torch.bool, device=row.device)
        for one in of_rows:
            kept_B = kept_B & one(batch)
        left = kept_B.nonzero().squeeze(1)
        rest = select(batch, left)
        for one in of_groups if len(left) else ():
            kept_B = kept_B.index_put((left,), kept_B[left] & one(rest))
        return kept_B

    return chosen
