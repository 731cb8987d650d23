"""The config.json of Qwen2-MoE: experts beside a shared one, which each token weighs, and a bias on q, k, v."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from funrl.models.decoder.config import Config
from funrl.models.huggingface.family_fields import (
    experts_of,
    layer_types,
    read_experts,
    write_window,
)

SHARED_EXPERT_NAMES = {
    "shared_gate": "mlp.shared_expert.gate_proj.weight",
    "shared_up": "mlp.shared_expert.up_proj.weight",
    "shared_down": "mlp.shared_expert.down_proj.weight",
    "shared_router": "mlp.shared_expert_gate.weight",
}


def read_qwen2_moe(got: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of `Config` of a config.json with all its defaults."""
    experts = read_experts(got, "moe_intermediate_size", bool(got["norm_topk_prob"]))
    shared = got["shared_expert_intermediate_size"]
    return {
        "attention_bias": bool(got["qkv_bias"]),
        "experts": replace(experts, shared=shared, shared_weighted=True),
    }


def write_qwen2_moe(config: Config) -> dict[str, Any]:
    """Fields of config.json that only this family has."""
    experts = experts_of(config)
    windows = {"use_sliding_window": config.attention.windows is not None, "layer_types": layer_types(config)}
    return (
        (write_window(config) if config.attention.windows is not None else {})
        | windows
        | {
            "qkv_bias": config.attention.bias,
            "num_experts": experts.count,
            "num_experts_per_tok": experts.per_token,
            "moe_intermediate_size": experts.mlp,
            "shared_expert_intermediate_size": experts.shared,
            "norm_topk_prob": experts.normalized,
            "mlp_only_layers": list(experts.dense),
            "decoder_sparse_step": 1,
        }
    )
