"""Divergences against sums in plain Python and against closed forms."""

import math

import pytest
import torch

from funrl.compiled_kernels.linear_divergence import divergence

BETAS = [0, 0.1, 0.5, 0.9, 1]


def randn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def kl(p, q):
    return sum(a * math.log(a / b) for a, b in zip(p, q, strict=True))


def by_hand(q, p, beta):
    """Of one pair of distributions, as the paper writes it."""
    if beta in (0, 1):
        return kl(q, p) if beta else kl(p, q)
    m = [beta * a + (1 - beta) * b for a, b in zip(p, q, strict=True)]
    return beta * kl(p, m) + (1 - beta) * kl(q, m)


@pytest.mark.parametrize("beta", BETAS)
def test_equals_sums(beta):
    q, p = randn(2, 3, 7).softmax(-1), randn(2, 3, 7, seed=1).softmax(-1)
    got = divergence(q.log(), p.log(), beta)
    assert got.shape == (2, 3)
    for value, a, b in zip(got.flatten(), q.view(6, 7).tolist(), p.view(6, 7).tolist(), strict=True):
        assert value.item() == pytest.approx(by_hand(a, b, beta), abs=1e-14)


def test_of_two_outcomes():
    # p = 3/4, 1/4 and q = 1/2, 1/2, so that m = 5/8, 3/8 at beta = 1/2.
    logp, teacher = torch.tensor([0.5, 0.5]).double().log(), torch.tensor([0.75, 0.25]).double().log()
    forward, reverse = 0.75 * math.log(1.5) + 0.25 * math.log(0.5), 0.5 * math.log(2 / 3) + 0.5 * math.log(2)
    middle = 0.5 * (0.75 * math.log(1.2) + 0.25 * math.log(2 / 3)) + 0.5 * (0.5 * math.log(0.8) + 0.5 * math.log(4 / 3))
    for beta, expected in ((0, forward), (1, reverse), (0.5, middle)):
        assert divergence(logp, teacher, beta).item() == pytest.approx(expected, abs=1e-15)


@pytest.mark.parametrize("beta", BETAS)
def test_is_zero_of_equals_alone_and_symmetric_in_the_middle(beta):
    logp, teacher = randn(5, 9).log_softmax(-1), randn(5, 9, seed=1).log_softmax(-1)
    assert divergence(logp, logp, beta).abs().max() < 1e-15 and (divergence(logp, teacher, beta) > 0).all()
    torch.testing.assert_close(divergence(logp, teacher, beta), divergence(teacher, logp, 1 - beta))
    if 0 < beta < 1:  # it has a bound, the entropy of the weights; a KL has none
        far = torch.tensor([[0.0, -800.0], [-800.0, 0.0]], dtype=torch.float64)
        bound = -beta * math.log(beta) - (1 - beta) * math.log1p(-beta)
        assert divergence(far[0], far[1], beta).item() == pytest.approx(bound)


def test_near_the_ends_it_is_the_kl_times_beta():
    logp, teacher, beta = randn(9).log_softmax(-1), randn(9, seed=1).log_softmax(-1), 1e-6
    for side, end in ((beta, 0), (1 - beta, 1)):
        assert (divergence(logp, teacher, side) / beta).item() == pytest.approx(
            divergence(logp, teacher, end).item(), rel=1e-4
        )


@pytest.mark.parametrize("beta", [-0.1, 1.1, math.nan])
def test_beta_has_a_range(beta):
    with pytest.raises(ValueError, match=f"beta is {beta}; it goes from 0"):
        divergence(torch.zeros(2), torch.zeros(2), beta)
