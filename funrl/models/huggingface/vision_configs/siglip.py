"""The config.json and the names of Gemma 3 and LLaVA-OneVision: a Gemma 3 or a Qwen2, and a SigLIP tower.

Gemma 3 squashes every picture to a square of one size, whose patches are averaged to a fixed number of tokens; these
see one another in the decoder. LLaVA-OneVision sees pictures as tiles.
"""

from __future__ import annotations

import math
from typing import Any

from funrl.models.decoder.config import Config
from funrl.models.errors import ModelError
from funrl.models.huggingface.configs.hf_family import UNEMBED, ConfigFields, VisionFamily
from funrl.models.huggingface.family_fields import GELU
from funrl.models.huggingface.vision_configs.shared import HALF, check_supported
from funrl.models.vision.config import CHANNELS, PictureLayout, TowerConfig, TowerForm
from funrl.models.vision.tiles import Tiles

_TOWER_ONLY = {  # the values of fields of vision_config that are supported
    "model_type": "siglip_vision_model",
    "num_channels": CHANNELS,
    "hidden_act": GELU,
    "vision_use_head": False,
}
_SIZES = {
    "layers": "num_hidden_layers",
    "embed": "hidden_size",
    "inner": "intermediate_size",
    "heads": "num_attention_heads",
    "patch": "patch_size",
}
_LLAVA_ONLY = {  # the same of config.json of LLaVA-OneVision
    "projector_hidden_act": "gelu",
    "vision_feature_select_strategy": "full",
    "vision_feature_layer": -1,
    "multimodal_projector_bias": True,
}
_MOST = "anyres_max_"
_TOWER = "vision_tower.vision_model."
_PROJECTOR = "multi_modal_projector."
_TEXT_PREFIX = "language_model.model."
_LEAVES = {  # of names of the tower without the ends of biases
    "embed/patch": f"{_TOWER}embeddings.patch_embedding",
    "embed/table": f"{_TOWER}embeddings.position_embedding",
    "embed/idle_norm": f"{_TOWER}post_layernorm",
    "merger/norm": f"{_TOWER}post_layernorm",
    "merger/mean_norm": f"{_PROJECTOR}mm_soft_emb_norm",
    "merger/first": f"{_PROJECTOR}linear_1",
    "merger/second": f"{_PROJECTOR}linear_2",
}
_WHOLE = {"merger/project": f"{_PROJECTOR}mm_input_projection_weight", "merger/newline": "image_newline"}
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


def _tower(fields: ConfigFields, form: ConfigFields, **own: Any) -> TowerConfig:
    """A tower of the fields of a config.json, with further fields of its form and its own."""
    got = fields["vision_config"]
    check_supported(got, _TOWER_ONLY)
    return TowerConfig(
        **{ours: got[theirs] for ours, theirs in _SIZES.items()},
        placeholder=fields["image_token_index"],
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
            mean=HALF,
            std=HALF,
            **form,
        ),
        **own,
    )


def _tower_of_gemma3(fields: ConfigFields, config: Config) -> TowerConfig:
    """The tower that config.json describes.

    Raises:
      ModelError: a field of vision_config has a value that is not supported, or sizes do not fit together.
    """
    got = fields["vision_config"]
    side = got["image_size"] // got["patch_size"]
    tokens = math.isqrt(fields["mm_tokens_per_image"])
    if tokens**2 != fields["mm_tokens_per_image"] or side * got["patch_size"] != got["image_size"] or side % tokens:
        raise ModelError(
            f"mm_tokens_per_image is {fields['mm_tokens_per_image']} for an image_size of {got['image_size']} and a "
            f"patch_size of {got['patch_size']}; it must be the square of a number that divides the patches of a side"
        )
    return _tower(
        fields,
        {"merger": "mean"},
        merge=side // tokens,
        begin=fields["boi_token_index"],
        end=fields["eoi_token_index"],
        layout=PictureLayout(side=side, frame="\n\n", mutual=True),
    )


