"""Planted faults by which vLLM samples with another policy than the published one, in process and in a server."""

import pytest
import torch
from planted_faults import FAULTS, SERVER, VLLM, Steps, published, wrong_weights
from small_engines import KINDS, NO_VLLM, WIDE, load

from funrl import trees
from funrl.mesh.launch import launch
from funrl.mesh.mesh import SINGLE, parse
from funrl.mesh.rules import COMPUTE, STORED, shard
from funrl.models import place, with_fields
from funrl.rollout.certificate import SyncError, certify
from funrl.rollout.engine import complete
from funrl.rollout.requests import requests_of
from funrl.rollout.sampling_parameters import Sampling

needs_vllm = pytest.mark.skipif(NO_VLLM is not None, reason=str(NO_VLLM))
STEPS = Steps(WIDE)
WRONG = wrong_weights(STEPS)
PROMPTS = [[1, 2, 3], [4, 5]]
ENGINES = {VLLM: "vllm", SERVER: "vllm server"}
HERE = {  # faults with a test of their own
    "stale_adapter": "tests/rollout/test_vllm_adapters.py",
    "slept_with_old_weights": "test_an_engine_that_wakes_with_the_weights_from_before",
    "earlier_run": "test_a_row_of_an_earlier_run",
}
HERE_IN_PROCESS = {"old_shard_of_a_rank": "test_a_tensor_rank_with_old_shards"}


@pytest.fixture(params=ENGINES)
def engine(request):
    engine = KINDS[ENGINES[request.param]].make(STEPS.model, SINGLE, torch.float32)
    engine.record_digests = True
    return engine


def sampled_by(engine):
    """The digest that all tokens of some completions have."""
    done = complete(engine, requests_of(PROMPTS, Sampling(max_new_tokens=4), 0))
    digests = [x.digests for x in done if x.digests is not None]
    assert list(map(len, digests)) == [len(x.tokens) for x in done]
    (number,) = torch.cat(digests).unique().tolist()
    return number


@pytest.mark.parametrize("kind", ENGINES)
def test_every_fault_that_the_engine_can_have_is_planted(kind):
    own = HERE_IN_PROCESS if kind == VLLM else {}
    assert {name for name, fault in FAULTS.items() if kind in fault.engines} == {*WRONG, *HERE, *own}


@needs_vllm
def test_right_weights_have_the_published_digest(engine):
    for params in (STEPS.old, STEPS.new):
        assert sampled_by(load(engine, params)) == published(params, engine.weights, STEPS.model)


@needs_vllm
@pytest.mark.parametrize("change", [{"tied": True}, {"family": "qwen2", "qk_norm": False, "attention_bias": True}])
def test_tied_embeddings_and_biases_are_read_too(change):
    config = with_fields(WIDE, **{"embed": 128} | change)
    steps = Steps(config)
    engine = KINDS["vllm"].make(steps.model, SINGLE, torch.float32)
    engine.record_digests = True
    for params in (steps.old, steps.new):
        assert sampled_by(load(engine, params)) == published(params, engine.weights, steps.model)


@needs_vllm
@pytest.mark.parametrize("fault", WRONG)
def test_other_weights_have_another_digest(fault, engine):
    ours, theirs = WRONG[fault]
    load(engine, STEPS.old, 1)
    assert sampled_by(load(engine, theirs)) != published(ours, engine.weights, STEPS.model)


@needs_vllm
def test_a_load_that_fails_leaves_an_engine_that_samples_nothing(engine):
    load(engine, STEPS.old, 1)

    def broken():
        yield from list(engine.weights.named(STEPS.new))[:5]
        raise OSError("the connection was lost")

    with pytest.raises(OSError, match="the connection was lost"):
        engine.load(broken(), 2)
    with pytest.raises(RuntimeError, match="the engine has no weights: call load first"):
        sampled_by(engine)
    engine.cancel(range(2))


@needs_vllm
def test_an_engine_that_wakes_with_the_weights_from_before(engine, monkeypatch):
    """Weights that a GPU's sleep has moved are read once more after it."""
    load(engine, STEPS.old, 1)
    engine.pause()
    load(engine, STEPS.new)
    engine._loaded.read()  # as the certificate does
    engine.core.reload(engine.weights.named(STEPS.old))
    wake = engine.core.wake
    monkeypatch.setattr(engine.core, "wake", lambda: wake() or True)
    engine.resume()
    assert sampled_by(engine) == published(STEPS.old, engine.weights, STEPS.model)


@needs_vllm
@pytest.mark.gloo
def test_a_tensor_rank_with_old_shards():
    """All shards of a rank, those of one weight, or another copy of a norm that both have."""

    def program(mesh):
        engine = KINDS["vllm"].make(STEPS.model, mesh, torch.float32)
        engine.record_digests = True
        second = mesh.index("tensor") == 1
        new, old = dict(trees.named(STEPS.new)), dict(trees.named(STEPS.old))
        results = {}
        for stale in ((), ("norm",), ("layers/0/mlp/down",), ("layers/1/attn/k",), ("unembed",), tuple(old)):
            own = trees.from_named(STEPS.new, iter({**new, **{name: old[name] for name in stale}}.items()))
            load(engine, STEPS.new, 2)
            engine.core.reload(engine.weights.named(own if second else STEPS.new))
            placed = place(STEPS.model, mesh, STORED, COMPUTE, torch.float32, STEPS.model.layer)
            digest = sampled_by(engine)
            try:
                certified = certify(placed, shard(STEPS.new, placed.stored, mesh), engine, 2)["sync/verified"]
            except SyncError as error:
                certified = str(error)
            results[stale] = digest, certified
        return results, published(STEPS.new, engine.weights, STEPS.model)

    results, ours = launch(program, parse("tp2"), "cpu")
    (right, verified), *wrong = results.values()
    assert right == ours and verified == 1.0
    assert len({ours, *(number for number, _ in wrong)}) == len(results)
    for stale, (_, message) in list(results.items())[1:]:
        assert f"{stale[0]} differs" in message or (len(stale) > 1 and "differ" in message), message


@needs_vllm
def test_a_row_of_an_earlier_run(engine):
    """Its version is the same, its digest is not."""
    (earlier,) = complete(load(engine, STEPS.other, 2), requests_of(PROMPTS[:1], Sampling(max_new_tokens=4), 0))
    (own,) = complete(load(engine, STEPS.new, 2), requests_of(PROMPTS[:1], Sampling(max_new_tokens=4), 0))
    assert earlier.versions.tolist() == own.versions.tolist()
    assert not (earlier.digests == own.digests).any()


@needs_vllm
def test_a_completion_that_newer_weights_continue_has_both_digests(engine):
    load(engine, STEPS.old, 1)
    engine.submit(requests_of(PROMPTS[:1], Sampling(max_new_tokens=5), 0))
    for _ in range(2):
        engine.step()
    load(engine, STEPS.new, 2)
    done = []
    while not done:
        done = engine.step()
    ours = [published(x, engine.weights, STEPS.model) for x in (STEPS.old, STEPS.new)]
    versions = done[0].versions.tolist()
    assert set(versions) == {1, 2} and done[0].digests.tolist() == [ours[version - 1] for version in versions]
