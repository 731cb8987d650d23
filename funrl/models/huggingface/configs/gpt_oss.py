"""The config.json of gpt-oss: attention with sinks, a window on every other layer, experts with biases."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from funrl.models.decoder.config import Config
from funrl.models.decoder.routing import ClampedGate
from funrl.models.errors import ModelError
from funrl.models.huggingface.family_fields import (
    experts_of,
    read_bias,
    read_experts,
    write_bias,
    write_layer_windows,
)

GPT_OSS_DEFAULTS = {"swiglu_alpha": 1.702, "swiglu_limit": 7.0}
GPT_OSS_WEIGHT_NAMES = {
    "sinks": "self_attn.sinks",
    "router": "mlp.router.weight",
    "router_logit_bias": "mlp.router.bias",
    "expert_gate": "mlp.experts.gate_proj.rows",
    "expert_up": "mlp.experts.up_proj.rows",
    "expert_down": "mlp.experts.down_proj.rows",
    "expert_gate_bias": "mlp.experts.gate_proj_bias",
    "expert_up_bias": "mlp.experts.up_proj_bias",
    "expert_down_bias": "mlp.experts.down_proj_bias",
}
GPT_OSS_WOVEN = {
    "mlp.experts.gate_up_proj": [f"mlp.experts.{name}_proj.rows" for name in ("gate", "up")],
    "mlp.experts.gate_up_proj_bias": [f"mlp.experts.{name}_proj_bias" for name in ("gate", "up")],
    "mlp.experts.down_proj": ["mlp.experts.down_proj.rows"],
}


def read_gpt_oss(got: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of `Config` of a config.json with all its defaults.

    Raises:
      ModelError: it does not say how rotary positions are stretched.
    """
    if not (got.get("rope_parameters") or got.get("rope_scaling")):
        raise ModelError("rope_parameters is missing: gpt_oss has rotary positions that are stretched")
    gate = ClampedGate(float(got["swiglu_alpha"]), float(got["swiglu_limit"]))
    experts = replace(read_experts(got, "intermediate_size", True), clamped=gate)
    return read_bias(got) | {"attention_sinks": True, "experts": experts}


def write_gpt_oss(config: Config) -> dict[str, Any]:
    """Fields of config.json that only this family has.

    Raises:
      ModelError: its experts have another gate.
    """
    experts = experts_of(config)
    if experts.clamped is None:
        raise ModelError("a gpt_oss config.json needs experts.clamped, which is None")
    fields = write_bias(config) | write_layer_windows(config)
    if config.rope.scaling is None:
        fields["rope_parameters"] = {"rope_type": "default", "rope_theta": config.rope.theta}
    return fields | {
        "num_local_experts": experts.count,
        "num_experts_per_tok": experts.per_token,
        "swiglu_alpha": experts.clamped.alpha,
        "swiglu_limit": experts.clamped.limit,
    }
