"""The config.json of Hugging Face's models: from and to the record of a decoder.

What is peculiar to a family is in `families.py`.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from funrl.models.decoder.config import Config, decoder_config
from funrl.models.decoder.layers import RopeScaling
from funrl.models.errors import ModelError
from funrl.models.flat import flat_fields, with_fields
from funrl.models.huggingface.configs.delta_nets import TEXT_PARTS, fields_of_text_part
from funrl.models.huggingface.configs.hf_family import (
    ConfigFields,
    HFFamily,
    VisionFamily,
    class_name,
    fields_as_written,
    fields_with_defaults,
)
from funrl.models.huggingface.families import FAMILIES
from funrl.models.huggingface.family_fields import (
    ACTIVATIONS,
    FULL,
    QUERY_GROWTH,
    SLIDING,
    attention_scale,
    layer_types,
    read_experts,
    whole_size,
    write_experts,
)
from funrl.models.huggingface.fp8_files import fp8_blocks
from funrl.models.model import ModelConfig, check_sizes
from funrl.models.vision.config import tower_in, with_tower

WithDefaults = Callable[[ConfigFields], dict[str, Any]]
DTYPES = ("float32", "bfloat16", "float16", "float64")
GIVEN_SIZES = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
LARGEST_NUMBER = 1e300
_POSITIVE = (  # fields that are numbers above 0 where they are given, also of rotary positions
    *("rms_norm_eps", "attn_logit_softcapping", "final_logit_softcapping", "routed_scaling_factor"),
    *("embedding_multiplier", "residual_multiplier", "attention_multiplier", "logits_scaling"),
    *("swiglu_alpha", "swiglu_limit", "partial_rotary_factor", "rope_theta", "factor", "mscale", "mscale_all_dim"),
    *("low_freq_factor", "high_freq_factor", "original_max_position_embeddings", "beta_fast", "beta_slow"),
)
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
    def foreign(self) -> ConfigFields:
        """All fields of config.json."""
        return json.loads(self.raw)


def architecture(config: ModelConfig) -> str:
    """The name in transformers of the class of a model without a value head."""
    family = config.source.family
    if isinstance(config, ModuleConfig):
        return (json.loads(config.raw).get("architectures") or [family])[0]
    own = FAMILIES[family]
    kind = "CAUSAL_LM" if own.vision is None else "IMAGE_TEXT_TO_TEXT"
    return own.causal_lm or class_name(family, kind) or family


def config_to_hf(config: ModelConfig) -> dict[str, Any]:
    """The fields of a model's config.json, readable by transformers 4 and 5.

    Raises:
      ModelError: config.json has no place for something of it.
    """
    if isinstance(config, ModuleConfig):
        return json.loads(config.raw)
    assert isinstance(config, Config)
    return _decoder_to_hf(config)


def check_config(raw: ConfigFields) -> None:
    """Check the types of fields of a parsed config.json, where its family is one of `FAMILIES`, and numbers of them.

    Raises:
      ModelError: naming the field and its value.
    """
    raw = fields_of_text_part(raw)
    if not isinstance(raw.get("model_type"), str):
        raise ModelError(f"model_type is {raw.get('model_type')!r}, it must be text")
    if raw["model_type"] not in FAMILIES:
        return
    for part in (raw, raw.get("text_config")):
        if isinstance(part, Mapping):
            _check_written(part)
    fields = _complete(raw)
    fields = fields.get("text_config", fields)
    rope = fields.get("rope_parameters") or {}
    where = "rope_scaling" if raw.get("rope_scaling") else "rope_parameters"
    parts = ((f"{where}.{name}", x) for name, x in rope.items() if isinstance(x, Mapping))
    for prefix, part in (("", fields), (where, rope), *parts):
        if not isinstance(part.get("rope_type", ""), str):
            raise ModelError(f"{prefix}.rope_type is {part['rope_type']!r}, it must be text")
        for name in _POSITIVE:
            value = part.get(name)
            if value is not None and not (isinstance(value, int | float) and 0 < value < LARGEST_NUMBER):
                label = f"{prefix}.{name}" if prefix and name not in raw else name
                raise ModelError(f"{label} is {value!r}, it must be a number above 0")


def _check_written(raw: ConfigFields) -> None:
    """Check fields that transformers reads without an error or fails at without their name. Raises: ModelError."""
    for name in (*GIVEN_SIZES, "num_key_value_heads", "head_dim", "max_position_embeddings"):
        if raw.get(name) is not None:
            whole_size(raw, name)
    for name in ("architectures", "layer_types"):
        value = raw.get(name)
        if value is not None and not (isinstance(value, list) and all(isinstance(x, str) for x in value)):
            raise ModelError(f"{name} is {value!r}, it must be a list of texts")
    for name in ("dtype", "torch_dtype"):
        if raw.get(name) is not None and raw[name] not in (*DTYPES, *(f"torch.{x}" for x in DTYPES), "auto"):
            raise ModelError(f"{name} is {raw[name]!r}, supported are {list(DTYPES)}")
    if raw.get("rope_theta", 1) is None:
        raise ModelError("rope_theta is None, it must be a number above 0")


def _complete(raw: ConfigFields) -> dict[str, Any]:
    """The fields of a config.json, and those that it lacks; one that `config_to_hf` writes the same lacks none.

    Raises:
      ModelError: as `transformers_config`.
    """
    family = FAMILIES.get(str(raw.get("model_type")))
    if family is not None and family.causal_lm:
        with contextlib.suppress(Exception):  # the reader with defaults names what is wrong
            if config_to_hf(config_from_hf(raw, fields_as_written)) == raw:
                return fields_as_written(raw)
    return fields_with_defaults(raw)


def config_from_hf(raw: ConfigFields, with_defaults: WithDefaults = _complete) -> Config:
    """The record of a parsed config.json, written by transformers 4 or 5; of `TEXT_PARTS`, that of the text part.

    Args:
      raw: the fields of the file.
      with_defaults: adds the fields that the file lacks.

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
    vision = family.vision
    fp8_blocks(raw)  # weights that are quantized in another way cannot be read
    outer = _fields(family, raw, with_defaults)
    got = outer if vision is None else _text_fields(family, outer)
    _refuse(family, got)
    embed, layers, heads = (whole_size(got, k) for k in ("hidden_size", "num_hidden_layers", "num_attention_heads"))
    windows = got.get("sliding_window") and got.get("use_sliding_window", True)
    got["layer_types"] = got.get("layer_types") or [SLIDING if windows else FULL] * layers
    fields: dict[str, object] = {
        "vocab": whole_size(got, "vocab_size"),
        "embed": embed,
        "layers": layers,
        "heads": heads,
        "kv_heads": heads if got.get("num_key_value_heads") is None else whole_size(got, "num_key_value_heads"),
        "head": embed // heads if got.get("head_dim") is None else whole_size(got, "head_dim"),
        "mlp": whole_size(got, "intermediate_size"),
        "norm_eps": float(got["rms_norm_eps"]),
        "tied": bool(got["tie_word_embeddings"]),
        "windows": _windows(family, got),
        "max_positions": whole_size(got, "max_position_embeddings"),
        "activation": ACTIVATIONS.get(str(got.get("hidden_act")), "silu"),
        "mlp_bias": bool(got.get("mlp_bias")),
        "dtype": _dtype(got),
        "family": name,
        "bos": got.get("bos_token_id"),
        "eos": token_ids(got.get("eos_token_id")),
        "pad": got.get("pad_token_id"),
    }
    rotary = _rotary(family, got)
    scaling = rotary.get("rope_scaling")
    if scaling is not None and scaling.kind == "longrope":  # longer sequences rotate all of their tokens otherwise
        fields["max_positions"] = min(scaling.original, scaling.extended)
    fields |= {**rotary, **family.values}
    for ours, theirs in family.fields.items():
        if theirs in got:
            fields[ours] = float(got[theirs]) if type(got[theirs]) is int else got[theirs]
    own = dict(family.read(got))
    if family.experts:
        own["experts"] = read_experts(family, got, own.get("experts"))
    config: Config = decoder_config(**fields | own)
    if vision is not None:
        config = with_tower(config, vision.tower(outer, config))
    if config.attention.latent is None or config.rope.scaling is None or config.rope.scaling.sharpness == 1:
        return config
    return with_fields(config, attention_scale=config.attention.head**-0.5 * config.rope.scaling.sharpness)


