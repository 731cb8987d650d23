"""Types and sizes of the fields of a config.json, which are checked before they are used."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from funrl.models.errors import ModelError
from funrl.models.huggingface.configs.hf_family import VisionFamily
from funrl.models.huggingface.configs.qwen3_5 import fields_of_text_part
from funrl.models.huggingface.families import FAMILIES
from funrl.models.model import MOST_LAYERS

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
    "rotary_dim": 2**16,
    "moe_num_experts": 2**16,
    "moe_k": 2**16,
    "moe_layer_interval": 4096,
    "global_head_dim": 2**16,
    "num_global_key_value_heads": 2**16,
    "top_k_experts": 2**16,
}
MAY_BE_NULL = ("num_key_value_heads", "head_dim", "q_lora_rank", "n_group", "topk_group")
# of a family whose models may be without experts
MAY_BE_NULL_IN = {
    "gemma4_text": ("num_global_key_value_heads", "num_experts", "top_k_experts", "moe_intermediate_size"),
}
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
COUNTS = (
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
    "attention_k_eq_v",
    "enable_moe_block",
    "use_double_wide_mlp",
    "norm_topk_prob",
    "rope_interleave",
    "use_bias",
    "qkv_bias",
    "use_qk_norm",
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

    Raises:
      ModelError: naming the field, its value and what it must be.
    """
    raw = fields_of_text_part(raw)
    name = raw.get("model_type")
    if not isinstance(name, str) or name not in FAMILIES:
        return
    raw = _with_text_fields(raw, FAMILIES[name].vision)
    for fields, text, holds in RULES:
        for field in fields:
            if field in raw and not ((raw[field] is None and field not in NOT_NULL) or holds(raw[field])):
                raise ModelError(f"{field} is {_short(raw[field])}, it must be {text}")
    may_be_null = (*MAY_BE_NULL, *MAY_BE_NULL_IN.get(name, ()))
    for field, largest in LARGEST_SIZES.items():
        value = raw.get(field, 1)
        if not ((value is None and field in may_be_null) or (type(value) is int and 1 <= value <= largest)):
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
