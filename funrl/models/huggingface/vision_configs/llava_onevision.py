"""The config.json and the names of LLaVA-OneVision: a Qwen2, and a SigLIP tower that sees pictures as tiles."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

from funrl.models.decoder.config import Config
from funrl.models.errors import ModelError
from funrl.models.huggingface.configs.hf_family import UNEMBED, VisionFamily
from funrl.models.huggingface.vision_configs.qwen2_5_vl import tower_in
from funrl.models.huggingface.vision_configs.siglip import (
    LAST_NORM,
    NAMES,
    OTHER_TOWER_PREFIXES,
    TOWER_PREFIX,
    name_of_siglip_layer,
    siglip_fields,
    siglip_form,
    siglip_sizes,
    siglip_vision_config,
)
from funrl.models.vision.config import PictureLayout, TowerConfig, VisionLanguageConfig, with_tower
from funrl.models.vision.model import vision_language_model
from funrl.models.vision.tiles import Tiles

_SIZES = range(384, 2305, 384)
_OUTER = {  # fields of config.json
    "image_token_index": 151646,
    "video_token_index": 151647,
    "image_grid_pinpoints": [list(size) for size in itertools.product(_SIZES, _SIZES)],
    "vision_aspect_ratio": "anyres_max_9",
}
_ONLY = {  # the values of fields that are supported
    "projector_hidden_act": "gelu",
    "vision_feature_select_strategy": "full",
    "vision_feature_layer": -1,
    "multimodal_projector_bias": True,
}
_TOWER_DEFAULTS = {  # of a config.json without a vision_config
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "num_hidden_layers": 26,
    "num_attention_heads": 16,
    "image_size": 384,
    "patch_size": 14,
    "vision_use_head": False,
}
_MOST = "anyres_max_"
_HALF = (0.5, 0.5, 0.5)
_TEXT_PREFIX = "language_model.model."
_PROJECTOR = "multi_modal_projector."
_NAMES = {
    **NAMES,
    **{f"embed/idle_norm{kind}": theirs for kind, theirs in LAST_NORM.items()},
    "merger/first": f"{_PROJECTOR}linear_1.weight",
    "merger/first_bias": f"{_PROJECTOR}linear_1.bias",
    "merger/second": f"{_PROJECTOR}linear_2.weight",
    "merger/second_bias": f"{_PROJECTOR}linear_2.bias",
    "merger/newline": "image_newline",
}


def text_of_llava_onevision(raw: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of the text model: those of text_config, and some that config.json itself has."""
    text = dict(raw.get("text_config") or {})
    if text.get("model_type", "qwen2") != "qwen2":
        raise ModelError(f"text_config.model_type is {text['model_type']!r}, supported is 'qwen2'")
    given = {name: raw[name] for name in ("dtype", "torch_dtype") if raw.get(name) is not None}
    tied = bool(raw.get("tie_word_embeddings")) or bool(text.get("tie_word_embeddings"))
    return text | given | {"tie_word_embeddings": tied}


def tower_of_llava_onevision(raw: Mapping[str, Any], config: Config) -> VisionLanguageConfig:
    """The config with the tower that config.json describes.

    Raises:
      ModelError: a field has a value that is not supported, or sizes do not fit together.
    """
    for name, value in _ONLY.items():
        if raw.get(name, value) not in (value, [value]):
            raise ModelError(f"{name} is {raw[name]!r}, supported is {value!r}")
    got = siglip_fields(raw, _TOWER_DEFAULTS)
    outer = {name: default if raw.get(name) is None else raw[name] for name, default in _OUTER.items()}
    pixels = got["image_size"]
    sizes, ratio = outer["image_grid_pinpoints"], str(outer["vision_aspect_ratio"])
    if any(len(size) != 2 or any(side % pixels for side in size) for size in sizes):
        raise ModelError(
            f"image_grid_pinpoints is {sizes}; it must be heights and widths in multiples of the image_size {pixels}"
        )
    if not ratio.removeprefix(_MOST).isdecimal():
        raise ModelError(f"vision_aspect_ratio is {ratio!r}, supported is '{_MOST}' and a number, such as '{_MOST}9'")
    tower = TowerConfig(
        **siglip_sizes(got),
        merge=1,
        placeholder=outer["image_token_index"],
        banned=(outer["video_token_index"],),
        form=siglip_form(got, merger="plain", idle_norm=True, mean=_HALF, std=_HALF),
        layout=PictureLayout(
            tiles=Tiles(
                pixels=pixels,
                states=pixels // got["patch_size"],
                canvases=tuple((height // pixels, width // pixels) for height, width in sizes),
                most=int(ratio.removeprefix(_MOST)),
            )
        ),
    )
    return with_tower(config, tower)


def nest_llava_onevision(flat: Mapping[str, Any], config: Config) -> dict[str, Any]:
    """The fields of config.json, of which `flat` are those of the text model.

    Raises:
      ModelError: the config has no tower, or one that sees no tiles.
    """
    tower = tower_in(config)
    tiles = tower.layout.tiles
    if tiles is None:
        raise ModelError("a llava_onevision config.json needs pictures in tiles, layout.tiles, which is None")
    outer = ("architectures", "model_type", "dtype", "torch_dtype", "tie_word_embeddings")
    text = {name: x for name, x in flat.items() if name not in outer[:2]}
    return {
        **{name: flat[name] for name in outer},
        **_ONLY,
        "image_token_index": tower.placeholder,
        "video_token_index": next(iter(tower.banned), tower.placeholder),
        "image_grid_pinpoints": [[rows * tiles.pixels, columns * tiles.pixels] for rows, columns in tiles.canvases],
        "vision_aspect_ratio": f"{_MOST}{tiles.most}",
        "text_config": {**text, "model_type": "qwen2"},
        "vision_config": siglip_vision_config(tower, tiles.pixels),
        "eos_token_id": flat["eos_token_id"],
        "pad_token_id": flat["pad_token_id"],
    }


def name_of_llava_onevision(name: str) -> str:
    """The name in files of a weight of the tower.

    Example: name_of_llava_onevision("merger/first") is "multi_modal_projector.linear_1.weight".
    """
    return _NAMES.get(name) or name_of_siglip_layer(name)


LLAVA_ONEVISION_VISION = VisionFamily(
    text=text_of_llava_onevision,
    tower=tower_of_llava_onevision,
    nest=nest_llava_onevision,
    name=name_of_llava_onevision,
    make=vision_language_model,
    prefix=_TEXT_PREFIX,
    unembed=f"language_model.{UNEMBED}",
    other_prefixes={  # beginnings of names, and those that other versions of transformers write instead
        _TEXT_PREFIX: ("model.language_model.",),
        f"language_model.{UNEMBED}": (UNEMBED,),
        TOWER_PREFIX: OTHER_TOWER_PREFIXES,
        _PROJECTOR: (f"model.{_PROJECTOR}",),
        "image_newline": ("model.image_newline",),
    },
    modules={
        _TEXT_PREFIX: "model.language_model.",
        TOWER_PREFIX: "model.vision_tower.",
        _PROJECTOR: f"model.{_PROJECTOR}",
    },
)
