"""Plans of `pack`: their properties on many draws, their bounds, and their efficiency."""

import itertools
import time

import numpy as np
import pytest

from funrl.data.packing import UNIT, PackingError, RowCost, lockstep_work, pack, pack_owned, packed_sizes, pad_rows

COST = RowCost(pair=2.6e-5)  # of a model of 7 billion parameters


def lognormal(count, seed=0, median=4096, most=33280):
    normal = np.random.default_rng(seed).standard_normal(count)
    return np.clip(np.rint(median * np.exp(normal)), 1, most).astype(np.int64)


def draws():
    rng = np.random.default_rng(0)
    for count, ranks, budget in ((0, 3, 64), (1, 4, 64), (3, 8, 64), (40, 1, 100), (200, 4, 128), (500, 7, 333)):
        yield rng.integers(1, 40, count), ranks, budget, None
        yield rng.integers(1, 40, count), ranks, budget, rng.integers(0, max(count // 2, 1), count)
        yield np.maximum(rng.integers(-20, 40, count), 0), ranks, budget, np.arange(count) // 2


def check(plan, lengths, ranks, sizes, max_segments, example):
    """Every row has a place of its own, in a micro-batch with its example and within all bounds."""
    assert plan.size.shape[1] == ranks and set(plan.size.flat) <= set(sizes)
    assert all(len(column) == len(lengths) for column in (plan.rank, plan.micro, plan.start))
    seen = []
    for rank in range(ranks):
        pieces = list(plan.own(rank))
        assert len(pieces) == len(plan.size)
        for number, (rows, size) in enumerate(pieces):
            seen += rows.tolist()
            assert (plan.rank[rows] == rank).all() and (plan.micro[rows] == number).all()
            # Laid end to end from offset 0, in the order of the rows that `own` gives.
            assert plan.start[rows].tolist() == [0, *np.cumsum(lengths[rows])[:-1]][: len(rows)]
            assert lengths[rows].sum() <= size == plan.size[number, rank]
            assert size == min(s for s in sizes if s >= lengths[rows].sum())
            assert len(rows) <= max_segments
            if example is not None:
                blocks = [list(block) for _, block in itertools.groupby(example[rows])]
                assert len(blocks) == len(set(example[rows].tolist()))
    assert sorted(seen) == list(range(len(lengths)))
    if example is not None:
        for number in set(example.tolist()):
            whole = example == number
            assert len(set(plan.rank[whole])) == len(set(plan.micro[whole])) == 1


@pytest.mark.parametrize("lengths,ranks,budget,example", list(draws()))
@pytest.mark.parametrize("cost", [RowCost(), RowCost(0.05), RowCost(0.05, window=7)])
def test_every_row_has_its_place(lengths, ranks, budget, example, cost):
    longest = 0 if not len(lengths) else int(lengths.max())
    most_rows = 8
    if example is not None and len(lengths):
        longest = int(np.bincount(example, lengths).max())
        most_rows = max(most_rows, int(np.bincount(example).max()))
    sizes = packed_sizes(budget, longest, 4)
    plan = pack(lengths, ranks, sizes, most_rows, example, cost)
    check(plan, lengths, ranks, sizes, most_rows, example)
    again = pack(lengths.tolist(), ranks, list(sizes), most_rows, None if example is None else example.tolist(), cost)
    assert all(np.array_equal(item, two) for item, two in zip(plan, again, strict=True))
    owner = np.arange(len(lengths)) % ranks
    stay = pack_owned(lengths, owner, ranks, sizes, most_rows, cost)
    check(stay, lengths, ranks, sizes, most_rows, None)
    assert stay.rank.tolist() == owner.tolist()


def test_the_work_of_a_row_is_counted_pair_by_pair():
    for window in (None, 1, 3, 50):
        for n in (0, 1, 2, 7):
            pairs = sum(1 for t in range(n) for s in range(t + 1) if window is None or s > t - window)
            assert RowCost(0.25, window).work(np.array([n])) == UNIT * n + UNIT * pairs // 4


def test_the_printed_examples():
    plan = pack([5, 1, 4, 2], 2, (6,), 8)
    assert plan.rank.tolist() == [0, 0, 1, 1] and plan.start.tolist() == [0, 5, 0, 4]
    assert packed_sizes(64, 10, 8, 4) == (8, 16, 24, 32, 48, 64)
    assert packed_sizes(64, 90, 8, 4) == (8, 16, 24, 32, 48, 72, 96)
    # 6 tokens each of 2 ranks at once: 6 units of work, and no padding.
    assert lockstep_work(plan, [5, 1, 4, 2], RowCost()) == 6 * UNIT


@pytest.mark.parametrize(
    "budget,longest,multiple", [(16384, 90, 8), (33280, 100, 1), (7, 9, 4), (1, 1, 1), (100, 3, 3)]
)
def test_few_sizes_and_little_padding(budget, longest, multiple):
    sizes = np.array(packed_sizes(budget, longest, multiple))
    most = max(budget, longest)
    assert len(sizes) <= 60 and (np.diff(sizes) > 0).all() and (sizes % multiple == 0).all()
    assert sizes[-1] >= most > sizes[:-1].max(initial=0)
    assert sizes[0] <= max(multiple, most / 100)
    # A micro-batch is an eighth larger than its tokens at most, but for the multiple, and where it is the smallest.
    assert (np.diff(sizes) <= np.maximum(sizes[:-1] / 8 + multiple, multiple)).all()


def test_few_tokens_are_one_micro_batch():
    lengths = np.random.default_rng(0).integers(6, 15, 128)
    plan = pack(lengths, 1, packed_sizes(16384, 14, 8), 2056)
    assert plan.size.shape == (1, 1) and lengths.sum() <= plan.size.item() <= lengths.sum() * 9 / 8


def test_an_example_that_fits_nowhere_is_named():
    with pytest.raises(PackingError, match=r"row 1 has 9 tokens, a micro-batch holds 8; raise the token budget"):
        pack([1, 9], 2, (8,), 4)
    with pytest.raises(PackingError, match=r"row 1 has 3 rows, a micro-batch holds 2; raise the number of segments"):
        pack([1, 1, 1, 1], 2, (8,), 2, example=[7, 3, 3, 3])


def test_equal_rows_are_packed_perfectly():
    lengths = np.full(64, 16)
    plan = pack(lengths, 4, packed_sizes(64, 16), 64)
    assert plan.size.tolist() == [[64] * 4] * 4
    assert lockstep_work(plan, lengths, RowCost()) == UNIT * 64 * 16 // 4


@pytest.mark.slow
def test_no_small_plan_is_far_from_the_best():
    """Against all ways to put 6 rows into 2 x 2 bins."""
    rng = np.random.default_rng(3)
    for _ in range(8):
        lengths = rng.integers(1, 33, 6)
        sizes = packed_sizes(64, int(lengths.max()), parts=8)
        cost = RowCost(0.02)
        best = None
        for bins in itertools.product(range(4), repeat=6):
            tokens = np.bincount(bins, lengths, 4)
            if tokens.max() <= 64:
                work = np.bincount(bins, cost.work(lengths) - UNIT * lengths, 4)
                work += [UNIT * next(s for s in sizes if s >= t) if t else 0 for t in tokens]
                time = sum(sorted(work, reverse=True)[::2])
                best = time if best is None else min(best, time)
        assert lockstep_work(pack(lengths, 2, sizes, 64, cost=cost), lengths, cost) <= 1.25 * best


@pytest.mark.parametrize(
    "ranks,minibatches,least",
    [
        (8, 1, 0.99),
        (64, 1, 0.97),
        (512, 1, 0.95),
        (8, 4, 0.98),
        (64, 4, 0.95),
        (512, 4, 0.85),
    ],
)
def test_efficiency_and_time_at_scale(ranks, minibatches, least):
    lengths = lognormal(16384)
    sizes = packed_sizes(65536, int(lengths.max()))
    order = np.random.default_rng(1).permutation(len(lengths))
    time_taken, start = 0, time.process_time()
    for rows in np.array_split(order, minibatches):
        plan = pack(lengths[rows], ranks, sizes, 1024, cost=COST)
        time_taken += lockstep_work(plan, lengths[rows], COST)
    seconds = time.process_time() - start
    assert COST.work(lengths).sum() / ranks / time_taken >= least
    assert seconds < 1.0  # 0.1 s on an idle core


def test_groups_stay_together_at_scale():
    lengths = lognormal(4096, median=400, most=3000)
    group = np.arange(4096) // 16
    sizes = packed_sizes(65536, int(np.bincount(group, lengths).max()))
    plan = pack(lengths, 8, sizes, 2048, group, COST)
    check(plan, lengths, 8, sizes, 2048, group)
    assert COST.work(lengths).sum() / 8 / lockstep_work(plan, lengths, COST) > 0.95


def test_rows_are_padded_on_the_right():
    rows = pad_rows([[1, 2, 3], [], [4]], 9, 4)
    assert rows.dtype == np.int32
    assert rows.tolist() == [[1, 2, 3, 9], [9, 9, 9, 9], [4, 9, 9, 9]]
    assert pad_rows([[1, 2, 3]], 0).shape == (1, 3)
    assert pad_rows([], 0, 8).shape == (0, 0)
