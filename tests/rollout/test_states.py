"""The native engine over layers that keep a state: beside others, with little room, snapshots and later turns."""

import functools

import pytest
import torch
from small_engines import PROMPTS, SMALL, assert_same, completed, decode, engine_of, load, weights
from test_native import mixed_requests

from funrl import trees
from funrl.batch import Batch
from funrl.mesh import rules
from funrl.mesh.launch import launch
from funrl.mesh.mesh import SINGLE, parse
from funrl.models import ModelError, decoder_config, decoder_model, place
from funrl.models.decoder.gated_delta_net import GatedDeltaNet
from funrl.models.decoder.routing import Experts
from funrl.rollout.certificate import SyncError, certify
from funrl.rollout.engine import complete
from funrl.rollout.hf_engine import hf_engine
from funrl.rollout.native.cells import CellPool
from funrl.rollout.native.engine import NativeEngine, NativeOptions, native_engine
from funrl.rollout.requests import Request, requests_of
from funrl.rollout.sampling_parameters import Sampling

MIXER = GatedDeltaNet(2, 4, 8, 6)
SIZES = SMALL | {"layers": 3, "family": "qwen3_next", "norm_offset": 1.0, "output_gate": True, "rotary_part": 4}
CONFIG = decoder_config(**SIZES, qk_norm=True, mixers=(MIXER, MIXER, None))
WITH_EXPERTS = decoder_config(
    **SIZES, qk_norm=True, mixers=(MIXER, MIXER, None), experts=Experts(4, 2, 16, shared=16, shared_weighted=True)
)
LONG = [i % 40 for i in range(75)]


def sizes_of(engine):
    return engine._backend.page_bytes, engine._backend.cell_bytes


# In float32 3e-5 on one processor, below 1e-5 on others.
@pytest.mark.parametrize(("dtype", "close"), [(torch.float64, 1e-12), (torch.float32, 1e-4)], ids=str)
def test_log_probabilities_are_the_trainers(dtype, close):
    how = Sampling(temperature=0.7, max_new_tokens=30)
    placed, params = place(decoder_model(WITH_EXPERTS), dtype=dtype), weights(WITH_EXPERTS, dtype)
    prompts = [*PROMPTS, LONG]
    done = completed(engine_of(WITH_EXPERTS, dtype), prompts, how)
    for number, completion in enumerate(done):
        prompt = prompts[number]
        batch = Batch(tokens=torch.tensor([[*prompt, *completion.tokens.tolist()]]), mask=None)
        logp = placed.token_scores(params, batch).logp[0, len(prompt) :]
        assert (logp - completion.raw_logp).abs().max() < close


@functools.cache
def requests_alone(seed):
    """Requests, and what an engine completes of each by itself."""
    requests = mixed_requests(12, seed)
    engine = engine_of(CONFIG, torch.float64)
    return requests, [item for request in requests for item in complete(engine, [request])]


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [{"snapshot_tokens": 20}, {"static": True, "snapshot_tokens": 16, "max_rows": 4}], ids=str
)
def test_a_completion_depends_on_no_neighbour(options):
    """With room for all, and with room for so few that some are preempted or have no snapshot."""
    requests, expected = requests_alone(0)
    engine = engine_of(CONFIG, torch.float64, **options)
    assert_same(complete(engine, requests), expected, 1e-12)
    page, cell = sizes_of(engine)
    small = engine_of(CONFIG, torch.float64, cache_bytes=14 * page + 4 * cell, **options)
    assert_same(complete(small, requests), expected, 1e-12)
    cost = small.cost()
    assert cost.cache_bytes <= 14 * page + 4 * cell and cost.used_pages == 0 and cost.cells >= 1
    (pool,) = small._scheduler.cells.lanes
    assert sorted([*pool._free, *pool._snapshots.values()]) == list(range(pool.cells)), "a cell was lost"


@pytest.mark.slow
def test_preempted_requests_are_computed_again(monkeypatch):
    requests = [
        r
        for number, count in enumerate([100] * 4 + [2] * 8)
        for r in requests_of([PROMPTS[2]], Sampling(max_new_tokens=count), number, number)
    ]
    plain = engine_of(CONFIG, torch.float64)
    expected = complete(plain, requests)
    page, cell = sizes_of(plain)
    again = {}
    for decodes in (True, False):
        engine = engine_of(CONFIG, torch.float64, cache_bytes=18 * page + 10 * cell, snapshot_tokens=32)
        if not decodes:
            monkeypatch.setattr(CellPool, "due", lambda self, slots, known: slots[:0])
        assert_same(complete(engine, requests), expected, 1e-12)
        assert engine.cost().cache_bytes <= 18 * page + 10 * cell and engine.cost().preempted > 0
        again[decodes] = engine.cost().recomputed
    assert 0 < again[True] < again[False]