def _fields(family: HFFamily, raw: ConfigFields, with_defaults: WithDefaults) -> dict[str, Any]:
    """The fields of a config.json with all defaults. Raises: ModelError, one is missing that has none here."""
    if family.vision is None:
        missing = [name for name in GIVEN_SIZES if raw.get(name, family.defaults.get(name)) is None]
        if missing:
            raise ModelError(f"{missing[0]} is missing, it must be a whole number of at least 1")
    elif not isinstance(raw.get("vision_config"), Mapping):
        raise ModelError(f"vision_config is {raw.get('vision_config')!r}, it must be the sizes of the vision tower")
    return with_defaults({**family.defaults, **raw})


def _text_fields(family: HFFamily, outer: ConfigFields) -> dict[str, Any]:
    """The fields of the text model of a config.json with a tower: those of text_config, and some that are outside."""
    names = ("eos_token_id", "dtype")
    given = {name: outer[name] for name in names if outer.get(name) is not None}
    return {**family.defaults, **outer["text_config"], **given, "tie_word_embeddings": outer["tie_word_embeddings"]}


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
    flat = flat_fields(config) | {"attention_scale": attention_scale(config)}
    raw |= _written_windows(family, config) | {theirs: flat[ours] for ours, theirs in family.fields.items()}
    if family.experts:
        raw |= write_experts(family, config)
    raw |= family.write(config)
    if scaling is not None and FULL in raw.get("rope_parameters", ()):
        raw["rope_parameters"][FULL] |= raw["rope_scaling"]
    if family.vision is not None:
        raw = _nested(raw, config, family.vision)
    written = config_from_hf(raw, fields_as_written if family.causal_lm else fields_with_defaults)
    written = with_fields(written, generation=config.source.generation)  # which has a file of its own
    if written != config:
        kept = flat_fields(written)
        lost = ", ".join(f"{name}={value}" for name, value in flat_fields(config).items() if value != kept[name])
        raise ModelError(f"a {config.source.family} config.json cannot hold {lost}")
    return raw


