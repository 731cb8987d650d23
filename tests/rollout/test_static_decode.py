"""Decoding by passes of static shape: what a CUDA graph needs, shown without a GPU, and what it must not change."""

import sys
from typing import ClassVar

import pytest
import torch
from device_waits import FAULTS, META, WAITS, no_waits
from selection import quick
from small_engines import CONFIGS, PROMPTS, SMALL, assert_same, completed, engine_of, load, weights
from test_engine_families import CONFIGS as OTHERS
from test_engine_families import EXPERTS
from torch.fx.experimental.proxy_tensor import make_fx

from funrl import trees
from funrl.mesh.collectives import gather_objects
from funrl.mesh.launch import launch
from funrl.mesh.mesh import SINGLE, Mesh, parse
from funrl.models import decoder_config, decoder_model
from funrl.models.errors import ModelError
from funrl.models.model import Lora
from funrl.rollout.engine import complete
from funrl.rollout.native import backends, cache_sizes, sequences, static_decode
from funrl.rollout.native.backends import TorchBackend
from funrl.rollout.native.device.captured import CapturedFunctions
from funrl.rollout.native.device.decode_state import STOP, DecodeForm, Spare, decode_pass, empty_state
from funrl.rollout.native.device.host_copy import HostCopy
from funrl.rollout.native.engine import PASSES_AHEAD, NativeOptions, native_engine
from funrl.rollout.native.static_decode import bucket, drafts_problem, row_bucket
from funrl.rollout.requests import Request, request_seed, requests_of
from funrl.rollout.sampling_parameters import Sampling

pytestmark = pytest.mark.versions

ROWS = (1, 2, 16)
SLOTS, PAGES = 17, 4
KINDS = ((0, Sampling(temperature=0.7)), (1, Sampling(top_k=5, top_p=0.9, min_p=0.01)), (2, Sampling(greedy=True)))
FAMILIES = {"qwen3 window": CONFIGS["qwen3 window"], "gemma2": OTHERS["gemma2"]} | EXPERTS


def decoder_on(device, config, dtype):
    """A model with weights and a cache on a device, and the state of its sequences."""
    backend = TorchBackend(decoder_model(config), Mesh(parse("dp1"), 0, torch.device(device)), dtype, None, 256)
    backend.load(trees.map(lambda x: torch.empty(x.shape, dtype=dtype, device=device), decoder_model(config).shapes))
    backend.resize(PAGES)
    return backend, empty_state(torch.zeros(SLOTS, dtype=torch.int64, device=device), 2, PAGES)


@pytest.mark.parametrize("family", quick(FAMILIES, ["qwen3 window", "gemma2", "deepseek_v3", "gpt_oss"]))
def test_a_pass_on_a_gpu_lets_the_host_wait_for_nothing(family):
    """On a device whose tensors have no numbers that one could ask for. Every size makes the same calls."""
    counts = []
    with torch.inference_mode():
        backend, state = decoder_on("meta", FAMILIES[family], torch.bfloat16)
        for rows in ROWS:
            rows_B = torch.zeros(rows, dtype=torch.int64, device="meta")
            with no_waits() as seen:
                result = decode_pass(backend, state, rows_B, DecodeForm(rows, PAGES, KINDS), Spare(PAGES - 1))
            assert all(x.shape == (rows,) and x.is_meta for x in result)
            counts.append(seen.names)
    assert len(counts[0]) > 50 and all(calls == counts[0] for calls in counts)


def recorded(self, key, compute, kind):
    """In place of a capture: the operators that a pass called, on the tensors that it had then. Nothing is computed."""
    traced = make_fx(compute, tracing_mode="fake", _allow_non_fake_inputs=True)()
    names = {str(node.target) for node in traced.graph.nodes}
    assert not any("_local_scalar_dense" in name or "nonzero" in name for name in names)
    result = tuple(torch.empty(key.rows, dtype=dtype) for dtype in (torch.int64, torch.float64, torch.float64))

    class Replay:
        def replay(self):
            for x, new in zip(result, traced(), strict=True):
                x.copy_(new)

    self._graphs[key] = Replay(), result
    return True


class ClonedCopy(HostCopy):
    """What a device copies in the order of its work is what was there then."""

    def __init__(self, tensors):
        super().__init__([x.clone() for x in tensors])


STOP_TOKENS = Sampling(max_new_tokens=5, stop=(3,))
SAMPLINGS = [
    Sampling(max_new_tokens=12, stop=(3, 17), samples=2),
    Sampling(max_new_tokens=10, stop=(5,), top_k=9, top_p=0.8, temperature=1.3),
]


