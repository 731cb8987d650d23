"""The config.json and the names of the text part of Gemma 4: dense, with vectors of each layer, or with experts.

Layers without a window have heads of a size of their own. The last layers may attend to the keys and values of earlier
ones.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from funrl.models.decoder.config import Config
from funrl.models.decoder.dense import Dense
from funrl.models.decoder.gemma4 import DenseBesideExperts, LayerVectors, LendingAttention
from funrl.models.decoder.layers import Norm, Rope
from funrl.models.decoder.routing import Experts
from funrl.models.errors import ModelError
from funrl.models.huggingface.configs.hf_family import HFFamily
from funrl.models.huggingface.family_fields import FULL, GELU, SLIDING, layer_types

_ROTARY = {
    SLIDING: {"rope_type": "default", "rope_theta": 10000.0},
    FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
}
_OVERRIDES = ("head_dim", "num_key_value_heads")  # fields that per_layer_config may have
_DEFAULTS = {"global_head_dim": 512, "num_global_key_value_heads": None}
_SUPPORTED = {
    "hidden_act": ("silu", GELU, "gelu", None),  # not read by transformers, which goes by hidden_activation
    "hidden_activation": (GELU,),
    "use_bidirectional_attention": (None, False, "vision"),  # of pictures alone
}
_NAMES = {
    "layer_scale": "layer_scalar",
    "vector_gate": "per_layer_input_gate.weight",
    "vector_projection": "per_layer_projection.weight",
    "vector_norm": "post_per_layer_input_norm.weight",
    "router": "router.proj.weight",
    "router_scale": "router.scale",
    "expert_scale": "router.per_expert_scale",
    "dense_out_norm": "post_feedforward_layernorm_1.weight",
    "expert_norm": "pre_feedforward_layernorm_2.weight",
    "expert_out_norm": "post_feedforward_layernorm_2.weight",
    **{f"expert_{name}": f"experts.{name}_proj.rows" for name in ("gate", "up", "down")},
}
_STACKED = {
    "experts.gate_up_proj": [f"experts.{name}_proj.rows" for name in ("gate", "up")],
    "experts.down_proj": ["experts.down_proj.rows"],
}


def _read(got: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of `Config` of a config.json with all its defaults.

    Raises:
      ModelError: a field has a value that is not supported.
    """
    kinds = got["layer_types"]
    if kinds[-1:] != [FULL]:
        raise ModelError(f"layer_types ends with {kinds[-1]!r}, the last layer must be {FULL!r}")
    rows = got["vocab_size_per_layer_input"]
    size = got["hidden_size_per_layer_input"] or 0
    if size and rows != got["vocab_size"]:
        raise ModelError(f"vocab_size_per_layer_input is {rows}, it must be vocab_size, {got['vocab_size']}")
    lenders = _lenders(kinds, got["num_kv_shared_layers"] or 0)
    experts = _experts(got)
    norm = Norm(float(got["rms_norm_eps"]))
    mlps = []
    for lender in lenders:
        wide = bool(got["use_double_wide_mlp"]) and lender is not None
        dense = Dense(got["intermediate_size"] * (1 + wide), "gelu")
        mlps.append(dense if experts is None else DenseBesideExperts(dense, experts, norm))
    return {
        "activation": "gelu",
        "attention_bias": bool(got.get("attention_bias", False)),
        "output_bias": bool(got.get("attention_bias", False)),
        "qk_norm": True,
        "attention_scale": 1.0,
        "norms": "sandwich",
        "embed_scale": float(got["hidden_size"]) ** 0.5,
        "logit_cap": got["final_logit_softcapping"],
        "layer_scales": True,
        "layer_vectors": LayerVectors(size) if size else None,
        "mixers": _mixers(got, kinds, lenders),
        "lenders": tuple(lenders) if any(lender is not None for lender in lenders) else (),
        "mlps": tuple(mlps),
        "experts": experts,
    }


def _mixers(got: Mapping[str, Any], kinds: Sequence[str], lenders: Sequence[int | None]) -> tuple[Any, ...]:
    """The attention of each layer."""
    rotary = got.get("rope_parameters") or _ROTARY
    mixers = []
    for i, kind in enumerate(kinds):
        own = _own_sizes(got, i, kind)
        full = kind == FULL
        if got["num_attention_heads"] % own["num_key_value_heads"]:
            raise ModelError(
                f"layer {i} has {own['num_key_value_heads']} heads of keys, which do not divide num_attention_heads "
                f"{got['num_attention_heads']}"
            )
        mixers.append(
            LendingAttention(
                heads=got["num_attention_heads"],
                kv_heads=own["num_key_value_heads"],
                head=own["head_dim"],
                rope=_rope(rotary, kind, own["head_dim"]),
                norm=Norm(float(got["rms_norm_eps"])),
                window=None if full else got["sliding_window"],
                bias=bool(got.get("attention_bias", False)),
                output_bias=bool(got.get("attention_bias", False)),
                qk_norm="head",
                scale=1.0,
                keys_as_values=full and bool(got["attention_k_eq_v"]),
                lends=i in lenders,
                borrows=lenders[i] is not None,
            )
        )
    return tuple(mixers)