def _tower_of_llava_onevision(fields: ConfigFields, config: Config) -> TowerConfig:
    """The tower that config.json describes.

    Raises:
      ModelError: a field has a value that is not supported, or sizes do not fit together.
    """
    for name, value in _LLAVA_ONLY.items():
        if fields[name] not in (value, [value]):
            raise ModelError(f"{name} is {fields[name]!r}, supported is {value!r}")
    if (text := fields["text_config"]["model_type"]) != "qwen2":
        raise ModelError(f"text_config.model_type is {text!r}, supported is 'qwen2'")
    got = fields["vision_config"]
    pixels = got["image_size"]
    sizes = fields["image_grid_pinpoints"]
    ratio = fields["vision_aspect_ratio"]
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
    own = {"banned": (fields["video_token_index"],), "layout": PictureLayout(tiles=tiles)}
    return _tower(fields, {"merger": "plain", "idle_norm": True}, merge=1, **own)


def _write(tower: TowerConfig, pixels: int, fields: ConfigFields) -> tuple[ConfigFields, ConfigFields, ConfigFields]:
    """ConfigFields of config.json, of vision_config and of text_config: those of the tower, and further ones."""
    sizes = {theirs: getattr(tower, ours) for ours, theirs in _SIZES.items()}
    own = {"image_size": pixels, "layer_norm_eps": tower.form.eps}
    return {**fields, "image_token_index": tower.placeholder}, {**_TOWER_ONLY, **sizes, **own}, {}


def _write_gemma3(tower: TowerConfig, config: Config) -> tuple[ConfigFields, ConfigFields, ConfigFields]:
    """ConfigFields of a config.json with a tower. Raises: ModelError, the tower has another form."""
    side = tower.layout.side
    if side is None:
        raise ModelError("a gemma3 config.json needs pictures of one size, layout.side, which is None")
    tokens = {"boi_token_index": tower.begin, "eoi_token_index": tower.end}
    return _write(tower, side * tower.patch, tokens | {"mm_tokens_per_image": (side // tower.merge) ** 2})


def _write_llava_onevision(tower: TowerConfig, config: Config) -> tuple[ConfigFields, ConfigFields, ConfigFields]:
    """The same of LLaVA-OneVision."""
    tiles = tower.layout.tiles
    if tiles is None:
        raise ModelError("a llava_onevision config.json needs pictures in tiles, layout.tiles, which is None")
    fields = {
        **_LLAVA_ONLY,
        "video_token_index": tower.video,
        "image_grid_pinpoints": [[rows * tiles.pixels, columns * tiles.pixels] for rows, columns in tiles.canvases],
        "vision_aspect_ratio": f"{_MOST}{tiles.most}",
    }
    return _write(tower, tiles.pixels, fields)


def name_of_siglip(name: str) -> str:
    """The name in files of a weight of the tower.

    Example: name_of_siglip("layers/0/norm1") is "vision_tower.vision_model.encoder.layers.0.layer_norm1.weight".
    """
    plain = name.removesuffix("_bias")
    if name in _WHOLE:
        return _WHOLE[name]
    part, *rest = plain.split("/")
    theirs = f"{_TOWER}encoder.layers.{rest[0]}.{_LAYER[rest[1]]}" if part == "layers" else _LEAVES[plain]
    return f"{theirs}.{'weight' if name == plain else 'bias'}"


GEMMA3_VISION = VisionFamily(
    text_type="gemma3_text",
    tower=_tower_of_gemma3,
    write=_write_gemma3,
    name=name_of_siglip,
    prefix=_TEXT_PREFIX,
    unembed=f"language_model.{UNEMBED}",
    other_prefixes={  # beginning of a name -> beginnings in files of other versions of transformers
        _TEXT_PREFIX: ("model.language_model.",),
        f"language_model.{UNEMBED}": (UNEMBED,),
        _TOWER: ("vision_tower.", "model.vision_tower.vision_model.", "model.vision_tower."),
        _PROJECTOR: (f"model.{_PROJECTOR}",),
        "image_newline": ("model.image_newline",),
    },
    modules={
        _TEXT_PREFIX: "model.language_model.",
        _TOWER: "model.vision_tower.",
        _PROJECTOR: f"model.{_PROJECTOR}",
    },
)
LLAVA_ONEVISION_VISION = GEMMA3_VISION._replace(
    text_type="qwen2",
    tower=_tower_of_llava_onevision,
    write=_write_llava_onevision,
)
