"""The config.json and the names of Gemma 3 with pictures: its text model, and a SigLIP tower.

Every picture is squashed to a square of one size, whose patches are averaged to a fixed number of tokens; these see
one another in the decoder.
"""

from __future__ import annotations

import math
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

_DEFAULTS = {"vocab_size": 262208, "num_attention_heads": 8}
_OUTER = {  # fields of config.json
    "mm_tokens_per_image": 256,
    "boi_token_index": 255999,
    "eoi_token_index": 256000,
    "image_token_index": 262144,
}
_HALF = (0.5, 0.5, 0.5)
_TEXT_PREFIX = "language_model.model."
_OTHER_PREFIXES = {  # beginnings of names, and those that other versions of transformers write instead
    _TEXT_PREFIX: ("model.language_model.",),
    f"language_model.{UNEMBED}": (UNEMBED,),
    TOWER_PREFIX: OTHER_TOWER_PREFIXES,
    "multi_modal_projector.": ("model.multi_modal_projector.",),
}
_NAMES = {
    **NAMES,
    **{f"merger/norm{kind}": theirs for kind, theirs in LAST_NORM.items()},
    "merger/mean_norm": "multi_modal_projector.mm_soft_emb_norm.weight",
    "merger/project": "multi_modal_projector.mm_input_projection_weight",
}


def text_of_gemma3(raw: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of the text model: those of text_config, and some that config.json itself has."""
    text = {**_DEFAULTS, **(raw.get("text_config") or {})}
    given = {name: raw[name] for name in ("eos_token_id", "dtype", "torch_dtype") if raw.get(name) is not None}
    return text | given | {"tie_word_embeddings": raw.get("tie_word_embeddings", True)}


def tower_of_gemma3(raw: Mapping[str, Any], config: Config) -> VisionLanguageConfig:
    """The config with the tower that config.json describes.

    Raises:
      ModelError: a field of vision_config has a value that is not supported, or sizes do not fit together.
    """
    got = siglip_fields(raw, {})
    outer = {name: default if raw.get(name) is None else raw[name] for name, default in _OUTER.items()}
    side = got["image_size"] // got["patch_size"]
    tokens = math.isqrt(outer["mm_tokens_per_image"])
    if tokens**2 != outer["mm_tokens_per_image"] or side * got["patch_size"] != got["image_size"] or side % tokens:
        raise ModelError(
            f"mm_tokens_per_image is {outer['mm_tokens_per_image']} for an image_size of {got['image_size']} and a "
            f"patch_size of {got['patch_size']}; it must be the square of a number that divides the patches of a side"
        )
    tower = TowerConfig(
        **siglip_sizes(got),
        merge=side // tokens,
        placeholder=outer["image_token_index"],
        begin=outer["boi_token_index"],
        end=outer["eoi_token_index"],
        form=siglip_form(got, merger="mean", mean=_HALF, std=_HALF),
        layout=PictureLayout(side=side, frame="\n\n", mutual=True),
    )
    return with_tower(config, tower)


def nest_gemma3(flat: Mapping[str, Any], config: Config) -> dict[str, Any]:
    """The fields of config.json, of which `flat` are those of the text model.

    Raises:
      ModelError: the config has no tower, or one of another form.
    """
    tower = tower_in(config)
    side = tower.layout.side
    if side is None:
        raise ModelError("a gemma3 config.json needs pictures of one size, layout.side, which is None")
    outer = ("architectures", "model_type", "dtype", "torch_dtype", "tie_word_embeddings")
    text = {name: x for name, x in flat.items() if name not in outer[:2]}
    tokens = ((side // tower.merge) ** 2, tower.begin, tower.end, tower.placeholder)
    return {
        **{name: flat[name] for name in outer},
        **dict(zip(_OUTER, tokens, strict=True)),
        "text_config": {**text, "model_type": "gemma3_text"},
        "vision_config": siglip_vision_config(tower, side * tower.patch),
        "eos_token_id": flat["eos_token_id"],
        "pad_token_id": flat["pad_token_id"],
    }


def name_of_gemma3(name: str) -> str:
    """The name in files of a weight of the tower.

    Example: name_of_gemma3("layers/0/norm1") is "vision_tower.vision_model.encoder.layers.0.layer_norm1.weight".
    """
    return _NAMES.get(name) or name_of_siglip_layer(name)


GEMMA3_VISION = VisionFamily(
    text=text_of_gemma3,
    tower=tower_of_gemma3,
    nest=nest_gemma3,
    name=name_of_gemma3,
    make=vision_language_model,
    prefix=_TEXT_PREFIX,
    unembed=f"language_model.{UNEMBED}",
    other_prefixes=_OTHER_PREFIXES,
    modules={_TEXT_PREFIX: "model.language_model.", TOWER_PREFIX: "model.vision_tower."},
)
