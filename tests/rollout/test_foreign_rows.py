"""Planted faults by which the native engine samples with another policy than the published one: its digests tell."""

import functools
from typing import Any

import pytest
import torch
from planted_faults import FAULTS, LORA, NATIVE, Steps, moved, published, wrong_weights

from funrl import trees
from funrl.mesh import rules
from funrl.mesh.launch import launch
from funrl.mesh.mesh import parse
from funrl.models import decoder_config, decoder_model, place
from funrl.models.deployed import deployed
from funrl.models.lora import trained_part
from funrl.rollout.adapter_engine import AdapterEngine
from funrl.rollout.certificate import SyncError
from funrl.rollout.engine import complete
from funrl.rollout.load_digest import LoadDigest, adapted_digest
from funrl.rollout.native.engine import NativeOptions, native_engine
from funrl.rollout.remote.engine import RemoteDigests, engine_digests, trained_digests
from funrl.rollout.requests import requests_of
from funrl.rollout.sampling_parameters import Sampling
from funrl.rollout.sync_proof import PolicyProof, SyncProof

SMALL = {"vocab": 40, "embed": 32, "layers": 3, "heads": 4, "kv_heads": 2, "head": 8, "mlp": 48, "max_positions": 64}
CONFIG = decoder_config(**SMALL)
STEPS = Steps(CONFIG)
WRONG = wrong_weights(STEPS)
PROMPTS = [[1, 2, 3], [4, 5]]
HERE = {  # faults with a test of their own, by its name
    "stale_adapter": "test_an_adapter_of_an_earlier_step",
    "slept_with_old_weights": "test_an_engine_that_wakes_with_the_weights_from_before",
    "scale_not_sent": "test_scales_of_earlier_weights",
    "old_shard_of_a_rank": "test_a_tensor_rank_with_old_shards",
    "earlier_run": "tests/trainer/test_foreign_row_runs.py",
}


def engine_of(dtype=torch.float32, **options):
    return native_engine(decoder_model(CONFIG), dtype=dtype, options=NativeOptions(record_digests=True, **options))


def load(engine, params, version=2):
    engine.load([(name, x.clone()) for name, x in engine.weights.named(params)], version)
    return engine


def sampled_by(engine):
    """The digest that all tokens of some completions have."""
    done = complete(engine, requests_of(PROMPTS, Sampling(max_new_tokens=4), 0))
    digests = [x.digests for x in done if x.digests is not None]
    assert list(map(len, digests)) == [len(x.tokens) for x in done]
    (number,) = torch.cat(digests).unique().tolist()
    return number


def test_every_fault_that_the_engine_can_have_is_planted():
    assert {name for name, fault in FAULTS.items() if NATIVE in fault.engines} == {*WRONG, *HERE}
    assert all(name in globals() for name in HERE.values() if not name.endswith(".py"))


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_right_weights_have_the_published_digest_in_every_form(dtype, packed):
    engine = load(engine_of(dtype, packed=packed), STEPS.new)
    assert sampled_by(engine) == published(STEPS.new, engine.weights, STEPS.model)
    load(engine, STEPS.old, 3)
    assert sampled_by(engine) == published(STEPS.old, engine.weights, STEPS.model)


@pytest.mark.parametrize("fault", WRONG)
def test_other_weights_have_another_digest(fault):
    ours, theirs = WRONG[fault]
    engine = load(load(engine_of(), STEPS.old, 1), theirs)
    assert sampled_by(engine) != published(ours, engine.weights, STEPS.model)
    assert sampled_by(load(engine, ours)) == published(ours, engine.weights, STEPS.model)


def test_equal_numbers_in_another_dtype_are_another_policy():
    rounded = trees.map(lambda x: x.bfloat16().float(), STEPS.new)
    narrow, wide = (load(engine_of(dtype), rounded) for dtype in (torch.bfloat16, torch.float32))
    assert published(rounded, narrow.weights, STEPS.model) == sampled_by(narrow) != sampled_by(wide)


def test_a_load_that_fails_leaves_an_engine_that_samples_nothing():
    engine = load(engine_of(), STEPS.old, 1)

    def broken():
        yield from list(engine.weights.named(STEPS.new))[:5]
        raise OSError("the connection was lost")

    with pytest.raises(OSError, match="the connection was lost"):
        engine.load(broken(), 2)
    with pytest.raises(RuntimeError, match="the engine has no weights: call load first"):
        sampled_by(engine)


def test_an_adapter_of_an_earlier_step():
    base = load(engine_of(), STEPS.new, 0)
    engine = AdapterEngine(base, "policy", LORA)
    below = published(STEPS.new, base.weights, STEPS.model)
    digests = {}
    for name, params in (("new", STEPS.factors), ("stale", STEPS.stale_factors)):
        factors = trained_part(STEPS.adapted, params)
        engine.load(engine.weights.named(factors), 2)
        alone = LoadDigest(engine.weights, lambda factors=factors: engine.weights.named(factors)).number
        digests[name] = sampled_by(engine)
        assert digests[name] == adapted_digest(below, alone)
    assert digests["new"] != digests["stale"]
    load(base, STEPS.old, 1)  # the same adapter on another base
    assert sampled_by(engine) not in digests.values()


