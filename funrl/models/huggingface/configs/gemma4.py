"""The config.json and the names of the text part of Gemma 4: dense, with vectors of each layer, or with experts.

Layers without a window have heads of a size of their own. The last layers may attend to the keys and values of earlier
ones.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from funrl.models.decoder.config import Config
from funrl.models.decoder.dense import Dense
from funrl.models.decoder.gemma4 import DenseBesideExperts, LayerVectors, LendingAttention
from funrl.models.decoder.layers import Norm, Rope
from funrl.models.errors import ModelError
from funrl.models.huggingface.configs.hf_family import ConfigFields, HFFamily
from funrl.models.huggingface.family_fields import BIASES, FULL, GELU, SLIDING, read_experts, read_gemma, write_experts

_OVERRIDES = ("head_dim", "num_key_value_heads")  # fields that per_layer_config may have
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
_MOE = HFFamily(
    experts={"count": "num_experts", "per_token": "top_k_experts", "mlp": "moe_intermediate_size"},
    expert_values={"activation": "gelu", "scaled": True},
)
_STACKED = {
    "experts.gate_up_proj": [f"experts.{name}_proj.rows" for name in ("gate", "up")],
    "experts.down_proj": ["experts.down_proj.rows"],
}


def _read(got: ConfigFields) -> ConfigFields:
    """ConfigFields of `Config` of a config.json with all its defaults.

    Raises:
      ModelError: a field has a value that is not supported.
    """
    kinds = got["layer_types"]
    rows = got["vocab_size_per_layer_input"]
    size = got["hidden_size_per_layer_input"] or 0
    if size and rows != got["vocab_size"]:
        raise ModelError(f"vocab_size_per_layer_input is {rows}, it must be vocab_size, {got['vocab_size']}")
    lenders = _lenders(kinds, got["num_kv_shared_layers"] or 0)
    experts = read_experts(_MOE, got) if got["enable_moe_block"] else None
    mlps = []
    for lender in lenders:
        wide = bool(got["use_double_wide_mlp"]) and lender is not None
        dense = Dense(got["intermediate_size"] * (1 + wide), "gelu")
        mlps.append(dense if experts is None else DenseBesideExperts(dense, experts, Norm(got["rms_norm_eps"])))
    return {
        **read_gemma(got),
        "layer_vectors": LayerVectors(size) if size else None,
        "mixers": tuple(_mixer(got, i, lenders) for i in range(len(kinds))),
        "lenders": tuple(lenders) if any(lender is not None for lender in lenders) else (),
        "mlps": tuple(mlps),
        "experts": experts,
    }


def _mixer(got: ConfigFields, layer: int, lenders: Sequence[int | None]) -> LendingAttention:
    """The attention of a layer. Raises: ModelError, sizes of its heads do not fit."""
    kind = got["layer_types"][layer]
    full = kind == FULL
    sizes = {name: got[name] for name in _OVERRIDES}
    for name, value in _overrides(got, layer).items():
        if name not in _OVERRIDES:
            raise ModelError(f"per_layer_config has {name}={value!r} for layer {layer}, it may have {_OVERRIDES}")
        sizes[name] = value
    head = sizes["head_dim"]
    kv_heads = sizes["num_key_value_heads"]
    if type(head) is not int or head < 1 or head % 2:
        raise ModelError(f"head_dim of layer {layer} is {head!r}, it must be an even number")
    if type(kv_heads) is not int or kv_heads < 1 or got["num_attention_heads"] % kv_heads:
        raise ModelError(
            f"layer {layer} has {kv_heads} heads of keys, which do not divide num_attention_heads "
            f"{got['num_attention_heads']}"
        )
    return LendingAttention(
        heads=got["num_attention_heads"],
        kv_heads=kv_heads,
        head=head,
        rope=_rope(got["rope_parameters"], kind, head),
        norm=Norm(got["rms_norm_eps"]),
        window=None if full else got["sliding_window"],
        bias=got["attention_bias"],
        output_bias=got["attention_bias"],
        qk_norm="head",
        scale=1.0,
        keys_as_values=full and got["attention_k_eq_v"],
        lends=layer in lenders,
        borrows=lenders[layer] is not None,
    )


def _overrides(got: ConfigFields, layer: int) -> ConfigFields:
    """Fields of the attention of a layer that differ from the model's; transformers 5.13 gives those of full layers."""
    if "per_layer_config" in got:
        return {int(number): fields for number, fields in got["per_layer_config"].items()}.get(layer, {})
    if got["layer_types"][layer] != FULL:
        return {}
    kv_heads = got["num_global_key_value_heads"] if got["attention_k_eq_v"] else None
    wide = {"head_dim": got["global_head_dim"] or got["head_dim"]}
    return wide if kv_heads is None else {**wide, "num_key_value_heads": kv_heads}


def _rope(rotary: ConfigFields, kind: str, head: int) -> Rope:
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


def _write(config: Config) -> ConfigFields:
    """ConfigFields of config.json that only this family has.

    Raises:
      ModelError: its layers are no Gemma 4's.
    """
    mixers = [config.mixer(i) for i in range(config.layers)]
    own = [mixer for mixer in mixers if isinstance(mixer, LendingAttention)]
    if len(own) < len(mixers):
        raise ModelError("a gemma4_text config.json needs LendingAttention in all layers")
    full = own[-1]
    local = next((mixer for mixer in own if mixer.window is not None), None)
    borrowing = sum(mixer.borrows for mixer in own)
    wide = [config.mlp.layer(i) for i, mixer in enumerate(own) if mixer.borrows]
    inner = [mlp.dense.inner if isinstance(mlp, DenseBesideExperts) else getattr(mlp, "inner", 0) for mlp in wide]
    experts = {} if config.mlp.experts is None else write_experts(_MOE, config)
    return {
        **experts,
        "hidden_activation": GELU,
        "global_head_dim": full.head,
        "num_global_key_value_heads": full.kv_heads if full.keys_as_values else None,
        "attention_k_eq_v": full.keys_as_values,
        "num_kv_shared_layers": borrowing,
        "use_double_wide_mlp": bool(inner) and inner[0] != config.mlp.inner,
        "hidden_size_per_layer_input": 0 if config.layer_vectors is None else config.layer_vectors.size,
        "vocab_size_per_layer_input": config.vocab,
        "enable_moe_block": config.mlp.experts is not None,
        "rope_parameters": {FULL: _rotary_of(full)} | ({} if local is None else {SLIDING: _rotary_of(local)}),
    }


def _rotary_of(mixer: LendingAttention) -> ConfigFields:
    assert mixer.rope is not None
    turning = mixer.rope.turning
    if turning is None:
        return {"rope_type": "default", "rope_theta": mixer.rope.theta}
    part = 2 * turning / mixer.head
    return {"rope_type": "proportional", "partial_rotary_factor": part, "rope_theta": mixer.rope.theta}


GEMMA4: HFFamily = HFFamily(
    supported=_SUPPORTED,
    windows=("layer_types", "sliding_window"),
    fields=BIASES | {"logit_cap": "final_logit_softcapping"},
    values={"activation": "gelu", "qk_norm": True, "attention_scale": 1.0, "norms": "sandwich", "layer_scales": True},
    read=_read,
    write=_write,
    rope_types=(),
    names=_NAMES,
    stacked=_STACKED,
)
