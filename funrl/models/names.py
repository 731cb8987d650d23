"""Names and shapes of weights in Hugging Face files."""

from __future__ import annotations

import math
from collections.abc import Mapping

from funrl import trees

_LAYER = {
    "attn_norm": "input_layernorm.weight",
    "mlp_norm": "post_attention_layernorm.weight",
    "q": "self_attn.q_proj.weight",
    "k": "self_attn.k_proj.weight",
    "v": "self_attn.v_proj.weight",
    "o": "self_attn.o_proj.weight",
    "q_bias": "self_attn.q_proj.bias",
    "k_bias": "self_attn.k_proj.bias",
    "v_bias": "self_attn.v_proj.bias",
    "o_bias": "self_attn.o_proj.bias",
    "q_norm": "self_attn.q_norm.weight",
    "k_norm": "self_attn.k_norm.weight",
    "gate": "mlp.gate_proj.weight",
    "up": "mlp.up_proj.weight",
    "down": "mlp.down_proj.weight",
}
EMBED, UNEMBED = "model.embed_tokens.weight", "lm_head.weight"
_TOP = {"embed": EMBED, "norm": "model.norm.weight", "unembed": UNEMBED}
_VALUE = "score.weight"  # of transformers' ForSequenceClassification


def hf_names(shapes: trees.Tree) -> Mapping[str, tuple[str, tuple[int, ...]]]:
    """For each weight of a decoder, or of one with a value head: its name and shape in a Hugging Face file.

    The tensor here is the one there with the heads as a dim of their own.

    Example: {"layers/0/attn/q": ("model.layers.0.self_attn.q_proj.weight", (H * N, D)), ...}
    """
    return {name: (_hf_name(name), _hf_shape(name, tuple(x.shape))) for name, x in trees.named(shapes)}


def _hf_name(name: str) -> str:
    if name == "value":
        return _VALUE
    parts = name.removeprefix("decoder/").split("/")
    return _TOP[parts[0]] if len(parts) == 1 else f"model.layers.{parts[1]}.{_LAYER[parts[-1]]}"


def _hf_shape(name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    last = name.rsplit("/", 1)[-1]
    if last in ("q", "k", "v", "q_bias", "k_bias", "v_bias"):
        return (math.prod(shape[:2]), *shape[2:])
    return (shape[0], math.prod(shape[1:])) if last == "o" else shape
