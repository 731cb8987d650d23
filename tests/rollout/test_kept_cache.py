"""New weights while requests run: their keys and values are computed again, or kept."""

import pytest
import torch
from small_engines import CONFIGS, NO_PACKING, weights

from funrl.models import decoder_model
from funrl.rollout.native.engine import NativeOptions, native_engine
from funrl.rollout.requests import requests_of
from funrl.rollout.sampling_parameters import Sampling

SAMPLING = Sampling(max_new_tokens=40)
LONG = [[1 + n % 39 for n in range(40)], [7]]  # the first fills pages


def engine_of(keep_cache, packed, seed=0):
    config = CONFIGS["llama"]
    options = NativeOptions(max_rows=4, cache_bytes=1 << 22, packed=packed, keep_cache=keep_cache)
    engine = native_engine(decoder_model(config), dtype=torch.float64, options=options)
    engine.load(engine.weights.named(weights(config, torch.float64, seed)), seed)
    return engine


def finished(engine, requests, done=()):
    done = list(done)
    while engine.unfinished():
        done += engine.step()
    return {x.number: x for x in done if x.number in {request.number for request in requests}}


def switched(keep_cache, packed, at=11):
    """Completions with other weights after some steps, and the engine."""
    engine = engine_of(keep_cache, packed)
    requests = requests_of(LONG, SAMPLING, 3)
    engine.submit(requests)
    done = [x for _ in range(at) for x in engine.step()]
    engine.load(engine.weights.named(weights(CONFIGS["llama"], torch.float64, 1)), 1)
    return finished(engine, requests, done), engine


COMPILED = pytest.param(True, marks=pytest.mark.skipif(NO_PACKING is not None, reason=str(NO_PACKING)))


@pytest.mark.parametrize("packed", [False, COMPILED])
def test_running_requests_keep_what_older_weights_computed(packed):
    kept, engine = switched(True, packed)
    renewed, other = switched(False, packed)
    assert engine.cost().prefilled < other.cost().prefilled  # nothing is computed again
    for number, x in kept.items():
        y = renewed[number]
        same = int((x.versions == 0).sum())
        assert 0 < same < len(x.tokens) and (y.versions == 0).sum() == same
        assert torch.equal(x.tokens[:same], y.tokens[:same]) and torch.equal(x.raw_logp[:same], y.raw_logp[:same])
        assert x.raw_logp[same] != y.raw_logp[same]  # of another cache


@pytest.mark.parametrize("keep_cache", [True, False])
def test_later_requests_share_no_page_of_older_weights(keep_cache):
    _, engine = switched(keep_cache, False)
    later = requests_of(LONG, SAMPLING, 5)
    engine.submit(later)
    fresh = engine_of(False, False, seed=1)
    fresh.submit(later)
    expected = finished(fresh, later)
    for number, x in finished(engine, later).items():
        assert torch.equal(x.tokens, expected[number].tokens) and torch.equal(x.raw_logp, expected[number].raw_logp)
