"""The config.json of Hugging Face's models: from and to the record of a decoder.

What is peculiar to a family is in `families.py`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from funrl.models.decoder.config import Config, decoder_config
from funrl.models.decoder.layers import RopeScaling
from funrl.models.errors import ModelError
from funrl.models.flat import flat_fields, with_fields
from funrl.models.huggingface.configs.hf_family import (
    GIVEN_SIZES,
    HFFamily,
    class_defaults,
    class_name,
    kinds_of_layers,
)
from funrl.models.huggingface.configs.ministral3 import QUERY_GROWTH
from funrl.models.huggingface.configs.qwen3_5 import TEXT_PARTS, fields_of_text_part
from funrl.models.huggingface.families import FAMILIES
from funrl.models.huggingface.family_fields import ACTIVATIONS, FULL, SLIDING
from funrl.models.huggingface.fp8_files import fp8_blocks
from funrl.models.model import ModelConfig, check_sizes

DTYPES = ("float32", "bfloat16", "float16", "float64")
_GEMMA3N = (
    "it has four residual streams that each layer predicts and corrects (AltUp), a second branch beside attention "
    "(LAuReL) and gates that are cut to their largest numbers, none of which the decoder has, and logits with a cap, "
    "which transformers' own code is not trained with here; take a gemma4_text or gemma3_text instead"
)
REFUSED_FAMILIES: Mapping[str, str] = {"gemma3n": _GEMMA3N, "gemma3n_text": _GEMMA3N}  # model_type -> the reason


@dataclass(frozen=True)
class ModuleConfig(ModelConfig):
    """Sizes of a model that transformers' own code computes.

    Attributes:
      heads: query heads of a layer.
      head: size of one.
      kv_heads: heads of keys and values.
      mlp: inner size of the mlp.
      raw: the JSON text of its config.json; the sizes are a summary of it.
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


