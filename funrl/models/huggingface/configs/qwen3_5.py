"""The config.json of the text part of Qwen3.5, dense or with experts, alone or beside a vision tower.

It is Qwen3-Next with the projections of gated delta nets apart. The vision tower of a directory that has one is not
read, and a saved directory has none.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from funrl.models.decoder.config import Config
from funrl.models.errors import ModelError
from funrl.models.huggingface.configs.qwen2_moe import SHARED_EXPERT_NAMES
from funrl.models.huggingface.configs.qwen3_next import (
    DELTA_NET_NAMES,
    NEXT_FUSED,
    read_delta_nets,
    write_delta_nets,
)
from funrl.models.huggingface.family_fields import experts_of, read_bias, read_experts, write_bias

QWEN3_5_NAMES = {
    **DELTA_NET_NAMES,
    **SHARED_EXPERT_NAMES,
    **{f"in_{part}": f"linear_attn.in_proj_qkv.{part}" for part in "qkv"},
    **{f"in_{part}": f"linear_attn.in_proj_{part}.weight" for part in "zba"},
}
QWEN3_5_FUSED = NEXT_FUSED | {"linear_attn.in_proj_qkv.weight": [f"linear_attn.in_proj_qkv.{part}" for part in "qkv"]}
# model_type of a model with a vision tower -> that of its text part
TEXT_PARTS = {"qwen3_5": "qwen3_5_text", "qwen3_5_moe": "qwen3_5_moe_text", "gemma4": "gemma4_text"}
# How the names of tensors of towers begin in such a model's files.
TOWER_PREFIXES = ("model.visual.", *(f"model.{part}." for part in ("vision_tower", "audio_tower")))
TOWER_PREFIXES += ("model.embed_vision.", "model.embed_audio.")
NESTED_PREFIX = "model.language_model."  # the same of the text part, which are "model." in a directory of its own


def fields_of_text_part(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """The fields of a config.json; of one with a vision tower, those of a directory of its text part.

    Raises:
      ModelError: text_config is not an object.
    """
    family = raw.get("model_type")
    if not isinstance(family, str) or family not in TEXT_PARTS:
        return raw
    text = raw.get("text_config")
    if not isinstance(text, Mapping):
        raise ModelError(f"text_config is {text!r}, it must be an object")
    outer = {name: x for name, x in raw.items() if name not in ("text_config", "vision_config", "audio_config")}
    tied = {"tie_word_embeddings": outer["tie_word_embeddings"]} if "tie_word_embeddings" in outer else {}
    return {**outer, **text, **tied, "model_type": TEXT_PARTS[family]}


def read_qwen3_5(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of `Config` of a config.json with all its defaults."""
    return read_bias(fields) | {"qk_norm": True} | read_delta_nets(fields, joined=False)


def read_qwen3_5_moe(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of `Config` of a config.json with all its defaults, with experts in every layer."""
    everywhere = {
        name: value for name, value in fields.items() if name not in ("decoder_sparse_step", "mlp_only_layers")
    }
    experts = read_experts(everywhere, "moe_intermediate_size", True)
    shared = fields["shared_expert_intermediate_size"]
    return read_qwen3_5(fields) | {"experts": replace(experts, shared=shared, shared_weighted=True)}


def write_qwen3_5(config: Config) -> dict[str, Any]:
    """Fields of config.json that only this family has."""
    return write_bias(config) | write_delta_nets(config)


def write_qwen3_5_moe(config: Config) -> dict[str, Any]:
    """Fields of config.json that only this family has, with experts."""
    experts = experts_of(config)
    return write_qwen3_5(config) | {
        "num_experts": experts.count,
        "num_experts_per_tok": experts.per_token,
        "moe_intermediate_size": experts.mlp,
        "shared_expert_intermediate_size": experts.shared,
    }
