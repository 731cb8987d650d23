"""The config.json of ERNIE 4.5: neighbours as pairs of rotary positions, biases; and experts beside a shared one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from funrl.models.decoder.config import Config
from funrl.models.decoder.routing import Experts
from funrl.models.errors import ModelError
from funrl.models.huggingface.family_fields import experts_of

ERNIE_SUPPORTED = {"sliding_window": (None,), "layer_types": (None,)}
ERNIE_EXPERT_NAMES = {
    "router_bias": "mlp.moe_statics.e_score_correction_bias",
    "shared_gate": "mlp.shared_experts.gate_proj.weight",
    "shared_up": "mlp.shared_experts.up_proj.weight",
    "shared_down": "mlp.shared_experts.down_proj.weight",
}


def read_ernie4_5(got: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of `Config` of a config.json with all its defaults."""
    bias = bool(got["use_bias"])
    return {"rotary_pairs": True, "attention_bias": bias, "output_bias": bias, "mlp_bias": bias}


def write_ernie4_5(config: Config) -> dict[str, Any]:
    """Fields of config.json that only this family has."""
    return {"use_bias": config.attention.bias}


def read_ernie4_5_moe(got: Mapping[str, Any]) -> dict[str, Any]:
    """The same of the family with experts.

    Raises:
      ModelError: no layer has any.
    """
    layers = range(got["num_hidden_layers"])
    last = len(layers) - 1 if got["moe_layer_end_index"] == -1 else got["moe_layer_end_index"]
    some = range(got["moe_layer_start_index"], last + 1)
    dense = tuple(i for i in layers if i not in some or (i + 1) % got["moe_layer_interval"])
    if len(dense) == len(layers):
        raise ModelError(f"no layer has experts: moe_layer_start_index is {some.start}, moe_layer_end_index {last}")
    experts = Experts(
        count=got["moe_num_experts"],
        per_token=got["moe_k"],
        mlp=got["moe_intermediate_size"],
        dense=dense,
        biased=True,
        shared=got["moe_num_shared_experts"] * got["moe_intermediate_size"],
        wide=True,
    )
    return read_ernie4_5(got) | {"experts": experts}


def write_ernie4_5_moe(config: Config) -> dict[str, Any]:
    """Fields of config.json that only this family has; layers with experts are every n-th of a range."""
    experts = experts_of(config)
    layers = [i for i in range(config.layers) if i not in experts.dense]
    step = layers[1] - layers[0] if len(layers) > 1 else layers[0] + 1
    return {
        "use_bias": False,
        "moe_num_experts": experts.count,
        "moe_k": experts.per_token,
        "moe_intermediate_size": experts.mlp,
        "moe_num_shared_experts": experts.shared // experts.mlp,
        "moe_layer_start_index": layers[0],
        "moe_layer_end_index": layers[-1],
        "moe_layer_interval": step,
    }
