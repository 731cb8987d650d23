"""Noise and draws against scalar loops, plain references, chi-square and float64."""

import math

import pytest
import torch
from plain_sampling import plain_logp
from torch._subclasses.fake_tensor import FakeTensorMode

from funrl.rollout import sampling
from funrl.rollout.sampling_parameters import Sampling


def uniform(seed: int, rows, steps) -> torch.Tensor:
    """The noise of all pairs of rows and steps, [R, S]."""
    seeds = torch.tensor([sampling.request_seed(seed, row) for row in rows.tolist()])
    return sampling.stream_noise(seeds[:, None], steps)


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


SEEDS = [0, 1, -1, 2**63 + 5, 12345678901234567890]


@pytest.mark.parametrize("seed", SEEDS)
def test_noise_is_splitmix64(seed):
    rows, steps = torch.tensor([0, 1, 7, 2**40]), torch.tensor([0, 1, 1000])
    noise = uniform(seed, rows, steps)
    assert noise.tolist() == [[splitmix(seed, r, s) for s in steps.tolist()] for r in rows.tolist()]


@pytest.mark.parametrize("seed", SEEDS)
def test_a_request_has_the_stream_of_its_row(seed):
    rows, steps = [0, 1, 7, 2**40, -3], torch.tensor([0, 5, 1, 1000, 2**33])
    seeds = torch.tensor([sampling.request_seed(seed, row) for row in rows])
    assert sampling.stream_noise(seeds, steps).tolist() == [
        splitmix(seed, *x) for x in zip(rows, steps.tolist(), strict=True)
    ]


def test_noise_does_not_depend_on_the_rows_beside_it():
    whole = uniform(3, torch.arange(50), torch.arange(20))
    order = torch.tensor([40, 3, 17])
    assert torch.equal(uniform(3, order, torch.arange(5, 9)), whole[order, 5:9])


def chi_square(counts: torch.Tensor, expected: torch.Tensor) -> float:
    """In standard deviations of its own distribution (about normal for many cells)."""
    statistic = ((counts - expected) ** 2 / expected).sum().item()
    freedom = counts.numel() - 1
    return (statistic - freedom) / math.sqrt(2 * freedom)


def test_noise_is_uniform_over_rows_steps_and_seeds():
    by_row = uniform(0, torch.arange(400), torch.arange(500))
    by_seed = torch.stack([uniform(s, torch.arange(10), torch.arange(10)) for s in range(2000)])
    for noise in (by_row, by_seed):
        assert noise.min() > 0 and noise.max() < 1
        counts = torch.histc(noise.flatten(), 1000, 0, 1)
        assert abs(chi_square(counts, torch.full_like(counts, noise.numel() / 1000))) < 4


def test_neighbours_are_independent():
    noise = uniform(0, torch.arange(400), torch.arange(500))
    next_seed = uniform(1, torch.arange(400), torch.arange(500))
    for a, b in ((noise[1:], noise[:-1]), (noise[:, 1:], noise[:, :-1]), (noise, next_seed)):
        cells = (a * 20).floor() * 20 + (b * 20).floor()
        counts = torch.bincount(cells.long().flatten(), minlength=400).double()
        assert abs(chi_square(counts, torch.full_like(counts, counts.sum().item() / 400))) < 4


def scalar_distribution(logits: list[float], how: Sampling, seen: list[bool]) -> list[float]:
    """Probabilities after the penalty, temperature, top-k, top-p and min-p, one number at a time in float64."""
    penalty = how.repetition_penalty
    logits = [(x / penalty if x > 0 else x * penalty) if old else x for x, old in zip(logits, seen, strict=True)]
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
    chosen = [i for i in chosen if weight[i] >= how.min_p * weight[chosen[0]]]
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
    Sampling(top_p=1e-30),
    Sampling(min_p=0.1),
    Sampling(min_p=1.0),
    Sampling(temperature=0.5, top_k=9, top_p=0.8),
    Sampling(top_k=1000, top_p=0.95, min_p=0.01),
    Sampling(repetition_penalty=1.4),
    Sampling(repetition_penalty=0.6, temperature=1.3),
    Sampling(repetition_penalty=2.0, temperature=0.8, top_k=12, top_p=0.9, min_p=0.05),
]


