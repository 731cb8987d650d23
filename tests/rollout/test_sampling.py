"""Noise and draws against scalar loops, chi-square and float64."""

import math

import pytest
import torch

from funrl.rollout import sampling
from funrl.rollout.completions import Sampling


def splitmix(seed: int, row: int, step: int) -> float:
    """`uniform` in Python's own integers."""

    def mixed(x: int) -> int:
        x = x % 2**64
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) % 2**64
        return x ^ (x >> 31)

    gamma = 0x9E3779B97F4A7C15
    start = mixed(mixed(seed) + row * gamma)
    return ((mixed(start + (step + 1) * gamma) >> 12) + 0.5) / 2**52


@pytest.mark.parametrize("seed", [0, 1, -1, 2**63 + 5, 12345678901234567890])
def test_noise_is_splitmix64(seed):
    rows, steps = torch.tensor([0, 1, 7, 2**40]), torch.tensor([0, 1, 1000])
    noise = sampling.uniform(seed, rows, steps)
    assert noise.tolist() == [[splitmix(seed, r, s) for s in steps.tolist()] for r in rows.tolist()]


def test_noise_does_not_depend_on_the_rows_beside_it():
    whole = sampling.uniform(3, torch.arange(50), torch.arange(20))
    order = torch.tensor([40, 3, 17])
    assert torch.equal(sampling.uniform(3, order, torch.arange(5, 9)), whole[order, 5:9])


def chi_square(counts: torch.Tensor, expected: torch.Tensor) -> float:
    """In standard deviations of its own distribution (about normal for many cells)."""
    statistic = ((counts - expected) ** 2 / expected).sum().item()
    freedom = counts.numel() - 1
    return (statistic - freedom) / math.sqrt(2 * freedom)


def test_noise_is_uniform_over_rows_steps_and_seeds():
    by_row = sampling.uniform(0, torch.arange(400), torch.arange(500))
    by_seed = torch.stack([sampling.uniform(s, torch.arange(10), torch.arange(10)) for s in range(2000)])
    for noise in (by_row, by_seed):
        assert noise.min() > 0 and noise.max() < 1
        counts = torch.histc(noise.flatten(), 1000, 0, 1)
        assert abs(chi_square(counts, torch.full_like(counts, noise.numel() / 1000))) < 4


def test_neighbours_are_independent():
    noise = sampling.uniform(0, torch.arange(400), torch.arange(500))
    next_seed = sampling.uniform(1, torch.arange(400), torch.arange(500))
    for a, b in ((noise[1:], noise[:-1]), (noise[:, 1:], noise[:, :-1]), (noise, next_seed)):
        cells = (a * 20).floor() * 20 + (b * 20).floor()
        counts = torch.bincount(cells.long().flatten(), minlength=400).double()
        assert abs(chi_square(counts, torch.full_like(counts, counts.sum().item() / 400))) < 4


def scalar_distribution(logits: list[float], how: Sampling) -> list[float]:
    """Probabilities after temperature, top-k and top-p, one number at a time in float64."""
    weight = [math.exp((x - max(logits)) / how.temperature) for x in logits]
    by_weight = sorted(range(len(logits)), key=lambda i: -weight[i])
    kept = by_weight[: how.top_k or len(logits)]
    total = sum(weight[i] for i in kept)
    chosen, mass = [], 0.0
    for i in kept:
        if mass >= how.top_p:
            break
        chosen.append(i)
        mass += weight[i] / total
    total = sum(weight[i] for i in chosen)
    return [weight[i] / total if i in chosen else 0.0 for i in range(len(logits))]


CASES = [
    Sampling(),
    Sampling(temperature=0.7),
    Sampling(temperature=1.8, top_k=5),
    Sampling(top_k=1),
    Sampling(top_k=1000),
    Sampling(top_p=0.6),
    Sampling(top_p=1e-9),
    Sampling(temperature=0.5, top_k=9, top_p=0.8),
]


