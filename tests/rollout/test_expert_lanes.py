"""Ranks that share the experts of a replica complete requests bit for bit as one process does."""

import random
from typing import Any

import pytest
import torch
from bit_texts import unlike
from lockstep_ranks import run_ranks
from selection import quick
from test_same_bits_experts import Texts, model_of

from funrl import trees
from funrl.compiled_kernels.kernel_library import library_problem
from funrl.mesh.launch import launch
from funrl.mesh.mesh import SINGLE, parse
from funrl.mesh.rules import GENERATE, layouts, shard
from funrl.models import decoder_config, decoder_model
from funrl.models.decoder.gated_delta_net import GatedDeltaNet
from funrl.models.decoder.routing import Experts
from funrl.models.errors import ModelError
from funrl.rollout.engine import complete
from funrl.rollout.native.engine import NativeOptions, native_engine
from funrl.rollout.requests import Request, requests_of
from funrl.rollout.sampling_parameters import Sampling

pytestmark = pytest.mark.skipif(library_problem() is not None, reason=str(library_problem()))
CASES = [
    ("qwen3 moe", torch.float32, "ep2"),
    ("deepseek", torch.float32, "ep4"),
    ("deepseek v3", torch.bfloat16, "dp2,ep2"),
    ("gpt-oss", torch.float32, "ep2,tp2"),
    ("mixtral", torch.bfloat16, "ep8"),
    ("odd sizes", torch.float64, "ep2"),
    ("olmo2", torch.float32, "ep2"),  # without experts
]


@pytest.mark.parametrize("case", quick(CASES, CASES[:3]), ids=str)
def test_ranks_complete_what_one_process_completes(case):
    family, dtype, mesh = case
    for seed in (18, 19):
        alone = Texts(family, dtype, seed).generate(packed=False).done
        for done in run_ranks(lambda ranks, s=seed: Texts(family, dtype, s).generate(ranks).done, parse(mesh)):
            assert unlike(done, alone) == 0


@pytest.mark.gloo
def test_processes_do_too():
    alone = Texts("deepseek", torch.float32, 20).generate().done
    assert (
        launch(lambda mesh: unlike(Texts("deepseek", torch.float32, 20).generate(mesh).done, alone), parse("ep2")) == 0
    )


def results_on(program, mesh) -> list[Any]:
    return run_ranks(program, parse(mesh))


def engine_of(mesh, family="deepseek", **options):
    model, params = model_of(family)
    engine = native_engine(model, mesh, torch.float32, NativeOptions(**options))
    placed = layouts(model.shapes, model.axes, GENERATE, sizes=mesh.sizes)
    engine.load(engine.weights.named(shard(params, placed, mesh)), 1)
    return engine


def requests(count, seed=0):
    pick = random.Random(seed)
    prompts = [[pick.randrange(136) for _ in range(pick.choice([1, 5, 33]))] for _ in range(count)]
    ways = [
        Sampling(max_new_tokens=9),
        Sampling(max_new_tokens=20, top_k=7, temperature=0.8),
        Sampling(greedy=True, max_new_tokens=15),
    ]
    ways.append(Sampling(max_new_tokens=12, repetition_penalty=1.3))
    return [Request(i, prompt, ways[i % len(ways)], i) for i, prompt in enumerate(prompts)]


@pytest.mark.parametrize("count", [1, 2, 7])
def test_a_rank_without_rows_takes_part(count):
    """One request on four ranks leaves three of them without any; later some have ended."""
    alone = complete(engine_of(SINGLE, packed=False), requests(count))
    for done in results_on(lambda mesh: complete(engine_of(mesh), requests(count)), "ep4"):
        assert unlike(done, alone) == 0