def name(how: Sampling) -> str:
    plain = Sampling()
    return " ".join(f"{k}={v}" for k, v in vars(how).items() if v != getattr(plain, k)) or "plain"


def draw(*shape: int, seed: int = 0, scale: float = 2.0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * scale


@pytest.mark.parametrize("how", CASES, ids=name)
def test_the_plain_reference_is_the_scalar_loop(how):
    logits, seen = draw(7, 23), draw(7, 23, seed=4) > 0
    expected = [scalar_distribution(*row) for row in zip(logits.tolist(), [how] * 7, seen.tolist(), strict=True)]
    whole = plain_logp(logits, how, seen).exp()
    torch.testing.assert_close(whole, torch.tensor(expected, dtype=torch.float64), atol=1e-12, rtol=0)


@pytest.mark.parametrize("how", CASES, ids=name)
def test_draws_follow_the_distribution_and_their_logp_is_exact(how):
    """Of a small vocabulary; inversion by blocks, as of a large one, has a test of its own."""
    vocab, rows = 23, 5000
    logits, seen = draw(1, vocab, seed=1), draw(1, vocab, seed=5) > 0
    noise = uniform(5, torch.arange(rows), torch.tensor([0]))[:, 0]
    token, logp, raw_logp = sampling.sample_tokens(logits.expand(rows, -1), noise, how, seen.expand(rows, -1))
    expected = plain_logp(logits, how, seen)[0]
    counts = torch.bincount(token, minlength=vocab).double()
    assert (counts[expected == -torch.inf] == 0).all()
    often = expected.exp() * rows > 5
    cells = torch.cat([counts[often], counts[~often].sum()[None]])
    probable = torch.cat([expected.exp()[often], expected.exp()[~often].sum()[None]])
    some = probable > 0
    if some.sum() > 2:
        assert chi_square(cells[some], probable[some] * rows) < 4
    torch.testing.assert_close(logp, expected[token], atol=1e-12, rtol=0)
    torch.testing.assert_close(raw_logp, logits[0].log_softmax(-1)[token], atol=1e-12, rtol=0)


@pytest.mark.parametrize("how", [Sampling(), Sampling(temperature=0.9), Sampling(top_p=0.9), Sampling(greedy=True)])
def test_float32_logp_agrees_with_float64(how):
    logits = draw(64, 5000, seed=2, scale=5)
    noise = uniform(0, torch.arange(64), torch.tensor([0]))[:, 0]
    token, logp, raw_logp = sampling.sample_tokens(logits.float(), noise, how)
    assert logp.dtype == raw_logp.dtype == torch.float32
    for ours, exact in ((logp, plain_logp(logits, how)), (raw_logp, logits.log_softmax(-1))):
        if not how.greedy or ours is raw_logp:
            torch.testing.assert_close(ours.double(), exact.gather(1, token[:, None])[:, 0], atol=2e-6, rtol=0)


def test_the_raw_logp_of_an_improbable_token_is_finite():
    logits = torch.tensor([[0.0, -150.0]])
    token, logp, raw_logp = sampling.sample_tokens(logits, torch.tensor([0.999]).double(), Sampling(temperature=60.0))
    assert token.item() == 1 and raw_logp.item() == -150.0  # its probability underflows in float32
    assert logp.item() == pytest.approx(-2.5 - math.log1p(math.exp(-2.5)))


def test_inversion_takes_the_token_whose_interval_holds_the_noise():
    weight = torch.tensor([[0.0, 0.25, 0.0, 0.5, 0.25, 0.0]], dtype=torch.float64)
    noise = torch.tensor([1e-16, 0.2, 0.26, 0.74, 0.76, 1 - 2.0**-53], dtype=torch.float64)
    for weights in (weight, weight.float(), (weight * 2**62).long(), (weight * 4).long()):
        token, total = sampling.invert(weights.expand(6, -1), noise)
        assert token[:, 0].tolist() == [1, 1, 3, 3, 4, 4]
        assert total.tolist() == [[weights.sum().item()]] * 6


@pytest.mark.parametrize("vocab", [1, 255, 256, 257, 1000, 2048])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int64])
def test_inversion_by_blocks_is_that_of_one_cumulative_sum(vocab, dtype):
    weight = (draw(500, vocab).exp() * 1e4 * (draw(500, vocab, seed=1) > 0)).to(dtype)
    weight[:, vocab // 2] += 1
    noise = uniform(1, torch.arange(500), torch.tensor([0]))[:, 0]
    token, total = sampling.invert(weight, noise)
    upto = weight.double().cumsum(1)
    expected = (upto <= noise[:, None] * upto[:, -1:]).sum(1, keepdim=True)
    assert (token == expected).float().mean() > (0.999 if dtype != torch.float32 else 0.98)  # but for rounding
    assert (weight.gather(1, token) > 0).all()
    torch.testing.assert_close(total.double(), upto[:, -1:], rtol=1e-6, atol=0)


def test_a_block_whose_sum_was_rounded_up_gives_its_last_token():
    weight = torch.tensor([[1.0, 1.5 * 2**-24, 0.0]])
    assert weight.sum() == 1 + 2.0**-23  # more than the two are together
    assert sampling.invert(weight, torch.tensor([1 - 2.0**-53]).double())[0].item() == 1


def test_greedy_takes_the_most_probable_with_the_models_own_logp():
    logits, seen = draw(9, 700, seed=3), draw(9, 700, seed=4) > 0
    how = Sampling(greedy=True, temperature=0.3, top_k=2)
    token, logp, raw_logp = sampling.sample_tokens(logits, None, how)
    assert torch.equal(token, logits.argmax(-1))
    torch.testing.assert_close(logp, logits.log_softmax(-1).amax(-1), atol=1e-12, rtol=0)
    assert torch.equal(logp, raw_logp)
    penalised = Sampling(greedy=True, repetition_penalty=1.5)
    other, _, raw_logp = sampling.sample_tokens(logits, None, penalised, seen)
    assert torch.equal(other, plain_logp(logits, penalised, seen).argmax(-1)) and not torch.equal(other, token)
    exact = logits.log_softmax(-1).gather(1, other[:, None])[:, 0]
    torch.testing.assert_close(raw_logp, exact, atol=1e-12, rtol=0)


def test_greedy_takes_the_first_of_equals():
    logits = torch.zeros(3, 600)
    logits[1, [300, 599]] = 1
    logits[2, 512:] = 1
    assert sampling.sample_tokens(logits, None, Sampling(greedy=True))[0].tolist() == [0, 300, 512]


def mixed_logits(vocab: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Peaked, flat, tied and one-token rows beside each other."""
    logits = draw(12, vocab, seed=6).to(dtype)
    logits *= torch.tensor([0.0, 0.01, 1.0, 4.0, 0.5, 2.0, 8.0, 1.0, 1.0, 3.0, 1.0, 0.2])[:, None].to(dtype)
    logits[7:9] = (logits[7:9] * 2).round() / 2
    logits[9, vocab // 3] = 200
    logits[10, : vocab // 2] = -torch.inf
    return logits


@pytest.mark.parametrize("vocab", [23, 300, 4097])
@pytest.mark.parametrize("how", [*CASES, Sampling(greedy=True)], ids=name)
def test_the_bits_of_a_row_do_not_depend_on_the_rows_beside_it(how, vocab):
    logits, seen = mixed_logits(vocab), draw(12, vocab, seed=7) > 1
    noise = uniform(2, torch.arange(12), torch.tensor([3]))[:, 0]
    whole = sampling.sample_tokens(logits, noise, how, seen)
    for rows in ([3], [0, 1, 2], [11, 4, 6, 8, 7], [9, 10], list(range(11, -1, -1)), [5] * 40):
        some = sampling.sample_tokens(logits[rows].clone(), noise[rows], how, seen[rows])
        assert all(torch.equal(a, b[rows]) for a, b in zip(some, whole, strict=True))


@pytest.mark.parametrize("vocab", [23, 300, 4097])
@pytest.mark.parametrize("how", [how for how in CASES if how.truncated], ids=name)
def test_the_short_way_and_the_long_one_give_the_same_bits(how, vocab, monkeypatch):
    logits, seen = mixed_logits(vocab), draw(12, vocab, seed=7) > 1
    noise = uniform(2, torch.arange(12), torch.tensor([4]))[:, 0]
    short = sampling.sample_tokens(logits, noise, how, seen)
    monkeypatch.setattr(sampling, "shortlist", lambda *_: None)
    assert all(torch.equal(a, b) for a, b in zip(short, sampling.sample_tokens(logits, noise, how, seen), strict=True))


@pytest.mark.parametrize("how", [*CASES, Sampling(greedy=True)], ids=name)
def test_logits_that_are_not_finite_give_a_logp_that_is_not_and_leave_other_rows_alone(how):
    good = draw(6, 300, seed=8).float()
    noise = uniform(0, torch.arange(6), torch.tensor([0]))[:, 0]
    seen = torch.zeros(6, 300, dtype=torch.bool)
    expected = sampling.sample_tokens(good, noise, how, seen)
    bad = good.clone()
    bad[1], bad[2, 5], bad[3, 299], bad[4] = torch.nan, torch.nan, torch.inf, -torch.inf
    token, logp, raw_logp = sampling.sample_tokens(bad, noise, how, seen)
    assert raw_logp.isnan().tolist() == [False, True, True, True, True, False]
    assert ((token >= 0) & (token < 300)).all()
    for a, b in zip((token, logp, raw_logp), expected, strict=True):
        assert torch.equal(a[[0, 5]], b[[0, 5]])


@pytest.mark.parametrize("how", [*CASES, Sampling(greedy=True)], ids=name)
def test_all_probability_on_one_token(how):
    logits, seen = torch.full((4, 700), -300.0), torch.zeros(4, 700, dtype=torch.bool)
    at = torch.tensor([0, 256, 511, 699])
    logits[torch.arange(4), at] = 300
    noise = uniform(0, torch.arange(4), torch.tensor([0]))[:, 0]
    token, logp, raw_logp = sampling.sample_tokens(logits, noise, how, seen)
    assert token.tolist() == at.tolist() and logp.tolist() == raw_logp.tolist() == [0.0] * 4


@pytest.mark.parametrize("how", [*CASES, Sampling(top_k=2500, top_p=0.5), Sampling(greedy=True)], ids=name)
def test_no_rows_and_no_numbers_are_drawn_from_too(how):
    for mode in (None, FakeTensorMode()):  # as a cost estimate traces it
        with mode or torch.inference_mode():
            rows = 5 if mode else 0
            logits, noise = torch.zeros(rows, 3000), torch.zeros(rows, dtype=torch.float64)
            token, logp, raw_logp = sampling.sample_tokens(logits, noise, how, torch.zeros_like(logits).bool())
            assert token.shape == logp.shape == raw_logp.shape == (rows,)


def test_a_penalty_needs_the_tokens_seen():
    with pytest.raises(ValueError, match=r"repetition_penalty is 1.5, so the tokens seen so far \(seen_RV\) must be"):
        sampling.sample_tokens(torch.zeros(1, 9), torch.zeros(1).double(), Sampling(repetition_penalty=1.5))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"temperature": 0.0}, "temperature is 0.0"),
        ({"temperature": math.nan}, "temperature is nan"),
        ({"temperature": math.inf}, "temperature is inf"),
        ({"top_k": -1}, "top_k is -1"),
        ({"top_p": 0.0}, "top_p is 0.0"),
        ({"top_p": 1.1}, "top_p is 1.1"),
        ({"min_p": -0.1}, "min_p is -0.1"),
        ({"min_p": math.nan}, "min_p is nan"),
        ({"repetition_penalty": 0.0}, "repetition_penalty is 0.0"),
        ({"repetition_penalty": math.inf}, "repetition_penalty is inf"),
        ({"stop_strings": ("a", "")}, r"stop_strings is \('a', ''\)"),
        ({"stop_strings": "ab"}, "stop_strings is 'ab'"),
        ({"max_new_tokens": 0}, "max_new_tokens is 0"),
        ({"samples": 0}, "samples is 0"),
    ],
)
def test_numbers_out_of_range_are_refused(wrong, message):
    with pytest.raises(ValueError, match=message):
        Sampling(**wrong)
