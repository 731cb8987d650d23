"""Several engines as one: each request is completed by the model that it names, whatever the others do."""

import pytest
import torch

from funrl.models import decoder_config, decoder_model
from funrl.rollout.engine import complete
from funrl.rollout.joint_engine import JointEngine
from funrl.rollout.native.engine import native_engine
from funrl.rollout.requests import requests_of
from funrl.rollout.sampling_parameters import Sampling

MODEL = decoder_model(decoder_config(vocab=19, embed=16, layers=1, heads=2, kv_heads=2, head=8, mlp=32))
PROMPTS = [[3, 4], [5], [6, 7, 8]]


def engine_of(seed, version):
    engine = native_engine(MODEL)
    engine.load(engine.weights.named(MODEL.init(torch.Generator().manual_seed(seed))), version)
    return engine


def requests(model="", first=0):
    return [
        request._replace(number=first + request.number, model=model)
        for request in requests_of(PROMPTS, Sampling(max_new_tokens=6, samples=2), 3)
    ]


def rows(done):
    return [
        (completion.tokens.tolist(), completion.raw_logp.tolist(), completion.versions.tolist()) for completion in done
    ]


@pytest.fixture
def joint():
    return JointEngine(engine_of(0, 4), {"rival": engine_of(1, 9)})


def test_each_request_is_completed_by_its_model(joint):
    own, rival = requests(), requests("rival", 50)
    mixed = [request for pair in zip(own, rival, strict=True) for request in pair]
    done = complete(joint, mixed)
    assert rows(done[::2]) == rows(complete(engine_of(0, 4), own))
    assert rows(done[1::2]) == rows(complete(engine_of(1, 9), requests(first=50)))
    assert joint.version == 4 and joint.unfinished() == 0
    cost = joint.cost()
    assert cost.decoded == sum(len(completion.tokens) for completion in done) and cost.page_tokens == 16


def test_a_model_that_is_not_there_is_refused_and_no_request_is_taken(joint):
    with pytest.raises(ValueError, match="names the model 'other'; there is none"):
        joint.submit([*requests(), *requests("other", 50)])
    assert joint.unfinished() == 0


def test_it_pauses_cancels_and_loads(joint):
    joint.submit([*requests(), *requests("rival", 50)])
    joint.step()
    joint.pause()
    assert joint.paused and joint.step() == []
    joint.resume()
    cancelled = joint.cancel([0, 50])
    assert sorted(request.number for request in cancelled) == [0, 50] and joint.unfinished() == 10
    joint.cancel(range(100))
    joint.load(engine_of(2, 0).held_weights(), 5)
    assert joint.version == 5 and rows(complete(joint, requests())) == rows(complete(engine_of(2, 5), requests()))
    assert rows(complete(joint, requests("rival"))) == rows(complete(engine_of(1, 9), requests()))
    assert joint.room() == engine_of(0, 0).room()
