"""The config.json of Hugging Face's models: from and to the record of a decoder.

What is peculiar to a family is in `families.py`. Types and sizes of fields are
checked before they are used.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from funrl.models.decoder.config import Config, decoder_config
from funrl.models.decoder.layers import RopeScaling
from funrl.models.errors import ModelError
from funrl.models.flat import flat_fields, with_fields
from funrl.models.huggingface.families import FAMILIES, HFFamily
from funrl.models.huggingface.family_fields import FULL, SLIDING
from funrl.models.huggingface.fp8_files import fp8_blocks
from funrl.models.model import MOST_LAYERS, ModelConfig, check_sizes

DTYPES = ("float32", "bfloat16", "float16", "float64")


@dataclass(frozen=True)
class ModuleConfig(ModelConfig):
    """Sizes of a model that transformers' own code computes.

    Attributes:
      heads: query heads of a layer.
      head: size of one.
      kv_heads: heads of keys and values.
      mlp: inner size of the mlp.
      raw: the JSON text of its config.json, of which the sizes are a summary.
    """

    heads: int = 1
    kv_heads: int = 1
    head: int = 1
    mlp: int = 1
    raw: str = "{}"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_sizes(heads=self.heads, kv_heads=self.kv_heads, head=self.head, mlp=self.mlp)

    @property
    def foreign(self) -> Mapping[str, Any]:
        """All fields of config.json."""
        return json.loads(self.raw)


def architecture(config: ModuleConfig) -> str:
    """The name in transformers of the class of a model."""
    return (json.loads(config.raw).get("architectures") or [config.source.family])[0]


def config_to_hf(config: ModelConfig) -> dict[str, Any]:
    """The fields of a model's config.json, readable by transformers 4 and 5.

    Raises:
      ModelError: config.json has no place for something of it.
    """
    if isinstance(config, ModuleConfig):
        return json.loads(config.raw)
    assert isinstance(config, Config)
    return _decoder_to_hf(config)


def config_from_hf(raw: Mapping[str, Any]) -> Config:
    """The record of a parsed config.json, written by transformers 4 or 5.

    Raises:
      ModelError: a field has a value that is not supported, or is missing.
    """
    name = raw.get("model_type")
    if not isinstance(name, str) or name not in FAMILIES:
        raise ModelError(f"model_type is {name!r}, supported are {sorted(FAMILIES)}")
    family = FAMILIES[name]
    got = {**family.defaults, **raw}
    _refuse(family, got)
    fp8_blocks(raw)  # weights that are quantized in another way cannot be read
    embed, layers, heads = (_size(got, k) for k in ("hidden_size", "num_hidden_layers", "num_attention_heads"))
    fields: dict[str, Any] = {
        "vocab": _size(got, "vocab_size"),
        "embed": embed,
        "layers": layers,
        "heads": heads,
        "kv_heads": heads if got.get("num_key_value_heads") is None else _size(got, "num_key_value_heads"),
        "head": embed // heads if got.get("head_dim") is None else _size(got, "head_dim"),
        "mlp": _size(got, "intermediate_size"),
        "norm_eps": float(got["rms_norm_eps"]),
        "tied": bool(got["tie_word_embeddings"]),
        "windows": _windows(family, got, layers),
        "max_positions": _size(got, "max_position_embeddings"),
        "dtype": _dtype(got),
        "family": name,
        "bos": got.get("bos_token_id"),
        "eos": token_ids(got.get("eos_token_id")),
        "pad": got.get("pad_token_id"),
    }
    config = decoder_config(**fields | _rotary(family, got) | family.read(got))
    if config.attention.latent is None or config.rope.scaling is None or config.rope.scaling.sharpness == 1:
        return config
    return with_fields(config, attention_scale=config.attention.head**-0.5 * config.rope.scaling.sharpness)


def token_ids(value: Any) -> tuple[int, ...]:
    """Token ids of a field that holds one, several or none."""
    if value is None:
        return ()
    return tuple(value) if isinstance(value, list | tuple) else (int(value),)


def _decoder_to_hf(config: Config) -> dict[str, Any]:
    """The fields of this model's config.json, readable by transformers 4 and 5."""
    family = FAMILIES[config.source.family]
    eos = config.special_tokens.eos
    raw: dict[str, Any] = {
        "architectures": [family.architecture],
        "model_type": config.source.family,
        "vocab_size": config.vocab,
        "hidden_size": config.embed,
        "intermediate_size": config.mlp.inner,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.attention.heads,
        "num_key_value_heads": config.attention.kv_heads,
        "head_dim": config.attention.head,
        "hidden_act": "silu",
        "rms_norm_eps": config.norm.eps,
        "rope_theta": config.rope.theta,
        "max_position_embeddings": config.max_positions,
        "tie_word_embeddings": config.tied,
        "bos_token_id": config.special_tokens.bos,
        "eos_token_id": eos[0] if len(eos) == 1 else list(eos) or None,
        "pad_token_id": config.special_tokens.pad,
        "dtype": config.source.dtype,
        "torch_dtype": config.source.dtype,
    }
    if config.rope.scaling is not None:
        raw["rope_scaling"] = _rope_to_hf(config.rope.scaling)
    raw |= family.write(config)
    written = with_fields(config_from_hf(raw), generation=config.source.generation)  # which has a file of its own
    if written != config:
        kept = flat_fields(written)
        lost = ", ".join(f"{name}={value}" for name, value in flat_fields(config).items() if value != kept[name])
        raise ModelError(f"a {config.source.family} config.json cannot hold {lost}")
    return raw


