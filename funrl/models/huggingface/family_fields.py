"""ConfigFields of config.json that only some Hugging Face families have: their meaning for a decoder, and the way back.

A field with the value that `Config` has, or `Experts`, is in the table of its family; here are the others.
"""

from __future__ import annotations

from typing import Any

from funrl.models.decoder.config import Config
from funrl.models.decoder.routing import ClampedGate, Experts
from funrl.models.errors import ModelError
from funrl.models.huggingface.configs.hf_family import ConfigFields, HFFamily

FULL = "full_attention"
SLIDING = "sliding_attention"
GELU = "gelu_pytorch_tanh"  # the name in transformers of what the decoder calls "gelu"
# Names of activations in transformers -> those of `gated`; of several names for one, the first is written.
ACTIVATIONS = {"silu": "silu", "swish": "silu", GELU: "gelu", "gelu": "gelu_erf"}
BIASES = {"attention_bias": "attention_bias", "output_bias": "attention_bias"}
QUERY_GROWTH = "llama_4_scaling_beta"  # of the rotary fields


def layer_types(config: Config) -> list[str]:
    """The kind of each layer, as config.json says it."""
    return [FULL if config.attention.window(i) is None else SLIDING for i in range(config.layers)]


def experts_of(config: Config) -> Experts:
    """The experts of a config. Raises: ModelError, there are none."""
    if config.mlp.experts is None:
        raise ModelError(f"a {config.source.family} config.json needs experts, which is None")
    return config.mlp.experts


def read_experts(family: HFFamily, got: ConfigFields, further: ConfigFields | None = None) -> Experts:
    """The experts of a config.json with all its defaults, by the table of its family.

    Args:
      further: other fields of `Experts`.

    Raises:
      ModelError: a size is no whole number of at least 1.
    """
    names = family.experts
    values: dict[str, Any] = {ours: got[theirs] for ours, theirs in names.items() if got.get(theirs) is not None}
    values |= {ours: whole_size(got, names[ours]) for ours in ("count", "per_token", "mlp")}
    layers = range(got["num_hidden_layers"])
    if "sparse" in values:
        dense = values.pop("sparse")
        values["dense"] = tuple(i for i in layers if i in dense or (i + 1) % got["decoder_sparse_step"])
    if "first_dense" in values:
        values["dense"] = tuple(layers[: values.pop("first_dense")])
    if "shared_experts" in values:
        values["shared"] = values.pop("shared_experts") * values["mlp"]
    return Experts(**values | dict(family.expert_values) | dict(further or {}))


def write_experts(family: HFFamily, config: Config) -> ConfigFields:
    """ConfigFields of config.json that `read_experts` reads."""
    experts = experts_of(config)
    counts = {"sparse": list(experts.dense), "first_dense": len(experts.dense)}
    counts["shared_experts"] = experts.shared // experts.mlp
    fields = {
        theirs: counts[ours] if ours in counts else getattr(experts, ours) for ours, theirs in family.experts.items()
    }
    return fields | ({"decoder_sparse_step": 1} if "sparse" in family.experts else {})


def whole_size(got: ConfigFields, name: str) -> int:
    """A size. Raises: ModelError, it is no whole number of at least 1."""
    value = got.get(name)
    if type(value) is not int or value < 1:
        raise ModelError(f"{name} is {value!r}, it must be a whole number of at least 1")
    return value


def attention_scale(config: Config) -> float:
    """Factor of the logits of attention."""
    scale = config.attention.scale
    return config.attention.head**-0.5 if scale is None else scale


def read_smollm3(got: ConfigFields) -> ConfigFields:
    rotates = tuple(bool(x) for x in got["no_rope_layers"][: got["num_hidden_layers"]])
    return {"rotates": None if all(rotates) else rotates}


def write_smollm3(config: Config) -> ConfigFields:
    return {"no_rope_layers": [int(x) for x in config.rope.rotates or [True] * config.layers]}


def read_gemma(got: ConfigFields) -> ConfigFields:
    return {"embed_scale": float(got["hidden_size"]) ** 0.5}


def read_gemma2(got: ConfigFields) -> ConfigFields:
    scalar = got["query_pre_attn_scalar"]
    if scalar < 1:
        raise ModelError(f"query_pre_attn_scalar is {scalar!r}, it must be a whole number of at least 1")
    return {**read_gemma(got), "attention_scale": scalar**-0.5}


def write_gemma2(config: Config) -> ConfigFields:
    return {"hidden_activation": GELU, "query_pre_attn_scalar": round(attention_scale(config) ** -2)}


def write_olmo3(config: Config) -> ConfigFields:
    sliding = {"rope_type": "default", "rope_theta": config.rope.local_theta or config.rope.theta}
    return {"rope_parameters": {FULL: {"rope_type": "default", "rope_theta": config.rope.theta}, SLIDING: sliding}}


def read_exaone4(got: ConfigFields) -> ConfigFields:
    """Beside a window, layers without one do not rotate, whether or not some layer has it."""
    rotates = tuple(kind == SLIDING for kind in got["layer_types"])
    return {"rotates": None if got["sliding_window"] is None or all(rotates) else rotates}


def write_exaone4(config: Config) -> ConfigFields:
    return {"sliding_window": None} if config.attention.windows is None and config.rope.rotates is None else {}


def read_ministral3(got: ConfigFields) -> ConfigFields:
    rate = got["rope_parameters"].get(QUERY_GROWTH)
    if isinstance(rate, bool) or not isinstance(rate, int | float):
        raise ModelError(f"rope_parameters.{QUERY_GROWTH} is {rate!r}, it must be a number")
    return {"query_growth": float(rate)}


def read_gpt_oss(got: ConfigFields) -> ConfigFields:
    return {"experts": {"clamped": ClampedGate(float(got["swiglu_alpha"]), float(got["swiglu_limit"]))}}


def write_gpt_oss(config: Config) -> ConfigFields:
    gate = experts_of(config).clamped
    if gate is None:
        raise ModelError("a gpt_oss config.json needs experts.clamped, which is None")
    plain = {"rope_parameters": {"rope_type": "default", "rope_theta": config.rope.theta}}
    return {"swiglu_alpha": gate.alpha, "swiglu_limit": gate.limit} | (plain if config.rope.scaling is None else {})


def read_ernie4_5_moe(got: ConfigFields) -> ConfigFields:
    """Experts in every n-th layer of a range. Raises: ModelError, no layer has any."""
    layers = range(got["num_hidden_layers"])
    last = len(layers) - 1 if got["moe_layer_end_index"] == -1 else got["moe_layer_end_index"]
    some = range(got["moe_layer_start_index"], last + 1)
    dense = tuple(i for i in layers if i not in some or (i + 1) % got["moe_layer_interval"])
    if len(dense) == len(layers):
        raise ModelError(f"no layer has experts: moe_layer_start_index is {some.start}, moe_layer_end_index {last}")
    return {"experts": {"dense": dense}}


def write_ernie4_5_moe(config: Config) -> ConfigFields:
    layers = [i for i in range(config.layers) if i not in experts_of(config).dense]
    step = layers[1] - layers[0] if len(layers) > 1 else layers[0] + 1
    ends = {"moe_layer_start_index": layers[0], "moe_layer_end_index": layers[-1]}
    return ends | {"moe_layer_interval": step, "use_bias": False}


def write_phi3(config: Config) -> ConfigFields:
    scaling = config.rope.scaling
    return {"original_max_position_embeddings": config.max_positions if scaling is None else scaling.original}
