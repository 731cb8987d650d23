"""The advantages of max@k: unbiased by all outcomes, centred, and the leave-two-out form by all sets of rows."""

import random
from itertools import combinations, product
from math import prod

import pytest
import torch

from funrl.algos import Signal, leave_one_out, max_at_k
from funrl.batch import Batch


def advantages(rewards, k):
    batch = Batch(mask=torch.ones(len(rewards), 1).bool(), group=torch.zeros(len(rewards), dtype=torch.int64))
    piece = max_at_k(k)
    signal = Signal(torch.tensor(rewards, dtype=torch.float64), batch.mask)
    return piece.update(signal, piece.init(), batch)[0].x.tolist()


def mean(values):
    values = list(values)
    return sum(values) / len(values)


def best(rewards, rows):
    return max((rewards[j] for j in rows), default=0.0)


def gain(rewards, k, i, rows):
    """The mean gain of the best of k by row i, over the sets with it among some rows."""
    others = [j for j in rows if j != i]
    return mean(best(rewards, (i, *some)) - best(rewards, some) for some in combinations(others, k - 1))


@pytest.mark.parametrize("n, k", [(3, 2), (5, 2), (5, 3), (6, 4), (6, 5), (4, 1)])
def test_it_is_the_gain_of_a_row_less_that_of_the_others_without_it(n, k):
    """PKPO's estimator and the leave-two-out baseline: of row j, in the rows without row i, by what j adds."""
    draw = random.Random(n * 10 + k)
    rewards = [draw.random() for _ in range(n)]
    every = range(n)
    for i, got in enumerate(advantages(rewards, k)):
        rest = [j for j in every if j != i]
        baseline = mean(gain(rewards, k, j, rest) for j in rest)
        assert got == pytest.approx(k * (gain(rewards, k, i, every) - baseline), abs=1e-12)


@pytest.mark.parametrize("n, k", [(3, 1), (3, 2), (4, 2), (4, 3), (5, 3)])
def test_the_gradient_is_that_of_max_at_k_in_expectation(n, k):
    """By all outcomes of n draws from 3 completions, whose probabilities are a softmax of logits."""
    rewards = (0.2, 1.0, 0.7)
    logits = torch.tensor([0.3, -0.6, 0.1], dtype=torch.float64, requires_grad=True)
    p = logits.softmax(0)
    exact = torch.zeros((), dtype=torch.float64)
    for drawn in product(range(3), repeat=k):
        exact = exact + p[list(drawn)].prod() * best(rewards, drawn)
    (want,) = torch.autograd.grad(exact, logits, retain_graph=True)
    probabilities = p.tolist()
    scores = [[(a == c) - probabilities[a] for a in range(3)] for c in range(3)]  # of log p[c] by the logits
    got = [0.0, 0.0, 0.0]
    for drawn in product(range(3), repeat=n):
        chance = prod(probabilities[c] for c in drawn)
        for advantage, c in zip(advantages([rewards[c] for c in drawn], k), drawn, strict=True):
            for a in range(3):
                got[a] += chance * advantage * scores[c][a] / n
    assert got == pytest.approx(want.tolist(), abs=1e-12)


@pytest.mark.parametrize("k", [1, 2, 7, 40])
def test_the_advantages_of_a_group_add_up_to_0(k):
    draw = random.Random(k)
    for n in (1, 2, 8, 64):
        rewards = [draw.choice([0.0, 1.0, draw.random()]) for _ in range(n)]
        assert sum(advantages(rewards, k)) == pytest.approx(0, abs=1e-10)


def test_one_completion_of_which_the_best_counts_is_leave_one_out():
    rewards = torch.tensor([0.1, 0.5, 0.4, 0.9], dtype=torch.float64)
    batch = Batch(mask=torch.ones(4, 1).bool(), group=torch.zeros(4, dtype=torch.int64))
    piece = leave_one_out()
    want = piece.update(Signal(rewards, batch.mask), piece.init(), batch)[0].x
    torch.testing.assert_close(torch.tensor(advantages(rewards.tolist(), 1), dtype=torch.float64), want)
