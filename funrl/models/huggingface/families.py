"""Hugging Face families that the decoder computes: what the config.json of each means, and what in it is refused.

A family is one entry of `FAMILIES`; docs/models.md says what each has beyond Llama. Its functions, in
`family_fields.py` or a file of `configs/`, read and write what no table says. `config.py` reads what families share.
"""

from __future__ import annotations

from collections.abc import Mapping

from funrl.models.huggingface import family_fields
from funrl.models.huggingface.configs.deepseek import (
    DEEPSEEK_EXPERT_NAMES,
    DEEPSEEK_V2,
    DEEPSEEK_V3,
    SHARED_EXPERTS,
    SIGMOID_EXPERTS,
)
from funrl.models.huggingface.configs.delta_nets import (
    QWEN3_5,
    QWEN3_5_MOE,
    QWEN3_NEXT,
    SHARED_EXPERT_NAMES,
    SPARSE_EXPERTS,
)
from funrl.models.huggingface.configs.gemma4 import GEMMA4
from funrl.models.huggingface.configs.hf_family import LAYERS, HFFamily
from funrl.models.huggingface.family_fields import ACTIVATIONS, BIASES, GELU
from funrl.models.huggingface.vision_configs import qwen_vl, siglip

_DENSE = {"hidden_act": tuple(ACTIVATIONS)}
_BIASED_MLP = _DENSE | {"mlp_bias": (False, True, None)}
_ONE_WINDOW = ("sliding_window",)
_LAYER_WINDOWS = ("layer_types", "sliding_window")
_SWITCHED_WINDOWS = ("use_sliding_window", "max_window_layers", *_LAYER_WINDOWS)
_GEMMA2 = HFFamily(
    supported={
        "hidden_act": ("silu", GELU, "gelu", None),  # not read by transformers, which goes by hidden_activation
        "hidden_activation": (GELU,),
        "use_bidirectional_attention": (False, None),
    },
    windows=_LAYER_WINDOWS,
    fields=BIASES | {"attention_cap": "attn_logit_softcapping", "logit_cap": "final_logit_softcapping"},
    values={"activation": "gelu", "norms": "sandwich", "norm_offset": 1.0},
    read=family_fields.read_gemma2,
    write=family_fields.write_gemma2,
)
_GEMMA3 = _GEMMA2._replace(
    supported={**_GEMMA2.supported, "attn_logit_softcapping": (None,)},  # which transformers does not apply
    fields={**_GEMMA2.fields, "local_rope_theta": "rope_local_base_freq"},
    values={**_GEMMA2.values, "qk_norm": True},
    local_rope=True,
)
_LOCAL_EXPERTS = {"count": "num_local_experts", "per_token": "num_experts_per_tok", "mlp": "intermediate_size"}
_QWEN3_EXPERTS = {name: theirs for name, theirs in SPARSE_EXPERTS.items() if name != "shared"}
_MIXTRAL_NAMES = {"router": "block_sparse_moe.gate.weight"} | {
    f"expert_{ours}": f"block_sparse_moe.experts.{theirs}.weight"
    for ours, theirs in (("gate", "w1"), ("up", "w3"), ("down", "w2"))
}
_QWEN2 = HFFamily(
    supported=_DENSE | {"attention_bias": (True, None)},
    windows=_SWITCHED_WINDOWS,
    values={"attention_bias": True},
)
_QWEN3 = HFFamily(supported=_DENSE, windows=_SWITCHED_WINDOWS, fields=BIASES, values={"qk_norm": True})
_QWEN3_MOE = _QWEN3._replace(supported={}, windows=("use_sliding_window", "sliding_window"), experts=_QWEN3_EXPERTS)
_OLMO2 = HFFamily(
    supported=_DENSE,
    fields=BIASES,
    values={"qk_norm": True, "qk_norm_over": "projection", "norms": "post"},
)
_ERNIE4_5 = HFFamily(
    supported=_DENSE,
    fields=dict.fromkeys(("attention_bias", "output_bias", "mlp_bias"), "use_bias"),
    values={"rotary_pairs": True},
)
FAMILIES: Mapping[str, HFFamily] = {
    "llama": HFFamily(supported=_BIASED_MLP, fields=BIASES, causal_lm="LlamaForCausalLM"),
    "qwen2": _QWEN2,
    "qwen2_5_vl": _QWEN2._replace(
        read=qwen_vl.read_qwen2_5_vl,
        rope_types=("default",),
        vision=qwen_vl.QWEN2_5_VISION,
    ),
    "llava_onevision": _QWEN2._replace(vision=siglip.LLAVA_ONEVISION_VISION),
    "qwen3_vl": _QWEN3._replace(
        windows=(),
        read=qwen_vl.read_qwen3_vl,
        rope_types=("default",),
        vision=qwen_vl.QWEN3_VISION,
    ),
    "qwen3_vl_moe": _QWEN3_MOE._replace(
        defaults={"norm_topk_prob": True},
        supported={"norm_topk_prob": (True, None)},
        windows=(),
        read=qwen_vl.read_qwen3_vl,
        rope_types=("default",),
        names=qwen_vl.QWEN3_VL_MOE_NAMES,
        abreast=qwen_vl.QWEN3_VL_MOE_ABREAST,
        vision=qwen_vl.QWEN3_MOE_VISION,
    ),
    "qwen3": _QWEN3,
    "mistral": HFFamily(supported=_DENSE, windows=_ONE_WINDOW),
    "phi3": HFFamily(
        supported=_DENSE,
        windows=_ONE_WINDOW,
        write=family_fields.write_phi3,
        rope_types=("default", "longrope"),
        partial_rotary=True,
        fused={
            "self_attn.qkv_proj.weight": [f"self_attn.{name}_proj.weight" for name in "qkv"],
            "mlp.gate_up_proj.weight": [f"mlp.{name}_proj.weight" for name in ("gate", "up")],
        },
    ),
    "olmo2": _OLMO2,
    "smollm3": HFFamily(
        supported=_BIASED_MLP,
        windows=_SWITCHED_WINDOWS,
        fields=BIASES,
        read=family_fields.read_smollm3,
        write=family_fields.write_smollm3,
    ),
    "granite": HFFamily(
        supported=_BIASED_MLP,
        fields=BIASES
        | {
            "embed_scale": "embedding_multiplier",
            "residual_scale": "residual_multiplier",
            "attention_scale": "attention_multiplier",
            "logit_divisor": "logits_scaling",
        },
    ),
    "qwen3_moe": _QWEN3_MOE,
    "qwen3_next": QWEN3_NEXT,
    "qwen3_5_text": QWEN3_5,
    "qwen3_5_moe_text": QWEN3_5_MOE,
    "mixtral": HFFamily(windows=_ONE_WINDOW, experts=_LOCAL_EXPERTS, names=_MIXTRAL_NAMES),
    "olmoe": HFFamily(
        supported={"clip_qkv": (None,)},
        fields=BIASES,
        values={"qk_norm": True, "qk_norm_over": "projection"},
        experts=_LOCAL_EXPERTS | {"count": "num_experts", "normalized": "norm_topk_prob"},
    ),
    "deepseek_v2": DEEPSEEK_V2,
    "deepseek_v3": DEEPSEEK_V3,
    "gpt_oss": HFFamily(
        defaults={"swiglu_alpha": 1.702, "swiglu_limit": 7.0},
        windows=_LAYER_WINDOWS,
        fields=BIASES,
        values={"attention_sinks": True},
        experts=_LOCAL_EXPERTS,
        read=family_fields.read_gpt_oss,
        write=family_fields.write_gpt_oss,
        names={
            "sinks": "self_attn.sinks",
            "router": "mlp.router.weight",
            "router_logit_bias": "mlp.router.bias",
            **{f"expert_{name}": f"mlp.experts.{name}_proj.rows" for name in ("gate", "up", "down")},
            **{f"expert_{name}_bias": f"mlp.experts.{name}_proj_bias" for name in ("gate", "up", "down")},
        },
        woven={
            "mlp.experts.gate_up_proj": [f"mlp.experts.{name}_proj.rows" for name in ("gate", "up")],
            "mlp.experts.gate_up_proj_bias": [f"mlp.experts.{name}_proj_bias" for name in ("gate", "up")],
            "mlp.experts.down_proj": ["mlp.experts.down_proj.rows"],
        },
    ),
    "qwen2_moe": HFFamily(
        windows=("use_sliding_window", *_LAYER_WINDOWS),
        fields={"attention_bias": "qkv_bias"},
        experts=SPARSE_EXPERTS,
        expert_values={"shared_weighted": True},
        names=SHARED_EXPERT_NAMES,
    ),
    "glm4_moe": HFFamily(
        fields={"attention_bias": "attention_bias", "qk_norm": "use_qk_norm"},
        experts=SHARED_EXPERTS,
        expert_values=SIGMOID_EXPERTS,
        write=lambda _: {"num_nextn_predict_layers": 0},
        partial_rotary=True,
        names=DEEPSEEK_EXPERT_NAMES,
        further_layers=LAYERS,
    ),
    "minimax_m2": HFFamily(
        supported={
            "attention_bias": (False, None),
            "use_qk_norm": (True, None),
            "qk_norm_type": ("per_layer", None),
            "use_routing_bias": (True, None),
            "scoring_func": ("sigmoid", None),
            "shared_intermediate_size": (0, None),
        },
        values={"qk_norm": True, "qk_norm_over": "projection"},
        experts=_LOCAL_EXPERTS,
        expert_values={"scoring": "sigmoid", "biased": True},
        partial_rotary=True,
        names=_MIXTRAL_NAMES | {"router_bias": "block_sparse_moe.e_score_correction_bias"},
        further_layers=LAYERS,
    ),
    "ernie4_5": _ERNIE4_5,
    "ernie4_5_moe": _ERNIE4_5._replace(
        supported={"use_bias": (False, None)},
        experts={
            "count": "moe_num_experts",
            "per_token": "moe_k",
            "mlp": "moe_intermediate_size",
            "shared_experts": "moe_num_shared_experts",
        },
        expert_values={"biased": True, "wide": True},
        read=family_fields.read_ernie4_5_moe,
        write=family_fields.write_ernie4_5_moe,
        names=DEEPSEEK_EXPERT_NAMES | {"router_bias": "mlp.moe_statics.e_score_correction_bias"},
        in_rows=("router_bias",),
        further_layers="model.mtp_",
    ),
    "exaone4": HFFamily(
        supported=_DENSE,
        windows=_LAYER_WINDOWS,
        values={"qk_norm": True, "norms": "post"},
        read=family_fields.read_exaone4,
        write=family_fields.write_exaone4,
    ),
    "olmo3": _OLMO2._replace(windows=_LAYER_WINDOWS, write=family_fields.write_olmo3, local_rope=True),
    "ministral3": HFFamily(
        supported=_DENSE,
        windows=_ONE_WINDOW,
        read=family_fields.read_ministral3,
        rope_types=("yarn",),
    ),
    "gemma": HFFamily(
        supported={"hidden_act": (GELU, "gelu"), "use_bidirectional_attention": (False, None)},
        fields=BIASES,
        values={"activation": "gelu", "norm_offset": 1.0},
        read=family_fields.read_gemma,
    ),
    "gemma2": _GEMMA2,
    "gemma3_text": _GEMMA3,
    "gemma3": _GEMMA3._replace(vision=siglip.GEMMA3_VISION),
    "gemma4_text": GEMMA4,
}


def family_of(name: str) -> HFFamily:
    """The family of a name; one without anything of its own for names that are not in `FAMILIES`."""
    return FAMILIES.get(name, HFFamily())
