"""Draws of a decoding step: the rule of rollout.sampling in float64, in C++."""

import math

import pytest
import torch

from funrl.compiled_kernels.decode_step import packed_decoder
from funrl.compiled_kernels.kernel_library import library_problem
from funrl.models.decoder.compiled_step import step_sizes
from funrl.models.decoder.config import decoder_config
from funrl.models.decoder.decoder import decoder_model
from funrl.rollout.sampling import invert

NO_KERNEL = library_problem()
pytestmark = pytest.mark.skipif(NO_KERNEL is not None, reason=str(NO_KERNEL))


@pytest.fixture(scope="module")
def sampler():
    config = decoder_config(vocab=10, embed=16, layers=1, heads=1, kv_heads=1, head=16, mlp=16)
    params = decoder_model(config).init(torch.Generator().manual_seed(0))
    return packed_decoder(step_sizes(config), params, torch.float32, 2)


@pytest.mark.parametrize("vocab", [1, 5, 256, 257, 2048, 5003])
@pytest.mark.parametrize("temperature", [1.0, 0.6, 1.7])
def test_draws_are_those_of_the_engine_s_own_rule(sampler, vocab, temperature):
    generator = torch.Generator().manual_seed(vocab)
    logits = torch.randn(4, vocab, generator=generator) * 3
    logits[1, vocab // 2 :] = -math.inf if vocab > 1 else 0  # never drawn
    source = torch.arange(4).repeat_interleave(250)
    noise = torch.rand(1000, dtype=torch.float64, generator=generator)
    token, sampling_logp, raw_logp = sampler.sample(logits, source, noise, temperature)
    logp = (logits.double() / temperature).log_softmax(-1)[source]
    assert torch.equal(token, invert(logp.exp(), noise)[0].squeeze(1))
    assert (sampling_logp - logp.gather(1, token[:, None]).squeeze(1)).abs().max() < 2e-6
    raw = logits.double().log_softmax(-1)[source].gather(1, token[:, None]).squeeze(1)
    assert (raw_logp - raw).abs().max() < 2e-6


def test_each_draw_has_its_own_temperature(sampler):
    logits = torch.randn(2, 300, generator=torch.Generator().manual_seed(0))
    source, noise = torch.tensor([1, 0, 1]), torch.tensor([0.3, 0.9, 0.6], dtype=torch.float64)
    temperature = torch.tensor([1.0, 0.5, 2.0], dtype=torch.float64)
    result = sampler.sample(logits, source, noise, temperature)
    for i in range(3):
        first = sampler.sample(logits, source[i : i + 1], noise[i : i + 1], float(temperature[i]))
        assert all(torch.equal(a[i : i + 1], b) for a, b in zip(result, first, strict=True))


def test_the_most_probable_token(sampler):
    logits = torch.randn(3, 700, generator=torch.Generator().manual_seed(0))
    logits[2, 5] = logits[2, 600] = 9.0  # the first of equals
    token, sampling_logp, raw_logp = sampler.sample(logits, torch.arange(3), None, 0.3)
    assert token.tolist() == [int(logits[0].argmax()), int(logits[1].argmax()), 5]
    expected = logits.double().log_softmax(-1).gather(1, token[:, None]).squeeze(1)
    assert torch.equal(sampling_logp, raw_logp) and (raw_logp - expected).abs().max() < 1e-6


def test_draws_have_the_frequencies_of_the_softmax(sampler):
    logits = torch.randn(1, 24, generator=torch.Generator().manual_seed(2)) * 1.5
    count, temperature = 40000, 0.8
    noise = torch.rand(count, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    token, _, _ = sampler.sample(logits, torch.zeros(count, dtype=torch.int64), noise, temperature)
    expected = count * (logits[0].double() / temperature).softmax(-1)
    assert expected.min() > 5
    chi_squared = ((torch.bincount(token, minlength=24) - expected) ** 2 / expected).sum()
    assert chi_squared < 49.7  # 0.999 of 23 degrees of freedom


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_row_that_is_not_finite_shows_in_its_log_probability(sampler, bad):
    logits = torch.zeros(3, 300)
    logits[1, 17] = bad
    logits[2] = -math.inf
    noise = torch.full((3,), 0.5, dtype=torch.float64)
    for given in (noise, None):
        token, sampling_logp, raw_logp = sampler.sample(logits, torch.arange(3), given, 0.7)
        assert token[1:].tolist() == [299, 299] and sampling_logp[1:].isnan().all() and raw_logp[1:].isnan().all()
        assert raw_logp[0].isfinite()


def test_noise_at_its_bounds_draws_what_has_probability(sampler):
    logits = torch.full((1, 600), -math.inf)
    logits[0, 100:400] = 0
    zero = torch.zeros(1, dtype=torch.int64)
    for noise, expected in ((2.0**-53, 100), (1 - 2.0**-53, 399), (1.0, 399)):
        token, _, _ = sampler.sample(logits, zero, torch.tensor([noise], dtype=torch.float64), 1.0)
        assert token.item() == expected


def test_bad_draws_are_named(sampler):
    logits, noise = torch.zeros(2, 10), torch.zeros(1, dtype=torch.float64)
    with pytest.raises(ValueError, match="not one of the 2 rows"):
        sampler.sample(logits, torch.tensor([2]), noise, 1.0)
    with pytest.raises(ValueError, match=r"noise_R is torch\.float32"):
        sampler.sample(logits, torch.tensor([1]), noise.float(), 1.0)
