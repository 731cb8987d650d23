"""The config.json and the names of Qwen2.5-VL and Qwen3-VL: a Qwen with three positions a token, and a tower.

Most layers of the tower of Qwen2.5-VL see windows of a picture. States of some layers of the tower of Qwen3-VL are
added after the first layers of the decoder, which may have experts.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

from funrl.models.decoder.config import Config
from funrl.models.errors import ModelError
from funrl.models.huggingface.configs.hf_family import ConfigFields, VisionFamily
from funrl.models.huggingface.family_fields import GELU
from funrl.models.huggingface.vision_configs.shared import HALF, check_supported
from funrl.models.vision.config import CHANNELS, FRAMES, TowerConfig, TowerForm

SECTIONS = "mrope_section"
QWEN3_VL_MOE_NAMES = {f"expert_{name}": f"mlp.experts.{name}_proj.columns" for name in ("gate", "up", "down")}
QWEN3_VL_MOE_ABREAST = {
    "mlp.experts.gate_up_proj": [f"mlp.experts.{name}_proj.columns" for name in ("gate", "up")],
    "mlp.experts.down_proj": ["mlp.experts.down_proj.columns"],
}
_PATCHES = {"in_channels": CHANNELS, "temporal_patch_size": FRAMES}  # fields of vision_config with one value
_SIZES = {
    "layers": "depth",
    "embed": "hidden_size",
    "heads": "num_heads",
    "inner": "intermediate_size",
    "patch": "patch_size",
    "merge": "spatial_merge_size",
}
_TOKENS = {"placeholder": "image_token_id", "begin": "vision_start_token_id", "end": "vision_end_token_id"}


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


def read_qwen2_5_vl(got: ConfigFields) -> ConfigFields:
    """ConfigFields of `Config` of its text model.

    Raises:
      ModelError: the sections of rotary frequencies do not make up a head.
    """
    sections = _rope_sections(got, (16, 24, 24), got["hidden_size"] // got["num_attention_heads"])
    return {"rope_axes": tuple(axis for axis, count in enumerate(sections) for _ in range(count))}


def read_qwen3_vl(got: ConfigFields) -> ConfigFields:
    """The same: rows and columns take each third frequency, up to their numbers, else it is time's."""
    head = got["head_dim"] or got["hidden_size"] // got["num_attention_heads"]
    sections = _rope_sections(got, (24, 20, 20), head)
    return {"rope_axes": tuple(i % 3 if i < 3 * sections[i % 3] else 0 for i in range(head // 2))}


def _rope_sections(got: ConfigFields, default: Sequence[int], head: int) -> Sequence[int]:
    """Counts of the rotary frequencies of a head that take each of three positions."""
    sections = got["rope_parameters"].get(SECTIONS) or default
    if len(sections) != 3 or 2 * sum(sections) != head:
        raise ModelError(f"{SECTIONS} is {list(sections)}; it must be 3 numbers whose sum is {head // 2}, half a head")
    return sections


def _tower(fields: ConfigFields, config: Config) -> TowerConfig:
    """The tower that config.json describes.

    Raises:
      ModelError: a field of vision_config has a value that is not supported.
    """
    got = fields["vision_config"]
    windows = config.source.family == "qwen2_5_vl"
    check_supported(got, _PATCHES | {"hidden_act": "silu" if windows else GELU, "out_hidden_size": config.embed})
    rope = got.get("rope_parameters") or {}
    if rope.get("rope_type", "axial") != "axial":
        raise ModelError(f"vision_config.rope_parameters.rope_type is {rope['rope_type']!r}, supported is 'axial'")
    form = TowerForm()
    if not windows:
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
            mean=HALF,
            std=HALF,
        )
    return TowerConfig(
        **{ours: got[theirs] for ours, theirs in _SIZES.items()},
        **{ours: fields[theirs] for ours, theirs in _TOKENS.items()},
        banned=(fields["video_token_id"],),
        theta=float(rope.get("rope_theta", 10000.0)),
        window=got["window_size"] if windows else None,
        whole_layers=tuple(got["fullatt_block_indexes"]) if windows else (),
        form=form,
    )


def _write(tower: TowerConfig, config: Config) -> tuple[ConfigFields, ConfigFields, ConfigFields]:
    """ConfigFields of config.json, of vision_config and of text_config."""
    family = config.source.family
    sections = [config.rope.axes.count(axis) for axis in range(3)]
    rope: dict[str, object] = {"rope_type": "default", "rope_theta": config.rope.theta, SECTIONS: sections}
    vision: dict[str, object] = {
        **_PATCHES,
        **{theirs: getattr(tower, ours) for ours, theirs in _SIZES.items()},
        "out_hidden_size": config.embed,
        "rope_parameters": {"rope_type": "axial", "rope_theta": tower.theta},
    }
    if family == "qwen2_5_vl":
        vision |= {"hidden_act": "silu", "window_size": tower.window}
        vision["fullatt_block_indexes"] = list(tower.whole_layers)
    else:
        rope["mrope_interleaved"] = True
        vision |= {"model_type": f"{family}_vision", "hidden_act": GELU}
        vision["num_position_embeddings"] = tower.form.table**2
        vision["deepstack_visual_indexes"] = list(tower.form.deep_layers)
    tokens = {theirs: getattr(tower, ours) for ours, theirs in _TOKENS.items()}
    return tokens | {"video_token_id": tower.video}, vision, {"rope_parameters": rope}


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
    text_type="qwen2_5_vl_text",
    tower=_tower,
    write=_write,
    name=name_of_qwen2_5_vl,
    modules={"model.": "model.language_model.", "visual.": "model.visual."},
)
QWEN3_VISION = VisionFamily(
    text_type="qwen3_vl_text",
    tower=_tower,
    write=_write,
    name=name_of_qwen3_vl,
    prefix="model.language_model.",
)
QWEN3_MOE_VISION = QWEN3_VISION._replace(text_type="qwen3_vl_moe_text")
