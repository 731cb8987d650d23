"""Balancing, micro-batches and padding, against brute force and their bounds."""

import itertools

import numpy as np
import pytest

from funrl.data.packing import balance, micro_batches, pad_rows


def draws():
    rng = np.random.default_rng(0)
    return [rng.integers(1, 40, size=n).tolist() for n in (1, 2, 3, 5, 8, 33)]


@pytest.mark.parametrize("lengths", draws())
@pytest.mark.parametrize("parts", [1, 2, 3, 8])
def test_balanced_parts_hold_every_row_once_and_nearly_equal_work(lengths, parts):
    shares = balance(lengths, parts)
    assert len(shares) == parts
    assert sorted(i for share in shares for i in share) == list(range(len(lengths)))
    assert all(share == sorted(share) for share in shares)
    totals = [sum(lengths[i] for i in share) for share in shares]
    assert max(totals) - min(totals) <= max(lengths)
    if len(lengths) >= parts:
        assert all(shares)
    if parts ** len(lengths) <= 7000:
        best = min(
            max(sum(x for x, p in zip(lengths, way, strict=True) if p == part) for part in range(parts))
            for way in itertools.product(range(parts), repeat=len(lengths))
        )
        assert max(totals) <= best * 4 / 3
    assert shares == balance(list(lengths), parts)


@pytest.mark.parametrize("lengths", draws())
@pytest.mark.parametrize("budget,multiple", [(1, 1), (40, 1), (64, 8), (10_000, 8)])
def test_micro_batches_keep_to_the_budget(lengths, budget, multiple):
    batches = micro_batches(lengths, budget, multiple)
    assert sorted(i for batch in batches for i in batch) == list(range(len(lengths)))
    for batch in batches:
        width = -(-max(lengths[i] for i in batch) // multiple) * multiple
        assert len(batch) == 1 or len(batch) * width <= budget
    # Lengths are sorted: no row of a batch is longer than any row of the batch before.
    for one, two in itertools.pairwise(batches):
        assert min(lengths[i] for i in one) >= max(lengths[i] for i in two)


def test_the_printed_examples():
    assert balance([5, 1, 4, 2], 2) == [[0, 1], [2, 3]]
    assert micro_batches([5, 1, 4, 2], 8) == [[0], [2, 3], [1]]
    assert micro_batches([], 8) == []
    assert balance([], 2) == [[], []]


def test_rows_are_padded_on_the_right():
    rows = pad_rows([[1, 2, 3], [], [4]], 9, 4)
    assert rows.dtype == np.int32
    assert rows.tolist() == [[1, 2, 3, 9], [9, 9, 9, 9], [4, 9, 9, 9]]
    assert pad_rows([[1, 2, 3]], 0).shape == (1, 3)
    assert pad_rows([], 0, 8).shape == (0, 0)
