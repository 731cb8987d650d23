"""Adapters beside vLLM's weights: its tokens, versions of completions that run, the certificate, and a server."""

import pytest
import torch
from planted_faults import published
from small_engines import (
    NO_VLLM,
    PROMPTS,
    WIDE,
    ServerProcess,
    _vllm,
    assert_same,
    completed,
    load,
    weights,
)
from test_vllm_engine import FAMILIES
from test_vllm_families import FAMILIES as FURTHER

from funrl import trees
from funrl.mesh.launch import launch
from funrl.mesh.mesh import SINGLE, parse
from funrl.mesh.rules import COMPUTE, STORED
from funrl.models import decoder_model, place
from funrl.models.deployed import deployed
from funrl.models.lora import PROJECTIONS, with_lora
from funrl.models.model import Lora
from funrl.rollout.adapter_engine import AdapterEngine
from funrl.rollout.certificate import SyncError, certify
from funrl.rollout.engine_abilities import ENGINES
from funrl.rollout.load_digest import adapted_digest, tree_digest
from funrl.rollout.native.engine import native_engine
from funrl.rollout.remote.engine import trained_digests
from funrl.rollout.requests import requests_of
from funrl.rollout.sampling_parameters import Sampling
from funrl.rollout.vllm.adapters import vllm_adapter_problem
from funrl.rollout.vllm.client import vllm_client
from funrl.rollout.vllm.contract import VLLMOptions
from funrl.rollout.vllm.families import ADAPTED_FAMILIES

needs_vllm = pytest.mark.skipif(NO_VLLM is not None, reason=str(NO_VLLM))
ALL = Lora(3, 4.0, PROJECTIONS)  # a scale that no format holds exactly
SOME = Lora(3, 4.0, ("q", "v", "down"))
GREEDY = Sampling(max_new_tokens=16, greedy=True)


class Adapted:
    """A model with adapters, its weights, and the engines that have them merged."""

    def __init__(self, config, lora):
        self.config, self.lora = config, lora
        self.plain = decoder_model(config)
        self.model = with_lora(self.plain, lora)
        self.placed = place(self.model, SINGLE, STORED, COMPUTE, torch.float32, self.model.layer)
        self.base = weights(config)

    def params(self, seed):
        """The base with random adapters."""
        generator = torch.Generator().manual_seed(seed)
        whole = self.model.init(torch.Generator().manual_seed(0))
        base = dict(trees.named(self.base))
        random = ((n, base.get(n, torch.randn(x.shape, generator=generator) * 0.3)) for n, x in trees.named(whole))
        return trees.from_named(whole, random)

    def engine(self, base, seed=1, version=1):
        """One adapter of an engine, which gets the base here."""
        engine = AdapterEngine(load(base, self.base), "policy", self.lora)
        return self.give(engine, seed, version)

    def give(self, engine, seed, version):
        apart = deployed(self.placed, self.params(seed), merge=False)
        engine.load(apart.exported(engine.weights.names), version)
        return engine

    def merged(self, seed=1, version=1):
        return load(native_engine(self.plain), deployed(self.placed, self.params(seed)).tree(), version)


@pytest.mark.parametrize(
    ("config", "lora", "device", "dtype", "problem"),
    [
        (WIDE, ALL, "cpu", torch.float32, None),
        (WIDE, ALL, "cuda", torch.bfloat16, None),
        (WIDE, ALL, "cuda", torch.float32, "vLLM's kernels for adapters on a GPU compute in 16 bits"),
        (WIDE, ALL._replace(rank=600), "cpu", torch.float32, "the rank is 600; vLLM takes 512 at most"),
        (
            WIDE,
            Lora(2, 2.0, ("q", "router")),
            "cpu",
            torch.float32,
            "router has adapters; vLLM adds those of attention",
        ),
        (FURTHER["phi3"], ALL, "cpu", torch.float32, "model_type is 'phi3'; vLLM adds adapters to llama, "),
    ],
)
def test_what_vllm_cannot_add_is_a_reason_to_merge(config, lora, device, dtype, problem):
    found = vllm_adapter_problem(decoder_model(config), lora, device, dtype)
    assert found == problem or (found or "").startswith(problem or " ")


@needs_vllm
@pytest.mark.parametrize("name", ADAPTED_FAMILIES)
def test_it_completes_as_the_native_engine_does_with_merged_weights(name):
    config = (FAMILIES | {"llama": FAMILIES["llama tied"]} | FURTHER)[name]
    adapted = Adapted(config, ALL)
    engine = adapted.engine(_vllm(adapted.plain, SINGLE, torch.float32, lora=adapted.lora))
    before = completed(engine, PROMPTS, GREEDY)
    assert_same(before, completed(adapted.merged(), PROMPTS, GREEDY), 5e-5)
    metrics = certify(adapted.placed, adapted.params(1), engine, 1, probes=True)
    assert metrics["sync/verified"] == 1.0 and metrics["sync/probe_gap"] < 1e-4
    adapted.give(engine, 2, 2)
    after = completed(engine, PROMPTS, GREEDY)
    assert_same(after, completed(adapted.merged(2, 2), PROMPTS, GREEDY), 2e-4)
    assert [x.tokens.tolist() for x in before] != [x.tokens.tolist() for x in after]


