"""Hugging Face families that the decoder computes: what the config.json of each means, and what in it is refused.

A family is one entry of `FAMILIES`; docs/models.md says what each has beyond Llama. Its functions, in
`family_fields.py` or a file of `configs/`, read and write what is peculiar to it. `config.py` reads what families
share.
"""

from __future__ import annotations

from collections.abc import Mapping

from funrl.models.huggingface.configs import (
    deepseek,
    ernie4_5,
    exaone4,
    gemma4,
    glm4_moe,
    gpt_oss,
    minimax_m2,
    ministral3,
    olmo3,
    qwen2_moe,
    qwen3_5,
    qwen3_next,
)
from funrl.models.huggingface.configs.hf_family import LAYERS, HFFamily
from funrl.models.huggingface.family_fields import (
    ACTIVATIONS,
    GELU,
    read_bias,
    read_experts,
    read_gemma,
    read_gemma2,
    read_gemma3,
    read_granite,
    read_olmo2,
    read_olmoe,
    read_qwen3_moe,
    read_smollm3,
    write_bias,
    write_gemma2,
    write_gemma3,
    write_granite,
    write_mixtral,
    write_olmoe,
    write_phi3,
    write_qwen2,
    write_qwen3,
    write_qwen3_moe,
    write_smollm3,
    write_window,
)
from funrl.models.huggingface.vision_configs import qwen_vl, siglip

