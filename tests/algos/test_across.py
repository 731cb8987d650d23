"""Advantage pieces where a rank holds some of the rows: the same bits as on one rank that holds them all."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from pieces import example
from tables import ROWS
from test_pieces import fields_of, signal_of

from funrl.across import Across, row_sums
from funrl.algos import Signal
from funrl.batch import FIELDS, as_dict, map_fields, with_across

PIECES = [row for row in ROWS if row.kind == "advantage"]
WHOLE_GROUPS, ANY = ([3, 0, 2, 4], [6, 1, 5]), ([4, 0, 1], [2], [6, 3, 5])  # rows of each rank


class Ranks:
    """Threads that stand for ranks, and the one exchange between them that is needed."""

    def __init__(self, owned):
        self.owned, self.barrier, self.box = owned, threading.Barrier(len(owned)), [None] * len(owned)

    def gathered(self, rank, value):
        self.box[rank] = value
        self.barrier.wait()
        values = list(self.box)
        self.barrier.wait()
        return values

    def across(self, rank):
        mine = torch.tensor(self.owned[rank])

        def sums(x):
            parts = torch.cat(self.gathered(rank, row_sums(x)))
            return torch.empty_like(parts).index_copy(
                0, torch.tensor([row for rows in self.owned for row in rows]), parts
            )

        def kth_largest(x, k):
            flat = torch.cat(self.gathered(rank, x.flatten())).sort(descending=True).values
            return flat[(int(k) - 1) if int(k) <= len(flat) else -1]

        return Across(sums, lambda x: x[mine], kth_largest)


def on_ranks(row, batch, owned):
    """What each rank gets of a piece, and its metrics."""
    ranks, whole = Ranks(owned), signal_of(row, batch)

    def run(rank):
        mine = torch.tensor(owned[rank])
        local = map_fields(lambda name, x: x if FIELDS[name].kind == "row" else x[mine], batch)
        local = with_across(local, ranks.across(rank))
        x = whole.x if whole.x.dim() == 1 else whole.x[mine]
        weight = None if whole.weight is None else whole.weight[mine]
        piece = row.make()
        return piece.update(Signal(x, whole.mask[mine], weight=weight), piece.init(), local)

    with ThreadPoolExecutor(len(owned)) as pool:
        return list(pool.map(run, range(len(owned))))


@pytest.mark.parametrize("owned", [WHOLE_GROUPS, ANY], ids=["whole groups", "any rows"])
@pytest.mark.parametrize("row", PIECES, ids=[row.name for row in PIECES])
def test_ranks_that_hold_some_rows_get_the_same_bits(row, owned):
    if owned is ANY and row.name.startswith("optimal_token_baseline"):
        pytest.skip("takes the token fields of whole groups")
    batch = row.prepare(example())
    piece = row.make()
    one, state = piece.update(signal_of(row, batch), piece.init(), batch)
    for rows, (signal, own_state) in zip(owned, on_ranks(row, batch, owned), strict=True):
        want, got = fields_of(one), fields_of(signal)
        assert set(got) == set(want)
        for name, value in want.items():
            assert torch.equal(got[name], value if value.dim() == 1 else value[rows]), name
        assert set(signal.metrics) == set(one.metrics)
        for name, metric in one.metrics.items():
            assert all(torch.equal(a, b) for a, b in zip(signal.metrics[name], metric, strict=True)), name
        assert repr(own_state) == repr(state)


def test_the_batch_of_a_rank_keeps_how_it_reaches_the_others():
    across = Ranks(ANY).across(1)
    batch = with_across(example(), across)
    assert batch._replace(score=None).across is across
    assert map_fields(lambda name, x: x, batch).across is across
    assert set(as_dict(batch)) == set(as_dict(example()))