def test_an_engine_that_wakes_with_the_weights_from_before():
    engine = load(engine_of(packed=False), STEPS.old, 1)
    engine.pause()
    load(engine, STEPS.new)
    engine._backend.load(STEPS.old)
    engine.resume()
    assert sampled_by(engine) == published(STEPS.old, engine.weights, STEPS.model)


@pytest.mark.parametrize("wrong", [None, "scales", "values"])
def test_scales_of_earlier_weights(wrong):
    model = decoder_model(CONFIG)
    engine = load(native_engine(model, options=NativeOptions(record_digests=True, float8=True)), STEPS.new)
    before: Any = load(native_engine(model, options=NativeOptions(float8=True)), moved(STEPS.old, 7))._backend
    if wrong is not None:
        here: Any = engine._backend
        own, other = (x._quantized[1]["mlp"] for x in (here, before))
        own["up"] = own["up"]._replace(**{wrong: getattr(other["up"], wrong)})
    right = sampled_by(engine) == published(STEPS.new, engine.weights, STEPS.model)
    assert right == (wrong is None)
    assert published(STEPS.new, engine.weights, STEPS.model) != published(STEPS.new, engine_of().weights, STEPS.model)


def shards_of(engine, params):
    layouts = engine.weights.layouts
    return engine.weights.named(rules.shard(params, layouts, engine.weights.mesh))


@pytest.mark.gloo
def test_a_tensor_rank_with_old_shards():
    """One rank has old shards, or another copy of a norm that all have."""

    def program(mesh):
        options = NativeOptions(record_digests=True, packed=False)
        engine = native_engine(decoder_model(CONFIG), mesh, options=options)
        numbers = []
        norm = {**STEPS.new, "norm": STEPS.old["norm"]}
        for own in (STEPS.new, STEPS.old, norm):
            params = own if mesh.index("tensor") == 1 else STEPS.new
            engine.load(shards_of(engine, params), 2)
            numbers.append(sampled_by(engine))
        return numbers, published(STEPS.new, engine.weights, STEPS.model)

    (right, old, norm), ours = launch(program, parse("tp2"), "cpu")
    assert right == ours and old != ours and norm not in (ours, old)


def test_the_tokens_of_a_completion_have_the_digests_of_their_own_weights():
    """New weights while requests run, and a completion that another engine continues."""
    engine = load(engine_of(), STEPS.old, 1)
    (request,) = requests_of([[1, 2, 3]], Sampling(max_new_tokens=6), 0)
    engine.submit([request._replace(most=2)])
    done = []
    while not done:
        done = engine.step()
    with pytest.raises(ValueError, match="completion 0 is continued, and what sampled it was not recorded"):
        engine.submit([request._replace(begun=done[0]._replace(digests=None))])
    load(engine, STEPS.new)
    engine.submit([request._replace(begun=done[0])])
    for _ in range(3):
        engine.step()
    load(engine, STEPS.first, 3)
    done = []
    while not done:
        done = engine.step()
    ours = [published(x, engine.weights, STEPS.model) for x in (STEPS.old, STEPS.new, STEPS.first)]
    (completion,) = done
    versions = completion.versions.tolist()
    assert set(versions) == {1, 2, 3}
    assert completion.digests is not None
    assert completion.digests.tolist() == [ours[version - 1] for version in versions]


def test_weights_that_only_some_replicas_hold_are_published_before_they_are_compared():
    """Rows of a replica that is ahead of the others are not foreign."""
    engine = load(engine_of(), STEPS.old, 1)
    proof = SyncProof()

    def begin(params, version, held):
        source = deployed(place(STEPS.model), params)
        own = trained_digests(source, engine.weights)
        theirs = functools.partial(engine_digests, engine)
        ranks = source.stored, engine.weights
        digests = RemoteDigests(version, source.mesh, *ranks, own_N2=own, engine=theirs, ready=lambda: held)
        proof.begin({"policy": PolicyProof(digests, engine.weights, version)})
        proof.settle()

    begin(STEPS.old, 1, held=False)  # the first digests are waited for: which weights can be read is not known before
    assert proof.take() == {"sync/verified": 1.0}
    begin(STEPS.new, 2, held=False)
    ours = [published(x, engine.weights, STEPS.model) for x in (STEPS.old, STEPS.new)]
    assert proof.take() == {} and proof.published_lists() == {"policy": [(ours[0], 1), (ours[1], 2)]}
    with pytest.raises(SyncError, match="do not hold the trainer's weights: the version is 1"):
        proof.complete()
