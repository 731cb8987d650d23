"""Families whose layers vLLM computes with other code: experts, attention sinks, latent attention, windows."""

import dataclasses

import pytest
import torch
from small_engines import KINDS, NO_VLLM, PROMPTS, SMALL, assert_same, completed, load, weights
from test_vllm_engine import assert_draws_as_native, fused, shards_of

from funrl import trees
from funrl.mesh.launch import launch
from funrl.mesh.mesh import SINGLE, parse
from funrl.mesh.rules import COMPUTE, STORED
from funrl.models import decoder_config, decoder_model, place, with_fields
from funrl.models.decoder.latent_attention import LatentSizes
from funrl.models.decoder.layers import RopeScaling
from funrl.models.decoder.routing import ClampedGate, Experts
from funrl.models.errors import ModelError
from funrl.models.huggingface.names import names_of
from funrl.rollout.certificate import SyncError, certify
from funrl.rollout.native.engine import native_engine
from funrl.rollout.sampling_parameters import Sampling
from funrl.rollout.vllm.core import check_vllm, vllm_page
from funrl.rollout.vllm.weights import as_loaded, unfused

needs_vllm = pytest.mark.skipif(NO_VLLM is not None, reason=str(NO_VLLM))
SIZES = SMALL | {"head": 32}
YARN = RopeScaling("yarn", 4.0, 1.0, 32.0, original=32, mscale=1.0, mscale_all=0.7)
CLAMPED = Experts(4, 2, 64, clamped=ClampedGate())
GROUPS = {"groups": 4, "chosen_groups": 2, "scale": 2.5, "shared": 32, "dense": (0,), "wide": True}
MLA = SIZES | {"kv_heads": SIZES["heads"], "head": 96}
SIGMOID = Experts(8, 3, 32, scoring="sigmoid", biased=True, **GROUPS)
NEW = SIZES | {"mlp": 32}
GEMMA = {"norm_offset": 1.0, "activation": "gelu", "embed_scale": 32**0.5, "tied": True}
GEMMAS = {**GEMMA, "norms": "sandwich", "attention_scale": 9**-0.5, "windows": (6, None)}
OLMO = {"qk_norm": True, "qk_norm_over": "projection"}
FAMILIES = {  # first one without experts: vLLM makes their group with the first model of a process alone
    "mistral": decoder_config(**SIZES, family="mistral", windows=(6, 6)),
    "ernie4_5": decoder_config(**SIZES, family="ernie4_5", rotary_pairs=True),
    "gemma": decoder_config(**SIZES, **GEMMA, family="gemma"),
    "gemma2": decoder_config(**SIZES, **GEMMAS, family="gemma2", attention_cap=0.7, logit_cap=2.0),
    "gemma3_text": decoder_config(
        **SIZES, **GEMMAS, family="gemma3_text", qk_norm=True, local_rope_theta=100.0, rope_theta=1e6
    ),
    "olmo2": decoder_config(**SIZES, **OLMO, family="olmo2", norms="post"),
    "olmo3": decoder_config(
        **SIZES, **OLMO, family="olmo3", norms="post", windows=(6, None), rope_theta=5e5, local_rope_theta=5e5
    ),
    "exaone4": decoder_config(
        **SIZES, family="exaone4", norms="post", qk_norm=True, windows=(6, None), rotates=(True, False)
    ),
    "ministral3": decoder_config(
        **SIZES, family="ministral3", rope_scaling=RopeScaling("yarn", 4.0, 1.0, 32.0, original=8), query_growth=0.3
    ),
    "granite": decoder_config(
        **SIZES, family="granite", embed_scale=2.0, residual_scale=0.5, attention_scale=0.2, logit_divisor=3.0
    ),
    "phi3": decoder_config(**SIZES | {"embed": 128}, family="phi3"),
    "smollm3": decoder_config(**SIZES | {"embed": 128}, family="smollm3", rotates=(True, False)),
    "qwen3_moe": decoder_config(**SIZES, family="qwen3_moe", qk_norm=True, experts=Experts(4, 2, 16)),
    "olmoe": decoder_config(
        **NEW | {"embed": 128}, **OLMO, family="olmoe", norm_eps=1e-5, experts=Experts(4, 2, 32, normalized=False)
    ),
    "qwen2_moe": decoder_config(
        **SIZES | {"embed": 128},
        family="qwen2_moe",
        attention_bias=True,
        experts=Experts(4, 2, 32, shared=32, shared_weighted=True, normalized=False),
    ),
    "minimax_m2": decoder_config(
        **NEW, **OLMO, family="minimax_m2", rotary_part=16, experts=Experts(4, 2, 32, scoring="sigmoid", biased=True)
    ),
    "ernie4_5_moe": decoder_config(
        **SIZES,
        family="ernie4_5_moe",
        rotary_pairs=True,
        experts=Experts(4, 2, 32, biased=True, shared=32, dense=(0,), wide=True),
    ),
    "qwen3_moe dense tied": decoder_config(
        **SIZES, family="qwen3_moe", qk_norm=True, tied=True, experts=Experts(4, 2, 32, dense=(1,), normalized=False)
    ),
    "mixtral": decoder_config(**SIZES, family="mixtral", experts=Experts(4, 2, 48)),
    "glm4_moe": decoder_config(**SIZES, family="glm4_moe", qk_norm=True, rotary_part=16, experts=SIGMOID),
    "gpt_oss": decoder_config(
        **SIZES | {"mlp": 64},
        family="gpt_oss",
        attention_sinks=True,
        attention_bias=True,
        output_bias=True,
        windows=(6, None),
        norm_eps=1e-5,
        experts=CLAMPED,
        rope_scaling=RopeScaling("yarn", 8.0, 1.0, 32.0, original=32, truncate=False),
    ),
    "deepseek_v2": decoder_config(
        **MLA,
        family="deepseek_v2",
        latent=LatentSizes(512, None, 32, 64, 32),
        experts=Experts(8, 3, 32, best_of_group=1, normalized=False, **GROUPS),
    ),
    "deepseek_v3": decoder_config(
        **MLA,
        family="deepseek_v3",
        latent=LatentSizes(512, 24, 32, 64, 32),
        rope_scaling=YARN,
        attention_scale=96**-0.5 * YARN.sharpness,
        experts=SIGMOID,
    ),
}
GPT, DEEPSEEK, MOE = FAMILIES["gpt_oss"], FAMILIES["deepseek_v3"], FAMILIES["qwen3_moe"]
WRONG = {
    "sizes of latent attention": (
        with_fields(DEEPSEEK, latent=LatentSizes(24, 20, 32, 64, 32)),
        "latent.kv_rank is 24 and latent.rope 64; vLLM's latent attention on a CPU takes 512 and 64",
    ),
    "halves": (
        with_fields(DEEPSEEK, latent=dataclasses.replace(DEEPSEEK.attention.latent, interleaved=False)),
        "latent.interleaved is False",
    ),
    "one mscale": (
        with_fields(DEEPSEEK, rope_scaling=dataclasses.replace(YARN, mscale=0.0)),
        "takes truncate, and both of mscale or neither",
    ),
    "no yarn": (with_fields(GPT, rope_scaling=None), "rope_scaling is None; vLLM's gpt_oss takes that of kind 'yarn'"),
    "gate": (
        with_fields(GPT, experts=dataclasses.replace(CLAMPED, clamped=ClampedGate(limit=5.0))),
        "experts.clamped is ClampedGate.*5.0.*; vLLM's gpt_oss takes ClampedGate.*7.0",
    ),
    "windows of gpt_oss": (
        with_fields(GPT, windows=(None, 6)),
        r"attention windows are \(None, 6\); vLLM's gpt_oss has one window on every other layer",
    ),
    "tied": (with_fields(GPT, tied=True), "the model has tied=True, with which vLLM's gpt_oss has not been tried"),
    "experts' sizes": (
        with_fields(GPT, mlp=48, experts=dataclasses.replace(CLAMPED, mlp=48)),
        "experts.mlp is 48; vLLM's gpt_oss on a CPU takes multiples of 32",
    ),
    "embedding": (with_fields(MOE, embed=48), "embed is 48; vLLM's experts on a CPU take multiples of 32"),
    "bias": (
        with_fields(FAMILIES["ernie4_5"], attention_bias=True, output_bias=True),
        "has attention_bias=True, with which vLLM's ernie4_5 has not",
    ),
    "heads": (with_fields(FAMILIES["olmoe"], embed=64), "heads=4 of size 32 do not make embed=64, as vLLM's olmoe"),
    "norm": (with_fields(FAMILIES["olmoe"], norm_eps=1e-6), "has norm_eps=1e-06, with which vLLM's olmoe has not"),
    "window": (with_fields(MOE, windows=(6, 6)), r"has windows=\(6, 6\), with which vLLM's qwen3_moe has not"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_vllm_does_not_compute_is_refused_by_name(name):
    config, message = WRONG[name]
    with pytest.raises(ModelError, match=message):
        check_vllm(decoder_model(config), "cpu", torch.float32)


def test_pages_of_latent_attention_have_16_tokens_of_one_vector():
    assert vllm_page(decoder_model(DEEPSEEK), "cpu", torch.float32) == (16, 16 * 2 * 576 * 4)
    assert vllm_page(decoder_model(GPT), "cpu", torch.float32) == (128, 128 * 2 * 2 * 2 * 32 * 4)


@pytest.mark.parametrize("name", FAMILIES)
def test_weights_are_read_back_but_those_of_experts(name):
    config = FAMILIES[name]
    params = weights(config)
    held = fused(config, params)
    if config.source.family == "gpt_oss":
        held = {key.replace("self_attn", "attn").replace("embed_tokens", "embedding"): x for key, x in held.items()}
    model = decoder_model(config)
    again = dict(unfused(model, held.get))
    names = names_of(model)
    for leaf, x in trees.named(params):
        there, shape = names[leaf]
        if ".experts." in there:
            assert again[there] is None
        else:
            assert torch.equal(again[there], x.reshape(shape)), there


def test_norms_that_tensor_ranks_split_are_not_read_back():
    config = FAMILIES["minimax_m2"]
    whole = fused(config, weights(config))
    held = {name: x[: len(x) // 2] if name.endswith("q_norm.weight") else x for name, x in whole.items()}
    read = {name.split(".")[-2] for name, x in unfused(decoder_model(config), held.get, tensor=2) if x is not None}
    assert {name for name in read if name.endswith("norm")} == {
        "norm",
        "input_layernorm",
        "post_attention_layernorm",
        "k_norm",
    }


def test_experts_go_in_one_by_one():
    model, params = decoder_model(GPT), weights(GPT)
    names = names_of(model)
    sinks = {}
    given = {names[name][0]: x.reshape(names[name][1]) for name, x in trees.named(params)}
    loaded = dict(as_loaded(model, given.items(), sinks))
    mlp = params["layers"][1]["mlp"]
    gate_up = loaded["model.layers.1.mlp.experts.3.w13_weight"]
    assert gate_up.shape == (32, 128)
    assert torch.equal(gate_up[:, ::2], mlp["expert_gate"][3].T) and torch.equal(
        gate_up[:, 1::2], mlp["expert_up"][3].T
    )
    assert torch.equal(loaded["model.layers.1.mlp.experts.2.w2_weight"], mlp["expert_down"][2].T)
    assert torch.equal(loaded["model.layers.1.mlp.experts.2.w2_bias"], mlp["expert_down_bias"][2])
    assert sorted(sinks) == [f"model.layers.{i}.self_attn.sinks" for i in range(2)]


def biased_weights(config, dtype=torch.float32, seed=0):
    """Random weights, those too that begin as zeros or ones: biases, by which experts are chosen too, and sinks."""
    generator = torch.Generator().manual_seed(seed + 7)

    def moved(name, x):
        if not name.endswith(("_bias", "sinks", "norm")):
            return x
        return x + 0.3 * torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x.dtype)

    wide = weights(config, torch.float64, seed)
    return trees.map(lambda x: x.to(dtype), trees.map_named(moved, wide))


@needs_vllm
@pytest.mark.parametrize("name", FAMILIES)
def test_it_draws_what_the_native_engine_draws(name):
    assert_draws_as_native(FAMILIES[name], biased_weights)


SPLIT = (  # what ranks split in ways of their own, beside heads: norms, shared experts, sinks, latent attention
    "olmo2",
    "gpt_oss",
    "deepseek_v3",
)


@needs_vllm
@pytest.mark.gloo
def test_two_ranks_draw_what_the_native_engine_draws():
    def program(mesh):
        sampling = Sampling(max_new_tokens=12, greedy=True)
        for config in map(FAMILIES.get, SPLIT):
            model = decoder_model(config)
            engine, peer = KINDS["vllm"].make(model, mesh, torch.float32), native_engine(model)
            for seed in (0, 1):
                params = biased_weights(config, seed=seed)
                done = completed(load(engine, params), PROMPTS, sampling)
                assert_same(done, completed(load(peer, params), PROMPTS, sampling), 2e-5)
            read = {name: x for name, x in engine.held_weights() if x is not None}
            for name, x in shards_of(config, params, mesh.rank).items():
                there = names_of(model)[name][0]
                assert (there in read) != (".experts." in there), there
                assert there not in read or torch.equal(read[there].reshape(x.shape), x), there
        return len(SPLIT)

    assert launch(program, parse("tp2"), "cpu") == len(SPLIT)


@needs_vllm
@pytest.mark.parametrize(
    ("name", "read", "unread"),
    [("gpt_oss", "1/attn/sinks", "1/mlp/expert_up"), ("deepseek_v3", "1/attn/q_b", "1/mlp/expert_up")],
)
def test_the_certificate_reads_what_it_can_and_the_probe_sees_the_rest(name, read, unread):
    config = FAMILIES[name]
    model, params = decoder_model(config), biased_weights(config)
    placed = place(model, SINGLE, STORED, COMPUTE, torch.float32, model.layer)
    engine = load(KINDS["vllm"].make(model, SINGLE, torch.float32), params)
    metrics = certify(placed, params, engine, 7, probes=True)
    assert metrics["sync/verified"] == 0.5 and metrics["sync/probe_gap"] < 1e-4
    for part, probes, message in ((read, False, f"{read} differs"), (unread, True, "log-probabilities")):
        load(engine, trees.map_named(lambda leaf, x, part=part: x * 2 if leaf.endswith(part) else x, params))
        with pytest.raises(SyncError, match=message):
            certify(placed, params, engine, 7, probes=probes)