@pytest.mark.slow
@pytest.mark.parametrize("static", [False, True])
def test_a_preempted_completion_goes_on_from_its_last_snapshot(static):
    requests = requests_of([PROMPTS[2], LONG[:40]], Sampling(max_new_tokens=80), 0)
    engine = engine_of(CONFIG, torch.float64, snapshot_tokens=32, static=static)
    engine.submit(requests)
    for _ in range(72):
        engine.step()
    engine._poll()
    lengths = [len(r.prompt) + len(engine.sampled(r.number)) for r in requests]
    engine._scheduler.restart()
    done = []
    while engine.unfinished():
        done += engine.step()
    expected = complete(engine_of(CONFIG, torch.float64), requests)
    assert_same(sorted(done, key=lambda completion: completion.number), expected, 1e-12)
    assert lengths[0] > 64 and lengths[1] > 96
    assert engine.cost().recomputed == sum((length - 1) % 32 for length in lengths)


def test_a_prompt_is_computed_once_for_its_samples():
    engine = engine_of(CONFIG, torch.float64)
    completed(engine, [LONG], Sampling(max_new_tokens=3, samples=4))
    assert engine.cost().prefilled == len(LONG) and engine.cost().cached == 3 * len(LONG)


@pytest.mark.slow
@pytest.mark.parametrize("static", [False, True])
def test_snapshots_are_used_where_a_text_goes_on(static):
    """A turn that continues the last one; a prompt again; a prompt that begins like another."""
    plain = engine_of(CONFIG, torch.float64)
    engine = engine_of(CONFIG, torch.float64, snapshot_tokens=32, static=static)
    how = Sampling(max_new_tokens=9)
    engine.reserve(400)  # so that the cache need not grow, which empties it
    first = completed(engine, [LONG], how)
    assert_same(first, completed(plain, [LONG], how), 1e-12)
    text = [*LONG, *first[0].tokens.tolist()]
    cases = [
        ([*text, 5, 6], len(text) - 1, len(text) - 1),  # the last token was never computed
        (LONG, 0, 64),
        ([*LONG[:40], 1, 2, 3], 0, 32),
        ([*LONG[:31], 1, 2, 3], 0, 0),
    ]
    for number, (prompt, computed, known) in enumerate(cases, 1):
        before = engine.cost().cached
        request = Request(number, prompt, how, seed=3, computed=computed)
        assert_same(complete(engine, [request]), complete(plain, [request]), 1e-12)
        assert engine.cost().cached - before == known, prompt


def test_a_prompt_leaves_a_snapshot_at_each_multiple_of_snapshot_tokens():
    engine = engine_of(CONFIG, torch.float64, snapshot_tokens=16)
    engine.reserve(400)
    how = Sampling(max_new_tokens=1)
    completed(engine, [LONG], how)
    for length, known in ((20, 16), (40, 32), (60, 48), (10, 0)):
        before = engine.cost().cached
        completed(engine, [[*LONG[:length], 1, 2]], how)
        assert engine.cost().cached - before == known


@pytest.mark.slow
@pytest.mark.parametrize("static", [False, True])
def test_snapshots_are_taken_in_completions(static):
    """Texts that go on within a completion, and behind one that a stop string has ended."""
    plain = engine_of(CONFIG, torch.float64)
    engine = engine_of(CONFIG, torch.float64, snapshot_tokens=20, static=static)  # of whole pages: 32
    engine.reserve(600)
    how = Sampling(max_new_tokens=80, stop_strings=("never said",))
    (first,) = completed(engine, [PROMPTS[2]], how)
    assert_same([first], completed(plain, [PROMPTS[2]], how), 1e-12)
    text = [*PROMPTS[2], *first.tokens.tolist()]
    later = Sampling(max_new_tokens=3)
    cases = [(text[:40], 0, 32), (text[:63], 0, 32), (text[:70], 0, 64), ([*text, 5], len(text) - 1, len(text) - 1)]
    for number, (prompt, computed, known) in enumerate(cases, 1):
        before = engine.cost()
        request = Request(number, [*prompt, 1, 2], later, seed=3, computed=computed)
        assert_same(complete(engine, [request]), complete(plain, [request]), 1e-12)
        assert engine.cost().cached - before.cached == known, prompt
        assert engine.cost().recomputed == before.recomputed


@pytest.mark.parametrize("static", [False, True])
def test_a_stop_string_leaves_a_snapshot_of_its_end_or_an_earlier_one(static):
    """A pass of static shape has computed one token more when the string is seen."""
    engine = engine_of(CONFIG, torch.float64, snapshot_tokens=16, static=static)
    engine.reserve(400)
    (whole,) = completed(engine, [LONG[:20]], Sampling(max_new_tokens=30))
    engine = engine_of(CONFIG, torch.float64, snapshot_tokens=16, static=static)
    engine.reserve(400)
    string = decode(whole.tokens[23:26].tolist())
    (first,) = completed(engine, [LONG[:20]], Sampling(max_new_tokens=30, stop_strings=(string,)))
    assert first.finish == "string"
    text = [*LONG[:20], *first.tokens.tolist()]
    request = Request(1, [*text, 5], Sampling(max_new_tokens=6), seed=3, computed=len(text) - 1)
    assert_same(complete(engine, [request]), complete(engine_of(CONFIG, torch.float64), [request]), 1e-12)
    again = len(text) - 1 - (len(text) - 1) // 16 * 16 if static else 0
    assert len(text) % 16 > 1 and engine.cost().recomputed == again