def architecture(config: ModelConfig) -> str:
    """The name in transformers of the class of a model without a value head."""
    family = config.source.family
    if isinstance(config, ModuleConfig):
        return (json.loads(config.raw).get("architectures") or [family])[0]
    return class_name(family, "CAUSAL_LM" if FAMILIES[family].vision is None else "IMAGE_TEXT_TO_TEXT") or family


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
    """The record of a parsed config.json, written by transformers 4 or 5; of `TEXT_PARTS`, that of the text part.

    Raises:
      ModelError: a field has a value that is not supported, or is missing.
    """
    raw = fields_of_text_part(raw)
    name = raw.get("model_type")
    if isinstance(name, str) and name in REFUSED_FAMILIES:
        raise ModelError(f"model_type is {name!r}, which is not supported: {REFUSED_FAMILIES[name]}")
    if not isinstance(name, str) or name not in FAMILIES:
        raise ModelError(f"model_type is {name!r}, supported are {sorted((*FAMILIES, *TEXT_PARTS))}")
    family = FAMILIES[name]
    text_type = name if family.vision is None else family.vision.text_type or f"{name}_text"
    of_class = class_defaults(text_type)
    defaults = {field: value for field, value in of_class.items() if field not in GIVEN_SIZES} | dict(family.defaults)
    got = {**defaults, **(raw if family.vision is None else family.vision.text(raw))}
    _refuse(family, got)
    fp8_blocks(raw)  # weights that are quantized in another way cannot be read
    embed, layers, heads = (_size(got, k) for k in ("hidden_size", "num_hidden_layers", "num_attention_heads"))
    if got.get("layer_types") is None:
        got["layer_types"] = kinds_of_layers(text_type, got)
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
        "activation": ACTIVATIONS.get(str(got.get("hidden_act")), "silu"),
        "mlp_bias": bool(got.get("mlp_bias")),
        "dtype": _dtype(got),
        "family": name,
        "bos": got.get("bos_token_id"),
        "eos": token_ids(got.get("eos_token_id")),
        "pad": got.get("pad_token_id"),
    }
    rotary = _rotary(family, got)
    scaling = rotary["rope_scaling"]
    if scaling is not None and scaling.kind == "longrope":  # longer sequences rotate all of their tokens otherwise
        fields["max_positions"] = min(scaling.original, scaling.extended)
    config: Config = decoder_config(**fields | rotary | family.read(got))
    if family.vision is not None:
        config = family.vision.tower(raw, config)
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
        "architectures": [architecture(config)],
        "model_type": config.source.family,
        "vocab_size": config.vocab,
        "hidden_size": config.embed,
        "intermediate_size": config.mlp.inner,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.attention.heads,
        "num_key_value_heads": config.attention.kv_heads,
        "head_dim": config.attention.head,
        "hidden_act": next(name for name, ours in ACTIVATIONS.items() if ours == config.mlp.activation),
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
    if (scaling := config.rope.scaling) is not None:
        raw["rope_scaling"] = _rope_to_hf(scaling)
        raw["max_position_embeddings"] = scaling.extended or config.max_positions
        if config.rope.query_growth:
            raw["rope_scaling"][QUERY_GROWTH] = config.rope.query_growth
    if family.partial_rotary:
        raw["partial_rotary_factor"] = (config.rope.part or config.attention.head) / config.attention.head
    if True in family.supported.get("mlp_bias", ()):
        raw["mlp_bias"] = config.mlp.bias
    raw |= family.write(config)
    if scaling is not None and FULL in raw.get("rope_parameters", ()):
        raw["rope_parameters"][FULL] |= raw["rope_scaling"]
    if family.vision is not None:
        raw = family.vision.nest(raw, config)
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
    if not family.rope_types:
        return {"rope_theta": got["rope_theta"], "rope_scaling": None}
    # transformers 5 writes everything into rope_parameters; 4 wrote rope_theta and rope_scaling.
    name = "rope_parameters" if got.get("rope_parameters") else "rope_scaling"
    rope = got.get(name) or {}
    local = got.get("rope_local_base_freq")
    per_layer = any(isinstance(value, Mapping) for value in rope.values())
    if local is None:
        if per_layer:
            raise ModelError(f"{name} is given per layer type ({sorted(rope)}), supported is one for all layers")
        theta, scaling = _rope(family, name, rope, got=got, default_theta=got["rope_theta"])
        return {"rope_theta": theta, "rope_scaling": scaling, "rotary_part": _rotated_part(family, rope, got)}
    if rope and name == "rope_parameters" and not per_layer:
        raise ModelError(f"{name} is {json.dumps(rope)}, it must be given per layer type ({FULL}, {SLIDING})")
    full = rope.get(FULL) or {} if per_layer else rope
    theta, scaling = _rope(family, name, full, got=got, default_theta=got["rope_theta"])
    sliding = rope.get(SLIDING) or {} if per_layer else {}
    local, stretched = _rope(family, name, sliding, got=got, default_theta=local)
    if stretched is not None:
        raise ModelError(f"{name}.{SLIDING}.rope_type is {stretched.kind!r}, supported is 'default'")
    return {"rope_theta": theta, "rope_scaling": scaling, "local_rope_theta": local}


def _rotated_part(family: HFFamily, rope: Mapping[str, Any], got: Mapping[str, Any]) -> int | None:
    """The size of the part of a head that is rotated, where the family says it; None: all of it."""
    if not family.partial_rotary:
        return None
    head = got.get("head_dim") or got["hidden_size"] // got["num_attention_heads"]
    part = rope.get("partial_rotary_factor") or got.get("partial_rotary_factor") or 1.0
    size = int(head * part)
    if not 0 < size <= head:
        raise ModelError(f"partial_rotary_factor is {part}: {size} of the {head} numbers of a head are rotated")
    return None if size == head else size


