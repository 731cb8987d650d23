"""Every term by its layout: padded or packed, pairs alternating or side by side, and its gradient.

The table of pieces tests the rest. Here gradients are differences of references that hold constant what a formula does.
"""

from __future__ import annotations

import copy
import math
import random

import pytest
import rows_newer
import rows_preference
import rows_terms
import torch
from pieces import fractions, on_term
from sequences import PACKED, PADDED, lay_out, make_sequences, masked, unpack

from funrl.algos import reads
from funrl.batch import MissingField, as_dict

ROWS = [*rows_terms.TERMS, *rows_newer.TERMS, *rows_preference.TERMS]
BY_NAME = pytest.mark.parametrize("row", ROWS, ids=[row.name for row in ROWS])


def needed(piece):
    return reads(piece).required


class Watched(dict):
    """A sequence that tells which of its fields are read."""

    def __init__(self, fields, seen):
        super().__init__(fields)
        self.seen = seen

    def __getitem__(self, name):
        self.seen.add(name)
        return super().__getitem__(name)


@BY_NAME
def test_a_row_says_whether_its_formula_stops_gradients(row):
    seen: set[str] = set()
    row.reference([Watched(s, seen) for s in masked(make_sequences())])
    assert row.stops == ("held" in seen)


def close(got, want, tolerance=1e-11):
    assert [len(x) for x in got] == [len(x) for x in want]
    for g, w in zip(got, want, strict=True):
        assert g == pytest.approx(w, rel=tolerance, abs=tolerance)


@BY_NAME
@pytest.mark.parametrize("rows", [PADDED, PACKED], ids=["padded", "packed"])
def test_equals_its_reference_whatever_lies_outside_the_mask(row, rows):
    term = row.make()
    sequences = make_sequences(0)
    logp, batch = lay_out(sequences, rows, needed(term), outside=math.nan)
    loss, metrics = on_term(term, logp, batch)
    close(unpack(loss, sequences, rows), row.reference(masked(sequences)))
    if row.metrics is not None:
        want = row.metrics(masked(sequences))
        assert set(want) == set(metrics)
        for name, values in want.items():
            close(unpack(metrics[name], sequences, rows), values)


def derivative(row, sequences, weights):
    """Central differences of the weighted reference by every masked number of the field."""
    numbers, step = [], 1e-6
    for i in range(len(sequences)):
        for t in range(len(sequences[i][row.through])):
            for k in range(len(sequences[i][row.through][t])) if row.through == "topk_logp" else (None,):
                values = []
                for sign in (1, -1):
                    moved = copy.deepcopy(sequences)
                    if k is None:
                        moved[i][row.through][t] += sign * step
                    else:
                        moved[i][row.through][t][k] += sign * step
                    losses = row.reference(moved)
                    values.append(
                        sum(w * x for ws, xs in zip(weights, losses, strict=True) for w, x in zip(ws, xs, strict=True))
                    )
                numbers.append((values[0] - values[1]) / (2 * step))
    return numbers


@BY_NAME
def test_gradient_is_the_references_and_nothing_leaks(row):
    """The gradient by the policy's numbers is right, exactly 0 outside the mask, and no other field gets one."""
    term, sequences, draw = row.make(), make_sequences(3), random.Random(3)
    logp, batch = lay_out(sequences, PADDED, needed(term))
    fields = {f: x for f, x in as_dict(batch).items() if f in needed(term) and x.is_floating_point()}
    leaves = {f: x.clone().requires_grad_() for f, x in fields.items()}
    through = logp.clone().requires_grad_() if row.through == "logp" else leaves[row.through]
    loss, _ = on_term(term, through if row.through == "logp" else logp, batch._replace(**leaves))
    weight_BT = torch.tensor([[draw.gauss(0, 1) for _ in r] for r in loss.tolist()], dtype=torch.float64)
    grads = torch.autograd.grad(
        torch.where(batch.mask, loss * weight_BT, 0.0).sum(), [through, *leaves.values()], allow_unused=True
    )
    grad = grads[0]
    assert grad is not None
    want = derivative(row, masked(sequences), unpack(weight_BT, sequences, PADDED))
    assert grad[batch.mask].flatten().tolist() == pytest.approx(want, rel=1e-6, abs=1e-7)
    assert (grad[~batch.mask] == 0).all()
    for name, g in zip(leaves, grads[1:], strict=True):
        assert g is None or name == row.through, f"a gradient goes through {name}"


@BY_NAME
def test_names_the_fields_it_reads(row):
    """A batch with exactly these fields is enough (every other test has them only), and none can be missing."""
    term = row.make()
    for field in needed(term) - {"mask"}:
        logp, batch = lay_out(make_sequences(0), PADDED, needed(term) - {field})
        with pytest.raises(MissingField, match=field):
            on_term(term, logp, batch)


@pytest.mark.parametrize("row", rows_preference.LOSSES, ids=[row.name for row in rows_preference.LOSSES])
def test_whole_losses_equal_their_references(row):
    loss, sequences = row.make(), make_sequences(6)
    for rows in (PADDED, PACKED):
        parts, _ = fractions(loss, *lay_out(sequences, rows, needed(loss)))
        got = [(f.num.item(), f.den.item()) for f in parts]
        for pair, want in zip(got, row.reference(masked(sequences)), strict=True):
            assert pair == pytest.approx(want, rel=1e-12)
