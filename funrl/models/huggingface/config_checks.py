"""Types and sizes of the fields of a config.json, which are checked before they are used."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from funrl.models.errors import ModelError
from funrl.models.huggingface.configs.hf_family import VisionFamily, class_defaults
from funrl.models.huggingface.configs.qwen3_5 import fields_of_text_part
from funrl.models.huggingface.families import FAMILIES
from funrl.models.model import MOST_LAYERS

# The largest whole numbers that are taken for real: a larger one would take all memory before its mistake is found.
LARGEST_SIZES = {"num_hidden_layers": MOST_LAYERS, "vocab_size": 2**26, "max_position_embeddings": 2**40}
LARGEST_OF_OTHERS = 2**24
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
    "swiglu_alpha",
    "swiglu_limit",
)
NOT_NULL = (
    "rms_norm_eps",
    "rope_theta",
    "rope_local_base_freq",
    "no_rope_layer_interval",
    *POSITIVE[3:8],
    *POSITIVE[-2:],
)
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


def _with_text_fields(raw: Mapping[str, Any], vision: VisionFamily | None) -> Mapping[str, Any]:
    """The fields with those of the text model of a family that sees pictures."""
    if vision is None:
        return raw
    for part in ("text_config", "vision_config"):
        if not isinstance(raw.get(part, {}), Mapping):
            raise ModelError(f"{part} is {_short(raw[part])}, it must be an object")
    return {**raw, **vision.text(raw)}


def check_config_fields(raw: Mapping[str, Any]) -> None:
    """Check the fields of a parsed config.json that this package reads, where its family is one of `FAMILIES`.

    Whole numbers and switches are the fields that have such defaults in the family's class of transformers.

    Raises:
      ModelError: naming the field, its value and what it must be.
    """
    raw = fields_of_text_part(raw)
    name = raw.get("model_type")
    if not isinstance(name, str) or name not in FAMILIES:
        return
    vision = FAMILIES[name].vision
    raw = _with_text_fields(raw, vision)
    defaults = class_defaults(name if vision is None else vision.text_type or f"{name}_text")
    for fields, text, holds in RULES:
        for field in fields:
            if field in raw and not ((raw[field] is None and field not in NOT_NULL) or holds(raw[field])):
                raise ModelError(f"{field} is {_short(raw[field])}, it must be {text}")
    ruled = {field for fields, _, _ in RULES for field in fields}
    for field in (field for field in raw if field not in ruled):
        value = raw[field]
        default = defaults.get(field)
        most = LARGEST_SIZES.get(field, LARGEST_OF_OTHERS)
        if value is None and (field in MAY_BE_NULL or default is None or isinstance(default, bool)):
            continue
        if isinstance(default, bool) and not isinstance(value, bool):
            raise ModelError(f"{field} is {_short(value)}, it must be true or false")
        counted = field in MAY_BE_NULL or (type(default) is int and default > 0)
        if counted and not (type(value) is int and 1 <= value <= most):
            least = "a whole number of at least 1"
            raise ModelError(f"{field} is {_short(value)}, it must be {least} and at most {most}")
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
    (("_sliding_window_pattern", "num_labels", "full_attention_interval"), "a whole number of at least 1", _count),
    (
        (
            *("max_window_layers", "first_k_dense_replace", "num_nextn_predict_layers"),
            *("sliding_window", "moe_num_shared_experts", "moe_layer_start_index"),
            *("num_kv_shared_layers", "hidden_size_per_layer_input", "vocab_size_per_layer_input"),
        ),
        "a whole number of at least 0",
        lambda value: value == 0 or _count(value),
    ),
    (("bos_token_id", "eos_token_id", "pad_token_id"), "a token id or a list of them", _tokens),
    (("architectures", "layer_types"), "a list of texts", _texts),
    (("no_rope_layers",), "a list of 0 and 1", _numbers),
    (
        ("sliding_window_pattern",),
        "a whole number of at least 0, or text",
        lambda x: isinstance(x, str) or x == 0 or _count(x),
    ),
    (("moe_layer_end_index",), "a whole number of at least -1", _token),
    (("mlp_only_layers",), "a list of numbers of layers", _numbers),
    (("use_bidirectional_attention",), "true, false or text", lambda value: isinstance(value, bool | str)),
    (
        ("rope_scaling", "rope_parameters", "id2label", "per_layer_config"),
        "an object",
        lambda value: isinstance(value, dict),
    ),
    (("dtype", "torch_dtype", "hidden_act", "hidden_activation"), "text", lambda value: isinstance(value, str)),
)