def _own_sizes(got: Mapping[str, Any], layer: int, kind: str) -> dict[str, int]:
    """Sizes of the heads of a layer: transformers writes them as per_layer_config, published files by kind.

    Raises:
      ModelError: the layer has another field of its own, or a size is no whole number.
    """
    sizes = {name: got[name] for name in _OVERRIDES}
    layers = got.get("per_layer_config")
    if layers is not None:
        given = layers.get(str(layer), layers.get(layer, {}))
    else:
        given = {"head_dim": got["global_head_dim"]} if kind == FULL else {}
        if kind == FULL and got["attention_k_eq_v"] and got["num_global_key_value_heads"] is not None:
            given = given | {"num_key_value_heads": got["num_global_key_value_heads"]}
    for name, value in given.items():
        if name not in _OVERRIDES:
            raise ModelError(f"per_layer_config has {name}={value!r} for layer {layer}, it may have {_OVERRIDES}")
        sizes[name] = value
    for name, value in sizes.items():
        if type(value) is not int or value < 1 or (name == "head_dim" and value % 2):
            wanted = "an even number" if name == "head_dim" else "a whole number of at least 1"
            raise ModelError(f"{name} of layer {layer} is {value!r}, it must be {wanted}")
    return sizes


def _rope(rotary: Mapping[str, Any], kind: str, head: int) -> Rope:
    """Rotary positions of a kind of layers.

    Raises:
      ModelError: they are missing, or of another type.
    """
    given = rotary.get(kind)
    if not isinstance(given, Mapping) or "rope_theta" not in given:
        raise ModelError(f"rope_parameters.{kind}.rope_theta is missing; rope_parameters are given per layer type")
    name = given.get("rope_type", "default")
    if name not in ("default", "proportional") or given.get("factor") not in (None, 1, 1.0):
        raise ModelError(f"rope_parameters.{kind} is {dict(given)}, supported are 'default' and 'proportional'")
    part = given.get("partial_rotary_factor") if name == "proportional" else 1.0
    turning = int((1.0 if part is None else part) * head // 2)
    if not 0 < turning <= head // 2:
        raise ModelError(f"rope_parameters.{kind}.partial_rotary_factor is {part}: {turning} of {head // 2} pairs turn")
    return Rope(head, float(given["rope_theta"]), turning=None if turning == head // 2 else turning)


def _lenders(kinds: Sequence[str], shared: int) -> list[int | None]:
    """For each layer, that whose keys and values it attends to: the last of its kind that makes its own.

    Raises:
      ModelError: there is none.
    """
    first = len(kinds) - shared
    last = {kind: i for i, kind in enumerate(kinds[: max(first, 0)])}
    missing = sorted(set(kinds) - set(last))
    if missing:
        raise ModelError(f"num_kv_shared_layers is {shared}: no layer before the last {shared} is of {missing[0]!r}")
    return [None if i < first else last[kind] for i, kind in enumerate(kinds)]


def _experts(got: Mapping[str, Any]) -> Experts | None:
    if not got["enable_moe_block"]:
        return None
    sizes = ("num_experts", "top_k_experts", "moe_intermediate_size")
    for name in sizes:
        if type(got.get(name)) is not int:
            raise ModelError(f"{name} is {got.get(name)!r}, it must be a whole number where enable_moe_block is true")
    count, per_token, inner = (got[name] for name in sizes)
    return Experts(count, per_token, inner, activation="gelu", scaled=True)


def _write(config: Config) -> dict[str, Any]:
    """Fields of config.json that only this family has.

    Raises:
      ModelError: its layers are no Gemma 4's.
    """
    mixers = [config.mixer(i) for i in range(config.layers)]
    own = [mixer for mixer in mixers if isinstance(mixer, LendingAttention)]
    if len(own) < len(mixers):
        raise ModelError("a gemma4_text config.json needs LendingAttention in all layers")
    full = own[-1]
    local = next((mixer for mixer in own if mixer.window is not None), None)
    kinds = layer_types(config)
    borrowing = sum(mixer.borrows for mixer in own)
    wide = [config.mlp.layer(i) for i, mixer in enumerate(own) if mixer.borrows]
    inner = [mlp.dense.inner if isinstance(mlp, DenseBesideExperts) else getattr(mlp, "inner", 0) for mlp in wide]
    fields = {
        "hidden_act": GELU,
        "hidden_activation": GELU,
        "layer_types": kinds,
        "attention_bias": full.bias,
        "global_head_dim": full.head,
        "num_global_key_value_heads": full.kv_heads if full.keys_as_values else None,
        "attention_k_eq_v": full.keys_as_values,
        "num_kv_shared_layers": borrowing,
        "use_double_wide_mlp": bool(inner) and inner[0] != config.mlp.inner,
        "final_logit_softcapping": config.scales.logit_cap,
        "hidden_size_per_layer_input": 0 if config.layer_vectors is None else config.layer_vectors.size,
        "vocab_size_per_layer_input": config.vocab,
        "rope_parameters": {FULL: _rotary_of(full)} | ({} if local is None else {SLIDING: _rotary_of(local)}),
    }
    if local is not None:  # transformers wants a window even where no layer has one
        fields["sliding_window"] = local.window
    experts = config.mlp.experts
    if experts is not None:
        fields |= {"num_experts": experts.count, "top_k_experts": experts.per_token}
        fields |= {"enable_moe_block": True, "moe_intermediate_size": experts.mlp}
    return fields


def _rotary_of(mixer: LendingAttention) -> dict[str, Any]:
    assert mixer.rope is not None
    turning = mixer.rope.turning
    if turning is None:
        return {"rope_type": "default", "rope_theta": mixer.rope.theta}
    part = 2 * turning / mixer.head
    return {"rope_type": "proportional", "partial_rotary_factor": part, "rope_theta": mixer.rope.theta}


GEMMA4: HFFamily = HFFamily(
    defaults=_DEFAULTS,
    supported=_SUPPORTED,
    read=_read,
    write=_write,
    rope_types=(),
    names=_NAMES,
    stacked=_STACKED,
)
