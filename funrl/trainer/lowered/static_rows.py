"""Rows of static shapes: a number of trained tokens that takes few values."""

from __future__ import annotations

import torch

from funrl.batch import Batch

TRAINED_PARTS = 4  # of a row: the number of trained tokens is filled up to a multiple of a part


def static_length(trained: int, tokens: int) -> int:
    """The number of trained tokens of a row, filled up; at most all tokens."""
    part = -(-tokens // TRAINED_PARTS)
    return min(max(1, -(-trained // part)) * part, tokens)


def static_rows(rows: Batch) -> Batch:
    """The rows with a number of trained tokens that is a part of the row's length.

    Places are added that the mask does not count: that behind the last token of a row is one always.
    """
    trained = rows.get("trained")
    if trained is None:
        return rows
    tokens = rows.tokens.shape[1]
    filling = trained.new_full((static_length(len(trained), tokens) - len(trained),), tokens - 1)
    return rows._replace(trained=torch.cat([trained, filling]))