def _refuse(family: HFFamily, got: Mapping[str, Any]) -> None:
    supported: dict[str, Any] = {
        "hidden_act": ("silu",),
        "mlp_bias": (False, None),
    }
    if not family.partial_rotary:
        supported["partial_rotary_factor"] = (1, 1.0, None)
    for name, values in (supported | dict(family.supported)).items():
        if got.get(name) not in values:
            raise ModelError(f"{name} is {got[name]!r}, supported is {values[0]!r}")


def _size(got: Mapping[str, Any], name: str) -> int:
    value = got.get(name)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ModelError(f"{name} is {value!r}, it must be a whole number of at least 1")
    return value


def _rotary(family: HFFamily, got: Mapping[str, Any]) -> dict[str, Any]:
    """The base and the stretching of rotary frequencies; where the family has them, the base of local layers too."""
    # transformers 5 writes everything into rope_parameters; 4 wrote rope_theta and rope_scaling.
    name = "rope_parameters" if got.get("rope_parameters") else "rope_scaling"
    rope = got.get(name) or {}
    local = got.get("rope_local_base_freq")
    per_layer = any(isinstance(value, Mapping) for value in rope.values())
    if local is None:
        if per_layer:
            raise ModelError(f"{name} is given per layer type ({sorted(rope)}), supported is one for all layers")
        theta, scaling = _rope(family, name, rope, default_theta=got["rope_theta"])
        return {"rope_theta": theta, "rope_scaling": scaling}
    if rope and name == "rope_parameters" and not per_layer:
        raise ModelError(f"{name} is {json.dumps(rope)}, it must be given per layer type ({FULL}, {SLIDING})")
    theta, scaling = _rope(family, name, rope.get(FULL) or {} if per_layer else rope, default_theta=got["rope_theta"])
    local, stretched = _rope(family, name, rope.get(SLIDING) or {} if per_layer else {}, default_theta=local)
    if stretched is not None:
        raise ModelError(f"{name}.{SLIDING}.rope_type is {stretched.kind!r}, supported is 'default'")
    return {"rope_theta": theta, "rope_scaling": scaling, "local_rope_theta": local}


def _rope(
    family: HFFamily, name: str, rope: Mapping[str, Any], default_theta: float
) -> tuple[float, RopeScaling | None]:
    """The base and the stretching of one kind of layers.

    Args:
      name: of the field of config.json.
    """
    kind = rope.get("rope_type", rope.get("type", "default"))
    theta = float(rope.get("rope_theta", default_theta))
    if rope.get("partial_rotary_factor") not in (None, 1, 1.0) and not family.partial_rotary:
        raise ModelError(f"{name}.partial_rotary_factor is {rope['partial_rotary_factor']!r}, supported is 1.0")
    if kind not in family.rope_types:
        raise ModelError(f"{name}.rope_type is {kind!r}, supported: {', '.join(map(repr, family.rope_types))}")
    if kind == "default":
        return theta, None
    wanted = _ROPE_FIELDS[kind]
    given: dict[str, Any] = dict(_YARN) if kind == "yarn" else {}
    given |= {field: value for field, value in rope.items() if value is not None}
    missing = [field for field in wanted.values() if field not in given]
    if missing:
        raise ModelError(f"{name}.{missing[0]} is missing; rope_type {kind!r} needs it")
    for factor in ("attention_factor", "attn_factor"):  # of transformers, and of vLLM
        if kind == "yarn" and factor in given:
            raise ModelError(f"{name}.{factor} is {given[factor]!r}, supported is None")
    if kind == "yarn" and not given.get("truncate", True):
        raise ModelError(f"{name}.truncate is {given['truncate']!r}, supported is True")
    return theta, RopeScaling(kind, **{ours: given[theirs] for ours, theirs in wanted.items()})


