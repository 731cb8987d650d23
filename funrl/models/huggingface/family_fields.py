"""Fields of config.json that only some Hugging Face families have: their meaning for a decoder, and the way back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from funrl.models.decoder.config import Config
from funrl.models.decoder.routing import Experts
from funrl.models.errors import ModelError
from funrl.models.flat import flat_fields

FULL = "full_attention"
SLIDING = "sliding_attention"
GELU = "gelu_pytorch_tanh"  # the name in transformers of what the decoder calls "gelu"
# Names of activations in transformers -> those of `gated`; of several names for one, the first is written.
ACTIVATIONS = {"silu": "silu", "swish": "silu", GELU: "gelu", "gelu": "gelu_erf"}


def read_bias(got: Mapping[str, Any]) -> dict[str, Any]:
    bias = bool(got.get("attention_bias", False))
    return {"attention_bias": bias, "output_bias": bias}


def write_bias(config: Config) -> dict[str, Any]:
    return {"attention_bias": config.attention.output_bias}


def write_qwen3(config: Config) -> dict[str, Any]:
    return write_bias(config) | (_write_upper(config) if config.attention.windows is not None else {})


def write_qwen2(config: Config) -> dict[str, Any]:
    return _write_upper(config) if config.attention.windows is not None else {}


def _write_upper(config: Config) -> dict[str, Any]:
    kinds = layer_types(config)
    first = kinds.index(SLIDING) if SLIDING in kinds else config.layers
    return {"use_sliding_window": True, "layer_types": kinds, "max_window_layers": first} | write_window(config)


def write_window(config: Config) -> dict[str, Any]:
    """The size of the windows: a config.json has one at most.

    Raises:
      ModelError: there are several sizes.
    """
    sizes = {w for w in config.attention.windows or () if w is not None}
    if len(sizes) > 1:
        raise ModelError(f"windows has sizes {sorted(sizes)}, config.json can say only one")
    return {"sliding_window": next(iter(sizes), None)}


def write_layer_windows(config: Config) -> dict[str, Any]:
    """The kinds of all layers and the size of the windows, for a class of transformers that makes a mask of windows.

    It wants a size even where no layer has a window, and takes its own where none is written.
    """
    kinds = {"layer_types": layer_types(config)}
    return kinds | (write_window(config) if config.attention.windows is not None else {})


def write_phi3(config: Config) -> dict[str, Any]:
    scaling = config.rope.scaling
    original = config.max_positions if scaling is None else scaling.original
    return write_window(config) | {"original_max_position_embeddings": original}


def layer_types(config: Config) -> list[str]:
    """The kind of each layer, as config.json says it."""
    return [FULL if config.attention.window(i) is None else SLIDING for i in range(config.layers)]


def read_olmo2(got: Mapping[str, Any]) -> dict[str, Any]:
    return read_bias(got) | {"qk_norm": True, "qk_norm_over": "projection", "norms": "post"}


def read_smollm3(got: Mapping[str, Any]) -> dict[str, Any]:
    rotates = _rotating_layers(got, int(got["num_hidden_layers"]))
    return read_bias(got) | {"rotates": None if all(rotates) else tuple(rotates)}


def write_smollm3(config: Config) -> dict[str, Any]:
    layers = range(config.layers)
    windows = {} if config.attention.windows is None else {"use_sliding_window": True} | write_window(config)
    rotates = [int(config.rope.rotates is None or config.rope.rotates[i]) for i in layers]
    return write_bias(config) | windows | {"layer_types": layer_types(config), "no_rope_layers": rotates}


def _rotating_layers(got: Mapping[str, Any], layers: int) -> list[bool]:
    """True for each layer that rotates; no_rope_layers has a 1 for it."""
    given = got.get("no_rope_layers")
    if given is None:
        return [(i + 1) % got["no_rope_layer_interval"] != 0 for i in range(layers)]
    if len(given) < layers:
        raise ModelError(f"no_rope_layers has {len(given)} entries for num_hidden_layers {layers}")
    return [bool(x) for x in given[:layers]]


MULTIPLIERS = {
    "embed_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "attention_scale": "attention_multiplier",
    "logit_divisor": "logits_scaling",
}


def read_gemma(got: Mapping[str, Any]) -> dict[str, Any]:
    scale = float(got["hidden_size"]) ** 0.5
    return read_bias(got) | {"activation": "gelu", "norm_offset": 1.0, "embed_scale": scale}


def read_granite(got: Mapping[str, Any]) -> dict[str, Any]:
    return read_bias(got) | {ours: float(got[theirs]) for ours, theirs in MULTIPLIERS.items()}


def write_granite(config: Config) -> dict[str, Any]:
    scale = config.attention.head**-0.5 if config.attention.scale is None else config.attention.scale
    fields = flat_fields(config)
    values = {theirs: fields[ours] for ours, theirs in MULTIPLIERS.items()}
    return write_bias(config) | values | {"attention_multiplier": scale}


def read_gemma2(got: Mapping[str, Any]) -> dict[str, Any]:
    scalar = got["query_pre_attn_scalar"]
    if not isinstance(scalar, int) or scalar < 1:
        raise ModelError(f"query_pre_attn_scalar is {scalar!r}, it must be a whole number of at least 1")
    return read_bias(got) | {
        "activation": "gelu",
        "norms": "sandwich",
        "norm_offset": 1.0,
        "embed_scale": float(got["hidden_size"]) ** 0.5,
        "attention_scale": scalar**-0.5,
        "attention_cap": got["attn_logit_softcapping"],
        "logit_cap": got["final_logit_softcapping"],
    }


def write_gemma2(config: Config) -> dict[str, Any]:
    scale = config.attention.head**-0.5 if config.attention.scale is None else config.attention.scale
    return (
        write_bias(config)
        | write_layer_windows(config)
        | {
            "hidden_act": GELU,
            "hidden_activation": GELU,
            "query_pre_attn_scalar": round(scale**-2),
            "attn_logit_softcapping": config.attention.cap,
            "final_logit_softcapping": config.scales.logit_cap,
        }
    )


def read_gemma3(got: Mapping[str, Any]) -> dict[str, Any]:
    return read_gemma2(got) | {"qk_norm": True}


def write_gemma3(config: Config) -> dict[str, Any]:
    if config.rope.local_theta is None:
        raise ModelError("a gemma3_text config.json needs local_rope_theta, which is None")
    return write_gemma2(config) | {"rope_local_base_freq": config.rope.local_theta}


def read_experts(got: Mapping[str, Any], mlp: str, normalized: bool) -> Experts:
    """The experts that a config.json describes; transformers writes their count by either of two names."""
    count = next((got[name] for name in ("num_local_experts", "num_experts") if got.get(name) is not None), 0)
    step = got.get("decoder_sparse_step") or 1
    dense = set(got.get("mlp_only_layers") or ())
    layers = range(got["num_hidden_layers"])
    return Experts(
        count=count,
        per_token=got["num_experts_per_tok"],
        mlp=got[mlp],
        normalized=normalized,
        dense=tuple(i for i in layers if i in dense or (i + 1) % step),
    )


def experts_of(config: Config) -> Experts:
    """The experts of a config. Raises: ModelError, there are none."""
    if config.mlp.experts is None:
        raise ModelError(f"a {config.source.family} config.json needs experts, which is None")
    return config.mlp.experts


def _write_experts(config: Config, count: str) -> dict[str, Any]:
    return {count: experts_of(config).count, "num_experts_per_tok": experts_of(config).per_token}


def read_qwen3_moe(got: Mapping[str, Any]) -> dict[str, Any]:
    experts = read_experts(got, "moe_intermediate_size", bool(got["norm_topk_prob"]))
    return read_bias(got) | {"qk_norm": True, "experts": experts}


def write_qwen3_moe(config: Config) -> dict[str, Any]:
    counts = _write_experts(config, "num_experts")
    experts = experts_of(config)
    window = write_window(config) | {"use_sliding_window": config.attention.windows is not None}
    return (
        write_bias(config)
        | (window if config.attention.windows is not None else {})
        | counts
        | {
            "moe_intermediate_size": experts.mlp,
            "norm_topk_prob": experts.normalized,
            "mlp_only_layers": list(experts.dense),
            "decoder_sparse_step": 1,
        }
    )


def write_mixtral(config: Config) -> dict[str, Any]:
    return write_window(config) | _write_experts(config, "num_local_experts")


def read_olmoe(got: Mapping[str, Any]) -> dict[str, Any]:
    experts = read_experts(got, "intermediate_size", bool(got["norm_topk_prob"]))
    return read_bias(got) | {"qk_norm": True, "qk_norm_over": "projection", "experts": experts}


def write_olmoe(config: Config) -> dict[str, Any]:
    counts = _write_experts(config, "num_experts")
    return write_bias(config) | counts | {"norm_topk_prob": experts_of(config).normalized}
