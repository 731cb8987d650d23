"""The config.json of DeepSeek-V2 and DeepSeek-V3: latent attention, and shared experts beside those of a router."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from funrl.models.decoder.config import Config
from funrl.models.decoder.latent_attention import LatentSizes
from funrl.models.decoder.routing import Experts
from funrl.models.errors import ModelError

_SUPPORTED = {
    "sliding_window": (None,),
    "layer_types": (None,),
    "attention_bias": (False, None),
    "moe_layer_freq": (1, None),
}
V2_SUPPORTED = _SUPPORTED | {
    "scoring_func": ("softmax", None),
    "topk_method": ("greedy", "group_limited_greedy"),
    "norm_topk_prob": (False, None),  # which transformers does not apply
}
V3_SUPPORTED = _SUPPORTED | {"scoring_func": ("sigmoid", None), "topk_method": ("noaux_tc", None)}
DEEPSEEK_EXPERT_NAMES = {
    "router_bias": "mlp.gate.e_score_correction_bias",
    "shared_gate": "mlp.shared_experts.gate_proj.weight",
    "shared_up": "mlp.shared_experts.up_proj.weight",
    "shared_down": "mlp.shared_experts.down_proj.weight",
}
WEIGHT_NAMES = {
    "q_a": "self_attn.q_a_proj.weight",
    "q_a_norm": "self_attn.q_a_layernorm.weight",
    "q_b": "self_attn.q_b_proj.weight",
    "kv_a": "self_attn.kv_a_proj_with_mqa.weight",
    "kv_a_norm": "self_attn.kv_a_layernorm.weight",
    "kv_b": "self_attn.kv_b_proj.weight",
} | DEEPSEEK_EXPERT_NAMES


def read_deepseek_v2(got: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of `Config` of a config.json with all its defaults.

    Raises:
      ModelError: keys and values have other heads than queries, head_dim is another size than that of the part that
        rotates, or it does not say how many experts a token takes.
    """
    grouped = got["topk_method"] == "group_limited_greedy"
    groups, chosen = (got["n_group"] or 1, got["topk_group"] or 1) if grouped else (1, 1)
    return _latent(got) | {
        "experts": read_shared_experts(got, groups=groups, chosen_groups=chosen, best_of_group=1, normalized=False)
    }


def read_deepseek_v3(got: Mapping[str, Any]) -> dict[str, Any]:
    """The same of DeepSeek-V3."""
    groups = got["n_group"] or 1
    chosen = got["topk_group"] or 1
    options: dict[str, Any] = {"groups": groups, "chosen_groups": chosen, "scoring": "sigmoid", "biased": True}
    return _latent(got) | {"experts": read_shared_experts(got, normalized=bool(got["norm_topk_prob"]), **options)}


def _latent(got: Mapping[str, Any]) -> dict[str, Any]:
    heads = got["num_attention_heads"]
    kv_heads = got.get("num_key_value_heads")
    if kv_heads not in (None, heads):
        raise ModelError(f"num_key_value_heads is {kv_heads}, latent attention has one for each of the {heads} heads")
    if got.get("head_dim") not in (None, got["qk_rope_head_dim"]):  # transformers takes rotary frequencies by it
        raise ModelError(
            f"head_dim is {got['head_dim']}, supported is qk_rope_head_dim, {got['qk_rope_head_dim']}, the size of the "
            "part of a head that rotates"
        )
    latent = LatentSizes(
        kv_rank=got["kv_lora_rank"],
        q_rank=got["q_lora_rank"],
        nope=got["qk_nope_head_dim"],
        rope=got["qk_rope_head_dim"],
        value=got["v_head_dim"],
        interleaved=bool(got.get("rope_interleave", True)),
    )
    return {"head": latent.nope + latent.rope, "latent": latent}


def read_shared_experts(got: Mapping[str, Any], **how: Any) -> Experts:
    """Experts beside a shared one in all layers but the first, of a config.json with DeepSeek's names of sizes.

    Args:
      how: further fields of `Experts`.

    Raises:
      ModelError: it does not say how many experts a token takes.
    """
    if got.get("num_experts_per_tok") is None:
        raise ModelError("num_experts_per_tok is None, it must be a whole number of at least 1")
    return Experts(
        count=got["n_routed_experts"],
        per_token=got["num_experts_per_tok"],
        mlp=got["moe_intermediate_size"],
        dense=tuple(range(min(got["first_k_dense_replace"], got["num_hidden_layers"]))),
        scale=float(got["routed_scaling_factor"]),
        shared=got["n_shared_experts"] * got["moe_intermediate_size"],
        wide=True,
        **how,
    )


def write_deepseek(config: Config) -> dict[str, Any]:
    """Fields of config.json that only these families have, or read otherwise.

    Raises:
      ModelError: it has no name for a part of the model.
    """
    latent = config.attention.latent
    experts = config.mlp.experts
    if latent is None or experts is None:
        missing = "latent" if latent is None else "experts"
        raise ModelError(f"a {config.source.family} config.json needs {missing}, which is None")
    softmax = experts.scoring == "softmax"
    return write_shared_experts(experts) | {
        "head_dim": latent.rope,
        "attention_bias": False,
        "kv_lora_rank": latent.kv_rank,
        "q_lora_rank": latent.q_rank,
        "qk_nope_head_dim": latent.nope,
        "qk_rope_head_dim": latent.rope,
        "v_head_dim": latent.value,
        "rope_interleave": latent.interleaved,
        "scoring_func": experts.scoring,
        "topk_method": "noaux_tc" if not softmax else "group_limited_greedy" if experts.groups > 1 else "greedy",
    }


def write_shared_experts(experts: Experts) -> dict[str, Any]:
    """Fields of config.json for what `read_shared_experts` reads."""
    return {
        "n_routed_experts": experts.count,
        "n_shared_experts": experts.shared // experts.mlp,
        "num_experts_per_tok": experts.per_token,
        "moe_intermediate_size": experts.mlp,
        "norm_topk_prob": experts.normalized,
        "routed_scaling_factor": experts.scale,
        "n_group": experts.groups,
        "topk_group": experts.chosen_groups,
        "first_k_dense_replace": len(experts.dense),
        "num_nextn_predict_layers": 0,
    }
