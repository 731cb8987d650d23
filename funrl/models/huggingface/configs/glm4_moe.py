"""The config.json of GLM-4.5 (glm4_moe): DeepSeek's experts beside plain attention with partial rotary positions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from funrl.models.decoder.config import Config
from funrl.models.huggingface.configs.deepseek import read_shared_experts, write_shared_experts
from funrl.models.huggingface.family_fields import experts_of

GLM_MOE_SUPPORTED = {"sliding_window": (None,), "layer_types": (None,)}


def read_glm4_moe(got: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of `Config` of a config.json with all its defaults."""
    groups: dict[str, Any] = {"groups": got["n_group"] or 1, "chosen_groups": got["topk_group"] or 1}
    normalized = bool(got["norm_topk_prob"])
    return {
        "attention_bias": bool(got.get("attention_bias", False)),
        "qk_norm": bool(got["use_qk_norm"]),
        "experts": read_shared_experts(got, normalized=normalized, scoring="sigmoid", biased=True, **groups),
    }


def write_glm4_moe(config: Config) -> dict[str, Any]:
    """Fields of config.json that only this family has."""
    return write_shared_experts(experts_of(config)) | {
        "attention_bias": config.attention.bias,
        "use_qk_norm": config.attention.qk_norm is not None,
    }