@pytest.fixture
def recording(monkeypatch):
    """Engines whose passes are recorded in place of a capture: (config, options) -> a plain and a recording one."""
    monkeypatch.setattr(CapturedFunctions, "_try_capture", recorded)
    monkeypatch.setattr(static_decode, "HostCopy", ClonedCopy)

    def engines(config, **options):
        plain, engine = (engine_of(config, packed=False, static=static, **options) for static in (False, True))
        engine._static._graphs._capture = True
        return plain, engine

    return engines


@pytest.mark.slow
def test_recorded_passes_draw_the_same_over_loads_of_other_weights(recording):
    """Passes that are replayed on the tensors of when they were recorded, over admissions, ends, and other weights.

    The weights that came first are the caller's. So the second ones get memory of their own, which the next ones are
    copied to: the passes of then stay.
    """
    config = decoder_config(**SMALL | {"layers": 1}, windows=(6,))
    plain, engine = recording(config, max_rows=6, dtype=torch.float64)
    graphs = engine._static._graphs
    known: list[dict] = []
    for seed in range(4):
        given = weights(config, torch.float64, seed)
        numbers = trees.map(torch.clone, given)
        for item in (plain, engine):
            item.load(item.weights.named(given), seed)
        stay = {key: graph for key, graph in graphs._graphs.items() if known and known[-1].get(key) is graph}
        assert len(stay) == (len(known[-1]) if seed >= 2 else 0) == graphs.captured
        for sampling in SAMPLINGS[:: 1 if seed < 2 else -1]:
            assert_same(completed(engine, PROMPTS, sampling, seed), completed(plain, PROMPTS, sampling, seed), 1e-12)
        fresh = engine_of(config, torch.float64, seed, packed=False)
        assert_same(completed(engine, PROMPTS, STOP_TOKENS), completed(fresh, PROMPTS, STOP_TOKENS), 1e-12)
        assert all(torch.equal(x, y) for x, y in zip(trees.leaves(given), trees.leaves(numbers), strict=True))
        assert graphs.captured >= 3 and any(form.tokens for form in graphs._graphs)
        known.append(dict(graphs._graphs))
    assert engine.cost().used_pages == 0
    with pytest.raises(KeyError, match="embed"):
        engine.load([], 9)
    assert engine.version is None and graphs.captured
    engine.load(engine.weights.named(weights(config, torch.float64, 1)), 1)
    plain.load(plain.weights.named(weights(config, torch.float64, 1)), 1)
    assert_same(completed(engine, PROMPTS, SAMPLINGS[0]), completed(plain, PROMPTS, SAMPLINGS[0]), 1e-12)
    done: list[list] = []
    for item in (plain, engine):
        item.submit(requests_of(PROMPTS, SAMPLINGS[0], 5))
        early = [ended for _ in range(5) for ended in item.step()]
        item.load(item.weights.named(weights(config, torch.float64, 2)), 2)
        done.append(early + [ended for _ in range(50) for ended in item.step()])
    assert_same(*(sorted(x, key=lambda ended: ended.number) for x in done), 1e-12)
    assert any({*ended.versions.tolist()} == {1, 2} for ended in done[1]) and graphs.captured
    engine.pause()
    assert graphs.captured == 0, "they have the addresses of a cache that is gone"


@pytest.mark.slow
def test_fewer_rows_take_a_captured_pass_of_more_until_a_capture_is_worth_it(recording, monkeypatch):
    """Rows that end one after the other: few sizes are captured. One that lasts gets a pass of its own."""
    every_page = lambda self, slots: self._state.table_SP.shape[1]  # noqa: E731
    monkeypatch.setattr(static_decode.StaticDecode, "_read_pages", every_page)  # as where attention has a kernel
    plain, engine = recording(decoder_config(**SMALL | {"layers": 1}), max_rows=32, dtype=torch.float64)
    lengths = [*range(6, 26), *[70] * 12]
    requests = [
        Request(n, [n % 9, 3], Sampling(max_new_tokens=new), request_seed(0, n)) for n, new in enumerate(lengths)
    ]
    assert_same(complete(engine, requests), complete(plain, requests), 1e-12)
    sizes = {form.rows for form in engine._static._graphs.keys if not form.tokens}
    assert sizes == {32, 16}, "rows 24 and 8 were too few times to be captured"