def test_each_rank_has_its_part_of_experts_and_pages():
    alone = engine_of(SINGLE, packed=False, cache_bytes=1 << 16)

    def program(mesh):
        engine = engine_of(mesh, cache_bytes=1 << 16, max_rows=3)
        pages = {}
        done = []
        engine.submit(requests(12))
        while engine.unfinished():
            done += engine.step()
            for sequence in engine._scheduler._running:
                pages.setdefault(sequence.lane, set()).update(sequence.pages)
            assert len(engine._scheduler._running) <= 3 * 4
        sizes = {name: tuple(x.shape) for name, x in engine.held_weights()}
        cost = engine.cost()
        return sorted(done, key=lambda x: x.number), pages, sizes, cost

    whole = complete(alone, requests(12))
    for done, pages, sizes, cost in results_on(program, "ep4"):
        assert unlike(done, whole) == 0
        assert sorted(pages) == [0, 1, 2, 3], "all lanes have rows"
        assert cost.cache_bytes <= 1 << 16
        assert {shape[0] for name, shape in sizes.items() if "expert_" in name} == {8 // 4}


def test_pages_are_preempted_and_rows_cancelled_alike_on_all_ranks():
    long = [request._replace(sampling=Sampling(max_new_tokens=60)) for request in requests(10, seed=3)]
    alone = complete(engine_of(SINGLE, packed=False), long)
    page = engine_of(SINGLE, packed=False)._backend.page_bytes

    def program(mesh):
        engine = engine_of(mesh, cache_bytes=8 * page)  # of a rank, with its spare page
        engine.submit(long)
        done = [x for _ in range(4) for x in engine.step()]
        done += engine.cancel([9])
        engine.pause()
        engine.resume()
        while engine.unfinished():
            done += engine.step()
        return sorted(done, key=lambda x: x.number), engine.cost().preempted

    for done, preempted in results_on(program, "ep2"):
        assert preempted > 0 and done[9].finish == "cancelled"
        assert unlike(done[:9], alone[:9]) == 0


@pytest.mark.parametrize(("family", "mesh"), [("deepseek", "ep4"), ("qwen3 moe", "ep2,tp2")])
def test_passes_of_static_shape_sample_the_same(family, mesh):
    """As CUDA graphs do; those with prompts are not static."""
    plain = [
        request._replace(sampling=Sampling(max_new_tokens=6 + 5 * (i % 3))) for i, request in enumerate(requests(9))
    ]
    alone = complete(engine_of(SINGLE, family, packed=False), plain)

    def program(ranks):
        engine = engine_of(ranks, family, static=True, max_rows=2)
        calls = []
        backend: Any = engine._backend
        decode = backend.decode
        backend.decode = lambda *given: calls.append(given[2].rows) or decode(*given)
        return complete(engine, plain), calls

    first, *others = results_on(program, mesh)
    assert len(first[1]) > 5 and max(first[1]) == 2
    for done, calls in (first, *others):
        assert unlike(done, alone) == 0 and calls == first[1]


@pytest.mark.parametrize("static", [False, True])
def test_states_of_a_fixed_size_are_in_lanes_too(static):
    sizes = {"vocab": 40, "embed": 16, "heads": 4, "kv_heads": 2, "head": 4, "mlp": 32, "layers": 2}
    mixers = (GatedDeltaNet(2, 4, 8, 6), None)
    model = decoder_model(decoder_config(**sizes, mixers=mixers, experts=Experts(4, 2, 8)))
    params = trees.cast(model.init(torch.Generator().manual_seed(0)), torch.float64)
    pick = random.Random(1)
    prompts = [[pick.randrange(40) for _ in range(pick.choice([1, 5, 33]))] for _ in range(5)]
    asked = requests_of(prompts, Sampling(max_new_tokens=12, samples=2), 0)

    def program(mesh):
        options = NativeOptions(static=static, snapshot_tokens=16)
        engine = native_engine(model, mesh, torch.float64, options)
        placed = layouts(model.shapes, model.axes, GENERATE, sizes=mesh.sizes)
        engine.load(engine.weights.named(shard(params, placed, mesh)), 1)
        return complete(engine, asked)

    alone = program(SINGLE)
    for done in results_on(program, "ep2"):
        assert [x.tokens.tolist() for x in done] == [x.tokens.tolist() for x in alone]
        for a, b in zip(done, alone, strict=True):
            torch.testing.assert_close(a.raw_logp, b.raw_logp, rtol=0, atol=1e-12)


def test_routes_are_recorded_on_all_ranks():
    wanted = complete(engine_of(SINGLE, packed=False, record_routes=True), requests(5))
    for done in results_on(lambda mesh: complete(engine_of(mesh, record_routes=True), requests(5)), "ep2"):
        pairs = [(a.routes, b.routes) for a, b in zip(done, wanted, strict=True)]
        assert all(a is not None and b is not None and torch.equal(a, b) for a, b in pairs)


def test_requests_that_are_cancelled_while_they_hold_no_page_have_empty_routes():
    def program(mesh):
        engine = engine_of(mesh, record_routes=True)
        engine.submit([request._replace(sampling=Sampling(max_new_tokens=60)) for request in requests(2)])
        for _ in range(4):
            engine.step()
        engine.pause()  # their pages are given up
        return engine.cancel([0, 1])

    for done in results_on(program, "ep2"):
        assert [completion.finish for completion in done] == ["cancelled"] * 2
        assert all(completion.routes is not None and (completion.routes == -1).all() for completion in done)


def test_weights_in_8_bits_are_refused():
    model, _ = model_of("olmo2")
    with pytest.raises(ModelError, match="ranks of ep share no weights in 8 bits, and the mesh is ep2"):
        results_on(lambda mesh: native_engine(model, mesh, options=NativeOptions(float8=True)), "ep2")
