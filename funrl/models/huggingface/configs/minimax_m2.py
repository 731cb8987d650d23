"""The config.json of MiniMax-M2: Mixtral's experts chosen by sigmoid + bias, and norms over all heads of q and k."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from funrl.models.decoder.config import Config
from funrl.models.huggingface.family_fields import experts_of, read_experts

MINIMAX_SUPPORTED = {
    "sliding_window": (None,),
    "layer_types": (None,),
    "attention_bias": (False, None),
    "use_qk_norm": (True, None),
    "qk_norm_type": ("per_layer", None),
    "use_routing_bias": (True, None),
    "scoring_func": ("sigmoid", None),
    "shared_intermediate_size": (0, None),
}


def read_minimax_m2(got: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of `Config` of a config.json with all its defaults."""
    experts = read_experts(got, "intermediate_size", True)
    fields = {
        "qk_norm": True,
        "qk_norm_over": "projection",
        "experts": replace(experts, scoring="sigmoid", biased=True),
    }
    rotated = got.get("rotary_dim")  # its name before rope_parameters had a place for it
    if rotated is None or "partial_rotary_factor" in (got.get("rope_parameters") or got):
        return fields
    return fields | {"rotary_part": None if rotated == got["head_dim"] else rotated}


def write_minimax_m2(config: Config) -> dict[str, Any]:
    """Fields of config.json that only this family has."""
    experts = experts_of(config)
    return {"num_local_experts": experts.count, "num_experts_per_tok": experts.per_token}