def published_number(adapted, engine, seed):
    """The digest that a trainer publishes of an adapter on its base."""
    apart = trained_digests(deployed(adapted.placed, adapted.params(seed), merge=False), engine.weights)
    names = [name for name, _ in trees.named(engine.weights.layouts)]
    factors = tree_digest(dict(zip(names, apart[:, 0].tolist(), strict=True)), engine.weights)
    return adapted_digest(published(adapted.base, engine.base.weights, adapted.plain), factors)


@needs_vllm
@pytest.mark.parametrize("served", [False, True])
def test_each_token_has_the_digest_of_the_adapter_that_sampled_it(served):
    """An adapter of an earlier step shows: its digest is the one that was published for that step."""
    adapted = Adapted(WIDE, SOME)
    server = ServerProcess() if served else None
    if server is None:
        base = _vllm(adapted.plain, SINGLE, torch.float32, lora=adapted.lora)
    else:
        options = VLLMOptions(64, 1 << 24, lora=adapted.lora, adapters=2)
        base = vllm_client(server.url, adapted.plain, options=options, timeout_s=120)
    base.record_digests = True
    engine = adapted.engine(base)
    ours = {1: published_number(adapted, engine, 1), 2: published_number(adapted, engine, 2)}
    assert ours[1] != ours[2]
    done = newer_in_the_middle(adapted, engine)
    pairs = (zip(x.versions.tolist(), x.digests.tolist(), strict=True) for x in done)
    seen = {pair for part in pairs for pair in part}
    assert (1, ours[1]) in seen <= {(1, ours[1]), (2, ours[2])}
    assert {number for x in completed(engine, PROMPTS, GREEDY) for number in x.digests.tolist()} == {ours[2]}
    if server is not None:
        server.kill()


@needs_vllm
@pytest.mark.gloo
def test_an_adapter_of_an_earlier_step_on_one_tensor_rank_shows_in_the_digests_of_all_rows():
    adapted = Adapted(WIDE, ALL)

    def program(mesh):
        base = _vllm(adapted.plain, mesh, torch.float32, lora=adapted.lora)
        base.record_digests = True
        engine = adapted.engine(base)
        numbers = []
        for own in (2, 1):
            adapted.give(engine, own if mesh.index("tensor") else 2, 2)
            numbers.append({number for x in completed(engine, PROMPTS, GREEDY) for number in x.digests.tolist()})
        return numbers, published_number(adapted, engine, 2)

    (right, stale), ours = launch(program, parse("tp2"), "cpu")
    assert right == {ours} and len(stale) == 1 and stale != right


def tokens_and_versions(done):
    return [(x.tokens.tolist(), x.versions.tolist()) for x in sorted(done, key=lambda x: x.number)]


def newer_in_the_middle(adapted, engine, steps=5):
    """Completions that begin with one version of the adapter, and meet the next after some steps."""
    engine.submit(requests_of(PROMPTS, GREEDY, 0))
    done = [x for _ in range(steps) for x in engine.step()]
    adapted.give(engine, 2, 2)
    late = [request._replace(number=100 + request.number) for request in requests_of(PROMPTS[:2], GREEDY, 0)]
    engine.submit(late)
    while engine.unfinished():
        done += engine.step()
    return sorted(done, key=lambda completion: completion.number)


@needs_vllm
def test_a_completion_ends_with_the_adapter_that_it_began_with_where_there_is_a_slot_for_it():
    adapted = Adapted(WIDE, SOME)
    engine = adapted.engine(_vllm(adapted.plain, SINGLE, torch.float32, lora=SOME, adapters=2))
    done = newer_in_the_middle(adapted, engine)
    begun = completed(adapted.merged(), PROMPTS, GREEDY)
    assert_same(done[: len(PROMPTS)], begun, 5e-5)
    late = completed(adapted.merged(2, 2), PROMPTS[:2], GREEDY)
    assert tokens_and_versions(done[len(PROMPTS) :]) == tokens_and_versions(late)
    assert ENGINES["vllm"].keeps_adapters and ENGINES["vllm_server"].keeps_adapters
    assert engine.version == 2 and {int(v) for x in done[: len(PROMPTS)] for v in x.versions} == {1}
    adapted.give(engine, 3, 3)  # nothing runs with the first two
    assert [adapter.version for adapter in engine.base._loads.values()] == [3]


