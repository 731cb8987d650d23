"""The config.json and the names of Gemma 3 and LLaVA-OneVision: a Gemma 3 or a Qwen2, and a SigLIP tower.

Gemma 3 squashes every picture to a square of one size, whose patches are averaged to a fixed number of tokens; these
see one another in the decoder. LLaVA-OneVision sees pictures as tiles.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from typing import Any

from funrl.models.decoder.config import Config
from funrl.models.errors import ModelError
from funrl.models.huggingface.configs.hf_family import UNEMBED, VisionFamily, class_defaults
from funrl.models.huggingface.family_fields import GELU
from funrl.models.vision.config import (
    CHANNELS,
    PictureLayout,
    TowerConfig,
    TowerForm,
    VisionLanguageConfig,
    tower_in,
    with_tower,
)
from funrl.models.vision.model import vision_language_model
from funrl.models.vision.tiles import Tiles

_TOWER_ONLY = {  # the values of fields of vision_config that are supported
    "model_type": "siglip_vision_model",
    "num_channels": CHANNELS,
    "hidden_act": GELU,
    "vision_use_head": False,
}
_SIZES = {"layers": "num_hidden_layers", "embed": "hidden_size", "inner": "intermediate_size"}
_SIZES |= {"heads": "num_attention_heads", "patch": "patch_size"}
_LLAVA_ONLY = {  # the same of config.json of LLaVA-OneVision
    "projector_hidden_act": "gelu",
    "vision_feature_select_strategy": "full",
    "vision_feature_layer": -1,
    "multimodal_projector_bias": True,
}
_PINPOINTS = [list(size) for size in itertools.product(range(384, 2305, 384), repeat=2)]  # of image_grid_pinpoints
_MOST = "anyres_max_"
_HALF = (0.5, 0.5, 0.5)
_OUTER = ("architectures", "model_type", "dtype", "torch_dtype", "tie_word_embeddings")  # fields beside text_config
_TOWER = "vision_tower.vision_model."
_PROJECTOR = "multi_modal_projector."
_TEXT_PREFIX = "language_model.model."
_OTHER_PREFIXES = {  # beginning of a name -> beginnings in files of other versions of transformers
    _TEXT_PREFIX: ("model.language_model.",),
    f"language_model.{UNEMBED}": (UNEMBED,),
    _TOWER: ("vision_tower.", "model.vision_tower.vision_model.", "model.vision_tower."),
    _PROJECTOR: (f"model.{_PROJECTOR}",),
}
_NAMES = {
    "embed/patch": f"{_TOWER}embeddings.patch_embedding.weight",
    "embed/patch_bias": f"{_TOWER}embeddings.patch_embedding.bias",
    "embed/table": f"{_TOWER}embeddings.position_embedding.weight",
}
_GEMMA_NAMES = {
    **_NAMES,
    "merger/norm": f"{_TOWER}post_layernorm.weight",
    "merger/norm_bias": f"{_TOWER}post_layernorm.bias",
    "merger/mean_norm": f"{_PROJECTOR}mm_soft_emb_norm.weight",
    "merger/project": f"{_PROJECTOR}mm_input_projection_weight",
}
_LLAVA_NAMES = {
    **_NAMES,
    "embed/idle_norm": f"{_TOWER}post_layernorm.weight",
    "embed/idle_norm_bias": f"{_TOWER}post_layernorm.bias",
    "merger/first": f"{_PROJECTOR}linear_1.weight",
    "merger/first_bias": f"{_PROJECTOR}linear_1.bias",
    "merger/second": f"{_PROJECTOR}linear_2.weight",
    "merger/second_bias": f"{_PROJECTOR}linear_2.bias",
    "merger/newline": "image_newline",
}
_LAYER = {
    "norm1": "layer_norm1",
    "norm2": "layer_norm2",
    "query": "self_attn.q_proj",
    "key": "self_attn.k_proj",
    "value": "self_attn.v_proj",
    "proj": "self_attn.out_proj",
    "up_proj": "mlp.fc1",
    "down_proj": "mlp.fc2",
}


def text_of_gemma3(raw: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of the text model: those of text_config, and some that config.json itself has."""
    sizes = {name: class_defaults("gemma3_text")[name] for name in ("vocab_size", "num_attention_heads")}
    given = {name: raw[name] for name in ("eos_token_id", "dtype", "torch_dtype") if raw.get(name) is not None}
    tied = {"tie_word_embeddings": raw.get("tie_word_embeddings", True)}
    return {**sizes, **(raw.get("text_config") or {}), **given, **tied}