@pytest.mark.slow
def test_recorded_passes_outlive_new_factors_of_an_adapter(recording):
    config = decoder_config(**SMALL | {"layers": 1})
    plain, engine = recording(config, max_rows=6, dtype=torch.float64)
    graphs = engine._static._graphs
    known = {}
    for seed, rank in enumerate((2, 2, 2, 2, 3)):
        lora = Lora(rank, alpha=4.0, targets=("q", "up"))
        generator = torch.Generator().manual_seed(seed)
        shapes = engine.adapter_weights(lora).names.values()
        factors = [(name, torch.randn(shape, generator=generator, dtype=torch.float64)) for name, shape in shapes]
        for item in (plain, engine):
            item.load_adapter("own", lora, factors, seed)
        assert graphs.captured == (len(known) if 2 <= seed < 4 else 0)
        requests = [request._replace(adapter="own") for request in requests_of(PROMPTS, SAMPLINGS[0], seed)]
        assert_same(complete(engine, requests), complete(plain, requests), 1e-12)
        known = dict(graphs._graphs)
        assert known
    completed(engine, PROMPTS, SAMPLINGS[0])
    completed(engine, PROMPTS, SAMPLINGS[0])
    others = {form for form in graphs.keys if form.adapters == (-1,)}
    assert others and others < set(graphs.keys)
    engine.drop_adapter("own")
    assert set(graphs.keys) == others, "graphs of an adapter that is gone hold its factors"


@pytest.mark.slow
def test_without_memory_for_two_copies_of_the_weights_a_load_frees_the_cache(recording, monkeypatch):
    plain, engine = recording(decoder_config(**SMALL | {"layers": 1}), dtype=torch.float64)
    for item in (plain, engine):
        completed(item, PROMPTS, SAMPLINGS[0])
    assert engine._static.captured and engine.cost().pages
    monkeypatch.setattr(cache_sizes, "free_bytes", lambda mesh: 99)
    engine.load(engine.weights.named(weights(engine.model.config, torch.float64)), 1)
    assert engine._static.captured == 0 and engine.cost().pages == 0


def test_a_row_that_ends_is_frozen_and_writes_to_the_spare_page():
    config = CONFIGS["llama"]
    backend = TorchBackend(decoder_model(config), SINGLE, torch.float64, None, 16)
    backend.load(weights(config, torch.float64))
    backend.spare = 1
    backend.resize(2)
    state = empty_state(torch.tensor([5, 6, 0]), 1, 1)
    state.numbers_CS[:, :2] = torch.tensor([[1, 1], [1, 1], [3, 9], [1, 2], [0, 0], [0, 0], [-1, -1], [0, 0], [-1, -1]])
    state.table_SP[:2, 0] = torch.tensor([0, 1])
    assert len(state.numbers_CS) == STOP + 1
    rows_B, seen = torch.tensor([0, 1, 2, 2]), []
    for _ in range(4):
        token_B, *_ = decode_pass(backend, state, rows_B, DecodeForm(4, 1, ((0, Sampling()),)), Spare(2))
        seen.append(token_B.tolist())
    lengths, ended = state.numbers_CS[0].tolist(), state.numbers_CS[5].tolist()
    assert lengths == [3, 5, 1] and ended == [1, 0, 1]  # the first one had its limit of 3 tokens after two
    assert state.tokens_S.tolist() == [seen[1][0], seen[3][1], 0]
    written = (backend._cache.pages[0][0] != 0).any(-1).any(-1).sum(1).tolist()
    assert written == [2, 4, 1]


def test_a_row_that_ended_costs_no_page_and_no_token():
    """The host sees an end some passes late: what was drawn behind it is dropped."""
    config, how = CONFIGS["llama"], Sampling(max_new_tokens=60, stop=tuple(range(0, 40, 3)), samples=4)
    engine, plain = (engine_of(config, torch.float64, packed=False, static=static) for static in (True, False))
    assert_same(completed(engine, PROMPTS, how), completed(plain, PROMPTS, how), 1e-12)
    cost, other = engine.cost(), plain.cost()
    assert cost.decoded == other.decoded and cost.used_pages == 0
    assert other.passes < cost.passes <= other.passes + PASSES_AHEAD


