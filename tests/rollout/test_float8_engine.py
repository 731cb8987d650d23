"""The native engine with the projections of its layers in 8 bits."""

import dataclasses

import numpy as np
import pytest
import torch

from funrl import trees
from funrl.compiled_kernels.float8 import FLOAT8, RowScaled
from funrl.mesh.mesh import SINGLE
from funrl.models import compile_layer, decoder_config, decoder_model, place
from funrl.models.decoder.routing import Experts
from funrl.models.errors import ModelError
from funrl.models.float8_weights import quantize_layers, quantized_bytes
from funrl.models.model import Inputs
from funrl.rollout import certificate
from funrl.rollout.certificate import SyncError, certify
from funrl.rollout.engine import complete
from funrl.rollout.native import cache_sizes
from funrl.rollout.native.engine import NativeOptions, native_engine
from funrl.rollout.native.float8_backend import Float8Backend
from funrl.rollout.requests import requests_of
from funrl.rollout.sampling_parameters import Sampling

SMALL = {"vocab": 96, "embed": 64, "layers": 3, "heads": 4, "kv_heads": 2, "head": 16, "mlp": 96, "max_positions": 128}
CONFIG = decoder_config(**SMALL, family="qwen3", qk_norm=True)
PROMPTS = np.random.default_rng(0).integers(3, 96, (3, 9)).tolist()
SAMPLING = Sampling(max_new_tokens=24, samples=2)


def weights(seed=0, dtype=torch.float32):
    return decoder_model(CONFIG).init(torch.Generator().manual_seed(seed), dtype)


def loaded(params, dtype=torch.float32, **options):
    engine = native_engine(decoder_model(CONFIG), dtype=dtype, options=NativeOptions(float8=True, **options))
    engine.load(engine.weights.named(params), 3)
    return engine


def completions(engine, prompts=PROMPTS):
    return complete(engine, requests_of(prompts, SAMPLING, 0))


