"""Properties of the project's own pieces beyond those of `funrl.testing`: values of a reference, and equal ranks.

A run checks the chain and the filter of any algorithm on a rank with some of the rows itself: `funrl.algos.check`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from funrl import trees
from funrl.across import ALONE, Across
from funrl.algos.core import Signal, run_piece
from funrl.batch import Batch, map_kinds, schema_of, with_across
from funrl.testing.awkward_rows import nearby_logp, token_rewards_like
from funrl.testing.subjects import (
    Subject,
    advantage_output,
    demand,
    demand_close,
    demand_equal,
    gradient_by,
    loss_parts,
    reduction_parts,
    signal_fields,
    term_output,
)

Reference = Callable[..., Any]
WHOLE_GROUPS = ([3, 0, 2, 4], [6, 1, 5])  # rows of each rank
ANY_ROWS = ([4, 0, 1], [2], [6, 3, 5])


def plain_batch(batch: Batch) -> SimpleNamespace:
    """The batch as nested lists, for references in plain Python; what it does not have is None."""
    return SimpleNamespace(**{k: v.tolist() if (v := batch.get(k)) is not None else None for k in schema_of(batch)})


def equals_reference(subject: Subject, reference: Reference) -> None:
    """Values are those of the reference."""
    batch = subject.batch()
    b = plain_batch(batch)
    logp = nearby_logp(batch)
    as_tensor = lambda x: torch.tensor(x, dtype=torch.float64)  # noqa: E731
    if subject.kind == "advantage":
        signal = advantage_output(subject, batch)
        expected = reference(subject.signal(batch).x.tolist(), b)
        got = signal_fields(signal)
        for name, want in expected.items():
            demand_close(got[name].double(), as_tensor(want), name)
        for name in set(got) & set(expected) - {"rows", "mask"}:
            outside = got[name][~signal.mask] if got[name].dim() == 2 else got[name][:0]
            demand((outside == 0).all(), f"{name} is not 0 outside the mask")
    elif subject.kind == "filter":
        demand(subject.piece(batch).tolist() == reference(b), "it keeps other rows than the reference")
    elif subject.kind == "term":
        want = as_tensor(reference(logp.tolist(), b))
        demand_close(term_output(subject.piece, logp, batch)[0][batch.mask], want[batch.mask], "the loss")
    else:
        if subject.kind == "loss":
            parts = loss_parts(subject.piece, logp, batch)[0]
            wanted = reference(logp.tolist(), b)
        else:
            rewards = token_rewards_like(batch)
            parts = reduction_parts(subject.piece, rewards, batch.mask)
            wanted = [reference(rewards.tolist(), b)]
        demand(len(parts) == len(wanted), f"it has {len(parts)} parts, the reference {len(wanted)}")
        for got, (num, den) in zip(parts, wanted, strict=True):
            demand_close(got.num, as_tensor(num), "the numerator")
            demand_close(got.den, as_tensor(den), "the denominator")


def reference_gradient(subject: Subject, reference: Reference) -> None:
    """The gradient is that of the reference, by differences."""
    batch = subject.batch()
    b = plain_batch(batch)
    logp = nearby_logp(batch)

    def total(values: list[list[float]]) -> float:
        out = reference(values, b)
        if subject.kind == "loss":
            return sum(num for num, _ in out)
        return sum(out[i][t] for i, t in batch.mask.nonzero().tolist())

    leaf = logp.clone().requires_grad_()
    if subject.kind == "loss":
        ours = torch.stack([f.num for f in loss_parts(subject.piece, leaf, batch)[0]]).sum()
    else:
        ours = term_output(subject.piece, leaf, batch)[0][batch.mask].sum()
    gradient = gradient_by(leaf, ours)
    step = 1e-6
    for i, t in batch.mask.nonzero().tolist()[::3]:
        up = logp.clone()
        down = logp.clone()
        up[i, t] += step
        down[i, t] -= step
        slope = (total(up.tolist()) - total(down.tolist())) / (2 * step)
        got = gradient[i, t].item()
        same = math.isclose(got, slope, rel_tol=1e-5, abs_tol=1e-7)
        demand(same, f"the gradient by token {t} of row {i} is {got:.6g}, the reference's by differences {slope:.6g}")


def ranks(subject: Subject) -> None:
    """Ranks that hold the tokens of some rows get the bits of one that holds all."""
    batch = subject.batch()
    signal = subject.signal(batch)
    exchanges: list[tuple[Tensor, Tensor]] = []  # what the rank that holds all rows gives and gets

    def recorded(exchange: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def call(x: Tensor, *k: Tensor) -> Tensor:
            exchanges.append((x, exchange(x, *k)))
            return exchanges[-1][1]

        return call

    across = Across(recorded(ALONE.sums), ALONE.own, recorded(ALONE.kth_largest))
    want = _outputs(subject, signal, with_across(batch, across))
    for owned in (WHOLE_GROUPS, ANY_ROWS):
        if owned is ANY_ROWS and subject.kind == "advantage" and subject.piece.whole_groups:
            continue
        for rows in owned:
            own = torch.tensor(rows)
            across = _repeated(exchanges, own)
            some = with_across(_rows_of(batch, own), across)
            x = signal.x if signal.x.dim() == 1 else signal.x[own]
            weight = None if signal.weight is None else signal.weight[own]
            got = _outputs(subject, Signal(x, signal.mask[own], weight=weight), some)
            of_rank = {k: v if v.dim() == 1 or k[0] == "/" else v[own] for k, v in want.items()}
            cure = "batch.across.sums(x) is the sum of every row, batch.across.own(x) picks one's own"
            demand_equal(got, of_rank, f"on a rank that has the tokens of rows {rows} ({cure})")


def _rows_of(batch: Batch, own: Tensor) -> Batch:
    """The batch as a rank holds it: its own rows of fields per token, all of those per row."""
    return map_kinds(lambda kind, x: x if kind.everywhere else kind.select(x, own), batch)


def _repeated(exchanges: Sequence[tuple[Tensor, Tensor]], own: Tensor) -> Across:
    """The exchange of a rank that gives its own rows of what was given before, and so gets the same."""
    remaining = iter(exchanges)

    def call(x: Tensor, *_: Tensor) -> Tensor:
        given, result = next(remaining, (x.new_empty(0), x))
        same = len(given) and torch.equal(x.nan_to_num(), given[own].nan_to_num())
        demand(same, f"on a rank that has the tokens of rows {own.tolist()} it exchanges other numbers of them")
        return result

    return Across(call, lambda x: x[own], call)


def _outputs(subject: Subject, signal: Signal, batch: Batch) -> dict[str, Tensor]:
    """All that a piece gives; names of what is of all rows begin with a slash."""
    if subject.kind == "filter":
        return {"kept rows": subject.piece(batch)}
    signal, state = run_piece(subject.piece, signal, subject.piece.init(), batch)
    values = signal_fields(signal)
    values |= {f"/metric {name} {i}": x for name, m in signal.metrics.items() for i, x in enumerate(m)}
    return values | {f"/state {i}": torch.as_tensor(x) for i, x in enumerate(trees.leaves(state), 1)}
