"""Hugging Face families that the decoder computes: what the config.json of each means, and what in it is refused.

| family | what it adds to a pre-norm decoder with rotary positions, grouped key-value heads and a gated SiLU mlp |
|---|---|
| llama | attention bias (q, k, v and o) where the config has it |
| qwen2 | bias on q, k, v; a sliding window on the upper layers where the config has it |
| qwen3 | q and k normalised per head, free head size, the sliding window of qwen2 |
| mistral | free head size, one sliding window on all layers where the config has it |
| phi3 | q, k, v are one tensor of its files, gate and up another; one sliding window on all layers |
| olmo2 | norms behind attention and mlp instead of before them; q and k normalised over all their heads |
| smollm3 | layers without rotary positions; these may have a sliding window |
| granite | factors of embeddings, residual branches, attention and logits |
| gemma2 | GELU, norms on both sides, 1 + w in norms, scaled embeddings, soft caps, a window on every other layer |
| qwen3_moe | qwen3 with experts in all layers or in some |
| mixtral | mistral with experts in all layers, the weights of a token's divided by their sum |
| olmoe | norms before attention and mlp, q and k normalised over all their heads, experts in all layers |
| deepseek_v2 | latent attention; experts by softmax, of a few groups where the config has them, beside a shared one |
| deepseek_v3 | latent attention; experts chosen by sigmoid + bias within a few groups, beside a shared one |
| qwen3_next | qwen3_moe with gated delta nets in most layers, gates in the others, and a weighted shared expert |
| gemma3_text | gemma2 with q and k normalised per head, and a rotary base of their own in layers with a window |

A family is one entry of `FAMILIES`. Its functions, most of them in `family_fields.py`, read and write what is peculiar
to it. `config.py` reads what families share.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from funrl.models.decoder.config import Config
from funrl.models.huggingface import deepseek, qwen3_next
from funrl.models.huggingface.family_fields import (
    GELU,
    MULTIPLIERS,
    all_layers,
    gemma2_kinds,
    gemma3_kinds,
    read_bias,
    read_experts,
    read_gemma2,
    read_gemma3,
    read_granite,
    read_olmo2,
    read_olmoe,
    read_qwen3_moe,
    read_smollm3,
    smollm3_kinds,
    upper_layers,
    write_bias,
    write_gemma2,
    write_gemma3,
    write_granite,
    write_mixtral,
    write_olmoe,
    write_qwen2,
    write_qwen3,
    write_qwen3_moe,
    write_smollm3,
    write_window,
)

LAYERS = "model.layers."  # how the names of a layer's tensors begin


def _nothing(_: object) -> dict[str, Any]:
    return {}


class HFFamily(NamedTuple):
    """A family of models in transformers.

    Attributes:
      architecture: the class of its causal language models.
      classifier: the class of its sequence classifiers; None: it has none.
      token_classifier: the same of its token classifiers.
      defaults: values that transformers takes for fields that config.json lacks.
      supported: further values that a field may have; any other is refused.
      read: fields of config.json -> fields of `Config` that only some families have.
      write: the config -> fields of config.json for them.
      kinds: (fields, layers) -> the kind of each layer, where config.json has no layer_types.
      rope_types: ways of stretching rotary frequencies.
      mixers: further kinds that layers may have, which `read` makes mixers of.
      partial_rotary: the rotated part of a head is any, which `read` gives.
      further_layers: how the names of tensors begin that predict tokens behind the next one, and are left out;
        `LAYERS`: those of layers behind the last.
      names: last parts of the names of weights here -> their names in a layer's file, where other families' differ.
      fused: tensor of a layer's file -> the tensors that it holds one behind the other.
    """

    architecture: str
    classifier: str | None
    token_classifier: str | None
    defaults: Mapping[str, Any]
    supported: Mapping[str, Sequence[Any]] = {}
    read: Callable[[Mapping[str, Any]], dict[str, Any]] = _nothing
    write: Callable[[Config], dict[str, Any]] = _nothing
    kinds: Callable[[Mapping[str, Any], int], list[str]] = upper_layers
    rope_types: Sequence[str] = ("default", "linear", "llama3", "yarn")
    mixers: Sequence[str] = ()
    partial_rotary: bool = False
    further_layers: str = ""
    fused: Mapping[str, Sequence[str]] = {}
    names: Mapping[str, str] = {}


def _family(name: str, defaults: Mapping[str, Any], **more: Any) -> HFFamily:
    """A family whose classes begin with `name`."""
    causal, sequence, token = (
        f"{name}For{task}" for task in ("CausalLM", "SequenceClassification", "TokenClassification")
    )
    return HFFamily(causal, sequence, token, defaults={**_COMMON, **defaults}, **more)


_COMMON = {"hidden_act": "silu", "rms_norm_eps": 1e-6, "tie_word_embeddings": False, "rope_theta": 10000.0}
_LLAMA = {"max_position_embeddings": 2048, "bos_token_id": 1, "eos_token_id": 2}
_QWEN = {
    "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
}
_ALL_LAYERS = {"use_sliding_window": True, "max_window_layers": 0}
_GEMMA = {
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": GELU,
    "tie_word_embeddings": True,
    "query_pre_attn_scalar": 256,
    "use_sliding_window": True,
    "sliding_window": 4096,
    "bos_token_id": 2,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
_ONE_WINDOW = {"layer_types": (None,)}
_NO_WINDOW = {"sliding_window": (None,)}
_GEMMA_SUPPORTED = {
    "hidden_act": ("silu", GELU, "gelu", None),  # not read by transformers, which goes by hidden_activation
    "hidden_activation": (GELU,),
    "use_bidirectional_attention": (False, None),
}
FAMILIES: Mapping[str, HFFamily] = {
    "llama": _family("Llama", _LLAMA, supported=_NO_WINDOW, read=read_bias, write=write_bias),
    "qwen2": _family(
        "Qwen2",
        _QWEN,
        read=lambda _: {"attention_bias": True},
        write=write_qwen2,
        supported={"attention_bias": (True, None)},
    ),
    "qwen3": _family(
        "Qwen3", _QWEN | {"head_dim": 128}, read=lambda got: read_bias(got) | {"qk_norm": True}, write=write_qwen3
    ),
    "mistral": _family(
        "Mistral",
        _LLAMA
        | _ALL_LAYERS
        | {
            "num_key_value_heads": 8,
            "max_position_embeddings": 131072,
            "sliding_window": 4096,
        },
        supported=_ONE_WINDOW,
        write=write_window,
    ),
    "phi3": _family(
        "Phi3",
        _ALL_LAYERS
        | {
            "rms_norm_eps": 1e-5,
            "max_position_embeddings": 4096,
            "bos_token_id": 1,
            "eos_token_id": 32000,
            "pad_token_id": 32000,
        },
        supported=_ONE_WINDOW,
        write=write_window,
        rope_types=("default",),
        fused={
            "self_attn.qkv_proj.weight": [f"self_attn.{name}_proj.weight" for name in "qkv"],
            "mlp.gate_up_proj.weight": [f"mlp.{name}_proj.weight" for name in ("gate", "up")],
        },
    ),
    "olmo2": _family(
        "Olmo2",
        {
            "rms_norm_eps": 1e-5,
            "max_position_embeddings": 2048,
            "eos_token_id": 50279,
            "pad_token_id": 1,
        },
        supported=_NO_WINDOW,
        read=read_olmo2,
        write=write_bias,
    )._replace(token_classifier=None),
    "smollm3": _family(
        "SmolLM3",
        {
            "num_key_value_heads": 4,
            "max_position_embeddings": 32768,
            "rope_theta": 2e6,
            "tie_word_embeddings": True,
            "no_rope_layer_interval": 4,
            "bos_token_id": 128000,
            "eos_token_id": 128001,
            "pad_token_id": 128004,
        },
        read=read_smollm3,
        write=write_smollm3,
        kinds=smollm3_kinds,
    ),
    "granite": _family(
        "Granite",
        _LLAMA | dict.fromkeys(MULTIPLIERS.values(), 1.0),
        supported=_NO_WINDOW,
        read=read_granite,
        write=write_granite,
    )._replace(classifier=None, token_classifier=None),
    "qwen3_moe": _family(
        "Qwen3Moe",
        _QWEN
        | {
            "num_key_value_heads": 4,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 768,
            "norm_topk_prob": False,
        },
        supported=_ONE_WINDOW,
        read=read_qwen3_moe,
        write=write_qwen3_moe,
        kinds=all_layers,
    ),
    "qwen3_next": _family(
        "Qwen3Next",
        qwen3_next.NEXT_DEFAULTS,
        kinds=qwen3_next.layer_kinds,
        mixers=(qwen3_next.LINEAR,),
        read=lambda fields: qwen3_next.read_qwen3_next(fields, read_qwen3_moe(fields)),
        write=lambda config: write_qwen3_moe(config) | qwen3_next.write_qwen3_next(config),
        partial_rotary=True,
        further_layers="mtp.",
        names=qwen3_next.NEXT_WEIGHT_NAMES,
        fused=qwen3_next.NEXT_FUSED,
    ),
    "mixtral": _family(
        "Mixtral",
        _LLAMA
        | _ALL_LAYERS
        | {
            "num_key_value_heads": 8,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1e6,
            "num_experts_per_tok": 2,
            "num_local_experts": 8,
        },
        supported=_ONE_WINDOW,
        write=write_mixtral,
        kinds=all_layers,
        read=lambda got: {"experts": read_experts(got, "intermediate_size", True)},
        names={"router": "block_sparse_moe.gate.weight"}
        | {
            f"expert_{ours}": f"block_sparse_moe.experts.{theirs}.weight"
            for ours, theirs in (("gate", "w1"), ("up", "w3"), ("down", "w2"))
        },
    ),
    "olmoe": _family(
        "Olmoe",
        {
            "rms_norm_eps": 1e-5,
            "max_position_embeddings": 4096,
            "eos_token_id": 50279,
            "pad_token_id": 1,
            "num_experts_per_tok": 8,
            "norm_topk_prob": False,
        },
        supported=_NO_WINDOW | {"clip_qkv": (None,)},
        read=read_olmoe,
        write=write_olmoe,
    )._replace(classifier=None, token_classifier=None),
    "deepseek_v2": _family(
        "DeepseekV2",
        deepseek.V2_DEFAULTS,
        supported=deepseek.V2_SUPPORTED,
        read=deepseek.read_deepseek_v2,
        write=deepseek.write_deepseek,
        rope_types=("default", "yarn"),
        names=deepseek.WEIGHT_NAMES,
        further_layers=LAYERS,
    )._replace(token_classifier=None),
    "deepseek_v3": _family(
        "DeepseekV3",
        deepseek.V3_DEFAULTS,
        supported=deepseek.V3_SUPPORTED,
        read=deepseek.read_deepseek_v3,
        write=deepseek.write_deepseek,
        rope_types=("default", "yarn"),
        names=deepseek.WEIGHT_NAMES,
        further_layers=LAYERS,
    ),
    "gemma2": _family(
        "Gemma2",
        _GEMMA
        | {
            "max_position_embeddings": 8192,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
        },
        supported=_GEMMA_SUPPORTED,
        read=read_gemma2,
        write=write_gemma2,
        kinds=gemma2_kinds,
    ),
    "gemma3_text": _family(
        "Gemma3",
        _GEMMA
        | {
            "max_position_embeddings": 131072,
            "attn_logit_softcapping": None,
            "final_logit_softcapping": None,
            "rope_theta": 1e6,
            "rope_local_base_freq": 10000.0,
        },
        supported=_GEMMA_SUPPORTED | {"attn_logit_softcapping": (None,)},  # which transformers does not apply
        read=read_gemma3,
        write=write_gemma3,
        kinds=gemma3_kinds,
    )._replace(classifier="Gemma3TextForSequenceClassification", token_classifier=None),
}
