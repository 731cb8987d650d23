"""The native engine over families that the compiled step does not take: transformers' tokens, the trainer's numbers."""

import pytest
import torch
from family_configs import DENSE
from selection import quick
from small_engines import PROMPTS, SMALL, assert_same, completed, engine_of, load, weights

from funrl.batch import Batch
from funrl.models import decoder_config, decoder_model, place
from funrl.models.decoder.latent_attention import LatentSizes
from funrl.models.decoder.layers import RopeScaling
from funrl.models.decoder.routing import ClampedGate, Experts
from funrl.models.huggingface.config import config_from_hf
from funrl.rollout.hf_engine import hf_engine
from funrl.rollout.native.backends import PackedBackend, TorchBackend
from funrl.rollout.sampling_parameters import Sampling

GEMMA = {
    "norms": "sandwich",
    "norm_offset": 1.0,
    "activation": "gelu",
    "embed_scale": 32**0.5,
    "attention_scale": 9**-0.5,
    "windows": (6, None),
    "tied": True,
}
GEMMA4_TEXT = {
    "model_type": "gemma4_text",
    "vocab_size": 40,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "global_head_dim": 12,
    "sliding_window": 6,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "num_kv_shared_layers": 2,
    "use_double_wide_mlp": True,
    "hidden_size_per_layer_input": 6,
    "vocab_size_per_layer_input": 40,
    "max_position_embeddings": 128,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
GEMMA4_EXPERTS = GEMMA4_TEXT | {
    "num_kv_shared_layers": 0,
    "hidden_size_per_layer_input": 0,
    "attention_k_eq_v": True,
    "enable_moe_block": True,
    "num_global_key_value_heads": 1,
    "num_experts": 4,
    "top_k_experts": 2,
    "moe_intermediate_size": 16,
}
CONFIGS = {
    "gemma2": decoder_config(**SMALL, **GEMMA, family="gemma2", attention_cap=0.7, logit_cap=2.0),
    "gemma3": decoder_config(
        **SMALL, **GEMMA, family="gemma3_text", qk_norm=True, local_rope_theta=100.0, rope_theta=1e6
    ),
    "olmo2": decoder_config(**SMALL, family="olmo2", norms="post", qk_norm=True, qk_norm_over="projection"),
    "smollm3": decoder_config(**SMALL, family="smollm3", rotates=(True, False)),
    "granite": decoder_config(
        **SMALL, family="granite", embed_scale=2.0, residual_scale=0.5, attention_scale=0.2, logit_divisor=3.0
    ),
    "phi3": decoder_config(**SMALL, family="phi3", windows=(6, 6)),
    "gemma": decoder_config(
        **SMALL, family="gemma", norm_offset=1.0, activation="gelu", embed_scale=32**0.5, tied=True
    ),
    "olmo3": decoder_config(
        **SMALL,
        family="olmo3",
        norms="post",
        qk_norm=True,
        qk_norm_over="projection",
        windows=(6, None),
        rope_theta=5e5,
        local_rope_theta=5e5,
    ),
    "exaone4": decoder_config(
        **SMALL, family="exaone4", norms="post", qk_norm=True, windows=(6, None), rotates=(True, False)
    ),
    "ernie4_5": decoder_config(
        **SMALL, family="ernie4_5", rotary_pairs=True, attention_bias=True, output_bias=True, mlp_bias=True
    ),
    "ministral3": decoder_config(
        **SMALL, family="ministral3", rope_scaling=RopeScaling("yarn", 4.0, 1.0, 32.0, original=8), query_growth=0.3
    ),
    "mistral": decoder_config(**SMALL | {"head": 16}, family="mistral", windows=(6, 6)),
    "gemma4": config_from_hf(GEMMA4_TEXT),
}

TINY = {
    "vocab_size": 40,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
BY_HAND = {config.source.family for config in CONFIGS.values()}
FURTHER = {  # families that are switches, by the configurations that are compared with transformers
    name: config_from_hf(TINY | raw) for name, raw in DENSE.items() if raw["model_type"] not in BY_HAND
}

EXPERTS = {
    "qwen3_moe": decoder_config(
        **SMALL, family="qwen3_moe", qk_norm=True, experts=Experts(count=4, per_token=2, mlp=16)
    ),
    "deepseek_v3": decoder_config(
        **SMALL | {"kv_heads": SMALL["heads"], "head": 12},
        family="deepseek_v3",
        latent=LatentSizes(24, 20, 8, 4, 6),
        experts=Experts(8, 3, 16, scoring="sigmoid", biased=True, groups=4, chosen_groups=2, scale=2.5, shared=16),
    ),
    "gpt_oss": decoder_config(
        **SMALL,
        family="gpt_oss",
        attention_sinks=True,
        attention_bias=True,
        output_bias=True,
        windows=(6, None),
        experts=Experts(4, 2, 16, clamped=ClampedGate()),
    ),
    "gemma4 experts": config_from_hf(GEMMA4_EXPERTS),
}


OLDER = ("gemma2", "gemma3", "olmo2", "smollm3", "granite", "phi3", "mistral")


@pytest.mark.parametrize("name", quick(CONFIGS | FURTHER, (*OLDER, "ministral3")))
def test_greedy_completions_are_those_of_transformers(name):
    config = (CONFIGS | FURTHER)[name]
    engine, how = engine_of(config), Sampling(greedy=True, max_new_tokens=16)
    assert name in FURTHER or isinstance(
        engine._backend, (PackedBackend if name in ("phi3", "mistral") else TorchBackend)
    )
    peer = load(hf_engine(decoder_model(config)), weights(config))
    assert_same(completed(engine, PROMPTS, how), completed(peer, PROMPTS, how), 2e-5)


@pytest.mark.parametrize(
    "name", quick(["gemma2", "granite", "deepseek_v3", "gpt_oss", "gemma4", "gemma4 experts"], ["gemma2", "gpt_oss"])
)
def test_log_probabilities_are_the_trainers(name):
    config, how = (CONFIGS | EXPERTS)[name], Sampling(temperature=0.7, max_new_tokens=20)
    placed, params = place(decoder_model(config), dtype=torch.float64), weights(config, torch.float64)
    done = completed(engine_of(config, torch.float64), PROMPTS, how)
    assert_same(completed(engine_of(config, torch.float64, static=True), PROMPTS, how), done, 1e-12)
    for number, completion in enumerate(done):
        prompt = PROMPTS[number]
        batch = Batch(tokens=torch.tensor([[*prompt, *completion.tokens.tolist()]]), mask=None)
        for temperature, got in ((0.7, completion.sampling_logp), (1.0, completion.raw_logp)):
            logp = placed.token_scores(params, batch, temperature=temperature).logp[0, len(prompt) :]
            assert (logp - got).abs().max() < 1e-10
