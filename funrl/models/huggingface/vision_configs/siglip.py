"""The vision_config and the names of a SigLIP tower, as Gemma 3 and LLaVA-OneVision have it."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

from funrl.models.errors import ModelError
from funrl.models.huggingface.family_fields import GELU
from funrl.models.vision.config import CHANNELS, TowerConfig, TowerForm

TOWER_PREFIX = "vision_tower.vision_model."
OTHER_TOWER_PREFIXES = ("vision_tower.", "model.vision_tower.vision_model.", "model.vision_tower.")
_ONLY = {  # the values of fields that are supported
    "model_type": "siglip_vision_model",
    "num_channels": CHANNELS,
    "hidden_act": GELU,
    "vision_use_head": False,
}
_DEFAULTS = {
    **_ONLY,
    "vision_use_head": True,
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "image_size": 224,
    "patch_size": 16,
    "layer_norm_eps": 1e-6,
}
NAMES = {
    "embed/patch": f"{TOWER_PREFIX}embeddings.patch_embedding.weight",
    "embed/patch_bias": f"{TOWER_PREFIX}embeddings.patch_embedding.bias",
    "embed/table": f"{TOWER_PREFIX}embeddings.position_embedding.weight",
}
LAST_NORM = {"": f"{TOWER_PREFIX}post_layernorm.weight", "_bias": f"{TOWER_PREFIX}post_layernorm.bias"}
_LAYER = {
    f"{ours}{bias}": f"{theirs}.{kind}"
    for (ours, theirs), (bias, kind) in itertools.product(
        {
            "norm1": "layer_norm1",
            "norm2": "layer_norm2",
            "query": "self_attn.q_proj",
            "key": "self_attn.k_proj",
            "value": "self_attn.v_proj",
            "proj": "self_attn.out_proj",
            "up_proj": "mlp.fc1",
            "down_proj": "mlp.fc2",
        }.items(),
        (("", "weight"), ("_bias", "bias")),
    )
}


def siglip_fields(raw: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of vision_config.

    Args:
      raw: fields of config.json.
      defaults: of a vision_config that is absent.

    Raises:
      ModelError: it is no object, or a field has a value that is not supported.
    """
    given = raw.get("vision_config", defaults or None)
    if not isinstance(given, Mapping):
        raise ModelError(f"vision_config is {given!r}, it must be the sizes of the vision tower")
    got = {**_DEFAULTS, **{name: x for name, x in given.items() if x is not None}}
    for name, value in _ONLY.items():
        if got[name] != value:
            raise ModelError(f"vision_config.{name} is {got[name]!r}, supported is {value!r}")
    return got


def siglip_sizes(got: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of `TowerConfig` for those of a vision_config."""
    return {
        "layers": got["num_hidden_layers"],
        "embed": got["hidden_size"],
        "heads": got["num_attention_heads"],
        "inner": got["intermediate_size"],
        "patch": got["patch_size"],
        "window": None,
    }


def siglip_form(got: Mapping[str, Any], **more: Any) -> TowerForm:
    """The form of the layers of a SigLIP tower, with further fields."""
    return TowerForm(
        norm="layer",
        gated=False,
        patch_bias=True,
        table=got["image_size"] // got["patch_size"],
        frames=1,
        joined=False,
        rotates=False,
        eps=float(got["layer_norm_eps"]),
        **more,
    )


def siglip_vision_config(tower: TowerConfig, image_size: int) -> dict[str, Any]:
    """The vision_config of a tower for squares of `image_size` pixels a side."""
    return {
        **_ONLY,
        "hidden_size": tower.embed,
        "intermediate_size": tower.inner,
        "num_hidden_layers": tower.layers,
        "num_attention_heads": tower.heads,
        "image_size": image_size,
        "patch_size": tower.patch,
        "layer_norm_eps": tower.form.eps,
    }


def name_of_siglip_layer(name: str) -> str:
    """The name in files of a weight of a layer.

    Example: name_of_siglip_layer("layers/0/norm1") is "vision_tower.vision_model.encoder.layers.0.layer_norm1.weight".
    """
    _, layer, leaf = name.split("/")
    return f"{TOWER_PREFIX}encoder.layers.{layer}.{_LAYER[leaf]}"