_DENSE = {"hidden_act": tuple(ACTIVATIONS)}
_BIASED_MLP = _DENSE | {"mlp_bias": (False, True, None)}
_ONE_WINDOW = {"layer_types": (None,)}
_NO_WINDOW = {"sliding_window": (None,)}
_GEMMA_SUPPORTED = {
    "hidden_act": ("silu", GELU, "gelu", None),  # not read by transformers, which goes by hidden_activation
    "hidden_activation": (GELU,),
    "use_bidirectional_attention": (False, None),
}
_GEMMA3 = HFFamily(
    defaults={"rope_theta": 1e6, "rope_local_base_freq": 10000.0},
    supported=_GEMMA_SUPPORTED | {"attn_logit_softcapping": (None,)},  # which transformers does not apply
    read=read_gemma3,
    write=write_gemma3,
)
_MIXTRAL_NAMES = {"router": "block_sparse_moe.gate.weight"} | {
    f"expert_{ours}": f"block_sparse_moe.experts.{theirs}.weight"
    for ours, theirs in (("gate", "w1"), ("up", "w3"), ("down", "w2"))
}
_QWEN2 = HFFamily(
    read=lambda _: {"attention_bias": True},
    write=write_qwen2,
    supported=_DENSE | {"attention_bias": (True, None)},
)
FAMILIES: Mapping[str, HFFamily] = {
    "llama": HFFamily(supported=_BIASED_MLP | _NO_WINDOW, read=read_bias, write=write_bias),
    "qwen2": _QWEN2,
    "qwen2_5_vl": _QWEN2._replace(
        read=qwen_vl.read_qwen2_5_vl,
        rope_types=("default",),
        vision=qwen_vl.QWEN2_5_VISION,
    ),
    "llava_onevision": _QWEN2._replace(vision=siglip.LLAVA_ONEVISION_VISION),
    "qwen3_vl": HFFamily(
        supported=_DENSE,
        read=qwen_vl.read_qwen3_vl,
        write=write_bias,
        rope_types=("default",),
        vision=qwen_vl.QWEN3_VISION,
    ),
    "qwen3_vl_moe": HFFamily(
        defaults={"norm_topk_prob": True, "intermediate_size": 5632},
        supported=qwen_vl.QWEN3_VL_MOE_SUPPORTED,
        read=qwen_vl.read_qwen3_vl_moe,
        write=write_qwen3_moe,
        rope_types=("default",),
        names=qwen_vl.QWEN3_VL_MOE_NAMES,
        abreast=qwen_vl.QWEN3_VL_MOE_ABREAST,
        vision=qwen_vl.QWEN3_VISION,
    ),
    "qwen3": HFFamily(
        supported=_DENSE,
        read=lambda got: read_bias(got) | {"qk_norm": True},
        write=write_qwen3,
    ),
    "mistral": HFFamily(
        supported=_DENSE | _ONE_WINDOW,
        write=write_window,
    ),
    "phi3": HFFamily(
        supported=_DENSE | _ONE_WINDOW,
        write=write_phi3,
        rope_types=("default", "longrope"),
        partial_rotary=True,
        fused={
            "self_attn.qkv_proj.weight": [f"self_attn.{name}_proj.weight" for name in "qkv"],
            "mlp.gate_up_proj.weight": [f"mlp.{name}_proj.weight" for name in ("gate", "up")],
        },
    ),
    "olmo2": HFFamily(
        supported=_DENSE | _NO_WINDOW,
        read=read_olmo2,
        write=write_bias,
    ),
    "smollm3": HFFamily(
        supported=_BIASED_MLP,
        read=read_smollm3,
        write=write_smollm3,
    ),
    "granite": HFFamily(
        supported=_BIASED_MLP | _NO_WINDOW,
        read=read_granite,
        write=write_granite,
    ),
    "qwen3_moe": HFFamily(
        supported=_ONE_WINDOW,
        read=read_qwen3_moe,
        write=write_qwen3_moe,
    ),
    "qwen3_next": HFFamily(
        defaults=qwen3_next.DELTA_NET_DEFAULTS,
        mixers=(qwen3_next.LINEAR,),
        read=lambda fields: qwen3_next.read_qwen3_next(fields, read_qwen3_moe(fields)),
        write=lambda config: write_qwen3_moe(config) | qwen3_next.write_qwen3_next(config),
        partial_rotary=True,
        further_layers="mtp.",
        names=qwen3_next.NEXT_WEIGHT_NAMES,
        fused=qwen3_next.NEXT_FUSED,
    ),
    "qwen3_5_text": HFFamily(
        defaults=qwen3_next.DELTA_NET_DEFAULTS,
        mixers=(qwen3_next.LINEAR,),
        read=qwen3_5.read_qwen3_5,
        write=qwen3_5.write_qwen3_5,
        partial_rotary=True,
        further_layers="mtp.",
        names=qwen3_5.QWEN3_5_NAMES,
        fused=qwen3_5.QWEN3_5_FUSED,
    ),
    "qwen3_5_moe_text": HFFamily(
        defaults=qwen3_next.DELTA_NET_DEFAULTS | {"intermediate_size": 512},  # which no layer has
        mixers=(qwen3_next.LINEAR,),
        read=qwen3_5.read_qwen3_5_moe,
        write=qwen3_5.write_qwen3_5_moe,
        partial_rotary=True,
        further_layers="mtp.",
        names=qwen3_5.QWEN3_5_NAMES,
        fused=qwen3_5.QWEN3_5_FUSED,
    ),
    "mixtral": HFFamily(
        supported=_ONE_WINDOW,
        write=write_mixtral,
        read=lambda got: {"experts": read_experts(got, "intermediate_size", True)},
        names=_MIXTRAL_NAMES,
    ),
    "olmoe": HFFamily(
        supported=_NO_WINDOW | {"clip_qkv": (None,)},
        read=read_olmoe,
        write=write_olmoe,
    ),
    "deepseek_v2": HFFamily(
        supported=deepseek.V2_SUPPORTED,
        read=deepseek.read_deepseek_v2,
        write=deepseek.write_deepseek,
        rope_types=("default", "yarn"),
        names=deepseek.WEIGHT_NAMES,
        further_layers=LAYERS,
    ),
    "deepseek_v3": HFFamily(
        defaults={"num_key_value_heads": None},
        supported=deepseek.V3_SUPPORTED,
        read=deepseek.read_deepseek_v3,
        write=deepseek.write_deepseek,
        rope_types=("default", "yarn"),
        names=deepseek.WEIGHT_NAMES,
        further_layers=LAYERS,
    ),
    "gpt_oss": HFFamily(
        defaults=gpt_oss.GPT_OSS_DEFAULTS,
        read=gpt_oss.read_gpt_oss,
        write=gpt_oss.write_gpt_oss,
        names=gpt_oss.GPT_OSS_WEIGHT_NAMES,
        woven=gpt_oss.GPT_OSS_WOVEN,
    ),
    "qwen2_moe": HFFamily(
        read=qwen2_moe.read_qwen2_moe,
        write=qwen2_moe.write_qwen2_moe,
        names=qwen2_moe.SHARED_EXPERT_NAMES,
    ),
    "glm4_moe": HFFamily(
        defaults={"partial_rotary_factor": 0.5},
        supported=glm4_moe.GLM_MOE_SUPPORTED,
        read=glm4_moe.read_glm4_moe,
        write=glm4_moe.write_glm4_moe,
        partial_rotary=True,
        names=deepseek.DEEPSEEK_EXPERT_NAMES,
        further_layers=LAYERS,
    ),
    "minimax_m2": HFFamily(
        supported=minimax_m2.MINIMAX_SUPPORTED,
        read=minimax_m2.read_minimax_m2,
        write=minimax_m2.write_minimax_m2,
        partial_rotary=True,
        names=_MIXTRAL_NAMES | {"router_bias": "block_sparse_moe.e_score_correction_bias"},
        further_layers=LAYERS,
    ),
    "ernie4_5": HFFamily(
        supported=_DENSE | ernie4_5.ERNIE_SUPPORTED,
        read=ernie4_5.read_ernie4_5,
        write=ernie4_5.write_ernie4_5,
    ),
    "ernie4_5_moe": HFFamily(
        supported=ernie4_5.ERNIE_SUPPORTED | {"use_bias": (False, None)},
        read=ernie4_5.read_ernie4_5_moe,
        write=ernie4_5.write_ernie4_5_moe,
        names=ernie4_5.ERNIE_EXPERT_NAMES,
        in_rows=("router_bias",),
        further_layers="model.mtp_",
    ),
    "exaone4": HFFamily(
        supported=_DENSE,
        read=exaone4.read_exaone4,
        write=exaone4.write_exaone4,
    ),
    "olmo3": HFFamily(
        defaults={"rope_local_base_freq": 5e5},
        supported=_DENSE,
        read=read_olmo2,
        write=olmo3.write_olmo3,
    ),
    "ministral3": HFFamily(
        defaults={"rope_theta": 1e6},
        supported=_DENSE | _ONE_WINDOW,
        read=ministral3.read_ministral3,
        write=write_window,
        rope_types=("yarn",),
    ),
    "gemma": HFFamily(
        supported=_NO_WINDOW | {"hidden_act": (GELU, "gelu"), "use_bidirectional_attention": (False, None)},
        read=read_gemma,
        write=write_bias,
    ),
    "gemma2": HFFamily(
        supported=_GEMMA_SUPPORTED,
        read=read_gemma2,
        write=write_gemma2,
    ),
    "gemma3_text": _GEMMA3,
    "gemma3": _GEMMA3._replace(vision=siglip.GEMMA3_VISION),
    "gemma4_text": gemma4.GEMMA4,
}