def test_what_a_pass_of_static_shape_cannot_draw_goes_the_other_way(monkeypatch):
    engine = engine_of(CONFIGS["llama"], torch.float64, packed=False, static=True)
    plain, ran = engine_of(CONFIGS["llama"], torch.float64, packed=False), []
    run = engine._static.run
    monkeypatch.setattr(engine._static, "run", lambda *given: (ran.append(given), run(*given))[1])
    penalty = Sampling(max_new_tokens=6, repetition_penalty=1.3)
    assert_same(completed(engine, PROMPTS, penalty), completed(plain, PROMPTS, penalty), 1e-12)
    assert not ran
    completed(engine, PROMPTS, Sampling(max_new_tokens=6))
    assert len(ran) == 5  # behind the pass of the prompts


def test_where_there_are_none_the_reason_is_told(caplog):
    with caplog.at_level("INFO", "funrl.rollout.native.engine"):
        engine = native_engine(
            decoder_model(CONFIGS["llama"]), options=NativeOptions(packed=False, static=True, speculate=2)
        )
    assert engine._static is None
    assert [x for x in caplog.messages if "static shape: drafts are made on the host" in x] == caplog.messages[-1:]
    assert native_engine(decoder_model(CONFIGS["llama"]), options=NativeOptions(packed=False))._static is None


def test_drafts_of_several_rows_are_refused_on_a_gpu():
    model = decoder_model(CONFIGS["llama"])
    mesh = Mesh(parse("dp1"), 0, torch.device("cuda"))
    message = "speculate is 2 and max_rows 8: drafts are made on the host, so that no pass on cuda is a CUDA graph"
    with pytest.raises(ModelError, match=message):
        native_engine(model, mesh, options=NativeOptions(speculate=2, max_rows=8))
    assert drafts_problem("cuda", 1) is None is drafts_problem("cpu", 512)


@pytest.mark.parametrize("static", [True, False])
def test_the_hosts_work_in_a_pass_does_not_grow_with_the_rows(static):
    """Python calls of passes in which nobody comes, goes or needs a page."""
    counts, config = [], decoder_config(**SMALL | {"layers": 1, "vocab": 8, "max_positions": 512})
    for rows in (16, 64):
        engine = engine_of(config, packed=False, static=static)
        engine.submit(requests_of([[1, 2]] * rows, Sampling(max_new_tokens=400), 0))
        for _ in range(20):
            engine.step()
        calls = []
        sys.setprofile(lambda frame, event, arg, calls=calls: calls.append(event))
        try:
            for _ in range(8):
                engine.step()
        finally:
            sys.setprofile(None)
        counts.append(calls.count("call") + calls.count("c_call"))
    assert counts[0] > 100 and abs(counts[1] - counts[0]) < 0.02 * counts[0], counts


def test_buckets():
    assert [bucket(n) for n in (1, 2, 3, 4, 5, 9, 300)] == [1, 2, 4, 4, 8, 16, 512]
    assert bucket(300, 320) == 320 and bucket(5, 320) == 8


def test_row_buckets_waste_less_than_a_quarter():
    sizes = [row_bucket(n, 10**6) for n in range(1, 1025)]
    few = [1, 2, 4, *range(8, 65, 8), *range(80, 257, 16), *range(288, 513, 32)]
    assert sorted(set(sizes[:512])) == few and len(few) == 31 and sizes[599] == 608
    assert all(n <= size < max(n + 8, 1.25 * n) for n, size in enumerate(sizes, 1)) and sizes == sorted(sizes)
    assert row_bucket(300, 310) == 310 and row_bucket(3, 3) == 3


class Capture:
    """In place of `torch.cuda.graph`."""

    def __init__(self, graph, pool, capture_error_mode):
        assert pool == "pool" and capture_error_mode == "thread_local"

    def __enter__(self): ...

    def __exit__(self, *_): ...


def test_the_first_run_is_eager_the_second_is_captured_and_a_failure_is_logged_once(monkeypatch, caplog):
    replayed, ran = [], []
    graph = type("Graph", (), {"replay": lambda self: replayed.append(self)})
    monkeypatch.setattr(torch.cuda, "CUDAGraph", graph)
    monkeypatch.setattr(torch.cuda, "graph", Capture)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: "pool")

    def compute():
        ran.append(1)
        return (torch.tensor(len(ran)),)

    functions, untouched = (CapturedFunctions(Mesh(parse("dp1"), 0, torch.device(x))) for x in ("cuda", "cpu"))
    assert [int(functions.run("a", compute)[0]) for _ in range(5)] == [1, 2, 2, 2, 2]
    assert len(replayed) == 4 and functions.captured == 1
    functions.drop()
    assert [int(functions.run("a", compute)[0]) for _ in range(2)] == [3, 3] and len(replayed) == 6
    assert [int(untouched.run("a", compute)[0]) for _ in range(3)] == [4, 5, 6] and len(replayed) == 6

    def refuse(*_, **__):
        raise RuntimeError("a synchronisation")

    monkeypatch.setattr(torch.cuda, "graph", refuse)
    assert functions.uncaptured == 0
    assert [int(functions.run("b", compute)[0]) for _ in range(3)] == [7, 8, 9] and functions.uncaptured == 2
    assert caplog.messages == [
        "rank 0 cannot capture passes as CUDA graphs, and all compute them eagerly: a synchronisation"
    ]
    monkeypatch.setattr(torch.cuda, "graph", Capture)
    assert [int(functions.run("c", compute, "others")[0]) for _ in range(3)] == [10, 11, 11]
    assert [int(functions.run("a", compute)[0]) for _ in range(2)] == [12, 13] and functions.captured == 1