def _written_windows(family: HFFamily, config: Config) -> dict[str, object]:
    """ConfigFields about windows. A class with kinds of layers wants a size even if no layer has a window, and has one.

    Raises:
      ModelError: there are several sizes.
    """
    windows = config.attention.windows
    sizes = {window for window in windows or () if window is not None}
    if len(sizes) > 1:
        raise ModelError(f"windows has sizes {sorted(sizes)}, config.json can say only one")
    kinds = layer_types(config)
    values = {
        "layer_types": kinds,
        "use_sliding_window": windows is not None,
        "max_window_layers": kinds.index(SLIDING) if sizes else config.layers,
        "sliding_window": next(iter(sizes), None),
    }
    return {
        name: values[name] for name in family.windows if sizes or name != "sliding_window" or len(family.windows) == 1
    }


def _nested(text: ConfigFields, config: Config, vision: VisionFamily) -> dict[str, Any]:
    """The fields of a config.json with a tower. Raises: ModelError, the config has none, or one of another form."""
    fields, of_tower, of_text = vision.write(tower_in(config), config)
    own = ("architectures", "model_type", "dtype", "torch_dtype", "tie_word_embeddings", "eos_token_id", "pad_token_id")
    inner = {name: x for name, x in text.items() if name not in own[:2]}
    return {
        **{name: text[name] for name in own},
        **fields,
        "text_config": {**inner, **of_text, "model_type": vision.text_type},
        "vision_config": of_tower,
    }


def _refuse(family: HFFamily, got: ConfigFields) -> None:
    supported: dict[str, Any] = {"hidden_act": ("silu",), "mlp_bias": (False, None)}
    supported |= {name: (None,) for name in ("sliding_window", "layer_types") if name not in family.windows}
    for name, values in (supported | dict(family.supported)).items():
        if got.get(name) not in values:
            raise ModelError(f"{name} is {got[name]!r}, supported is {values[0]!r}")


def _rotary(family: HFFamily, got: ConfigFields) -> dict[str, Any]:
    """The base and the stretching of rotary frequencies; where the family has them, the base of local layers too."""
    if not family.rope_types:
        return {}
    rope = got["rope_parameters"]
    if not family.local_rope:
        if kinds := sorted(name for name, x in rope.items() if isinstance(x, Mapping)):
            raise ModelError(f"rope_parameters is given per layer type ({kinds}), supported is one for all layers")
        theta, scaling = _rope(family, rope, got)
        return {"rope_theta": theta, "rope_scaling": scaling, "rotary_part": _rotated_part(family, rope, got)}
    if set(rope) != {FULL, SLIDING}:
        raise ModelError(f"rope_parameters is {json.dumps(rope)}, it must be given per layer type ({FULL}, {SLIDING})")
    theta, scaling = _rope(family, rope[FULL], got)
    local, stretched = _rope(family, rope[SLIDING], got)
    if stretched is not None:
        raise ModelError(f"rope_parameters.{SLIDING}.rope_type is {stretched.kind!r}, supported is 'default'")
    return {"rope_theta": theta, "rope_scaling": scaling, "local_rope_theta": local}


