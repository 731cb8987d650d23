"""The config.json of Qwen3-Next: gated delta nets between layers of gated attention, and a gated shared expert."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from funrl.models.decoder.config import Config
from funrl.models.decoder.gated_delta_net import GatedDeltaNet
from funrl.models.huggingface.configs.qwen2_moe import SHARED_EXPERT_NAMES
from funrl.models.huggingface.family_fields import FULL, experts_of

LINEAR = "linear_attention"
DELTA_NET_DEFAULTS = {"partial_rotary_factor": 0.25}
DELTA_NET_NAMES = {
    "a_log": "linear_attn.A_log",
    "dt_bias": "linear_attn.dt_bias",
    "z_norm": "linear_attn.norm.weight",
    "out": "linear_attn.out_proj.weight",
} | {f"conv_{part}": f"linear_attn.conv1d.{part}" for part in "qkv"}
NEXT_WEIGHT_NAMES = {
    "qkvz": "linear_attn.in_proj_qkvz.weight",
    "ba": "linear_attn.in_proj_ba.weight",
    **DELTA_NET_NAMES,
    **SHARED_EXPERT_NAMES,
}
NEXT_FUSED = {"linear_attn.conv1d.weight": [f"linear_attn.conv1d.{part}" for part in "qkv"]}


def read_qwen3_next(fields: Mapping[str, Any], qwen3_moe: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of `Config` of a config.json with all its defaults.

    Args:
      fields: of the config.json.
      qwen3_moe: those of `Config` that Qwen3-MoE has of it.

    Raises:
      ModelError: a kind of layer is unknown.
    """
    shared = fields["shared_expert_intermediate_size"]
    experts = replace(qwen3_moe["experts"], shared=shared, shared_weighted=True)
    return dict(qwen3_moe) | read_delta_nets(fields, joined=True) | {"experts": experts}


def read_delta_nets(fields: Mapping[str, Any], joined: bool) -> dict[str, Any]:
    """Fields of `Config` of models with gated delta nets between layers of gated attention.

    Args:
      fields: of a config.json with all its defaults.
      joined: as in `GatedDeltaNet`.

    Raises:
      ModelError: a kind of layer is unknown.
    """
    mixer = GatedDeltaNet(
        key_heads=fields["linear_num_key_heads"],
        value_heads=fields["linear_num_value_heads"],
        key=fields["linear_key_head_dim"],
        value=fields["linear_value_head_dim"],
        width=fields["linear_conv_kernel_dim"],
        norm_eps=float(fields["rms_norm_eps"]),
        joined=joined,
    )
    return {
        "norm_offset": 1.0,
        "output_gate": True,
        "mixers": tuple(mixer if kind == LINEAR else None for kind in _period(fields["layer_types"])),
    }


def write_qwen3_next(config: Config) -> dict[str, Any]:
    """Fields of config.json that only this family has.

    Raises:
      ModelError: there are no experts.
    """
    shared = experts_of(config).shared
    return write_delta_nets(config) | {"shared_expert_intermediate_size": shared}


def write_delta_nets(config: Config) -> dict[str, Any]:
    """Fields of config.json for layers that may be gated delta nets; without one, their sizes are left out."""
    mixers = [config.mixer(i) for i in range(config.layers)]
    mixer = next((mixer for mixer in mixers if isinstance(mixer, GatedDeltaNet)), None)
    kinds = {"layer_types": [LINEAR if isinstance(mixer, GatedDeltaNet) else FULL for mixer in mixers]}
    if mixer is None:
        return kinds
    return kinds | {
        "linear_num_key_heads": mixer.key_heads,
        "linear_num_value_heads": mixer.value_heads,
        "linear_key_head_dim": mixer.key,
        "linear_value_head_dim": mixer.value,
        "linear_conv_kernel_dim": mixer.width,
    }


def _period(kinds: Sequence[str]) -> Sequence[str]:
    """The shortest beginning that, repeated, gives all kinds."""
    layers = range(len(kinds))
    length = next(n for n in range(1, len(kinds) + 1) if all(kinds[i] == kinds[i % n] for i in layers))
    return kinds[:length]
