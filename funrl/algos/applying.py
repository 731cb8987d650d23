"""Advantage chains run on a batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from funrl.algos.core import Advantage, Signal, run_piece
from funrl.algos.metrics import Metric, PieceError
from funrl.batch import Batch, declare, select


def first_signal(batch: Batch) -> Signal:
    """The initial signal of a chain: the scores, or zeros if the batch has none."""
    score_B = batch.get("score")
    if score_B is None:
        like = batch.get("old_logp")
        score_B = batch.mask.new_zeros(len(batch.mask), dtype=torch.float32 if like is None else like.dtype)
    return Signal(score_B, batch.mask)


def apply_advantage(
    advantage: Advantage, state: Any, batch: Batch, choose: Callable[[Batch, Tensor], Batch] = select
) -> tuple[Batch, Any, dict[str, Metric]]:
    """Run a chain on a batch.

    Args:
      choose: (batch, row numbers) -> batch, used if the chain resamples rows.

    Returns: the batch with the fields that the chain made (`advantage`, `mask`, `returns`, `weight` and others), with
      `sampled` (the mask before it) and with the rows that it resampled; the next state; metrics.

    Raises:
      PieceError: the chain's result is not per token.
    """
    batch = declare(batch, advantage.fields)
    signal, state = run_piece(advantage, first_signal(batch), state, batch=batch)
    if signal.x.dim() != 2:
        raise PieceError(f"the advantage chain ends with {list(signal.x.shape)}: put to_tokens() at its end")
    batch = batch._replace(advantage=signal.x, mask=signal.mask, sampled=batch.mask, **signal.fields)
    return (batch if signal.rows is None else choose(batch, signal.rows)), state, signal.metrics