_ORIGINAL = {"factor": "factor", "original": "original_max_position_embeddings"}
_ROPE_FIELDS: Mapping[str, Mapping[str, str]] = {
    "linear": {"factor": "factor"},
    "llama3": _ORIGINAL | {"low": "low_freq_factor", "high": "high_freq_factor"},
    "yarn": _ORIGINAL | {"low": "beta_slow", "high": "beta_fast", "mscale": "mscale", "mscale_all": "mscale_all_dim"},
}
_YARN = {"beta_slow": 1.0, "beta_fast": 32.0, "mscale": 0.0, "mscale_all_dim": 0.0}  # where they are not given


def _rope_to_hf(rope: RopeScaling) -> dict[str, Any]:
    raw: dict[str, Any] = {"rope_type": rope.kind}
    fields = {theirs: getattr(rope, ours) for ours, theirs in _ROPE_FIELDS[rope.kind].items()}
    return raw | {name: value for name, value in fields.items() if value}


def _windows(family: HFFamily, got: Mapping[str, Any], layers: int) -> tuple[int | None, ...] | None:
    window = got.get("sliding_window") if got.get("use_sliding_window") else None
    kinds = got.get("layer_types")
    kinds = family.kinds(got, layers) if kinds is None else kinds
    known = (FULL, *(family.mixers or (SLIDING,)))
    unknown = sorted(set(kinds) - set(known))
    if unknown:
        raise ModelError(f"layer_types has {unknown[0]!r}, supported are {' and '.join(map(repr, known))}")
    if len(kinds) != layers:
        raise ModelError(f"layer_types has {len(kinds)} entries for num_hidden_layers {layers}")
    if SLIDING not in kinds:
        return None
    if window is None:
        raise ModelError("layer_types has 'sliding_attention' but sliding_window is off")
    return tuple(window if kind == SLIDING else None for kind in kinds)


def _dtype(got: Mapping[str, Any]) -> str:
    dtype = str(got.get("dtype") or got.get("torch_dtype") or "float32").removeprefix("torch.")
    if dtype not in DTYPES:
        raise ModelError(f"dtype is {dtype!r}, supported are {list(DTYPES)}")
    return dtype


# The largest value that is taken for real: a larger one would take all memory before its mistake is found.
LARGEST_SIZES = {
    "vocab_size": 2**26,
    "hidden_size": 2**20,
    "intermediate_size": 2**24,
    "num_hidden_layers": MOST_LAYERS,
    "num_attention_heads": 2**16,
    "num_key_value_heads": 2**16,
    "head_dim": 2**16,
    "max_position_embeddings": 2**40,
    "num_experts": 2**16,
    "num_local_experts": 2**16,
    "num_experts_per_tok": 2**16,
    "moe_intermediate_size": 2**24,
    "decoder_sparse_step": 4096,
    "n_routed_experts": 2**16,
    "n_shared_experts": 2**16,
    "n_group": 2**16,
    "topk_group": 2**16,
    "kv_lora_rank": 2**16,
    "q_lora_rank": 2**16,
    "qk_nope_head_dim": 2**16,
    "qk_rope_head_dim": 2**16,
    "v_head_dim": 2**16,
    "linear_num_key_heads": 2**16,
    "linear_num_value_heads": 2**16,
    "linear_key_head_dim": 2**16,
    "linear_value_head_dim": 2**16,
    "linear_conv_kernel_dim": 4096,
    "shared_expert_intermediate_size": 2**24,
}
MAY_BE_NULL = ("num_key_value_heads", "head_dim", "q_lora_rank", "n_group", "topk_group")
POSITIVE = (
    "rms_norm_eps",
    "rope_theta",
    "rope_local_base_freq",
    "embedding_multiplier",
    "residual_multiplier",
    "attention_multiplier",
    "logits_scaling",
    "routed_scaling_factor",
    "attn_logit_softcapping",
    "final_logit_softcapping",
    "partial_rotary_factor",
)
COUNTS = (
    "sliding_window",
    "sliding_window_pattern",
    "_sliding_window_pattern",
    "no_rope_layer_interval",
    "num_labels",
    "full_attention_interval",
)
SWITCHES = (
    "tie_word_embeddings",
    "attention_bias",
    "mlp_bias",
    "use_sliding_window",
    "use_bidirectional_attention",
    "norm_topk_prob",
    "rope_interleave",
)
NOT_NULL = ("rms_norm_eps", "rope_theta", "rope_local_base_freq", "no_rope_layer_interval", *POSITIVE[3:8])
ROPE_FIELDS = (
    "rope_theta",
    "factor",
    "low_freq_factor",
    "high_freq_factor",
    "original_max_position_embeddings",
    "beta_fast",
    "beta_slow",
    "mscale",
    "mscale_all_dim",
    "partial_rotary_factor",
)