def _rope(
    family: HFFamily, name: str, rope: Mapping[str, Any], got: Mapping[str, Any], default_theta: float
) -> tuple[float, RopeScaling | None]:
    """The base and the stretching of one kind of layers.

    Args:
      name: of the field of config.json.
      got: all fields.
    """
    kind = rope.get("rope_type", rope.get("type", "default"))
    kind = "longrope" if kind == "su" else kind  # its name in older files
    theta = float(rope.get("rope_theta", default_theta))
    if rope.get("partial_rotary_factor") not in (None, 1, 1.0) and not family.partial_rotary:
        raise ModelError(f"{name}.partial_rotary_factor is {rope['partial_rotary_factor']!r}, supported is 1.0")
    if kind not in family.rope_types:
        raise ModelError(f"{name}.rope_type is {kind!r}, supported: {', '.join(map(repr, family.rope_types))}")
    if kind == "default":
        return theta, None
    wanted = _ROPE_FIELDS[kind]
    given = dict(_ROPE_DEFAULTS.get(kind, {}))
    given |= {field: value for field, value in rope.items() if value is not None}
    if kind == "longrope":
        given = _longrope(given, got)
    missing = [field for field in wanted.values() if field not in given]
    if missing:
        raise ModelError(f"{name}.{missing[0]} is missing; rope_type {kind!r} needs it")
    if kind == "yarn" and "attn_factor" in given:  # of vLLM
        raise ModelError(f"{name}.attn_factor is {given['attn_factor']!r}, supported is None")
    scaling = RopeScaling(kind, **{ours: given[theirs] for ours, theirs in wanted.items()})
    return theta, scaling


def _longrope(given: Mapping[str, Any], got: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of rotary positions of "longrope", with fields from elsewhere in config.json."""
    extended = _size(got, "max_position_embeddings")
    original = given.get("original_max_position_embeddings") or got.get("original_max_position_embeddings") or extended
    factor = given.get("factor", extended / original)
    places = {"original_max_position_embeddings": original, "max_position_embeddings": extended, "factor": factor}
    factors = {name: tuple(given[name]) for name in ("short_factor", "long_factor") if name in given}
    return {**given, **places, **factors}


_ORIGINAL = {"factor": "factor", "original": "original_max_position_embeddings"}
_ROPE_FIELDS: Mapping[str, Mapping[str, str]] = {
    "linear": {"factor": "factor"},
    "llama3": _ORIGINAL | {"low": "low_freq_factor", "high": "high_freq_factor"},
    "dynamic": {"factor": "factor"},
    "yarn": _ORIGINAL
    | {"low": "beta_slow", "high": "beta_fast", "mscale": "mscale", "mscale_all": "mscale_all_dim"}
    | {"truncate": "truncate", "fixed_amplitude": "attention_factor"},
    "longrope": _ORIGINAL
    | {"short": "short_factor", "long": "long_factor", "fixed_amplitude": "attention_factor"}
    | {"extended": "max_position_embeddings"},
}
# Values of fields that are not given.
_ROPE_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "yarn": {"beta_slow": 1.0, "beta_fast": 32.0, "mscale": 0.0, "mscale_all_dim": 0.0}
    | {"truncate": True, "attention_factor": 0.0},
    "longrope": {"attention_factor": 0.0},
}


_ROPE_WHERE_SET = ("mscale", "mscale_all_dim", "attention_factor")  # absent, they follow from the other fields


def _rope_to_hf(rope: RopeScaling) -> dict[str, Any]:
    """The fields of rotary positions, those with a default too: vLLM requires some of them."""
    raw: dict[str, Any] = {"rope_type": rope.kind}
    for ours, theirs in _ROPE_FIELDS[rope.kind].items():
        value = getattr(rope, ours)
        if theirs != "max_position_embeddings" and (value or theirs not in _ROPE_WHERE_SET):
            raw[theirs] = list(value) if isinstance(value, tuple) else value
    return raw


def _windows(family: HFFamily, got: Mapping[str, Any], layers: int) -> tuple[int | None, ...] | None:
    window = got.get("sliding_window") or None if got.get("use_sliding_window", True) else None
    kinds = got["layer_types"]
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
