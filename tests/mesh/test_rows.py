"""Rows on their ranks: the same bits on every mesh, padding and number of threads, and moves against slices."""

import hashlib
import math

import numpy as np
import pytest
import torch

from funrl.across import ALONE, row_sums
from funrl.mesh.collectives import gather_objects, psum, ragged_all_to_all
from funrl.mesh.launch import launch, view
from funrl.mesh.mesh import parse, single
from funrl.mesh.rows import (
    Owners,
    across,
    gather_table,
    hand_over,
    kth_largest,
    move_rows,
    move_traffic,
    own_rows,
    token_bytes,
)
from funrl.mesh.simulate import gather, per_rank, simulate

ROWS = ("data", "expert")
SINGLE = single()


def drawn(B=23, T=700, dtype=torch.float32):
    """Lengths, numbers [B, T] that are 0 behind each row's end, and owners among four ranks."""
    rng = np.random.default_rng(5)
    lengths = rng.integers(0, T + 1, B)
    lengths[3] = 0
    x = torch.from_numpy(rng.standard_normal((B, T))).to(dtype)
    x[torch.arange(T) >= torch.from_numpy(lengths)[:, None]] = 0
    return lengths, x, rng.integers(0, 4, B)


def digest(*tensors):
    return hashlib.sha256(b"".join(x.cpu().contiguous().numpy().tobytes() for x in tensors)).hexdigest()


def test_sums_of_rows_depend_on_neither_padding_nor_neighbours_nor_threads():
    lengths, x, _ = drawn()
    expected = row_sums(x)
    exact = torch.tensor([math.fsum(row) for row in x.double().tolist()], dtype=torch.float64)
    assert (expected - exact).abs().max() < 1e-12
    threads = torch.get_num_threads()
    try:
        for count in (1, 3):
            torch.set_num_threads(count)
            for rows in (1, 2, 23):
                for width in (700, 768, 4096):
                    padded = torch.nn.functional.pad(x[:rows], (0, width - 700))
                    assert torch.equal(row_sums(padded), expected[:rows])
            for row, length in enumerate(lengths):
                assert torch.equal(row_sums(x[row : row + 1, :length]), expected[row : row + 1])
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_the_kth_largest_of_one_rank_is_that_of_a_sort(dtype):
    _, x, _ = drawn(dtype=dtype)
    x[0, :6] = torch.tensor([torch.inf, -torch.inf, -0.0, 1e-40, -1e-40, 3.0])
    x[1, :4] = 3.0
    down = x.flatten().sort(descending=True).values
    for k in (1, 2, 3, 100, 5000, x.numel() - 1, x.numel()):
        got = kth_largest(x, torch.tensor(k), SINGLE, ROWS)
        assert got == down[k - 1] and got.dtype == dtype and got.shape == ()
    assert kth_largest(x, torch.tensor(x.numel() + 7), SINGLE, ROWS) == down[-1]
    few = torch.where(x > 1, x, -torch.inf)
    for k in (1, 50, int((x > 1).sum()), int((x > 1).sum()) + 1, x.numel()):
        assert kth_largest(few, torch.tensor(k), SINGLE, ROWS) == few.flatten().sort(descending=True).values[k - 1]
    x[2, 0] = torch.nan
    assert kth_largest(x, torch.tensor(1), SINGLE, ROWS).isnan()
    assert kth_largest(x, torch.tensor(2), SINGLE, ROWS) == torch.inf


def test_on_one_rank_it_is_what_a_prompt_has():
    _, x, _ = drawn()
    first = across(np.zeros(len(x), dtype=np.int64), SINGLE, ROWS)
    column = torch.arange(len(x))
    assert torch.equal(first.sums(x), ALONE.sums(x)) and torch.equal(first.own(column), column)
    for k in (1, 40, 3000):
        assert torch.equal(first.kth_largest(x, torch.tensor(k)), ALONE.kth_largest(x, torch.tensor(k)))


def share(x, lengths, own):
    """The rows of a rank, no wider than they must be: ranks differ in their padding."""
    rows = own.numpy()
    return x[own, : max(int(lengths[rows].max(initial=0)), 1)]


def bits_of(mesh, ranks):
    """What a chain of an advantage would see of the drawn rows on this mesh, as one digest."""
    lengths, x, owner = drawn()
    owner = owner % ranks
    there = across(owner, mesh, ROWS)
    own = own_rows(owner, mesh, ROWS)
    mine = share(x, lengths, own)
    sums = there.sums(mine)
    mask = torch.arange(mine.shape[1]) < torch.from_numpy(lengths)[own][:, None]
    eligible = torch.where(mask, mine, -torch.inf)
    kth = [there.kth_largest(eligible, torch.tensor(k)) for k in (1, 17, 1000)]
    table = gather_table(
        {"wide": row_sums(mine), "some": mask.any(1), "two": mine[:, :1].repeat(1, 2).half(), "at": own},
        owner,
        mesh,
        ROWS,
    )
    assert table["at"].tolist() == list(range(23)) and table["some"].dtype == torch.bool
    assert torch.equal(there.own(table["at"]), own)
    return digest(sums, *kth, *table.values())


@pytest.mark.slow
@pytest.mark.gloo
def test_the_bits_are_the_same_on_every_mesh():
    whole = bits_of(SINGLE, 1)
    for text, ranks in (("dp2,ep2", 4), ("dp2,tp2", 2)):
        assert launch(lambda mesh, ranks=ranks: agreed(bits_of(mesh, ranks), mesh), parse(text)) == [whole]