def check_config_fields(raw: Mapping[str, Any]) -> None:
    """Check the fields of a parsed config.json that this package reads, where its family is one of `FAMILIES`.

    Raises:
      ModelError: naming the field, its value and what it must be.
    """
    name = raw.get("model_type")
    if not isinstance(name, str) or name not in FAMILIES:
        return
    for fields, text, holds in RULES:
        for field in fields:
            if field in raw and not ((raw[field] is None and field not in NOT_NULL) or holds(raw[field])):
                raise ModelError(f"{field} is {_short(raw[field])}, it must be {text}")
    for field, largest in LARGEST_SIZES.items():
        value = raw.get(field, 1)
        if not ((value is None and field in MAY_BE_NULL) or (type(value) is int and 1 <= value <= largest)):
            least = "a whole number of at least 1"
            raise ModelError(f"{field} is {_short(value)}, it must be {least} and at most {largest}")
    for field in ("rope_scaling", "rope_parameters"):
        _check_rope(field, raw.get(field) or {})


def _check_rope(name: str, rope: Mapping[str, Any]) -> None:
    for field, value in rope.items():
        if isinstance(value, Mapping):
            _check_rope(f"{name}.{field}", value)
        elif field in ROPE_FIELDS and value is not None and not _positive(value):
            raise ModelError(f"{name}.{field} is {_short(value)}, it must be a number above 0")
        elif field in ("rope_type", "type") and not isinstance(value, str):
            raise ModelError(f"{name}.{field} is {_short(value)}, it must be text")


def _positive(value: Any) -> bool:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return number and math.isfinite(value) and value > 0 if not isinstance(value, int) or value < 2**63 else False


def _count(value: Any) -> bool:
    return type(value) is int and 1 <= value < 2**63


def _token(value: Any) -> bool:
    return type(value) is int and -1 <= value < 2**63  # -1 is none, in old files


def _tokens(value: Any) -> bool:
    return _token(value) or (isinstance(value, list) and all(map(_token, value)))


def _texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


def _numbers(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, int) for item in value)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


RULES: tuple[tuple[tuple[str, ...], str, Callable[[Any], bool]], ...] = (
    (POSITIVE, "a number above 0", _positive),
    (COUNTS, "a whole number of at least 1", _count),
    (SWITCHES, "true or false", lambda value: isinstance(value, bool)),
    (
        ("max_window_layers", "first_k_dense_replace", "num_nextn_predict_layers"),
        "a whole number of at least 0",
        lambda value: value == 0 or _count(value),
    ),
    (("bos_token_id", "eos_token_id", "pad_token_id"), "a token id or a list of them", _tokens),
    (("architectures", "layer_types"), "a list of texts", _texts),
    (("no_rope_layers",), "a list of 0 and 1", _numbers),
    (("mlp_only_layers",), "a list of numbers of layers", _numbers),
    (("rope_scaling", "rope_parameters", "id2label"), "an object", lambda value: isinstance(value, dict)),
    (("dtype", "torch_dtype", "hidden_act", "hidden_activation"), "text", lambda value: isinstance(value, str)),
)