def assert_equal(first, second):
    for x, y in zip(first, second, strict=True):
        assert torch.equal(x.tokens, y.tokens) and torch.equal(x.raw_logp, y.raw_logp)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_log_probabilities_are_those_of_quantized_weights(dtype):
    """Computed without pages, of whole texts, with the same rounding; and with the weights as they were."""
    params = weights(dtype=dtype)
    done = completions(loaded(params, dtype))
    tokens = torch.stack([torch.cat([torch.tensor(PROMPTS[i // 2]), x.tokens]) for i, x in enumerate(done)])
    engine_logp = torch.stack([x.raw_logp for x in done])
    model = decoder_model(CONFIG)
    gaps = {}
    for name, layers in (("loaded", params["layers"]), ("quantized", quantize_layers(params))):
        hidden = model.apply({**params, "layers": layers}, Inputs(tokens), SINGLE).hidden
        logp = (hidden.float() @ model.unembedding(params).float().T).log_softmax(-1)[:, 8:-1]
        gaps[name] = (logp.gather(2, tokens[:, 9:, None])[..., 0] - engine_logp).abs().max()
    assert 1e-3 < gaps["loaded"] < 0.5
    assert gaps["quantized"] < (1e-5 if dtype == torch.float32 else 0.1)


def test_a_completion_depends_on_no_other_and_passes_of_static_shape_have_its_bits():
    params = weights()
    whole = completions(loaded(params))
    assert_equal(whole[:2], completions(loaded(params), PROMPTS[:1]))
    assert_equal(whole, completions(loaded(params, max_rows=2)))
    assert_equal(whole, completions(loaded(params, static=True)))


@pytest.mark.parametrize("static", [None, True])
def test_new_weights_are_quantized_too(static):
    engine = loaded(weights(0), static=static)
    completions(engine)
    for seed in (1, 2):
        engine.load(engine.weights.named(weights(seed)), 3 + seed)
        assert_equal(completions(engine), completions(loaded(weights(seed), static=static)))


def test_the_proof_of_a_sync_reads_what_was_loaded_and_probes_what_is_computed(monkeypatch):
    params = weights()
    engine = loaded(weights())
    placed = place(decoder_model(CONFIG))
    metrics = certify(placed, params, engine, 3, probes=True)
    assert metrics["sync/verified"] == 1 and 1e-3 < metrics["sync/probe_gap"] < 0.5
    backend = engine._backend
    assert isinstance(backend, Float8Backend)
    backend._quantized = quantize_layers(weights(7))
    monkeypatch.setitem(certificate.PROBE_BOUNDS, FLOAT8, 0.3)
    with pytest.raises(SyncError, match=r"rounding in torch.float8_e4m3fn explains 0.3. Its weights are the trainer's"):
        certify(placed, params, engine, 3, probes=True)
    params["layers"][1]["mlp"]["down"][3, 5] += 1e-6  # which 8 bits do not have
    with pytest.raises(SyncError, match=r"layers/1/mlp/down differs"):
        certify(placed, params, engine, 3)


def test_projections_alone_are_quantized():
    params = weights()
    layer = quantize_layers(params)[1]
    assert {name for part in ("attn", "mlp") for name, x in layer[part].items() if isinstance(x, RowScaled)} == {
        *("q", "k", "v", "o"),
        *("gate", "up", "down"),
    }
    assert layer["attn"]["q_norm"] is params["layers"][1]["attn"]["q_norm"]
    engine = native_engine(decoder_model(CONFIG), options=NativeOptions(float8=True))
    rows = 4 * 16 + 2 * 2 * 16 + 64 + 2 * 96 + 64
    numbers = 64 * (4 * 16 + 2 * 2 * 16 + 4 * 16 + 3 * 96)
    assert quantized_bytes(engine.weights.layouts) == 3 * (numbers + 4 * rows)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"family": "qwen3_moe", "experts": Experts(count=4, per_token=2, mlp=16)}, "products of experts"),
        ({"embed": 24, "mlp": 40}, "no layer has a projection of q, k, v, o, gate, up, down whose sizes 16 divides"),
    ],
)
def test_models_without_products_in_8_bits_are_refused(changes, problem):
    with pytest.raises(ModelError, match=f"float8 is True: {problem}"):
        native_engine(decoder_model(decoder_config(**SMALL | changes)), options=NativeOptions(float8=True))


def test_captured_passes_stay_if_new_weights_fit_with_their_quantized_form(monkeypatch):
    """The device has room for the weights as they come, but not for these and 8 bits of them."""
    engine = loaded(weights(), static=True)
    completions(engine)
    layers = quantize_layers(weights())
    made = [x for layer in layers for part in ("attn", "mlp") for x in layer[part].values() if isinstance(x, RowScaled)]
    loads, quantized = trees.nbytes(weights()), trees.nbytes(made)
    monkeypatch.setattr(type(engine._static), "captured", 1)
    for free, stays in ((loads + quantized - 1, False), (loads + quantized, True)):
        monkeypatch.setattr(cache_sizes, "free_bytes", lambda mesh, free=free: free)
        engine.load(engine.weights.named(weights(1)), 4)
        assert (engine.cost().pages > 0) == stays
        completions(engine)


def test_control_rows_take_their_pages_from_the_bound_of_the_cache(monkeypatch):
    """Of 8 pages, where completions have 3, 5 are of the engine's cache."""
    sizes = []
    empty = Float8Backend.empty_cache
    monkeypatch.setattr(Float8Backend, "empty_cache", lambda self, pages: (sizes.append(pages), empty(self, pages))[1])
    page_bytes = decoder_model(CONFIG).page_bytes(SINGLE, 16, torch.float32)
    engine = loaded(weights(), control_every=1, cache_bytes=8 * page_bytes)
    short = complete(engine, requests_of(PROMPTS, Sampling(max_new_tokens=4), 0))
    assert len(short) == 3 and engine.cost().pages > 0
    assert_equal(completions(engine), completions(loaded(weights())))
    assert engine.cost().pages == 5 and max(sizes) <= 3
    with pytest.raises(ValueError, match=r"5 pages of keys and values; the cache of \S+ GB has 4"):
        engine.check(requests_of([[3] * 60], Sampling(max_new_tokens=8), 0))


@pytest.mark.parametrize("static", [None, True])
@pytest.mark.parametrize("options", [{"top_k": 5}, {"temperature": 0.7}, {}], ids=str)
def test_control_rows_leave_where_decoding_without_rounding_does(options, static):
    """Every second completion, beside an engine that has the weights as they were loaded and the same noise."""
    sampling = dataclasses.replace(SAMPLING, **options)
    engine = loaded(weights(), control_every=2, static=static)
    plain = native_engine(decoder_model(CONFIG), options=NativeOptions(packed=False))
    plain.load(plain.weights.named(weights()))
    done, others = (complete(x, requests_of(PROMPTS, sampling, 0))[::2] for x in (engine, plain))
    shares, distances = [], []
    model = decoder_model(CONFIG)
    for row, (x, y) in enumerate(zip(done, others, strict=True)):
        unlike = (x.tokens != y.tokens).nonzero()
        shares.append(unlike[0].item() / 24 if len(unlike) else 1.0)
        tokens = torch.cat([torch.tensor(PROMPTS[row]), x.tokens])
        hidden = model.apply(weights(), Inputs(tokens[None]), SINGLE).hidden[0, 8:-1]
        logp = (hidden @ model.unembedding(weights()).T).log_softmax(-1).gather(1, x.tokens[:, None])[:, 0]
        distances.append((logp - x.raw_logp).abs().sum().item())
    assert min(shares) < 1
    totals = engine.control.take()
    assert totals == (3, 72, pytest.approx(sum(distances), rel=1e-4), pytest.approx(sum(shares), rel=1e-9))
    assert engine.control.take() == (0, 0, 0, 0)


def test_what_is_of_several_weights_or_begun_elsewhere_is_no_control_row():
    engine = loaded(weights(), control_every=1)
    engine.submit(requests_of(PROMPTS, SAMPLING, 0))
    engine.step()
    engine.load(engine.weights.named(weights(1)), 4)
    while engine.unfinished():
        engine.step()
    complete(engine, requests_of(PROMPTS, Sampling(greedy=True, max_new_tokens=4), 0))
    assert engine.control.take() == (0, 0, 0, 0)


@pytest.mark.parametrize("seeds", [(0,), (0, 1, 2)])
def test_fused_passes_sample_the_tokens_of_others(seeds):
    """By the references of the fused kernels, as on a GPU by the kernels; also after new weights.

    Their sums differ in the last bits, and where one of these rounds a number otherwise, by a sixteenth of that.
    """
    plain, fused = (loaded(weights(), static=True) for _ in range(2))
    backend = fused._backend
    assert isinstance(backend, Float8Backend)
    backend.__dict__["_fused_sizes"] = fused.model.abilities.compiled_step
    for seed in seeds:
        for engine in (plain, fused):
            engine.load(engine.weights.named(weights(seed)), seed)
        pairs = list(zip(completions(plain), completions(fused), strict=True))
        same = torch.cat([(x.tokens == y.tokens).cumprod(0).bool() for x, y in pairs])
        gaps = torch.cat([(x.raw_logp - y.raw_logp).abs() for x, y in pairs])[same]
        assert same.float().mean() > 0.7 and gaps.median() < 1e-5 and gaps.max() < 0.05
    assert backend._fused is not None
    q, k = (backend._quantized[0]["attn"][name] for name in "qk")
    assert q.values.untyped_storage().data_ptr() == k.values.untyped_storage().data_ptr()
    held = dict(fused.held_weights())
    assert all(torch.equal(held[name], x) for name, x in trees.named(weights(seeds[-1])))


@pytest.mark.slow
def test_a_compiled_layer_takes_quantized_weights_and_those_of_control_rows():
    model = decoder_model(CONFIG)
    results = []
    for layer in (None, compile_layer(model, "on", backend="aot_eager")):
        engine = native_engine(model, options=NativeOptions(float8=True, control_every=2), layer=layer)
        engine.load(engine.weights.named(weights()))
        results.append((completions(engine), engine.control and engine.control.take()))
    assert_equal(results[0][0], results[1][0])
    assert results[0][1] == results[1][1]


def test_the_form_of_weights_says_it():
    assert loaded(weights()).weights.float8
    assert not dataclasses.replace(loaded(weights()).weights, float8=False).float8
