"""Properties of advantages and filters, each a function of the piece that raises AssertionError."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from funrl import trees
from funrl.algos.core import Signal, run_piece
from funrl.batch import Batch, select
from funrl.testing.awkward_rows import ANY_ROWS, WHOLE_GROUPS, ThreadRanks, poisoned
from funrl.testing.subjects import Subject, advantage_output, demand, demand_close, demand_equal, signal_fields

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


def ranks(subject: Subject) -> None:
    """Ranks that hold the tokens of some rows get the bits of one that holds all."""
    batch = subject.batch()
    for owned in (WHOLE_GROUPS, ANY_ROWS):
        if owned is ANY_ROWS and subject.kind == "advantage" and subject.piece.whole_groups:
            continue
        for rows, (got, want) in zip(owned, _on_thread_ranks(subject, batch, owned), strict=True):
            own = {k: v if v.dim() == 1 else v[torch.tensor(rows)] for k, v in want.items() if k[0] != "/"}
            own |= {k: v for k, v in want.items() if k[0] == "/"}  # of all rows
            cure = "batch.across.sums(x) is the sum of every row, batch.across.own(x) picks one's own"
            demand_equal(got, own, f"on a rank that has the tokens of rows {rows} ({cure})")


def _on_thread_ranks(subject: Subject, batch: Batch, owned: Any) -> list[tuple[dict[str, Tensor], dict[str, Tensor]]]:
    """Of each rank, what it gets, and what one that holds all rows gets."""
    exchange = ThreadRanks(owned)
    piece = subject.piece
    whole = subject.signal(batch)

    def outputs(given: Signal, rows: Batch) -> dict[str, Tensor]:
        if subject.kind == "filter":
            return {"kept rows": piece(rows)}
        signal, state = run_piece(piece, given, piece.init(), rows)
        values = signal_fields(signal)
        values |= {f"/metric {name} {i}": x for name, m in signal.metrics.items() for i, x in enumerate(m)}
        return values | {f"/state {i}": torch.as_tensor(x) for i, x in enumerate(trees.leaves(state), 1)}

    def on_rank(rank: int) -> dict[str, Tensor] | BaseException:
        own = torch.tensor(owned[rank])
        x = whole.x if whole.x.dim() == 1 else whole.x[own]
        weight = None if whole.weight is None else whole.weight[own]
        try:
            return outputs(Signal(x, whole.mask[own], weight=weight), exchange.batch_of(rank, batch))
        except BaseException as error:
            exchange.barrier.abort()  # others wait for this rank
            return error

    with ThreadPoolExecutor(len(owned)) as pool:
        outs = list(pool.map(on_rank, range(len(owned))))
    failed = [out for out in outs if isinstance(out, BaseException)]
    for error in sorted(failed, key=lambda error: isinstance(error, threading.BrokenBarrierError)):
        raise error
    alone = outputs(whole, batch)
    return [(out, alone) for out in outs if isinstance(out, dict)]


def truth_per_row(subject: Subject) -> None:
    """A filter gives a truth value per row."""
    kept = subject.piece(subject.batch())
    rows = len(subject.batch().mask)
    right = isinstance(kept, Tensor) and kept.dtype == torch.bool and kept.shape == (rows,)
    demand(right, f"it gave {kept!r}: a tensor [{rows}] of truth values is needed")
