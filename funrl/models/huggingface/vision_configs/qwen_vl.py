"""The config.json and the names of Qwen2.5-VL and Qwen3-VL: a Qwen with three positions a token, and a tower.

Most layers of the tower of Qwen2.5-VL see windows of a picture. States of some layers of the tower of Qwen3-VL are
added after the first layers of the decoder, which may have experts.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from funrl.models.decoder.config import Config
from funrl.models.errors import ModelError
from funrl.models.huggingface.configs.hf_family import VisionFamily, class_defaults
from funrl.models.huggingface.family_fields import GELU, read_bias, read_qwen3_moe
from funrl.models.vision.config import (
    CHANNELS,
    FRAMES,
    TowerConfig,
    TowerForm,
    VisionLanguageConfig,
    tower_in,
    with_tower,
)
from funrl.models.vision.model import vision_language_model

SECTIONS = "mrope_section"
PATCH_FIELDS = {"in_channels": CHANNELS, "temporal_patch_size": FRAMES}  # of vision_config
QWEN3_VL_MOE_SUPPORTED = {"norm_topk_prob": (True, None), "sliding_window": (None,), "layer_types": (None,)}
QWEN3_VL_MOE_NAMES = {f"expert_{name}": f"mlp.experts.{name}_proj.columns" for name in ("gate", "up", "down")}
QWEN3_VL_MOE_ABREAST = {
    "mlp.experts.gate_up_proj": [f"mlp.experts.{name}_proj.columns" for name in ("gate", "up")],
    "mlp.experts.down_proj": ["mlp.experts.down_proj.columns"],
}
_HALF = (0.5, 0.5, 0.5)


def _with_biases(names: Mapping[str, str]) -> dict[str, str]:
    """Names of weights and of the biases beside them, of modules."""
    pairs = itertools.product(names.items(), (("", "weight"), ("_bias", "bias")))
    return {f"{ours}{bias}": f"{theirs}.{kind}" for (ours, theirs), (bias, kind) in pairs}


_LAYER = _with_biases({"qkv": "attn.qkv", "proj": "attn.proj"})
_NAMES_2_5 = {
    "embed/patch": "patch_embed.proj.weight",
    "merger/norm": "merger.ln_q.weight",
    **_with_biases({"merger/first": "merger.mlp.0", "merger/second": "merger.mlp.2"}),
}
_LAYER_2_5 = {
    **{"norm1": "norm1.weight", "norm2": "norm2.weight"},
    **_LAYER,
    **_with_biases({f"{name}_proj": f"mlp.{name}_proj" for name in ("gate", "up", "down")}),
}
_NAMES_3 = {**_with_biases({"embed/patch": "patch_embed.proj"}), "embed/table": "pos_embed.weight"}
_HALVES_3 = {"norm1": "norm1", "norm2": "norm2", "up_proj": "mlp.linear_fc1", "down_proj": "mlp.linear_fc2"}
_LAYER_3 = _LAYER | _with_biases(_HALVES_3)
_MERGER_3 = _with_biases({"norm": "norm", "first": "linear_fc1", "second": "linear_fc2"})


def text_of_qwen_vl(raw: Mapping[str, Any]) -> dict[str, Any]:
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
      ModelError: the sections of rotary frequencies do not make up a head.
    """
    sections = _rope_sections(got, (16, 24, 24), got["hidden_size"] // got["num_attention_heads"])
    axes = tuple(axis for axis, count in enumerate(sections) for _ in range(count))
    return {"attention_bias": True, "rope_axes": axes}


def read_qwen3_vl(got: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of `Config` of the text model of a dense one; raises ModelError as `read_qwen2_5_vl`."""
    return read_bias(got) | {"qk_norm": True, "rope_axes": _rope_axes(got)}


def read_qwen3_vl_moe(got: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of `Config` of the text model of one with experts; raises ModelError as `read_qwen2_5_vl`."""
    return read_qwen3_moe(got) | {"rope_axes": _rope_axes(got)}


def _rope_axes(got: Mapping[str, Any]) -> tuple[int, ...]:
    """The position that each frequency takes: rows and columns each third one, up to their numbers, else time."""
    head = got.get("head_dim") or got["hidden_size"] // got["num_attention_heads"]
    sections = _rope_sections(got, (24, 20, 20), head)
    return tuple(i % 3 if i < 3 * sections[i % 3] else 0 for i in range(head // 2))


def _rope_sections(got: Mapping[str, Any], default: Sequence[int], head: int) -> Sequence[int]:
    """Counts of the rotary frequencies of a head that take each of three positions."""
    sections = got.get(SECTIONS) or default
    if len(sections) != 3 or 2 * sum(sections) != head:
        raise ModelError(f"{SECTIONS} is {list(sections)}; it must be 3 numbers whose sum is {head // 2}, half a head")
    return sections


def tower_of_qwen_vl(raw: Mapping[str, Any], config: Config) -> VisionLanguageConfig:
    """The config with the tower that config.json describes.

    Raises:
      ModelError: a field of vision_config has a value that is not supported.
    """
    family = raw["model_type"]
    given = raw.get("vision_config")
    if not isinstance(given, Mapping):
        raise ModelError(f"vision_config is {given!r}, it must be the sizes of the vision tower")
    given = {name: x for name, x in given.items() if x is not None}
    windows = family == "qwen2_5_vl"
    wanted = PATCH_FIELDS | {"hidden_act": "silu" if windows else GELU, "out_hidden_size": config.embed}
    for name, value in wanted.items():
        if given.get(name, value) != value:
            raise ModelError(f"vision_config.{name} is {given[name]!r}, supported is {value!r}")
    rope = given.get("rope_parameters") or {}
    if rope.get("rope_type", "axial") != "axial":
        raise ModelError(f"vision_config.rope_parameters.rope_type is {rope['rope_type']!r}, supported is 'axial'")
    got = {**class_defaults(family, "vision_config"), **given}
    outer = {**class_defaults(family), **raw}
    if windows:
        own: dict[str, Any] = {"window": got["window_size"], "whole_layers": tuple(got["fullatt_block_indexes"])}
    else:
        entries = got["num_position_embeddings"]
        side = round(entries**0.5)
        if side**2 != entries:
            raise ModelError(f"vision_config.num_position_embeddings is {entries}, it must be the square of a number")
        form = TowerForm(
            norm="layer",
            gated=False,
            patch_bias=True,
            table=side,
            deep_layers=tuple(got["deepstack_visual_indexes"]),
            mean=_HALF,
            std=_HALF,
        )
        own = {"window": None, "form": form}
    tower = TowerConfig(
        layers=got["depth"],
        embed=got["hidden_size"],
        heads=got["num_heads"],
        inner=got["intermediate_size"],
        patch=got["patch_size"],
        merge=got["spatial_merge_size"],
        placeholder=outer["image_token_id"],
        banned=(outer["video_token_id"],),
        begin=outer["vision_start_token_id"],
        end=outer["vision_end_token_id"],
        theta=float(rope.get("rope_theta", 10000.0)),
        **own,
    )
    return with_tower(config, tower)


def nest_qwen_vl(flat: Mapping[str, Any], config: Config) -> dict[str, Any]:
    """The fields of config.json with a tower.

    Args:
      flat: fields of the text model.
      config: with a tower.

    Raises:
      ModelError: the config has no tower.
    """
    tower = tower_in(config)
    family = config.source.family
    outer = ("architectures", "model_type", "dtype", "torch_dtype", "tie_word_embeddings")
    text = {name: x for name, x in flat.items() if name not in (*outer, "rope_theta")}
    sections = [config.rope.axes.count(axis) for axis in range(3)]
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": config.rope.theta, SECTIONS: sections}
    if family == "qwen2_5_vl":
        windows = {"window_size": tower.window, "fullatt_block_indexes": list(tower.whole_layers)}
        own: dict[str, Any] = {"hidden_act": "silu", **windows}
    else:
        rope["mrope_interleaved"] = True
        own = {
            "model_type": f"{family}_vision",
            "hidden_act": GELU,
            "num_position_embeddings": tower.form.table**2,
            "deepstack_visual_indexes": list(tower.form.deep_layers),
        }
    vision = {
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
        "text_config": {**text, "model_type": f"{family}_text", "rope_parameters": rope},
        "vision_config": {**PATCH_FIELDS, **vision, **own},
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
    if name in _NAMES_2_5:
        return f"visual.{_NAMES_2_5[name]}"
    _, layer, leaf = name.split("/")
    return f"visual.blocks.{layer}.{_LAYER_2_5[leaf]}"


def name_of_qwen3_vl(name: str) -> str:
    """The name in files of a weight of the tower.

    Example: name_of_qwen3_vl("deep_mergers/0/first") is "model.visual.deepstack_merger_list.0.linear_fc1.weight".
    """
    part, *rest = name.split("/")
    if part == "embed":
        theirs = _NAMES_3[name]
    elif part == "layers":
        theirs = f"blocks.{rest[0]}.{_LAYER_3[rest[1]]}"
    else:
        merger = "merger" if part == "merger" else f"deepstack_merger_list.{rest[0]}"
        theirs = f"{merger}.{_MERGER_3[rest[-1]]}"
    return f"model.visual.{theirs}"


QWEN2_5_VISION = VisionFamily(
    text=text_of_qwen_vl,
    tower=tower_of_qwen_vl,
    nest=nest_qwen_vl,
    name=name_of_qwen2_5_vl,
    make=vision_language_model,
    modules={"model.": "model.language_model.", "visual.": "model.visual."},
)
QWEN3_VISION = VisionFamily(
    text=text_of_qwen_vl,
    tower=tower_of_qwen_vl,
    nest=nest_qwen_vl,
    name=name_of_qwen3_vl,
    make=vision_language_model,
    prefix="model.language_model.",
)
