"""Rows laid end to end and back, against loops."""

import numpy as np
import pytest
import torch

from funrl.compiled_kernels.varlen_attention import segment_offsets
from funrl.data.packing import pack, pack_tokens, packed_sizes, slots, unpack_tokens


@pytest.mark.parametrize("K", [None, 3])
def test_packed_and_back_is_the_same(K):
    rng = np.random.default_rng(0)
    lengths = rng.integers(0, 12, 40)
    x = torch.arange(1, 40 * 12 * (K or 1) + 1).view(40, 12, *([K] if K else []))
    plan = pack(lengths, 2, packed_sizes(40, 12, parts=4), 8)
    back = torch.zeros_like(x)
    for rank in range(2):
        for rows, size in plan.own(rank):
            at = slots(lengths, rows, 12, size, 8)
            packed = pack_tokens(x, at, -1)
            assert packed.shape == (1, size, *x.shape[2:]) and len(at.offsets) == 9
            total = 0
            for number, row in enumerate(rows, 1):
                part = slice(plan.start[row], plan.start[row] + lengths[row])
                assert torch.equal(packed[0, part], x[row, : lengths[row]])
                assert at.positions[0, part].tolist() == list(range(lengths[row]))
                assert (at.segments[0, part] == number).all()
                total += lengths[row]
            assert (packed[0, total:] == -1).all() and not at.used[0, total:].any() and at.used[0, :total].all()
            assert (at.segments[0, total:] == 0).all() and at.offsets[-1] == total
            assert segment_offsets(at.segments, 8).tolist() == at.offsets.tolist()
            assert max(lengths[rows], default=0) <= at.longest <= size
            unpack_tokens(packed, at, back)
    for row, length in enumerate(lengths):
        assert torch.equal(back[row, :length], x[row, :length]) and (back[row, length:] == 0).all()


def test_the_printed_example():
    at = slots(np.array([2, 3]), np.array([1, 0]), 4, 6, 2)
    assert at.source.tolist() == [4, 5, 6, 0, 1, 0] and at.offsets.tolist() == [0, 3, 5] and at.longest == 4


def test_what_does_not_fit_is_an_error():
    with pytest.raises(ValueError, match="2 rows of 5 tokens do not fit in 2 segments of 4 tokens"):
        slots(np.array([2, 3]), np.array([1, 0]), 4, 4, 2)
    with pytest.raises(ValueError, match="2 rows of 5 tokens do not fit in 1 segments of 6 tokens"):
        slots(np.array([2, 3]), np.array([1, 0]), 4, 6, 1)


def test_an_idle_micro_batch_is_all_padding():
    at = slots(np.array([2]), np.array([], dtype=np.int64), 4, 3, 2)
    assert at.offsets.tolist() == [0, 0, 0] and not at.used.any() and at.longest == 1
    assert pack_tokens(torch.ones(1, 4), at).tolist() == [[0, 0, 0]]
