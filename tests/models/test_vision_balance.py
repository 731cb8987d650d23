"""Pictures assigned to the ranks that compute them."""

import numpy as np
import pytest

from funrl.mesh.mesh import Mesh, parse
from funrl.models.vision.balance import assign_pictures, assigned_pictures, padded_units
from funrl.models.vision.config import TowerConfig
from funrl.models.vision.grids import picture_work

TOWER = TowerConfig(layers=3, embed=8, heads=1, inner=12, patch=4, window=16, whole_layers=(1,), placeholder=1)


def loads_of(work, to, shape):
    loads = np.zeros(shape, dtype=np.int64)
    np.add.at(loads, tuple(to.T), work)
    return loads


@pytest.mark.parametrize("shape", [(4, 1), (1, 4), (3, 2)])
def test_no_rank_has_more_than_the_mean_and_one_picture(shape):
    draw = np.random.default_rng(0)
    for count in (0, 1, 7, 200):
        work = draw.integers(1, 100, count)
        owner = np.sort(draw.integers(0, shape[0], count) ** 2 // shape[0])  # the first ranks have most
        to = assign_pictures(work, owner, shape)
        loads = loads_of(work, to, shape)
        assert loads.max() <= loads.mean() + work.max(initial=0)
        assert np.array_equal(to, assign_pictures(work, owner, shape))
    assert loads.max() <= 1.02 * loads.mean()  # of 200 pictures


def test_pictures_that_are_balanced_stay_and_the_rest_moves():
    work = np.array([4, 4, 4, 4, 4, 4])
    assert assign_pictures(work, np.array([0, 0, 0, 1, 1, 1]), (2, 1)).tolist() == [[0, 0]] * 3 + [[1, 0]] * 3
    # three and two are as good as two and three; of four and one one moves
    owners = ([0, 0, 0, 1, 1], [0, 0, 0, 0, 1])
    moved = [assign_pictures(work[:5], np.array(owner), (2, 1))[:, 0] - owner for owner in owners]
    assert [x.tolist().count(1) for x in moved] == [0, 1] and not any(-1 in x for x in moved)
    # a large one that exceeds the mean is placed before small ones, which then move
    uneven = assign_pictures(np.array([26, 8, 26, 16, 8]), np.array([0, 0, 1, 1, 1]), (2, 1))
    assert loads_of(np.array([26, 8, 26, 16, 8]), uneven, (2, 1)).tolist() == [[42], [42]]
    # of ranks with the same rows each takes one of equal pictures
    assert assign_pictures(work[:2], np.array([0, 0]), (1, 2)).tolist() == [[0, 0], [0, 1]]


def test_each_picture_is_computed_once_and_all_ranks_agree():
    sizes = np.array([(2, 4), (8, 6), (2, 2), (4, 4), (10, 2), (2, 8)])
    owner = np.array([0, 0, 0, 2, 2, 3])  # rank 1 has none
    shape = parse("dp4,sp2,tp2")
    ranks = [assigned_pictures(TOWER, sizes, owner, Mesh(shape, rank)) for rank in range(16)]
    for rank, one in enumerate(ranks):
        row = rank // 4
        assert len(one.to_Q2) == (owner == row).sum()
        assert all(np.array_equal(one.to_Q2, peer.to_Q2) for peer in ranks[4 * row : 4 * row + 4])
        own = sizes[owner == row].tolist()
        for (to_row, replica), size in zip(one.to_Q2.tolist(), own, strict=True):
            computing = ranks[4 * to_row + replica]
            assert [row, *size] in np.column_stack([computing.source_S, computing.grids_S2]).tolist()
    assert sum(len(one.source_S) for one in ranks) == len(sizes)
    assert all(one.source_S.tolist() == sorted(one.source_S.tolist()) for one in ranks)


def test_work_is_of_patches_and_of_the_pairs_that_see_one_another():
    """8 x 4 patches are two windows of 4 x 4 patches."""
    patch = 8 * (4 * 8 + 3 * 12)
    pairs = 32**2 + 2 * (2 * 16**2)  # of one layer that sees all, and of two with windows
    assert picture_work((8, 4), TOWER) == 3 * 32 * patch + 2 * 8 * pairs


def test_shares_have_few_sizes():
    assert [padded_units(n) for n in (0, 1, 15, 16, 17, 100, 1000)] == [1, 1, 15, 16, 18, 104, 1024]
    sizes = {n: padded_units(n) for n in range(1, 4097)}
    assert len(set(sizes.values())) == 80
    assert all(n <= size <= 1.125 * n for n, size in sizes.items())