def text_of_llava_onevision(raw: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of the text model: those of text_config, and some that config.json itself has."""
    text = dict(raw.get("text_config") or {})
    if text.get("model_type", "qwen2") != "qwen2":
        raise ModelError(f"text_config.model_type is {text['model_type']!r}, supported is 'qwen2'")
    given = {name: raw[name] for name in ("dtype", "torch_dtype") if raw.get(name) is not None}
    tied = bool(raw.get("tie_word_embeddings")) or bool(text.get("tie_word_embeddings"))
    return text | given | {"tie_word_embeddings": tied}


def _fields(raw: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The fields of config.json and of its vision_config, with all their defaults.

    Raises:
      ModelError: vision_config is no object, or a field of it has a value that is not supported.
    """
    vision = raw.get("vision_config")
    if not isinstance(vision, Mapping):
        raise ModelError(f"vision_config is {vision!r}, it must be the sizes of the vision tower")
    defaults = {**class_defaults("siglip_vision_model"), **_TOWER_ONLY, "vision_use_head": True}
    got = {**defaults, **{name: x for name, x in vision.items() if x is not None}}
    for name, value in _TOWER_ONLY.items():
        if got[name] != value:
            raise ModelError(f"vision_config.{name} is {got[name]!r}, supported is {value!r}")
    return {**class_defaults(raw["model_type"]), **{name: x for name, x in raw.items() if x is not None}}, got


def _tower(got: Mapping[str, Any], form: Mapping[str, Any], **fields: Any) -> TowerConfig:
    """A tower of the fields of a vision_config, with further fields of its form and its own."""
    return TowerConfig(
        **{ours: got[theirs] for ours, theirs in _SIZES.items()},
        window=None,
        form=TowerForm(
            norm="layer",
            gated=False,
            patch_bias=True,
            table=got["image_size"] // got["patch_size"],
            frames=1,
            joined=False,
            rotates=False,
            eps=float(got["layer_norm_eps"]),
            mean=_HALF,
            std=_HALF,
            **form,
        ),
        **fields,
    )


def tower_of_gemma3(raw: Mapping[str, Any], config: Config) -> VisionLanguageConfig:
    """The config with the tower that config.json describes.

    Raises:
      ModelError: a field of vision_config has a value that is not supported, or sizes do not fit together.
    """
    outer, got = _fields(raw)
    side = got["image_size"] // got["patch_size"]
    tokens = math.isqrt(outer["mm_tokens_per_image"])
    if tokens**2 != outer["mm_tokens_per_image"] or side * got["patch_size"] != got["image_size"] or side % tokens:
        raise ModelError(
            f"mm_tokens_per_image is {outer['mm_tokens_per_image']} for an image_size of {got['image_size']} and a "
            f"patch_size of {got['patch_size']}; it must be the square of a number that divides the patches of a side"
        )
    tower = _tower(
        got,
        {"merger": "mean"},
        merge=side // tokens,
        placeholder=outer["image_token_index"],
        begin=outer["boi_token_index"],
        end=outer["eoi_token_index"],
        layout=PictureLayout(side=side, frame="\n\n", mutual=True),
    )
    return with_tower(config, tower)


def tower_of_llava_onevision(raw: Mapping[str, Any], config: Config) -> VisionLanguageConfig:
    """The config with the tower that config.json describes.

    Raises:
      ModelError: a field has a value that is not supported, or sizes do not fit together.
    """
    for name, value in _LLAVA_ONLY.items():
        if raw.get(name, value) not in (value, [value]):
            raise ModelError(f"{name} is {raw[name]!r}, supported is {value!r}")
    outer, got = _fields(raw)
    pixels = got["image_size"]
    sizes = outer["image_grid_pinpoints"] or _PINPOINTS
    ratio = str(outer["vision_aspect_ratio"])
    if any(len(size) != 2 or any(side % pixels for side in size) for size in sizes):
        raise ModelError(
            f"image_grid_pinpoints is {sizes}; it must be heights and widths in multiples of the image_size {pixels}"
        )
    if not ratio.removeprefix(_MOST).isdecimal():
        raise ModelError(f"vision_aspect_ratio is {ratio!r}, supported is '{_MOST}' and a number, such as '{_MOST}9'")
    tiles = Tiles(
        pixels=pixels,
        states=pixels // got["patch_size"],
        canvases=tuple((height // pixels, width // pixels) for height, width in sizes),
        most=int(ratio.removeprefix(_MOST)),
    )
    tower = _tower(
        got,
        {"merger": "plain", "idle_norm": True},
        merge=1,
        placeholder=outer["image_token_index"],
        banned=(outer["video_token_index"],),
        layout=PictureLayout(tiles=tiles),
    )
    return with_tower(config, tower)


def _nested(flat: Mapping[str, Any], tower: TowerConfig, text_type: str, pixels: int, **fields: Any) -> dict[str, Any]:
    """The fields of config.json: `flat` of the text model, the tower's, and further ones."""
    vision = {theirs: getattr(tower, ours) for ours, theirs in _SIZES.items()}
    return {
        **{name: flat[name] for name in _OUTER},
        **fields,
        "image_token_index": tower.placeholder,
        "text_config": {**{name: x for name, x in flat.items() if name not in _OUTER[:2]}, "model_type": text_type},
        "vision_config": {**_TOWER_ONLY, **vision, "image_size": pixels, "layer_norm_eps": tower.form.eps},
        "eos_token_id": flat["eos_token_id"],
        "pad_token_id": flat["pad_token_id"],
    }


def nest_gemma3(flat: Mapping[str, Any], config: Config) -> dict[str, Any]:
    """The fields of config.json with a tower.

    Args:
      flat: fields of the text model.
      config: with a tower.

    Raises:
      ModelError: the config has no tower, or one of another form.
    """
    tower = tower_in(config)
    side = tower.layout.side
    if side is None:
        raise ModelError("a gemma3 config.json needs pictures of one size, layout.side, which is None")
    tokens = {"boi_token_index": tower.begin, "eoi_token_index": tower.end}
    tokens["mm_tokens_per_image"] = (side // tower.merge) ** 2
    return _nested(flat, tower, "gemma3_text", side * tower.patch, **tokens)


def nest_llava_onevision(flat: Mapping[str, Any], config: Config) -> dict[str, Any]:
    """The fields of config.json with a tower.

    Args:
      flat: fields of the text model.
      config: with a tower.

    Raises:
      ModelError: the config has no tower, or one that sees no tiles.
    """
    tower = tower_in(config)
    tiles = tower.layout.tiles
    if tiles is None:
        raise ModelError("a llava_onevision config.json needs pictures in tiles, layout.tiles, which is None")
    fields = {
        **_LLAVA_ONLY,
        "video_token_index": next(iter(tower.banned), tower.placeholder),
        "image_grid_pinpoints": [[rows * tiles.pixels, columns * tiles.pixels] for rows, columns in tiles.canvases],
        "vision_aspect_ratio": f"{_MOST}{tiles.most}",
    }
    return _nested(flat, tower, "qwen2", tiles.pixels, **fields)


def name_of_gemma3(name: str) -> str:
    """The name in files of a weight of the tower.

    Example: name_of_gemma3("layers/0/norm1") is "vision_tower.vision_model.encoder.layers.0.layer_norm1.weight".
    """
    return _GEMMA_NAMES.get(name) or _name_of_layer(name)


def name_of_llava_onevision(name: str) -> str:
    """The name in files of a weight of the tower.

    Example: name_of_llava_onevision("merger/first") is "multi_modal_projector.linear_1.weight".
    """
    return _LLAVA_NAMES.get(name) or _name_of_layer(name)


def _name_of_layer(name: str) -> str:
    _, layer, leaf = name.split("/")
    kind = "bias" if leaf.endswith("_bias") else "weight"
    return f"{_TOWER}encoder.layers.{layer}.{_LAYER[leaf.removesuffix('_bias')]}.{kind}"


GEMMA3_VISION = VisionFamily(
    text=text_of_gemma3,
    tower=tower_of_gemma3,
    nest=nest_gemma3,
    name=name_of_gemma3,
    make=vision_language_model,
    prefix=_TEXT_PREFIX,
    unembed=f"language_model.{UNEMBED}",
    other_prefixes=_OTHER_PREFIXES,
    modules={_TEXT_PREFIX: "model.language_model.", _TOWER: "model.vision_tower."},
)
LLAVA_ONEVISION_VISION = VisionFamily(
    text_type="qwen2",
    text=text_of_llava_onevision,
    tower=tower_of_llava_onevision,
    nest=nest_llava_onevision,
    name=name_of_llava_onevision,
    make=vision_language_model,
    prefix=_TEXT_PREFIX,
    unembed=f"language_model.{UNEMBED}",
    other_prefixes=_OTHER_PREFIXES | {"image_newline": ("model.image_newline",)},
    modules={
        _TEXT_PREFIX: "model.language_model.",
        _TOWER: "model.vision_tower.",
        _PROJECTOR: f"model.{_PROJECTOR}",
    },
)
