"""Advantage chains run on a batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from funrl.algos.advantages.units import Units, by_unit, choose_rows, episode_fields, units_of
from funrl.algos.core import Advantage, Signal, run_piece
from funrl.algos.metrics import Metric, PieceError
from funrl.batch import Batch, declare, kind_of
from funrl.kinds import Value, line_places


def first_signal(batch: Batch) -> Signal:
    """The initial signal of a chain: the scores, or zeros if the batch has none."""
    score_B = batch.get("score")
    if score_B is None:
        like = batch.get("old_logp")
        score_B = batch.mask.new_zeros(len(batch.mask), dtype=torch.float32 if like is None else like.dtype)
    return Signal(score_B, batch.mask)


def apply_advantage(
    advantage: Advantage, state: object, batch: Batch, choose: Callable[[Batch, Tensor], Batch] = choose_rows
) -> tuple[Batch, Any, dict[str, Metric]]:
    """Run a chain on a batch.

    Args:
      choose: (batch, row numbers) -> batch, used if the chain resamples rows. Where rows belong to episodes, the chain
        sees one number for each agent of an episode, and all rows of what it chooses are taken.

    Returns: the batch with the fields that the chain made (`advantage`, `mask`, `returns`, `weight` and others), with
      `sampled` (the mask before it) and with the rows that it resampled; the next state; metrics.

    Raises:
      PieceError: the chain's result is not per token.
    """
    batch = declare(batch, advantage.fields)
    units = units_of(batch)
    seen = batch if units is None else by_unit(batch, units)
    signal, state = run_piece(advantage, first_signal(seen), state, batch=seen)
    if signal.x.dim() != 2:
        raise PieceError(f"the advantage chain ends with {list(signal.x.shape)}: put to_tokens() at its end")
    if units is None:
        batch = batch._replace(advantage=signal.x, mask=signal.mask, sampled=batch.mask, **signal.fields)
        return (batch if signal.rows is None else choose(batch, signal.rows)), state, signal.metrics
    fields = {name: _of_rows(batch, name, x, units) for name, x in signal.fields.items()}
    batch = batch._replace(advantage=signal.x, mask=signal.mask, sampled=batch.mask, **fields)
    batch = batch._replace(**episode_fields(batch, units))
    return (batch if signal.rows is None else choose(batch, _rows_of(signal.rows, units))), state, signal.metrics


def _of_rows(batch: Batch, name: str, x: Value, units: Units) -> Value:
    """A field of the chain for each row, where it is one for each unit."""
    kind = kind_of(batch, name)
    return kind.select(x, units.index) if kind.everywhere else x


def _rows_of(chosen_N: Tensor, units: Units) -> Tensor:
    """The rows of the chosen units, in their order; a unit may be chosen several times."""
    order_B = units.index.argsort(stable=True)
    counts_U = units.index.bincount(minlength=len(units.first))
    begins_U = counts_U.cumsum(0) - counts_U
    places = line_places(begins_U[chosen_N].cpu().numpy(), counts_U[chosen_N].cpu().numpy())
    return order_B[places.to(order_B.device)]