def replayed_on_ranks(mesh, refused):
    """Completions by replayed passes and by plain ones, kinds of graphs, and of the captures tried, on two ranks.

    Args:
      refused: the capture that fails on the last rank.
    """
    attempts = []

    def capture(self, key, compute, kind):
        attempts.append(kind)
        return (mesh.rank == 0 or len(attempts) != refused) and recorded(self, key, compute, kind)

    CapturedFunctions._try_capture = capture  # this process ends with the program
    static_decode.HostCopy = ClonedCopy
    config = decoder_config(**SMALL | {"layers": 1})
    done = []
    for static in (False, True):
        options = NativeOptions(packed=False, max_rows=6, static=static)
        engine = load(native_engine(decoder_model(config), mesh, torch.float64, options=options), weights(config))
        if static:
            engine._static._graphs._capture = True
        done.append(completed(engine, PROMPTS, SAMPLINGS[0]))
    kinds = {"passes with prompts" if form.tokens else "passes" for form in engine._static._graphs._graphs}
    return gather_objects((*done, kinds, attempts), mesh)


@pytest.mark.gloo
@pytest.mark.slow
def test_tensor_ranks_replay_together_or_not_at_all():
    """The second capture fails on one of them: all passes of its kind are eager on both."""
    ranks = launch(lambda mesh: replayed_on_ranks(mesh, 2), parse("tp2"), "cpu")
    for plain, replayed, kinds, attempts in ranks:
        assert_same(replayed, plain, 1e-12)
        assert kinds == {"passes", "passes with prompts"} - {attempts[1]} and attempts.count(attempts[1]) <= 2
        assert attempts == ranks[0][-1] and len(attempts) > 2


class CountedCopy(HostCopy):
    """Counts copies to the host, and the passes that had begun when each was read; the numbers are 0."""

    made = 0
    ages: ClassVar[list[int]] = []

    def __init__(self, tensors):
        self._tensors = [torch.zeros(x.shape, dtype=x.dtype) for x in tensors]
        type(self).made += 1
        self.number = type(self).made

    def arrays(self):
        type(self).ages.append(type(self).made - self.number)
        return [x.numpy() for x in self._tensors]


@pytest.fixture
def on_device(monkeypatch):
    """An engine on a device that only `CountedCopy` can read."""
    for module in (static_decode, sequences):
        monkeypatch.setattr(module, "HostCopy", CountedCopy)
    monkeypatch.setattr(CountedCopy, "made", 0)
    monkeypatch.setattr(CountedCopy, "ages", [])
    options = NativeOptions(packed=False, static=True, max_rows=16, cache_bytes=10**7)
    model = decoder_model(CONFIGS["llama"])
    engine = native_engine(model, Mesh(parse("dp1"), 0, META), torch.bfloat16, options=options)
    engine.load(
        engine.weights.named(trees.map(lambda x: torch.empty(x.shape, dtype=torch.bfloat16, device=META), model.shapes))
    )
    return engine


@pytest.mark.slow
def test_decoding_copies_once_a_pass_and_reads_four_passes_later(on_device):
    """Between two passes the host asks the device for nothing else, so that it is some passes ahead."""
    on_device.submit(requests_of(PROMPTS, Sampling(max_new_tokens=40, samples=2, top_p=0.9), 0))
    with no_waits() as prompts:  # passes with prompts in them do not wait either, and some copy pages
        while on_device._scheduler.only_decoding() is None:
            assert not on_device.step()
    assert "aten::index_copy_" in prompts.names
    before = on_device.cost().passes
    CountedCopy.made = 0
    CountedCopy.ages.clear()
    with no_waits() as decoding:
        for _ in range(10):
            assert not on_device.step()
    assert on_device.cost().passes - before == 10 == CountedCopy.made and decoding.names
    assert CountedCopy.ages[-6:] == [PASSES_AHEAD] * 6  # each is read while later passes compute


