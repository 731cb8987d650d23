"""Decoding passes by fused kernels: what they compute, on a CPU by their references, and their operators."""

import collections
import functools

import pytest
import torch
from device_waits import no_waits
from small_engines import CONFIGS, PROMPTS, SMALL, assert_same, completed, engine_of, weights
from test_engine_families import CONFIGS as OTHERS

from funrl import trees
from funrl.compiled_kernels import fused_decode
from funrl.compiled_kernels.fused_decode import SPLIT_PRODUCT_ROWS, fused_problem, parts_for, trial_in
from funrl.compiled_kernels.gpu_kernels.trials import trial_problem
from funrl.compiled_kernels.grouped_linear import grouped_linear
from funrl.mesh.mesh import Mesh, parse
from funrl.models import compile_layer, decoder_config, decoder_model
from funrl.models.decoder import experts
from funrl.models.decoder.routing import Experts
from funrl.models.model import Lora
from funrl.rollout.native.backends import TorchBackend
from funrl.rollout.native.device import decode_state
from funrl.rollout.native.device.captured import CapturedFunctions
from funrl.rollout.native.device.decode_state import DecodeForm, Spare, empty_state
from funrl.rollout.native.device.row_sampler import row_sampler_error
from funrl.rollout.native.engine import NativeOptions, native_engine
from funrl.rollout.sampling_parameters import Sampling

PLAIN = {
    name: config
    for name, config in CONFIGS.items()
    if not isinstance(decoder_model(config).abilities.compiled_step, str)
}
QWEN3 = {"vocab": 151936, "embed": 2048, "heads": 16, "kv_heads": 8, "head": 128, "mlp": 6144, "layers": 28}
# Launches of an operator; of attention those of the kernels for long sequences, or fewer.
LAUNCHES = {
    # of a library
    "aten::mm": 1,
    # Triton
    "funrl::begin_rows": 1,
    "funrl::rotated_heads": 1,
    "funrl::decode_attention": 2,
    "funrl::add_norm": 1,
    "funrl::gated_halves": 1,
    "funrl::split_product": 1,
    "funrl::logit_block_sums": 1,
    "funrl::sample_rows": 1,
    # views and memory
    "aten::numpy_T": 0,
    "aten::new_empty": 0,
}
HOST_COPIES = 3  # tokens and both log-probabilities, one copy each


def fused_backend(engine):
    """The backend of an engine on a CPU, as it is on a GPU."""
    engine._backend.__dict__["_fused_sizes"] = engine.model.abilities.compiled_step
    return engine._backend


@pytest.mark.parametrize("name", PLAIN)
def test_fused_passes_sample_the_tokens_of_others(name):
    """All of a run of the engine: admissions, ends, pages, groups of samplings."""
    config = PLAIN[name]
    plain = engine_of(config, torch.float64, packed=False, static=True)
    engine = engine_of(config, torch.float64, packed=False, static=True)
    backend = fused_backend(engine)
    for sampling in (Sampling(max_new_tokens=20, stop=(3, 17), samples=2), Sampling(max_new_tokens=9, top_k=5)):
        assert_same(completed(engine, PROMPTS, sampling), completed(plain, PROMPTS, sampling), 1e-9)
    assert backend._fused is not None


def test_stacked_weights_are_the_models_own_and_follow_a_load():
    config = PLAIN["llama"]
    engine = engine_of(config, torch.float64, packed=False, static=True)
    backend = fused_backend(engine)
    completed(engine, PROMPTS, Sampling(max_new_tokens=4))
    before = dict(trees.named(weights(config, torch.float64)))
    held = dict(backend.held())
    assert held.keys() == before.keys() and all(torch.equal(held[name], before[name]) for name in held)
    q, k = (held[f"layers/0/attn/{name}"] for name in "qk")
    assert q.untyped_storage().data_ptr() == k.untyped_storage().data_ptr()
    engine.load(engine.weights.named(weights(config, torch.float64, 1)), 1)
    first = backend._fused
    assert first is not None, "a captured pass must not stack weights"
    plain = engine_of(config, torch.float64, packed=False, static=True)
    plain.load(plain.weights.named(weights(config, torch.float64, 1)), 1)
    sampling = Sampling(max_new_tokens=6)
    assert_same(completed(engine, PROMPTS, sampling), completed(plain, PROMPTS, sampling), 1e-9)
    assert backend._fused is first


