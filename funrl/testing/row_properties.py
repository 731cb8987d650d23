"""Properties of advantages and filters, each a function of the piece that raises AssertionError."""

from __future__ import annotations

import torch
from torch import Tensor

from funrl.algos.core import Signal, run_piece
from funrl.batch import select
from funrl.testing.awkward_rows import poisoned
from funrl.testing.subjects import Subject, advantage_output, demand, demand_close, signal_fields

ROW_ORDER = (3, 0, 6, 5, 1, 4, 2)


def advantage_outside_the_mask(subject: Subject) -> None:
    """NaN in everything that is outside the mask changes no bit."""
    batch = subject.batch()
    piece = subject.piece
    row = advantage_output(subject, batch)
    signal = subject.signal(batch)
    if subject.tokens:
        signal = signal._replace(x=torch.where(batch.mask, signal.x, torch.nan))
    if signal.weight is not None:
        signal = signal._replace(weight=torch.where(batch.mask, signal.weight, torch.nan))
    other = signal_fields(run_piece(piece, signal, piece.init(), poisoned(batch))[0])
    for name, value in signal_fields(row).items():
        on = row.mask if value.dim() == 2 and name != "mask" else torch.ones_like(value, dtype=torch.bool)
        same = torch.equal(other[name][on], value[on])
        demand(same, f"{name} on sampled tokens is another where NaN is outside the mask: use where_masked")


def row_order(subject: Subject) -> None:
    """The order of rows does not matter."""
    batch = subject.batch()
    order = torch.tensor(ROW_ORDER)
    piece = subject.piece
    moved = select(batch, order)
    if subject.kind == "filter":
        demand(torch.equal(piece(moved), piece(batch)[order]), "it keeps other rows where they have another order")
        return
    signal = subject.signal(batch)
    weight = None if signal.weight is None else signal.weight[order]
    given = Signal(signal.x[order], signal.mask[order], weight=weight)
    got = signal_fields(run_piece(piece, given, piece.init(), moved)[0])
    for name, value in signal_fields(advantage_output(subject, batch)).items():
        demand_close(got[name], value[order], f"{name} in another order of rows")


def truth_per_row(subject: Subject) -> None:
    """A filter gives a truth value per row."""
    kept = subject.piece(subject.batch())
    rows = len(subject.batch().mask)
    right = isinstance(kept, Tensor) and kept.dtype == torch.bool and kept.shape == (rows,)
    demand(right, f"it gave {kept!r}: a tensor [{rows}] of truth values is needed")
