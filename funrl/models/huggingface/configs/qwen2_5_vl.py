"""The config.json and the names of Qwen2.5-VL: a Qwen2 with three positions a token, and a tower with windows."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

from funrl.models.decoder.config import Config
from funrl.models.errors import ModelError
from funrl.models.vision.config import CHANNELS, FRAMES, TowerConfig, VisionLanguageConfig, with_tower

VL_DEFAULTS = {
    "num_key_value_heads": 8,
    "max_position_embeddings": 32768,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 80,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e6,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
}
SECTIONS = "mrope_section"
_TOWER_DEFAULTS = {
    "depth": 32,
    "hidden_size": 3584,
    "hidden_act": "silu",
    "intermediate_size": 3420,
    "num_heads": 16,
    "in_channels": CHANNELS,
    "patch_size": 14,
    "spatial_merge_size": 2,
    "temporal_patch_size": FRAMES,
    "window_size": 112,
    "fullatt_block_indexes": (7, 15, 23, 31),
}
_TOKENS = {
    "image_token_id": 151655,
    "video_token_id": 151656,
    "vision_start_token_id": 151652,
    "vision_end_token_id": 151653,
}
_TOWER_NAMES = {
    "embed/patch": "patch_embed.proj.weight",
    "merger/norm": "merger.ln_q.weight",
    "merger/first": "merger.mlp.0.weight",
    "merger/first_bias": "merger.mlp.0.bias",
    "merger/second": "merger.mlp.2.weight",
    "merger/second_bias": "merger.mlp.2.bias",
}
_TOWER_LAYER = {
    "norm1": "norm1.weight",
    "norm2": "norm2.weight",
    "qkv": "attn.qkv.weight",
    "qkv_bias": "attn.qkv.bias",
    "proj": "attn.proj.weight",
    "proj_bias": "attn.proj.bias",
} | {
    f"{name}_proj{ours}": f"mlp.{name}_proj.{theirs}"
    for name, (ours, theirs) in itertools.product(("gate", "up", "down"), (("", "weight"), ("_bias", "bias")))
}


def text_of_qwen2_5_vl(raw: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of the text model: those of text_config, or of config.json itself, as older files have them."""
    text = {name: x for name, x in raw.items() if name not in ("text_config", "vision_config")}
    text |= {name: x for name, x in (raw.get("text_config") or {}).items() if name != "model_type"}
    rope = text.get("rope_parameters") or text.get("rope_scaling")
    if rope and rope.get("type", rope.get("rope_type")) in ("mrope", "default"):
        text.pop("rope_scaling", None)
        plain = {name: x for name, x in rope.items() if name not in (SECTIONS, "type", "rope_type")}
        text["rope_parameters"] = plain | {"rope_type": "default"}
        text[SECTIONS] = rope.get(SECTIONS)
    return text


def read_qwen2_5_vl(got: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of `Config` of its text model.

    Raises:
      ModelError: the sections of rotary frequencies are missing, or do not make up a head.
    """
    sections = got.get(SECTIONS) or (16, 24, 24)
    head = got["hidden_size"] // got["num_attention_heads"]
    if len(sections) != 3 or 2 * sum(sections) != head:
        raise ModelError(f"{SECTIONS} is {list(sections)}; it must be 3 numbers whose sum is {head // 2}, half a head")
    axes = tuple(axis for axis, count in enumerate(sections) for _ in range(count))
    return {"attention_bias": True, "rope_axes": axes}


def tower_of_qwen2_5_vl(raw: Mapping[str, Any], config: Config) -> VisionLanguageConfig:
    """The config with the tower that config.json describes.

    Raises:
      ModelError: a field of vision_config has a value that is not supported.
    """
    given = raw.get("vision_config")
    if not isinstance(given, Mapping):
        raise ModelError(f"vision_config is {given!r}, it must be the sizes of the vision tower")
    got = {**_TOWER_DEFAULTS, **{name: x for name, x in given.items() if x is not None}}
    rope = got.get("rope_parameters") or {}
    wanted = {
        "hidden_act": "silu",
        "in_channels": CHANNELS,
        "temporal_patch_size": FRAMES,
        "out_hidden_size": config.embed,
    }
    for name, value in wanted.items():
        if got.get(name, value) != value:
            raise ModelError(f"vision_config.{name} is {got[name]!r}, supported is {value!r}")
    if rope.get("rope_type", "axial") != "axial":
        raise ModelError(f"vision_config.rope_parameters.rope_type is {rope['rope_type']!r}, supported is 'axial'")
    tokens = {name: raw.get(name, default) for name, default in _TOKENS.items()}
    tower = TowerConfig(
        layers=got["depth"],
        embed=got["hidden_size"],
        heads=got["num_heads"],
        inner=got["intermediate_size"],
        patch=got["patch_size"],
        merge=got["spatial_merge_size"],
        window=got["window_size"],
        whole_layers=tuple(got["fullatt_block_indexes"]),
        placeholder=tokens["image_token_id"],
        banned=(tokens["video_token_id"],),
        begin=tokens["vision_start_token_id"],
        end=tokens["vision_end_token_id"],
        theta=float(rope.get("rope_theta", 10000.0)),
    )
    return with_tower(config, tower)


def nest_qwen2_5_vl(flat: Mapping[str, Any], config: Config) -> dict[str, Any]:
    """The fields of config.json, of which `flat` are those of the text model.

    Raises:
      ModelError: the config has no tower.
    """
    if not isinstance(config, VisionLanguageConfig):
        raise ModelError("a qwen2_5_vl config.json needs a vision tower: with_vision(model, tower) gives it one")
    tower = config.tower
    sections = [config.rope.axes.count(axis) for axis in range(3)]
    outer = ("architectures", "model_type", "dtype", "torch_dtype", "tie_word_embeddings")
    text = {name: x for name, x in flat.items() if name not in (*outer, "rope_theta")}
    rope = {"rope_type": "default", "rope_theta": config.rope.theta, SECTIONS: sections}
    vision = {
        "model_type": "qwen2_5_vl",
        "depth": tower.layers,
        "hidden_size": tower.embed,
        "hidden_act": "silu",
        "intermediate_size": tower.inner,
        "num_heads": tower.heads,
        "in_channels": CHANNELS,
        "patch_size": tower.patch,
        "spatial_merge_size": tower.merge,
        "temporal_patch_size": FRAMES,
        "window_size": tower.window,
        "fullatt_block_indexes": list(tower.whole_layers),
        "out_hidden_size": config.embed,
    }
    return {
        **{name: flat[name] for name in outer},
        "text_config": {**text, "model_type": "qwen2_5_vl_text", "rope_parameters": rope},
        "vision_config": vision,
        "image_token_id": tower.placeholder,
        "video_token_id": next(iter(tower.banned), tower.placeholder),
        "vision_start_token_id": tower.begin,
        "vision_end_token_id": tower.end,
        "eos_token_id": flat["eos_token_id"],
        "pad_token_id": flat["pad_token_id"],
    }


def name_of_qwen2_5_vl(name: str) -> str:
    """The name in files of a weight of the tower.

    Example: name_of_qwen2_5_vl("layers/0/qkv") is "visual.blocks.0.attn.qkv.weight".
    """
    if name in _TOWER_NAMES:
        return f"visual.{_TOWER_NAMES[name]}"
    _, layer, leaf = name.split("/")
    return f"visual.blocks.{layer}.{_TOWER_LAYER[leaf]}"