def agreed(value, mesh):
    return sorted(set(gather_objects(value, mesh)))


def test_sums_in_the_simulator():
    _, x, _ = drawn(B=8)
    owner = np.repeat(np.arange(2), 4)
    with simulate("dp2") as mesh:
        mine = per_rank(2, lambda r: row_sums(x[owner == r]))
        own = per_rank(2, lambda r: torch.from_numpy(np.flatnonzero(owner == r)))
        met = psum(torch.zeros(8, dtype=torch.float64).index_copy(0, own, mine), mesh, "data")
        top = kth_largest(per_rank(2, lambda r: x[owner == r]), torch.tensor(9), mesh, "data")
    for rank in range(2):
        assert torch.equal(gather(met, rank), row_sums(x))
        assert gather(top, rank) == x.flatten().sort(descending=True).values[8]


def fields_of(x, lengths):
    """All kinds of fields a batch has, 0 behind the rows' ends."""
    mask = torch.arange(x.shape[1]) < torch.from_numpy(lengths)[:, None]
    return {
        "tokens": (x.abs() * 1e6).long(),
        "mask": mask & (x > 0),
        "old_logp": x,
        "value": x.half(),
        "teacher_topk": torch.stack([x.double(), 2 * x.double()], -1),
    }


def moves(mesh, ranks):
    lengths, x, owner = drawn()
    owner, whole = owner % ranks, fields_of(x, lengths)
    rng = np.random.default_rng(9)
    sent = 0
    for turn in range(4):
        to = rng.integers(0, ranks, len(owner)) if turn else np.zeros(len(owner), dtype=np.int64)
        mine = {name: share(f, lengths, own_rows(owner, mesh, ROWS)) for name, f in whole.items()}
        moved = move_rows(mine, lengths, owner, to, mesh)
        own = own_rows(to, mesh, ROWS)
        width = max(8, -(-int(lengths[own.numpy()].max(initial=0)) // 8) * 8)
        for name, f in whole.items():
            expected = torch.nn.functional.pad(f.movedim(1, -1), (0, 8)).movedim(-1, 1)[own, :width].clone()
            assert moved.fields[name].dtype == f.dtype and torch.equal(moved.fields[name], expected), name
        me = mesh.index(ROWS)
        assert token_bytes(mine) == 27
        counted = move_traffic(lengths, owner, mesh, to, mesh)
        assert (moved.sent, moved.received) == (27 * counted.sent[me], 27 * counted.received[me])
        assert counted.messages[me] == len(set(to[(owner == me) & (lengths > 0)]) - {me})
        assert moved.sent == 27 * lengths[(owner == me) & (to != me)].sum()  # 4 + 1 + 4 + 2 + 16 bytes a token
        assert moved.received == 27 * lengths[(owner != me) & (to == me)].sum()
        owner, sent = to, sent + moved.sent
    return sent


@pytest.mark.slow
@pytest.mark.gloo
def test_rows_move_whole():
    assert moves(SINGLE, 1) == 0
    for text, ranks in (("dp3", 3), ("dp2,tp2", 2)):
        assert launch(lambda mesh, ranks=ranks: moves(mesh, ranks), parse(text)) > 0


def hands_over(mesh, text):
    """Rows that go between two meshes and back, against what is counted of it."""
    other, (lengths, x, owner) = view(mesh, parse(text)), drawn()
    whole, rng = fields_of(x, lengths), np.random.default_rng(4)
    source, target, sent = other, mesh, 0
    owner = owner % source.size(ROWS)
    for _ in range(2):
        to = rng.integers(0, target.size(ROWS), len(owner))
        mine = {name: share(f, lengths, own_rows(owner, source, ROWS)) for name, f in whole.items()}
        moved = hand_over(mine, lengths, Owners(owner, source), Owners(to, target))
        own = own_rows(to, target, ROWS)
        for name, f in whole.items():
            width = moved.fields[name].shape[1]
            expected = torch.nn.functional.pad(f.movedim(1, -1), (0, 8)).movedim(-1, 1)[own, :width]
            assert torch.equal(moved.fields[name], expected), name
        counted, me = move_traffic(lengths, owner, source, to, target), mesh.process
        assert (moved.sent, moved.received) == (27 * counted.sent[me], 27 * counted.received[me])
        assert (
            counted.sent.sum() == counted.received.sum()
            and (counted.messages > 0).tolist() == (counted.sent > 0).tolist()
        )
        source, target, owner, sent = target, source, to, sent + moved.sent
    return sent


@pytest.mark.gloo
@pytest.mark.parametrize(("train", "generate"), [("dp2,tp2", "dp4"), ("dp3", "tp3")])
def test_rows_are_handed_over_between_meshes(train, generate):
    assert launch(lambda mesh: hands_over(mesh, generate), parse(train)) > 0


@pytest.mark.gloo
def test_an_exchange_may_be_uneven_and_empty():
    def program(mesh):
        me = mesh.index("data")
        send = [me * 3 + peer for peer in range(3)]  # rank 0 sends itself nothing
        flat = torch.cat([torch.full((n, 2), 10 * me + peer) for peer, n in enumerate(send)])
        out = ragged_all_to_all(flat, send, [peer * 3 + me for peer in range(3)], mesh, "data")
        assert out[:, 0].tolist() == [10 * peer + me for peer in range(3) for _ in range(peer * 3 + me)]
        return True

    assert launch(program, parse("dp3"))
