"""The config.json of DeepSeek-V2 and DeepSeek-V3: latent attention, and shared experts beside those of a router."""

from __future__ import annotations

from funrl.models.decoder.config import Config
from funrl.models.decoder.latent_attention import LatentSizes
from funrl.models.errors import ModelError
from funrl.models.huggingface.configs.hf_family import LAYERS, ConfigFields, HFFamily
from funrl.models.huggingface.family_fields import experts_of

_LATENT = {
    "kv_rank": "kv_lora_rank",
    "q_rank": "q_lora_rank",
    "nope": "qk_nope_head_dim",
    "rope": "qk_rope_head_dim",
    "value": "v_head_dim",
}
SHARED_EXPERTS = {
    "count": "n_routed_experts",
    "per_token": "num_experts_per_tok",
    "mlp": "moe_intermediate_size",
    "normalized": "norm_topk_prob",
    "scale": "routed_scaling_factor",
    "groups": "n_group",
    "chosen_groups": "topk_group",
    "first_dense": "first_k_dense_replace",
    "shared_experts": "n_shared_experts",
}
SIGMOID_EXPERTS = {"scoring": "sigmoid", "biased": True, "wide": True}
DEEPSEEK_EXPERT_NAMES = {
    "router_bias": "mlp.gate.e_score_correction_bias",
    "shared_gate": "mlp.shared_experts.gate_proj.weight",
    "shared_up": "mlp.shared_experts.up_proj.weight",
    "shared_down": "mlp.shared_experts.down_proj.weight",
}
_NAMES = {
    "q_a": "self_attn.q_a_proj.weight",
    "q_a_norm": "self_attn.q_a_layernorm.weight",
    "q_b": "self_attn.q_b_proj.weight",
    "kv_a": "self_attn.kv_a_proj_with_mqa.weight",
    "kv_a_norm": "self_attn.kv_a_layernorm.weight",
    "kv_b": "self_attn.kv_b_proj.weight",
} | DEEPSEEK_EXPERT_NAMES


def _read(got: ConfigFields) -> ConfigFields:
    """ConfigFields of `Config`. Raises: ModelError, keys and values have other heads than queries."""
    heads = got["num_attention_heads"]
    if got["num_key_value_heads"] != heads:
        raise ModelError(
            f"num_key_value_heads is {got['num_key_value_heads']}, latent attention has one for each of the {heads} "
            "heads"
        )
    sizes = {ours: got[theirs] for ours, theirs in _LATENT.items()}
    latent = LatentSizes(**sizes, interleaved=bool(got.get("rope_interleave", True)))
    return {"head": latent.nope + latent.rope, "latent": latent}


def _read_v2(got: ConfigFields) -> ConfigFields:
    grouped = got["topk_method"] == "group_limited_greedy"
    return {**_read(got), "experts": {} if grouped else {"groups": 1, "chosen_groups": 1}}


def _write(config: Config) -> ConfigFields:
    """ConfigFields of config.json. Raises: ModelError, attention is not latent."""
    latent = config.attention.latent
    experts = experts_of(config)
    if latent is None:
        raise ModelError(f"a {config.source.family} config.json needs latent, which is None")
    greedy = "group_limited_greedy" if experts.groups > 1 else "greedy"
    return {theirs: getattr(latent, ours) for ours, theirs in _LATENT.items()} | {
        "head_dim": latent.rope,
        "attention_bias": False,
        "rope_interleave": latent.interleaved,
        "scoring_func": experts.scoring,
        "topk_method": greedy if experts.scoring == "softmax" else "noaux_tc",
        "num_nextn_predict_layers": 0,
    }


_SUPPORTED = {"attention_bias": (False, None), "moe_layer_freq": (1, None)}
DEEPSEEK_V3: HFFamily = HFFamily(
    defaults={"num_key_value_heads": None},
    supported=_SUPPORTED | {"scoring_func": ("sigmoid", None), "topk_method": ("noaux_tc", None)},
    experts=SHARED_EXPERTS,
    expert_values=SIGMOID_EXPERTS,
    read=_read,
    write=_write,
    rope_types=("default", "yarn"),
    names=_NAMES,
    further_layers=LAYERS,
)
DEEPSEEK_V2: HFFamily = DEEPSEEK_V3._replace(
    supported=_SUPPORTED
    | {
        "scoring_func": ("softmax", None),
        "topk_method": ("greedy", "group_limited_greedy"),
        "norm_topk_prob": (False, None),  # which transformers does not apply
    },
    expert_values={"normalized": False, "best_of_group": 1, "wide": True},
    read=_read_v2,
)
