"""The config.json and the names of Qwen3-VL, dense or with experts: a Qwen3 with three positions a token, and a tower.

States of some layers of the tower are added behind the first layers of the decoder.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from funrl.models.decoder.config import Config
from funrl.models.errors import ModelError
from funrl.models.huggingface.configs.hf_family import VisionFamily
from funrl.models.huggingface.family_fields import GELU, read_bias, read_qwen3_moe
from funrl.models.huggingface.vision_configs.qwen2_5_vl import (
    PATCH_FIELDS,
    TOWER_LAYER,
    VISION_TOKENS,
    nest_fields,
    rope_sections,
    text_of_qwen2_5_vl,
    tower_in,
    vision_fields,
)
from funrl.models.vision.config import TowerConfig, TowerForm, VisionLanguageConfig, with_tower
from funrl.models.vision.model import vision_language_model

QWEN3_VL_DEFAULTS = {
    "num_key_value_heads": 32,
    "head_dim": 128,
    "max_position_embeddings": 128000,
    "rope_theta": 500000.0,
}
QWEN3_VL_MOE_DEFAULTS = QWEN3_VL_DEFAULTS | {
    "num_key_value_heads": 16,
    "head_dim": None,
    "intermediate_size": 5632,
    "moe_intermediate_size": 1408,
    "num_experts_per_tok": 4,
    "num_experts": 60,
    "norm_topk_prob": True,
}
QWEN3_VL_MOE_SUPPORTED = {"norm_topk_prob": (True, None), "sliding_window": (None,), "layer_types": (None,)}
QWEN3_VL_MOE_NAMES = {f"expert_{name}": f"mlp.experts.{name}_proj.columns" for name in ("gate", "up", "down")}
QWEN3_VL_MOE_ABREAST = {
    "mlp.experts.gate_up_proj": [f"mlp.experts.{name}_proj.columns" for name in ("gate", "up")],
    "mlp.experts.down_proj": ["mlp.experts.down_proj.columns"],
}
TEXT_PREFIX = "model.language_model."
_INTERLEAVED = "mrope_interleaved"
_TOWER_DEFAULTS = PATCH_FIELDS | {
    "depth": 27,
    "hidden_size": 1152,
    "hidden_act": GELU,
    "intermediate_size": 4304,
    "num_heads": 16,
    "patch_size": 16,
    "spatial_merge_size": 2,
    "num_position_embeddings": 2304,
    "deepstack_visual_indexes": (8, 16, 24),
}
_HALF = (0.5, 0.5, 0.5)
_TOWER_NAMES = {
    "embed/patch": "patch_embed.proj.weight",
    "embed/patch_bias": "patch_embed.proj.bias",
    "embed/table": "pos_embed.weight",
}
_TOWER_LAYER = TOWER_LAYER | {
    "norm1_bias": "norm1.bias",
    "norm2_bias": "norm2.bias",
    "up_proj": "mlp.linear_fc1.weight",
    "up_proj_bias": "mlp.linear_fc1.bias",
    "down_proj": "mlp.linear_fc2.weight",
    "down_proj_bias": "mlp.linear_fc2.bias",
}
_MERGER = {
    "norm": "norm.weight",
    "norm_bias": "norm.bias",
    "first": "linear_fc1.weight",
    "first_bias": "linear_fc1.bias",
    "second": "linear_fc2.weight",
    "second_bias": "linear_fc2.bias",
}


def read_qwen3_vl(got: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of `Config` of the text model of a dense one.

    Raises:
      ModelError: the sections of rotary frequencies do not make up a head.
    """
    return read_bias(got) | {"qk_norm": True, "rope_axes": _rope_axes(got)}


def read_qwen3_vl_moe(got: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of `Config` of the text model of one with experts; raises ModelError as `read_qwen3_vl`."""
    return read_qwen3_moe(got) | {"rope_axes": _rope_axes(got)}


def _rope_axes(got: Mapping[str, Any]) -> tuple[int, ...]:
    """The position that each frequency takes: rows and columns each third one, up to their numbers, else time."""
    head = got.get("head_dim") or got["hidden_size"] // got["num_attention_heads"]
    sections = rope_sections(got, (24, 20, 20), head)
    return tuple(i % 3 if i < 3 * sections[i % 3] else 0 for i in range(head // 2))


def tower_of_qwen3_vl(raw: Mapping[str, Any], config: Config) -> VisionLanguageConfig:
    """The config with the tower that config.json describes.

    Raises:
      ModelError: a field of vision_config has a value that is not supported.
    """
    got = vision_fields(raw, _TOWER_DEFAULTS, {"hidden_act": GELU, "out_hidden_size": config.embed})
    entries = got["num_position_embeddings"]
    side = round(entries**0.5)
    if side**2 != entries:
        raise ModelError(f"vision_config.num_position_embeddings is {entries}, it must be the square of a number")
    tokens = {name: raw.get(name, default) for name, default in VISION_TOKENS.items()}
    tower = TowerConfig(
        layers=got["depth"],
        embed=got["hidden_size"],
        heads=got["num_heads"],
        inner=got["intermediate_size"],
        patch=got["patch_size"],
        merge=got["spatial_merge_size"],
        window=None,
        placeholder=tokens["image_token_id"],
        banned=(tokens["video_token_id"],),
        begin=tokens["vision_start_token_id"],
        end=tokens["vision_end_token_id"],
        theta=got["rope_theta"],
        form=TowerForm(
            norm="layer",
            gated=False,
            patch_bias=True,
            table=side,
            deep_layers=tuple(got["deepstack_visual_indexes"]),
            mean=_HALF,
            std=_HALF,
        ),
    )
    return with_tower(config, tower)


def nest_qwen3_vl(flat: Mapping[str, Any], config: Config) -> dict[str, Any]:
    """The fields of config.json, of which `flat` are those of the text model.

    Raises:
      ModelError: the config has no tower.
    """
    tower = tower_in(config)
    vision = {
        "model_type": f"{config.source.family}_vision",
        "hidden_act": GELU,
        "num_position_embeddings": tower.form.table**2,
        "deepstack_visual_indexes": list(tower.form.deep_layers),
    }
    return nest_fields(flat, config, vision, {_INTERLEAVED: True})


def name_of_qwen3_vl(name: str) -> str:
    """The name in files of a weight of the tower.

    Example: name_of_qwen3_vl("deep_mergers/0/first") is "model.visual.deepstack_merger_list.0.linear_fc1.weight".
    """
    part, *rest = name.split("/")
    if part == "embed":
        theirs = _TOWER_NAMES[name]
    elif part == "layers":
        theirs = f"blocks.{rest[0]}.{_TOWER_LAYER[rest[1]]}"
    else:
        merger = "merger" if part == "merger" else f"deepstack_merger_list.{rest[0]}"
        theirs = f"{merger}.{_MERGER[rest[-1]]}"
    return f"model.visual.{theirs}"


QWEN3_VISION = VisionFamily(
    text=text_of_qwen2_5_vl,
    tower=tower_of_qwen3_vl,
    nest=nest_qwen3_vl,
    name=name_of_qwen3_vl,
    make=vision_language_model,
    prefix=TEXT_PREFIX,
)