def _rotated_part(family: HFFamily, rope: ConfigFields, got: ConfigFields) -> int | None:
    """The size of the part of a head that is rotated; None: all of it. Raises: ModelError, it cannot be."""
    head = got.get("head_dim") or got["hidden_size"] // got["num_attention_heads"]
    part = rope.get("partial_rotary_factor") or 1.0
    size = int(head * part)
    if not 0 < size <= head:
        raise ModelError(f"partial_rotary_factor is {part}: {size} of the {head} numbers of a head are rotated")
    return None if size == head else size


def _rope(family: HFFamily, rope: ConfigFields, got: ConfigFields) -> tuple[float, RopeScaling | None]:
    """The base and the stretching of one kind of layers. Raises: ModelError, these are not supported."""
    kind = rope["rope_type"]
    if kind not in family.rope_types:
        raise ModelError(f"rope_type is {kind!r}, supported: {', '.join(map(repr, family.rope_types))}")
    if rope.get("partial_rotary_factor") not in (None, 1.0) and not family.partial_rotary:
        raise ModelError(f"partial_rotary_factor is {rope['partial_rotary_factor']}, supported is 1.0")
    theta = float(rope["rope_theta"])
    if kind == "default":
        return theta, None
    given: dict[str, Any] = {"beta_fast": 32.0} | {name: x for name, x in rope.items() if x is not None}
    if kind == "longrope":
        extended = whole_size(got, "max_position_embeddings")  # which is elsewhere in config.json
        factors = {name: tuple(given[name]) for name in ("short_factor", "long_factor")}
        ratio = extended / given["original_max_position_embeddings"]
        given = {"factor": ratio, **given, **factors, "max_position_embeddings": extended}
    if kind == "yarn" and "attn_factor" in given:  # of vLLM
        raise ModelError(f"attn_factor is {given['attn_factor']!r}, supported is None")
    values: dict[str, Any] = {ours: given[theirs] for ours, theirs in _ROPE_FIELDS[kind].items() if theirs in given}
    return theta, RopeScaling(kind, **values)


_ORIGINAL = {"factor": "factor", "original": "original_max_position_embeddings"}
_ROPE_FIELDS: Mapping[str, Mapping[str, str]] = {
    "default": {},
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
_ROPE_WHERE_SET = ("mscale", "mscale_all_dim", "attention_factor")  # absent, they follow from the other fields


def _rope_to_hf(rope: RopeScaling) -> dict[str, Any]:
    """The fields of rotary positions, those with a default too: vLLM requires some of them."""
    raw: dict[str, Any] = {"rope_type": rope.kind}
    for ours, theirs in _ROPE_FIELDS[rope.kind].items():
        value = getattr(rope, ours)
        if theirs != "max_position_embeddings" and (value or theirs not in _ROPE_WHERE_SET):
            raw[theirs] = list(value) if isinstance(value, tuple) else value
    return raw


def _windows(family: HFFamily, got: ConfigFields) -> tuple[int | None, ...] | None:
    kinds = got["layer_types"]
    known = (FULL, *(family.mixers or (SLIDING,)))
    if unknown := sorted(set(kinds) - set(known)):
        raise ModelError(f"layer_types has {unknown[0]!r}, supported are {' and '.join(map(repr, known))}")
    if SLIDING not in kinds:
        return None
    if not got.get("sliding_window") or not got.get("use_sliding_window", True):
        raise ModelError("layer_types has 'sliding_attention' but sliding_window is off")
    window = whole_size(got, "sliding_window")
    return tuple(window if kind == SLIDING else None for kind in kinds)


def _dtype(got: ConfigFields) -> str:
    dtype = str(got.get("dtype") or "float32").removeprefix("torch.")
    if dtype not in DTYPES:
        raise ModelError(f"dtype is {dtype!r}, supported are {list(DTYPES)}")
    return dtype