def test_captured_passes_read_one_memory_also_after_a_load(monkeypatch):
    """Passes with prompts are captured first; a graph must not read weights that are stacked later, and so freed."""
    config = PLAIN["llama"]
    engine, plain = (engine_of(config, torch.float64, packed=False, static=True) for _ in range(2))
    backend = fused_backend(engine)
    addresses = lambda: tuple(x.data_ptr() for _, x in backend.held())  # noqa: E731
    seen = []
    run = CapturedFunctions.run

    def watched(graphs, form, *given):
        seen.append((form.tokens, addresses()))
        return run(graphs, form, *given)

    monkeypatch.setattr(CapturedFunctions, "run", watched)
    sampling = Sampling(max_new_tokens=6)
    completed(engine, PROMPTS, sampling)
    assert seen[0][0] and len({read for _, read in seen}) == 1
    for seed in (1, 2, 3):
        kept = backend.overwrite(trees.map(torch.clone, weights(config, torch.float64, seed)))
        plain.load(plain.weights.named(weights(config, torch.float64, seed)), seed)
        assert kept == (seed > 1) and (not kept or addresses() == seen[-1][1])
        assert_same(completed(engine, PROMPTS, sampling), completed(plain, PROMPTS, sampling), 1e-9)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_gate_and_up_of_experts_are_one_product(monkeypatch, dtype):
    """The model's own weights become parts of one, and follow a load into the memory that captured passes read."""
    config = decoder_config(**SMALL, experts=Experts(4, 2, 12))
    engine, plain = (engine_of(config, dtype, packed=False, static=True) for _ in range(2))
    backend = engine._backend
    backend._stacks = True  # as on a GPU
    sampling = Sampling(max_new_tokens=6)
    products = []
    for seed in (1, 2, 3):
        given = weights(config, dtype, seed)
        for item in (engine, plain):
            item.load(item.weights.named(given), seed)
        held, expected = (dict(trees.named(x)) for x in (dict(backend.held()), given))
        assert held.keys() == expected.keys() and all(torch.equal(held[name], expected[name]) for name in held)
        assert len({held[f"layers/0/mlp/expert_{name}"].untyped_storage().data_ptr() for name in ("gate", "up")}) == 1
        got, other = (completed(item, PROMPTS, sampling) for item in (engine, plain))
        assert_same(got, other, 1e-9 if dtype is torch.float64 else 0)
    monkeypatch.setattr(
        experts, "grouped_linear", lambda *args: products.append(args[1].shape) or grouped_linear(*args)
    )
    completed(engine, PROMPTS[:1], Sampling(max_new_tokens=1))
    assert (4, 24, config.embed) in products and (4, 12, config.embed) not in products


def test_weights_that_adapters_stand_on_are_not_stacked():
    config = PLAIN["llama"]
    engine = engine_of(config, torch.float64, packed=False, static=True)
    backend = fused_backend(engine)
    q = dict(backend.held())["layers/0/attn/q"]
    lora = Lora(2, alpha=4.0, targets=("q",))
    spec = engine.adapter_weights(lora)
    engine.load_adapter(
        "a", lora, [(name, torch.zeros(shape, dtype=torch.float64)) for name, shape in spec.names.values()]
    )
    completed(engine, PROMPTS, Sampling(max_new_tokens=4))
    engine.drop_adapter("a")
    completed(engine, PROMPTS, Sampling(max_new_tokens=4))
    assert backend._fused is None and dict(backend.held())["layers/0/attn/q"] is q, "captured passes read it"


def pass_on_meta(monkeypatch, rows, layers):
    """Operators of a pass of Qwen3 1.7B by kernels, on a device without numbers."""
    monkeypatch.setattr(decode_state, "samples_by_kernels", lambda hidden_BD, groups: True)
    config = decoder_config(**QWEN3 | {"layers": layers, "tied": True, "qk_norm": True})
    model = decoder_model(config)
    backend = TorchBackend(model, Mesh(parse("dp1"), 0, torch.device("meta")), torch.bfloat16, None, 256)
    backend.__dict__["_fused_sizes"] = model.abilities.compiled_step
    backend.load(trees.map(lambda x: torch.empty(x.shape, dtype=torch.bfloat16, device="meta"), model.shapes))
    backend.resize(4)
    # As on a GPU, whose products are summed in float32.
    backend.own_logits = lambda h_RD: torch.mm(h_RD, backend._unembed_VD.T).new_empty(
        len(h_RD), config.vocab, dtype=torch.float32
    )
    state = empty_state(torch.zeros(rows + 1, dtype=torch.int64, device="meta"), 2, 4)
    rows_B = torch.zeros(rows, dtype=torch.int64, device="meta")
    form = DecodeForm(rows, 4, ((0, Sampling(temperature=0.7)),))
    with torch.inference_mode():
        backend.decode(state, rows_B, form, Spare(3))  # stacks the weights
        with no_waits() as seen:
            result = backend.decode(state, rows_B, form, Spare(3))
    assert all(x.shape == (rows,) and x.is_meta for x in result)
    return seen.names


