"""Derived seeds: the numbers that runs have had, and within what a generator takes for any seed."""

import pytest
import torch

from funrl.seeds import LIMIT, derived_seed


@pytest.mark.parametrize("seed", [0, 1, 7, 2026])
def test_small_seeds_give_the_formula(seed):
    assert derived_seed(seed, 30) == seed * 1_000_003 + 30
    assert derived_seed(seed, 30, 4) == (seed * 1_000_003 + 30) * 1_003 + 4


def test_the_example():
    assert (derived_seed(1, 2), derived_seed(1, 2, 3)) == (1_000_005, 1_003_005_018)


@pytest.mark.parametrize("seed", [20261121110907, LIMIT - 1])
def test_large_seeds_fit_and_stay_apart(seed):
    derived_seeds = [derived_seed(seed + i, step, epoch) for i in (0, -1) for step in range(5) for epoch in range(3)]
    derived_seeds += [derived_seed(seed, step) for step in range(5)]
    assert len(set(derived_seeds)) == len(derived_seeds)
    for item in derived_seeds:
        torch.Generator().manual_seed(item)