@needs_vllm
def test_a_completion_without_a_slot_goes_on_with_the_newer_adapter_and_says_so():
    adapted = Adapted(WIDE, SOME)
    engine = adapted.engine(_vllm(adapted.plain, SINGLE, torch.float32, lora=SOME))
    peer = AdapterEngine(load(native_engine(adapted.plain), adapted.base), "policy", SOME)
    for version in (1, 2):  # the native engine goes on with the newer one always
        own = trees.named(adapted.params(version))
        parts = {n: x for n, x in own if n in peer.weights.names}
        if version == 1:
            peer.load(iter(parts.items()), 1)
            peer.submit(requests_of(PROMPTS, GREEDY, 0))
            ended = [x for _ in range(5) for x in peer.step()]
            done = newer_in_the_middle(adapted, engine)
            continue
        written = [len(peer.sampled(n)) for n in range(len(PROMPTS))]
        assert set(written) == {5}
        peer.load(iter(parts.items()), 2)
        while peer.unfinished():
            ended += peer.step()
    assert not ENGINES["native"].keeps_adapters
    first = [x for x in done if x.number < 100]
    assert tokens_and_versions(first) == tokens_and_versions(ended)
    assert first[0].versions.tolist() == [1] * 5 + [2] * 11


@needs_vllm
def test_the_certificate_reads_the_slots_that_vllm_computes_with():
    adapted = Adapted(WIDE, ALL)
    engine = adapted.engine(_vllm(adapted.plain, SINGLE, torch.float32, lora=ALL))
    params = adapted.params(1)
    assert certify(adapted.placed, params, engine, 1)["sync/verified"] == 1.0
    manager = engine.base.core.runner.lora_manager._adapter_manager
    slot = manager.lora_index_to_id.index(engine.base.adapters["policy"].number)
    module = manager.modules["model.layers.1.self_attn.qkv_proj"]
    held = module.lora_b_stacked[2][slot, 0, 3]
    held[1] *= 1.001
    with pytest.raises(SyncError, match=r"layers/1/attn/v_lora_b"):
        certify(adapted.placed, params, engine, 1)
    adapted.give(engine, 1, 1)
    module.lora_a_stacked[0][slot, 0, 5, 2] = 0.1  # beyond the rank, as a larger adapter would leave it
    with pytest.raises(SyncError, match=r"layers/1/attn/q_lora_a"):
        certify(adapted.placed, params, engine, 1)
    with pytest.raises(SyncError, match="the version is 1"):
        certify(adapted.placed, adapted.params(2), engine, 2)


@needs_vllm
def test_faulty_factors_are_refused_and_the_old_adapter_stays():
    adapted = Adapted(WIDE, SOME)
    engine = adapted.engine(_vllm(adapted.plain, SINGLE, torch.float32, lora=SOME))
    before = completed(engine, PROMPTS, GREEDY)
    named = dict(deployed(adapted.placed, adapted.params(2), merge=False).exported(engine.weights.names))
    first = next(iter(named))
    for wrong, error in (
        ({n: x for n, x in named.items() if n != first}, KeyError),
        (named | {"model.layers.0.self_attn.k_proj.lora_A.weight": torch.ones(3, 32)}, KeyError),
        (named | {first: torch.ones(2, 32)}, ValueError),
    ):
        with pytest.raises(error, match=first if error is ValueError else "weight"):
            engine.load(iter(wrong.items()), 2)
    assert_same(completed(engine, PROMPTS, GREEDY), before, 1e-6)
    with pytest.raises(ValueError, match="an adapter 'other' more than the 1 that this engine was made for"):
        engine.base.load_adapter("other", SOME, iter(named.items()), 2)
    with pytest.raises(RuntimeError, match="load the base before its adapters"):
        _vllm(adapted.plain, SINGLE, torch.float32, lora=SOME).load_adapter("policy", SOME, (), 2)


@needs_vllm
def test_a_server_gets_the_adapter_alone_and_has_it_again_after_it_was_killed():
    adapted = Adapted(WIDE, SOME)
    server = ServerProcess()
    options = VLLMOptions(64, 1 << 24, lora=SOME, adapters=2)
    engine = adapted.engine(vllm_client(server.url, adapted.plain, options=options, timeout_s=120))
    core = engine.base.core
    base_bytes = sum(x.numel() * 4 for x in trees.leaves(adapted.base))
    own_bytes = 4 * sum(a * b for _, (a, b) in engine.weights.names.values())
    assert own_bytes < core.sent < own_bytes + 3000 and own_bytes < base_bytes / 4
    assert_same(completed(engine, PROMPTS, GREEDY), completed(adapted.merged(), PROMPTS, GREEDY), 5e-5)
    metrics = certify(adapted.placed, adapted.params(1), engine, 1, probes=True)
    assert metrics["sync/verified"] == 1.0 and metrics["sync/probe_gap"] < 1e-4
    with pytest.raises(SyncError, match="layers/0/attn/q_lora_a differs on rank 0; 12 of 12"):
        certify(adapted.placed, adapted.params(2), engine, 1)
    port = int(server.url.rsplit(":", 1)[1])
    engine.submit(requests_of(PROMPTS, GREEDY, 0))
    done = [x for _ in range(4) for x in engine.step()]
    adapted.give(engine, 2, 2)
    server.kill()
    again = ServerProcess(port)
    while engine.unfinished():
        done += engine.step()
    assert core.generation == 2
    assert_same(sorted(done, key=lambda x: x.number), completed(adapted.merged(), PROMPTS, GREEDY), 5e-5)
    assert_same(completed(engine, PROMPTS, GREEDY), completed(adapted.merged(2, 2), PROMPTS, GREEDY), 5e-5)
    again.kill()
