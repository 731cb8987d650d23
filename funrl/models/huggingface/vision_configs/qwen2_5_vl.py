"""The config.json and the names of Qwen2.5-VL: a Qwen2 with three positions a token, and a tower with windows."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from funrl.models.decoder.config import Config
from funrl.models.errors import ModelError
from funrl.models.huggingface.configs.hf_family import VisionFamily
from funrl.models.vision.config import CHANNELS, FRAMES, TowerConfig, VisionLanguageConfig, with_tower
from funrl.models.vision.model import vision_language_model

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
PATCH_FIELDS = {"in_channels": CHANNELS, "temporal_patch_size": FRAMES}  # of vision_config
_TOWER_DEFAULTS = PATCH_FIELDS | {
    "depth": 32,
    "hidden_size": 3584,
    "hidden_act": "silu",
    "intermediate_size": 3420,
    "num_heads": 16,
    "patch_size": 14,
    "spatial_merge_size": 2,
    "window_size": 112,
    "fullatt_block_indexes": (7, 15, 23, 31),
}
VISION_TOKENS = {
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
TOWER_LAYER = {
    "norm1": "norm1.weight",
    "norm2": "norm2.weight",
    "qkv": "attn.qkv.weight",
    "qkv_bias": "attn.qkv.bias",
    "proj": "attn.proj.weight",
    "proj_bias": "attn.proj.bias",
}
_TOWER_LAYER = TOWER_LAYER | {
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
    text["tie_word_embeddings"] = raw.get("tie_word_embeddings", False)  # what text_config says of it is not read
    return text


def read_qwen2_5_vl(got: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of `Config` of its text model.

    Raises:
      ModelError: the sections of rotary frequencies are missing, or do not make up a head.
    """
    sections = rope_sections(got, (16, 24, 24), got["hidden_size"] // got["num_attention_heads"])
    axes = tuple(axis for axis, count in enumerate(sections) for _ in range(count))
    return {"attention_bias": True, "rope_axes": axes}


def rope_sections(got: Mapping[str, Any], default: Sequence[int], head: int) -> Sequence[int]:
    """Numbers of the rotary frequencies of a head that take each of three positions.

    Raises:
      ModelError: they do not make up a head.
    """
    sections = got.get(SECTIONS) or default
    if len(sections) != 3 or 2 * sum(sections) != head:
        raise ModelError(f"{SECTIONS} is {list(sections)}; it must be 3 numbers whose sum is {head // 2}, half a head")
    return sections


def tower_of_qwen2_5_vl(raw: Mapping[str, Any], config: Config) -> VisionLanguageConfig:
    """The config with the tower that config.json describes.

    Raises:
      ModelError: a field of vision_config has a value that is not supported.
    """
    got = vision_fields(raw, _TOWER_DEFAULTS, {"hidden_act": "silu", "out_hidden_size": config.embed})
    tokens = {name: raw.get(name, default) for name, default in VISION_TOKENS.items()}
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
        theta=got["rope_theta"],
    )
    return with_tower(config, tower)


def vision_fields(raw: Mapping[str, Any], defaults: Mapping[str, Any], wanted: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of vision_config, with the base of its rotary frequencies as "rope_theta".

    Args:
      raw: fields of config.json.
      defaults: of fields that it lacks.
      wanted: the only values of some, besides `PATCH_FIELDS`.

    Raises:
      ModelError: a field has another value.
    """
    given = raw.get("vision_config")
    if not isinstance(given, Mapping):
        raise ModelError(f"vision_config is {given!r}, it must be the sizes of the vision tower")
    got = {**defaults, **{name: x for name, x in given.items() if x is not None}}
    rope = got.get("rope_parameters") or {}
    for name, value in {**PATCH_FIELDS, **wanted}.items():
        if got.get(name, value) != value:
            raise ModelError(f"vision_config.{name} is {got[name]!r}, supported is {value!r}")
    if rope.get("rope_type", "axial") != "axial":
        raise ModelError(f"vision_config.rope_parameters.rope_type is {rope['rope_type']!r}, supported is 'axial'")
    return got | {"rope_theta": float(rope.get("rope_theta", 10000.0))}


def nest_qwen2_5_vl(flat: Mapping[str, Any], config: Config) -> dict[str, Any]:
    """The fields of config.json, of which `flat` are those of the text model.

    Raises:
      ModelError: the config has no tower.
    """
    tower = tower_in(config)
    vision = {
        "hidden_act": "silu",
        "window_size": tower.window,
        "fullatt_block_indexes": list(tower.whole_layers),
    }
    return nest_fields(flat, config, vision, {})


def tower_in(config: Config) -> TowerConfig:
    """The tower of a config. Raises: ModelError, it has none."""
    if not isinstance(config, VisionLanguageConfig):
        raise ModelError(
            f"a {config.source.family} config.json needs a vision tower: with_vision(model, tower) gives it one"
        )
    return config.tower


def nest_fields(
    flat: Mapping[str, Any], config: Config, vision: Mapping[str, Any], rope: Mapping[str, Any]
) -> dict[str, Any]:
    """The fields of config.json of a Qwen with a tower.

    Args:
      flat: those of the text model.
      config: with a tower.
      vision, rope: further fields of vision_config, and of the rope_parameters of text_config.
    """
    tower = tower_in(config)
    family = config.source.family
    outer = ("architectures", "model_type", "dtype", "torch_dtype", "tie_word_embeddings")
    text = {name: x for name, x in flat.items() if name not in (*outer, "rope_theta")}
    sections = [config.rope.axes.count(axis) for axis in range(3)]
    parameters = {"rope_type": "default", "rope_theta": config.rope.theta, SECTIONS: sections, **rope}
    sizes = {
        "depth": tower.layers,
        "hidden_size": tower.embed,
        "intermediate_size": tower.inner,
        "num_heads": tower.heads,
        "patch_size": tower.patch,
        "spatial_merge_size": tower.merge,
        "out_hidden_size": config.embed,
        "rope_parameters": {"rope_type": "axial", "rope_theta": tower.theta},
    }
    return {
        **{name: flat[name] for name in outer},
        "text_config": {**text, "model_type": f"{family}_text", "rope_parameters": parameters},
        "vision_config": {**PATCH_FIELDS, **sizes, **vision},
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


QWEN2_5_VISION = VisionFamily(
    text=text_of_qwen2_5_vl,
    tower=tower_of_qwen2_5_vl,
    nest=nest_qwen2_5_vl,
    name=name_of_qwen2_5_vl,
    make=vision_language_model,
    modules={"model.": "model.language_model.", "visual.": "model.visual."},
)