def test_newer_snapshots_take_the_place_of_older_ones():
    """Two texts want a cell and two snapshots each, and one at its end: more than there are cells."""
    engine = engine_of(CONFIG, torch.float64, snapshot_tokens=32)
    how, other = Sampling(max_new_tokens=3), LONG[::-1]
    for prompt in (LONG, other):
        completed(engine, [prompt], how)
    assert engine.cost().cells == 5 and engine.cost().cached == 0
    completed(engine, [other], how)
    assert engine.cost().cached == 64


def test_without_snapshots_nothing_is_reused():
    engine = engine_of(CONFIG, torch.float64)
    for _ in range(2):
        completed(engine, [LONG], Sampling(max_new_tokens=3))
    assert engine.cost().cached == 0


@pytest.mark.slow
def test_partial_completions_go_on_under_new_weights():
    """Interrupted after some tokens, with the same weights and with others: as a request that was given the tokens."""
    how = Sampling(max_new_tokens=24)
    whole = completed(engine_of(CONFIG, torch.float64), PROMPTS, how)
    engine = engine_of(CONFIG, torch.float64, snapshot_tokens=16)
    requests = requests_of(PROMPTS, how, 0)
    parts = complete(engine, [request._replace(most=10) for request in requests])
    assert [part.finish for part in parts] == ["paused"] * len(PROMPTS)
    again = [r._replace(begun=p, computed=len(r.prompt) + 9) for r, p in zip(requests, parts, strict=True)]
    assert_same(complete(engine, again), whole, 1e-12)
    engine.submit(again)
    for _ in range(5):
        engine.step()
    load(engine, weights(CONFIG, torch.float64, seed=1), version=8)
    late = []
    while engine.unfinished():
        late += engine.step()
    other = engine_of(CONFIG, torch.float64, seed=1)
    for completion, request in zip(sorted(late, key=lambda x: x.number), requests, strict=True):
        assert (
            completion.versions.unique().tolist() == [7, 8]
            and completion.versions[14] == 7
            and completion.versions[-1] == 8
        )
        same = torch.cat([completion.versions == 7]).sum().item()
        begun = completion._replace(tokens=completion.tokens[:same], sampling_logp=completion.sampling_logp[:same])
        begun = begun._replace(raw_logp=completion.raw_logp[:same], versions=completion.versions[:same])
        (expected,) = complete(other, [request._replace(begun=begun)])
        assert_same([completion], [expected], 1e-12)


def test_the_certificate_finds_states_of_earlier_weights(monkeypatch):
    model = decoder_model(CONFIG)
    engine = engine_of(CONFIG, torch.float64, snapshot_tokens=16)
    engine.reserve(600)
    placed = place(model, dtype=torch.float64)
    for version, seed in ((8, 1), (9, 2)):
        params = weights(CONFIG, torch.float64, seed)
        load(engine, params, version)
        metrics = certify(placed, params, engine, version, probes=True)
        assert metrics["sync/verified"] == 1 and metrics["sync/probe_gap"] < 1e-11
    monkeypatch.setattr(NativeEngine, "_drop_cache", lambda self: None)
    load(engine, weights(CONFIG, torch.float64, 1), 10)
    with pytest.raises(SyncError, match="wrong or stale, such as packed weights or cached prefixes"):
        certify(placed, weights(CONFIG, torch.float64, 1), engine, 10, probes=True)


def test_drafts_are_refused_where_layers_keep_states():
    message = "speculate is 2: layers of a qwen3_next keep a state, which cannot take back"
    with pytest.raises(ModelError, match=message):
        native_engine(decoder_model(CONFIG), options=NativeOptions(speculate=2))


def test_transformers_engine_takes_no_experts():
    with pytest.raises(ModelError, match="takes no experts, which a qwen3_next has: use native_engine"):
        hf_engine(decoder_model(WITH_EXPERTS))


def _on_ranks(mesh):
    model = decoder_model(WITH_EXPERTS)
    engine = native_engine(model, mesh, torch.float64, NativeOptions(snapshot_tokens=16))
    params = weights(WITH_EXPERTS, torch.float64)
    engine.load(engine.weights.named(rules.shard(params, engine.weights.layouts, mesh)), 0)
    held = trees.nbytes(engine._backend.model.init_cache(mesh, 0, 1, torch.float64, torch.device("meta"), 1))
    return completed(engine, [*PROMPTS, LONG], Sampling(max_new_tokens=10)), held


@pytest.mark.slow
@pytest.mark.gloo
def test_tensor_ranks_share_the_heads():
    model = decoder_model(WITH_EXPERTS)
    expected = completed(engine_of(WITH_EXPERTS, torch.float64), [*PROMPTS, LONG], Sampling(max_new_tokens=10))
    result, held = launch(_on_ranks, parse("tp2"), "cpu")
    assert_same(result, expected, 1e-10)
    assert held * 2 == model.cell_bytes(SINGLE, torch.float64)