@pytest.mark.parametrize("how", CASES, ids=str)
def test_distribution_is_that_of_the_scalar_loop(how):
    logits = torch.randn(7, 23, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 2
    logp, ids = sampling.candidates(logits, how)
    whole = torch.zeros_like(logits) if ids is not None else logp.exp()
    if ids is not None:
        whole.scatter_(1, ids, logp.exp())
    expected = torch.tensor([scalar_distribution(row, how) for row in logits.tolist()], dtype=torch.float64)
    torch.testing.assert_close(whole, expected, atol=1e-12, rtol=0)


@pytest.mark.parametrize("how", CASES, ids=str)
def test_draws_follow_the_distribution_and_their_logp_is_exact(how):
    logits = torch.randn(1, 23, generator=torch.Generator().manual_seed(1), dtype=torch.float64) * 2
    rows = 20000
    noise = sampling.uniform(5, torch.arange(rows), torch.tensor([0]))[:, 0]
    token, logp, model_logp = sampling.sample_tokens(logits.expand(rows, -1), noise, how)
    expected = torch.tensor(scalar_distribution(logits[0].tolist(), how), dtype=torch.float64)
    counts = torch.bincount(token, minlength=23).double()
    assert (counts[expected == 0] == 0).all()
    common = expected * rows > 5
    if common.sum() > 2:
        assert chi_square(counts[common], expected[common] * rows) < 4
    torch.testing.assert_close(logp, expected[token].log(), atol=1e-12, rtol=0)
    torch.testing.assert_close(model_logp, logits[0].log_softmax(-1)[token], atol=1e-12, rtol=0)


def test_float32_logp_agrees_with_float64():
    logits = torch.randn(64, 5000, generator=torch.Generator().manual_seed(2), dtype=torch.float64) * 5
    noise = sampling.uniform(0, torch.arange(64), torch.tensor([0]))[:, 0]
    how = Sampling(temperature=0.9)
    token, logp, model_logp = sampling.sample_tokens(logits.float(), noise, how)
    exact = (logits / 0.9).log_softmax(-1).gather(1, token[:, None])[:, 0]
    torch.testing.assert_close(logp.double(), exact, atol=1e-5, rtol=0)
    exact = logits.log_softmax(-1).gather(1, token[:, None])[:, 0]
    torch.testing.assert_close(model_logp.double(), exact, atol=1e-5, rtol=0)


def test_inversion_takes_the_token_whose_interval_holds_the_noise():
    logp = torch.tensor([[0.0, 0.25, 0.0, 0.5, 0.25, 0.0]], dtype=torch.float64).log()
    noise = torch.tensor([1e-16, 0.2, 0.26, 0.74, 0.76, 1 - 2.0**-53], dtype=torch.float64)
    assert sampling.invert(logp.expand(6, -1), noise)[:, 0].tolist() == [1, 1, 3, 3, 4, 4]


def test_greedy_takes_the_by_weight_with_the_models_own_logp():
    logits = torch.randn(9, 30, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    token, logp, model_logp = sampling.sample_tokens(logits, None, Sampling(greedy=True, temperature=0.3, top_k=2))
    assert torch.equal(token, logits.argmax(-1))
    torch.testing.assert_close(logp, logits.log_softmax(-1).amax(-1))
    assert torch.equal(logp, model_logp)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"temperature": 0.0}, "temperature is 0.0"),
        ({"top_k": -1}, "top_k is -1"),
        ({"top_p": 0.0}, "top_p is 0.0"),
        ({"top_p": 1.1}, "top_p is 1.1"),
        ({"max_new_tokens": 0}, "max_new_tokens is 0"),
        ({"samples": 0}, "samples is 0"),
    ],
)
def test_numbers_out_of_range_are_refused(wrong, message):
    with pytest.raises(ValueError, match=message):
        Sampling(**wrong)