def test_a_copy_to_the_host_is_asynchronous_and_waited_for_when_it_is_read(monkeypatch):
    """On a GPU, which this machine need not have: each call that would be made there, in order."""
    calls = []
    empty, copy = torch.empty, torch.Tensor.copy_

    class Event:
        def record(self):
            calls.append("record")

        def synchronize(self):
            calls.append("synchronize")

    def pinned(shape, dtype, pin_memory):
        calls.append(f"pinned {pin_memory}")
        return empty(shape, dtype=dtype)

    def copied(to, source, non_blocking=False):
        calls.append(f"asynchronous {non_blocking}")
        return copy(to, source)

    class OnGpu(torch.Tensor):
        device = property(lambda self: torch.device("cuda"))
        is_cuda = property(lambda self: True)
        is_cpu = property(lambda self: False)
        __torch_function__ = torch._C._disabled_torch_function_impl

    x = torch.arange(3).as_subclass(OnGpu)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch, "empty", pinned)
    monkeypatch.setattr(torch.Tensor, "copy_", copied)
    host = HostCopy([x])
    assert calls == ["pinned True", "asynchronous True", "record"]
    assert host.arrays()[0].tolist() == [0, 1, 2] and calls[3:] == ["synchronize"]


@pytest.mark.parametrize("fault", FAULTS)
def test_a_decoding_pass_that_waits_is_found(fault, on_device, monkeypatch):
    sound = backends.decode_pass

    def waiting(*args, **kwargs):
        sampled = sound(*args, **kwargs)
        FAULTS[fault](sampled[0])
        return sampled

    on_device.submit(requests_of(PROMPTS, Sampling(max_new_tokens=40), 0))
    while on_device._scheduler.only_decoding() is None:
        on_device.step()
    with no_waits():
        on_device.step()
    monkeypatch.setattr(backends, "decode_pass", waiting)
    with pytest.raises(AssertionError, match=WAITS), no_waits():
        on_device.step()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype,close", [(torch.float32, 1e-4), (torch.bfloat16, 0.3)], ids=["float32", "bfloat16"])
def test_graphs_on_a_gpu_draw_what_passes_without_them_draw(dtype, close):
    config, mesh = decoder_config(**SMALL | {"head": 16, "vocab": 300}), Mesh(parse("dp1"), 0, torch.device("cuda"))
    how, made = Sampling(max_new_tokens=40, stop=(3, 17), samples=4, top_p=0.95), []
    for static in (None, False):
        options = NativeOptions(max_rows=6, static=static)
        engine = native_engine(decoder_model(config), mesh, dtype, options=options)
        engine.load(engine.weights.named(trees.map(torch.Tensor.cuda, weights(config, dtype))))
        made.append((engine, completed(engine, PROMPTS, how)))
    (engine, by_graphs), (eager, by_host) = made
    assert engine._static is not None and engine._static._graphs.captured > 0
    if dtype is torch.float32:
        assert_same(by_graphs, by_host, close)
    for by_graph, other in zip(by_graphs, by_host, strict=True):  # in 16 bits a token may differ, and all behind it
        same = (by_graph.tokens[:1] == other.tokens[:1]).all()
        assert not same or (by_graph.raw_logp[0] - other.raw_logp[0]).abs() < close
    captured = engine._static._graphs
    mixed = any(form.tokens for form in captured._graphs)
    assert mixed == (dtype is torch.bfloat16), "only for 16 bits is there a kernel that takes lengths from the device"
    allocated = torch.cuda.memory_allocated()
    for seed in (1, 2):  # the first ones were the caller's, so the next ones get memory of their own
        before = dict(captured._graphs)
        engine.load(engine.weights.named(trees.map(torch.Tensor.cuda, weights(config, dtype, seed))), seed)
        assert captured._graphs == (before if seed == 2 else {})
        assert seed == 2 or torch.cuda.memory_allocated() <= allocated
        done = completed(engine, PROMPTS * 3, how)
        eager.load(eager.weights.named(trees.map(torch.Tensor.cuda, weights(config, dtype, seed))), seed)
        if dtype is torch.float32:
            assert_same(done, completed(eager, PROMPTS * 3, how), close)
    engine.pause()
    assert captured.captured == 0