@pytest.mark.parametrize("rows", [1, 8, 64, 512])
def test_a_pass_takes_few_operators_and_launches(monkeypatch, rows):
    """At most 20 operators and 10 a layer; of 28 layers at most 290 launches, by the list above."""
    one, two = (pass_on_meta(monkeypatch, rows, layers) for layers in (1, 2))
    assert len(two) - len(one) <= 10 and 2 * len(one) - len(two) <= 20, collections.Counter(two)
    names = pass_on_meta(monkeypatch, rows, QWEN3["layers"])
    assert len(names) == len(one) + 27 * (len(two) - len(one))
    assert HOST_COPIES + sum(LAUNCHES[name] for name in names) <= 290
    products = "funrl::split_product" if rows <= SPLIT_PRODUCT_ROWS else "aten::mm"
    assert names.count(products) >= 4 * 28


def test_which_models_it_is_for(monkeypatch):
    cuda = torch.device("cuda")
    sizes = decoder_model(PLAIN["llama"]).abilities.compiled_step
    other = decoder_model(OTHERS["gemma2"]).abilities.compiled_step
    monkeypatch.setattr(fused_decode, "kernels_run", lambda trial: trial is trial_in(torch.bfloat16))
    monkeypatch.setattr(fused_decode, "kernel_for", lambda *_: None)
    assert fused_problem(other, torch.bfloat16, cuda, 256).startswith("fused decoding kernels do not take")
    assert "in 16 bits, not in torch.float32" in fused_problem(sizes, torch.float32, cuda, 256)
    assert "no kernel attends over pages of 256 tokens" in fused_problem(sizes, torch.bfloat16, cuda, 256)
    monkeypatch.setattr(fused_decode, "kernel_for", lambda *_: object())
    assert fused_problem(sizes, torch.bfloat16, cuda, 256) is None
    monkeypatch.setattr(fused_decode, "kernels_run", lambda trial: trial is trial_in(torch.float16))
    assert "do not run" in fused_problem(sizes, torch.bfloat16, cuda, 256)


@pytest.mark.parametrize("remat", ["none", "full"])
def test_a_compiled_layer_is_the_models_own_and_another_one_is_not(monkeypatch, remat):
    model = decoder_model(PLAIN["llama"])
    monkeypatch.setattr("funrl.rollout.native.backends.fused_problem", lambda *_: None)

    def sizes_of(layer):
        backend = TorchBackend(model, Mesh(parse("dp1"), 0, torch.device("cuda")), torch.bfloat16, layer, 256)
        return backend._fused_sizes

    for layer in (None, model.layer, compile_layer(model, "off", remat=remat), compile_layer(model, "on", remat=remat)):
        assert sizes_of(layer) == model.abilities.compiled_step
    decorated = functools.wraps(model.layer)(lambda *args: model.layer(*args))
    assert sizes_of(decorated) is None and decorated.__wrapped__ is model.layer
    assert sizes_of(functools.wraps(compile_layer(model, "on"))(decorated)) is None


def test_parts_occupy_a_gpu_and_divide_the_sum():
    for outputs, inner in ((4096, 2048), (2048, 2048), (12288, 2048), (2048, 6144), (64, 64)):
        parts = parts_for(torch.empty(inner, outputs, device="meta"))
        assert 1 <= parts <= 8 and (parts == 1 or inner // parts >= 256)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_decodes_by_the_kernels():
    """Greedy completions in bfloat16, by kernels and by the model's own operators: few tokens differ by rounding."""
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        assert trial_problem(trial_in(dtype)) is None
    assert trial_problem(row_sampler_error) is None
    config = decoder_config(**SMALL | {"head": 64}, family="qwen3", qk_norm=True)
    mesh = Mesh(parse("dp1"), 0, torch.device("cuda"))
    results = []
    for fuses in (True, False):
        engine = native_engine(decoder_model(config), mesh, torch.bfloat16, NativeOptions(static=True))
        if not fuses:
            engine._backend.__dict__["_fused_sizes"] = None
        engine.load(engine.weights.named(trees.map(lambda x: x.cuda(), weights(config, torch.bfloat16))))
        results.append(completed(engine, PROMPTS, Sampling(max_new_tokens=12, greedy=True)))
        assert (engine._backend._fused is not None) == fuses
        assert engine._static._graphs.captured > 0
    same = torch.cat([a.tokens == b.tokens for a, b in zip(*results, strict=True)])
    assert same.float().mean() > 0.5
    for a, b in zip(*results, strict=True):
        assert (a.raw_logp[:2] - b.raw_logp[:2]).abs().max() < 0.1
