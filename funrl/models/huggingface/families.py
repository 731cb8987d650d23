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

A family is one entry of `FAMILIES`. Its functions read and write what is peculiar to it; what families share is read in
`config.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from funrl.models.decoder.config import Config
from funrl.models.decoder.routing import Experts
from funrl.models.errors import ModelError
from funrl.models.huggingface import deepseek, qwen3_next

FULL, SLIDING = "full_attention", "sliding_attention"
LAYERS = "model.layers."  # how the names of a layer's tensors begin
GELU = "gelu_pytorch_tanh"  # the name in transformers of what the decoder calls "gelu"


def upper_layers(got: Mapping[str, Any], layers: int) -> list[str]:
    """Kinds of layers where config.json has none: sliding from max_window_layers on."""
    first = got.get("max_window_layers", layers)
    sliding = got.get("use_sliding_window") and got.get("sliding_window") is not None
    return [SLIDING if sliding and i >= first else FULL for i in range(layers)]


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


def _bias(got: Mapping[str, Any]) -> dict[str, Any]:
    bias = bool(got.get("attention_bias", False))
    return {"attention_bias": bias, "output_bias": bias}


def _write_bias(config: Config) -> dict[str, Any]:
    return {"attention_bias": config.output_bias}


def _write_qwen3(config: Config) -> dict[str, Any]:
    return _write_bias(config) | (_write_upper(config) if config.windows is not None else {})


def _write_qwen2(config: Config) -> dict[str, Any]:
    return _write_upper(config) if config.windows is not None else {}


def _write_upper(config: Config) -> dict[str, Any]:
    kinds = layer_types(config)
    first = kinds.index(SLIDING) if SLIDING in kinds else config.layers
    return {"use_sliding_window": True, "layer_types": kinds, "max_window_layers": first} | _write_window(config)


def _write_window(config: Config) -> dict[str, Any]:
    """The size of the windows: a config.json has one at most.

    Raises:
      ModelError: there are several sizes.
    """
    sizes = {w for w in config.windows or () if w is not None}
    if len(sizes) > 1:
        raise ModelError(f"windows has sizes {sorted(sizes)}, config.json can say only one")
    return {"sliding_window": next(iter(sizes), None)}


def layer_types(config: Config) -> list[str]:
    """The kind of each layer, as config.json says it."""
    return [FULL if config.window(i) is None else SLIDING for i in range(config.layers)]


def _read_olmo2(got: Mapping[str, Any]) -> dict[str, Any]:
    return _bias(got) | {"qk_norm": True, "qk_norm_over": "projection", "norms": "post"}


def _read_smollm3(got: Mapping[str, Any]) -> dict[str, Any]:
    rotates = _rotating_layers(got, int(got["num_hidden_layers"]))
    return _bias(got) | {"rotates": None if all(rotates) else tuple(rotates)}


def _write_smollm3(config: Config) -> dict[str, Any]:
    layers = range(config.layers)
    windows = {} if config.windows is None else {"use_sliding_window": True} | _write_window(config)
    rotates = [int(config.rotates is None or config.rotates[i]) for i in layers]
    return _write_bias(config) | windows | {"layer_types": layer_types(config), "no_rope_layers": rotates}


def _rotating_layers(got: Mapping[str, Any], layers: int) -> list[bool]:
    """True for each layer that rotates; no_rope_layers has a 1 for it."""
    given = got.get("no_rope_layers")
    if given is None:
        return [(i + 1) % got["no_rope_layer_interval"] != 0 for i in range(layers)]
    if len(given) < layers:
        raise ModelError(f"no_rope_layers has {len(given)} entries for num_hidden_layers {layers}")
    return [bool(x) for x in given[:layers]]


def _smollm3_kinds(got: Mapping[str, Any], layers: int) -> list[str]:
    sliding = got.get("use_sliding_window") and got.get("sliding_window") is not None
    return [SLIDING if sliding and not rotates else FULL for rotates in _rotating_layers(got, layers)]


_MULTIPLIERS = {
    "embed_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "attention_scale": "attention_multiplier",
    "logit_divisor": "logits_scaling",
}


def _read_granite(got: Mapping[str, Any]) -> dict[str, Any]:
    return _bias(got) | {ours: float(got[theirs]) for ours, theirs in _MULTIPLIERS.items()}


def _write_granite(config: Config) -> dict[str, Any]:
    scale = config.head**-0.5 if config.attention_scale is None else config.attention_scale
    values = {theirs: getattr(config, ours) for ours, theirs in _MULTIPLIERS.items()}
    return _write_bias(config) | values | {"attention_multiplier": scale}


def _read_gemma2(got: Mapping[str, Any]) -> dict[str, Any]:
    scalar = got["query_pre_attn_scalar"]
    if not isinstance(scalar, int) or scalar < 1:
        raise ModelError(f"query_pre_attn_scalar is {scalar!r}, it must be a whole number of at least 1")
    return _bias(got) | {
        "activation": "gelu",
        "norms": "sandwich",
        "norm_offset": 1.0,
        "embed_scale": float(got["hidden_size"]) ** 0.5,
        "attention_scale": scalar**-0.5,
        "attention_cap": got["attn_logit_softcapping"],
        "logit_cap": got["final_logit_softcapping"],
    }


def _write_gemma2(config: Config) -> dict[str, Any]:
    scale = config.head**-0.5 if config.attention_scale is None else config.attention_scale
    return _write_bias(config) | _write_window(config) | {
        "hidden_act": GELU,
        "hidden_activation": GELU,
        "layer_types": layer_types(config),
        "query_pre_attn_scalar": round(scale**-2),
        "attn_logit_softcapping": config.attention_cap,
        "final_logit_softcapping": config.logit_cap,
    }  # fmt: skip


def _read_gemma3(got: Mapping[str, Any]) -> dict[str, Any]:
    return _read_gemma2(got) | {"qk_norm": True}


def _write_gemma3(config: Config) -> dict[str, Any]:
    if config.local_rope_theta is None:
        raise ModelError("a gemma3_text config.json needs local_rope_theta, which is None")
    return _write_gemma2(config) | {"rope_local_base_freq": config.local_rope_theta}


def _gemma2_kinds(got: Mapping[str, Any], layers: int) -> list[str]:
    return [FULL if i % 2 else SLIDING for i in range(layers)]


def _gemma3_kinds(got: Mapping[str, Any], layers: int) -> list[str]:
    pattern = got.get("sliding_window_pattern", got.get("_sliding_window_pattern", 6))
    return [SLIDING if (i + 1) % pattern else FULL for i in range(layers)]


def _read_experts(got: Mapping[str, Any], mlp: str, normalized: bool) -> Experts:
    """The experts that a config.json describes; transformers writes their count by either of two names."""
    count = next((got[name] for name in ("num_local_experts", "num_experts") if got.get(name) is not None), 0)
    step, dense = got.get("decoder_sparse_step") or 1, set(got.get("mlp_only_layers") or ())
    layers = range(got["num_hidden_layers"])
    return Experts(
        count=count,
        per_token=got["num_experts_per_tok"],
        mlp=got[mlp],
        normalized=normalized,
        dense=tuple(i for i in layers if i in dense or (i + 1) % step),
    )


def _experts(config: Config) -> Experts:
    if config.experts is None:
        raise ModelError(f"a {config.family} config.json needs experts, which is None")
    return config.experts


def _write_experts(config: Config, count: str) -> dict[str, Any]:
    return {count: _experts(config).count, "num_experts_per_tok": _experts(config).per_token}


def _read_qwen3_moe(got: Mapping[str, Any]) -> dict[str, Any]:
    experts = _read_experts(got, "moe_intermediate_size", bool(got["norm_topk_prob"]))
    return _bias(got) | {"qk_norm": True, "experts": experts}


def _write_qwen3_moe(config: Config) -> dict[str, Any]:
    counts = _write_experts(config, "num_experts")
    experts = _experts(config)
    window = _write_window(config) | {"use_sliding_window": config.windows is not None}
    return _write_bias(config) | (window if config.windows is not None else {}) | counts | {
        "moe_intermediate_size": experts.mlp,
        "norm_topk_prob": experts.normalized,
        "mlp_only_layers": list(experts.dense),
        "decoder_sparse_step": 1,
    }  # fmt: skip


def _write_mixtral(config: Config) -> dict[str, Any]:
    return _write_window(config) | _write_experts(config, "num_local_experts")


def _read_olmoe(got: Mapping[str, Any]) -> dict[str, Any]:
    experts = _read_experts(got, "intermediate_size", bool(got["norm_topk_prob"]))
    return _bias(got) | {"qk_norm": True, "qk_norm_over": "projection", "experts": experts}


def _write_olmoe(config: Config) -> dict[str, Any]:
    counts = _write_experts(config, "num_experts")
    return _write_bias(config) | counts | {"norm_topk_prob": _experts(config).normalized}


def _all_layers(got: Mapping[str, Any], layers: int) -> list[str]:
    sliding = got.get("use_sliding_window") and got.get("sliding_window") is not None
    return [SLIDING if sliding else FULL] * layers


def _family(name: str, defaults: Mapping[str, Any], **more: Any) -> HFFamily:
    """A family whose classes begin with `name`."""
    causal, sequence, token = (
        f"{name}For{task}" for task in ("CausalLM", "SequenceClassification", "TokenClassification")
    )
    return HFFamily(causal, sequence, token, {**_COMMON, **defaults}, **more)


_COMMON = {"hidden_act": "silu", "rms_norm_eps": 1e-6, "tie_word_embeddings": False, "rope_theta": 10000.0}
_LLAMA = {"max_position_embeddings": 2048, "bos_token_id": 1, "eos_token_id": 2}
_QWEN = {
    "num_key_value_heads": 32, "max_position_embeddings": 32768, "use_sliding_window": False, "sliding_window": 4096,
    "max_window_layers": 28,
}  # fmt: skip
_ALL_LAYERS = {"use_sliding_window": True, "max_window_layers": 0}
_GEMMA = {
    "num_key_value_heads": 4, "head_dim": 256, "hidden_activation": GELU, "tie_word_embeddings": True,
    "query_pre_attn_scalar": 256, "use_sliding_window": True, "sliding_window": 4096, "bos_token_id": 2,
    "eos_token_id": 1, "pad_token_id": 0,
}  # fmt: skip
_ONE_WINDOW = {"layer_types": (None,)}
_NO_WINDOW = {"sliding_window": (None,)}
_GEMMA_SUPPORTED = {
    "hidden_act": ("silu", GELU, "gelu", None),  # not read by transformers, which goes by hidden_activation
    "hidden_activation": (GELU,),
    "use_bidirectional_attention": (False, None),
}
FAMILIES: Mapping[str, HFFamily] = {
    "llama": _family("Llama", _LLAMA, supported=_NO_WINDOW, read=_bias, write=_write_bias),
    "qwen2": _family(
        "Qwen2", _QWEN, read=lambda _: {"attention_bias": True}, write=_write_qwen2,
        supported={"attention_bias": (True, None)},
    ),
    "qwen3": _family(
        "Qwen3", _QWEN | {"head_dim": 128}, read=lambda got: _bias(got) | {"qk_norm": True}, write=_write_qwen3
    ),
    "mistral": _family(
        "Mistral", _LLAMA | _ALL_LAYERS | {
            "num_key_value_heads": 8, "max_position_embeddings": 131072, "sliding_window": 4096,
        }, supported=_ONE_WINDOW, write=_write_window,
    ),
    "phi3": _family(
        "Phi3", _ALL_LAYERS | {
            "rms_norm_eps": 1e-5, "max_position_embeddings": 4096, "bos_token_id": 1, "eos_token_id": 32000,
            "pad_token_id": 32000,
        }, supported=_ONE_WINDOW, write=_write_window, rope_types=("default",),
        fused={
            "self_attn.qkv_proj.weight": [f"self_attn.{name}_proj.weight" for name in "qkv"],
            "mlp.gate_up_proj.weight": [f"mlp.{name}_proj.weight" for name in ("gate", "up")],
        },
    ),
    "olmo2": _family(
        "Olmo2", {
            "rms_norm_eps": 1e-5, "max_position_embeddings": 2048, "eos_token_id": 50279, "pad_token_id": 1,
        }, supported=_NO_WINDOW, read=_read_olmo2, write=_write_bias,
    )._replace(token_classifier=None),
    "smollm3": _family(
        "SmolLM3", {
            "num_key_value_heads": 4, "max_position_embeddings": 32768, "rope_theta": 2e6,
            "tie_word_embeddings": True, "no_rope_layer_interval": 4, "bos_token_id": 128000,
            "eos_token_id": 128001, "pad_token_id": 128004,
        }, read=_read_smollm3, write=_write_smollm3, kinds=_smollm3_kinds,
    ),
    "granite": _family(
        "Granite", _LLAMA | dict.fromkeys(_MULTIPLIERS.values(), 1.0), supported=_NO_WINDOW, read=_read_granite,
        write=_write_granite,
    )._replace(classifier=None, token_classifier=None),
    "qwen3_moe": _family(
        "Qwen3Moe", _QWEN | {
            "num_key_value_heads": 4, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "norm_topk_prob": False,
        }, supported=_ONE_WINDOW, read=_read_qwen3_moe, write=_write_qwen3_moe, kinds=_all_layers,
    ),
    "qwen3_next": _family(
        "Qwen3Next", qwen3_next.NEXT_DEFAULTS, kinds=qwen3_next.layer_kinds, mixers=(qwen3_next.LINEAR,),
        read=lambda fields: qwen3_next.read_qwen3_next(fields, _read_qwen3_moe(fields)),
        write=lambda config: _write_qwen3_moe(config) | qwen3_next.write_qwen3_next(config),
        partial_rotary=True, further_layers="mtp.", names=qwen3_next.NEXT_WEIGHT_NAMES, fused=qwen3_next.NEXT_FUSED,
    ),
    "mixtral": _family(
        "Mixtral", _LLAMA | _ALL_LAYERS | {
            "num_key_value_heads": 8, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "rope_theta": 1e6,
            "num_experts_per_tok": 2, "num_local_experts": 8,
        }, supported=_ONE_WINDOW, write=_write_mixtral, kinds=_all_layers,
        read=lambda got: {"experts": _read_experts(got, "intermediate_size", True)},
        names={"router": "block_sparse_moe.gate.weight"} | {
            f"expert_{ours}": f"block_sparse_moe.experts.{theirs}.weight"
            for ours, theirs in (("gate", "w1"), ("up", "w3"), ("down", "w2"))
        },
    ),
    "olmoe": _family(
        "Olmoe", {
            "rms_norm_eps": 1e-5, "max_position_embeddings": 4096, "eos_token_id": 50279, "pad_token_id": 1,
            "num_experts_per_tok": 8, "norm_topk_prob": False,
        }, supported=_NO_WINDOW | {"clip_qkv": (None,)}, read=_read_olmoe, write=_write_olmoe,
    )._replace(classifier=None, token_classifier=None),
    "deepseek_v2": _family(
        "DeepseekV2", deepseek.V2_DEFAULTS, supported=deepseek.V2_SUPPORTED, read=deepseek.read_deepseek_v2,
        write=deepseek.write_deepseek, rope_types=("default", "yarn"), names=deepseek.WEIGHT_NAMES,
        further_layers=LAYERS,
    )._replace(token_classifier=None),
    "deepseek_v3": _family(
        "DeepseekV3", deepseek.V3_DEFAULTS, supported=deepseek.V3_SUPPORTED, read=deepseek.read_deepseek_v3,
        write=deepseek.write_deepseek, rope_types=("default", "yarn"), names=deepseek.WEIGHT_NAMES,
        further_layers=LAYERS,
    ),
    "gemma2": _family(
        "Gemma2", _GEMMA | {
            "max_position_embeddings": 8192, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0,
        }, supported=_GEMMA_SUPPORTED, read=_read_gemma2, write=_write_gemma2, kinds=_gemma2_kinds,
    ),
    "gemma3_text": _family(
        "Gemma3", _GEMMA | {
            "max_position_embeddings": 131072, "attn_logit_softcapping": None, "final_logit_softcapping": None,
            "rope_theta": 1e6, "rope_local_base_freq": 10000.0,
        }, supported=_GEMMA_SUPPORTED | {"attn_logit_softcapping": (None,)},  # which transformers does not apply
        read=_read_gemma3, write=_write_gemma3, kinds=_gemma3_kinds,
    )._replace(classifier="Gemma3TextForSequenceClassification", token_classifier=None),
}  # fmt: skip
