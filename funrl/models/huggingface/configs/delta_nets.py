"""The config.json of Qwen3-Next and of the text part of Qwen3.5: gated delta nets between layers of gated attention.

Qwen3.5 has their projections apart, and is dense or has experts, alone or beside a vision tower. The tower of a
directory that has one is not read, and a saved directory has none.
"""

from __future__ import annotations

from collections.abc import Mapping

from funrl.models.decoder.config import Config
from funrl.models.decoder.gated_delta_net import GatedDeltaNet
from funrl.models.errors import ModelError
from funrl.models.huggingface.configs.hf_family import ConfigFields, HFFamily
from funrl.models.huggingface.family_fields import BIASES, FULL, whole_size

LINEAR = "linear_attention"
_SIZES = {
    "key_heads": "linear_num_key_heads",
    "value_heads": "linear_num_value_heads",
    "key": "linear_key_head_dim",
    "value": "linear_value_head_dim",
    "width": "linear_conv_kernel_dim",
}
SHARED_EXPERT_NAMES = {
    "shared_gate": "mlp.shared_expert.gate_proj.weight",
    "shared_up": "mlp.shared_expert.up_proj.weight",
    "shared_down": "mlp.shared_expert.down_proj.weight",
    "shared_router": "mlp.shared_expert_gate.weight",
}
WEIGHED_EXPERTS = {
    "count": "num_experts",
    "per_token": "num_experts_per_tok",
    "mlp": "moe_intermediate_size",
    "shared": "shared_expert_intermediate_size",
}
SPARSE_EXPERTS = WEIGHED_EXPERTS | {"normalized": "norm_topk_prob", "sparse": "mlp_only_layers"}
_NAMES = {
    "a_log": "linear_attn.A_log",
    "dt_bias": "linear_attn.dt_bias",
    "z_norm": "linear_attn.norm.weight",
    "out": "linear_attn.out_proj.weight",
    **{f"conv_{part}": f"linear_attn.conv1d.{part}" for part in "qkv"},
    **SHARED_EXPERT_NAMES,
}
_FUSED = {"linear_attn.conv1d.weight": [f"linear_attn.conv1d.{part}" for part in "qkv"]}
_APART = {
    **{f"in_{part}": f"linear_attn.in_proj_qkv.{part}" for part in "qkv"},
    **{f"in_{part}": f"linear_attn.in_proj_{part}.weight" for part in "zba"},
}
# model_type of a model with a vision tower -> that of its text part
TEXT_PARTS = {"qwen3_5": "qwen3_5_text", "qwen3_5_moe": "qwen3_5_moe_text", "gemma4": "gemma4_text"}
# How the names of tensors of towers begin in such a model's files.
TOWER_PREFIXES = ("model.visual.", *(f"model.{part}." for part in ("vision_tower", "audio_tower")))
TOWER_PREFIXES += ("model.embed_vision.", "model.embed_audio.")
NESTED_PREFIX = "model.language_model."  # the same of the text part, which are "model." in a directory of its own


def fields_of_text_part(raw: ConfigFields) -> ConfigFields:
    """The fields of a config.json; of one with a vision tower, those of a directory of its text part.

    Raises:
      ModelError: text_config is not an object.
    """
    family = raw.get("model_type")
    if not isinstance(family, str) or family not in TEXT_PARTS:
        return raw
    text = raw.get("text_config")
    if not isinstance(text, Mapping):
        raise ModelError(f"text_config is {text!r}, it must be an object")
    outer = {name: x for name, x in raw.items() if name not in ("text_config", "vision_config", "audio_config")}
    tied = {"tie_word_embeddings": outer["tie_word_embeddings"]} if "tie_word_embeddings" in outer else {}
    return {**outer, **text, **tied, "model_type": TEXT_PARTS[family]}


def _read(fields: ConfigFields, joined: bool = False) -> ConfigFields:
    """ConfigFields of `Config`; the kinds of layers are taken as the shortest beginning that, repeated, gives all."""
    sizes = {ours: whole_size(fields, theirs) for ours, theirs in _SIZES.items()}
    mixer = GatedDeltaNet(**sizes, norm_eps=float(fields["rms_norm_eps"]), joined=joined)
    kinds = fields["layer_types"]
    layers = range(len(kinds))
    period = next(n for n in range(1, len(kinds) + 1) if all(kinds[i] == kinds[i % n] for i in layers))
    return {"mixers": tuple(mixer if kind == LINEAR else None for kind in kinds[:period])}


def _write(config: Config) -> ConfigFields:
    """ConfigFields of config.json; without a delta net, its sizes are left out."""
    mixers = [config.mixer(i) for i in range(config.layers)]
    mixer = next((mixer for mixer in mixers if isinstance(mixer, GatedDeltaNet)), None)
    sizes = {} if mixer is None else {theirs: getattr(mixer, ours) for ours, theirs in _SIZES.items()}
    return sizes | {"layer_types": [LINEAR if isinstance(mixer, GatedDeltaNet) else FULL for mixer in mixers]}


QWEN3_5: HFFamily = HFFamily(
    windows=("layer_types",),
    fields=BIASES,
    values={"qk_norm": True, "norm_offset": 1.0, "output_gate": True},
    mixers=(LINEAR,),
    read=_read,
    write=_write,
    partial_rotary=True,
    further_layers="mtp.",
    names=_NAMES | _APART,
    fused=_FUSED | {"linear_attn.in_proj_qkv.weight": [f"linear_attn.in_proj_qkv.{part}" for part in "qkv"]},
)
QWEN3_5_MOE: HFFamily = QWEN3_5._replace(
    defaults={"intermediate_size": 512},  # which no layer has
    experts=WEIGHED_EXPERTS,
    expert_values={"shared_weighted": True},
)
QWEN3_NEXT: HFFamily = QWEN3_5._replace(
    experts=SPARSE_EXPERTS,
    expert_values={"shared_weighted": True},
    read=lambda fields: _read(fields, joined=True),
    names=_NAMES | {"qkvz": "linear_attn.in_proj_qkvz.weight", "ba": "linear_attn.in_proj_ba.weight"},
    fused=_FUSED,
)
