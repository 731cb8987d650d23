"""The table of families of docs/models.md, from the families and from what the tests compare.

    python tools/families.py

writes the table anew; `tests/models/test_families_page.py` fails where the page has drifted. A family without notes
here is an error.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "models.md"
BEGIN, END = "<!-- families: written by tools/families.py -->", "<!-- end of the families -->"
sys.path.insert(0, str(ROOT))

HEAD = "| model_type | beyond Llama | refused | configurations | meshes |\n|---|---|---|---|---|"
SWITCHES = "those of its switches"  # whose tests name no family

# model_type -> what it has beyond Llama, and what of it is refused
NOTES = {
    "llama": ("attention bias, mlp bias", ""),
    "qwen2": ("bias on q, k, v; a window on upper layers", ""),
    "qwen2_5_vl": (
        "`qwen2` with three positions a token, and a vision tower with windows ([pictures](vision.md))",
        "videos; stretched rotary positions",
    ),
    "llava_onevision": (
        "`qwen2` with a vision tower that sees tiles of a picture beside an overview ([pictures](vision.md))",
        "videos; other layers of the tower than the last",
    ),
    "qwen3": ("q and k normalised per head; a window on upper layers", ""),
    "qwen3_vl": (
        "`qwen3` with three positions a token, and a vision tower whose states enter several layers "
        "([pictures](vision.md))",
        "videos; stretched rotary positions",
    ),
    "qwen3_vl_moe": ("the same with experts", "videos; stretched rotary positions; layer types"),
    "mistral": ("one window on all layers", "layer types"),
    "ministral3": ("`mistral` with `yarn` and queries that grow with their positions", "layer types"),
    "phi3": (
        "fused q, k, v and fused gate, up in its files; one window; long rope, partial rotary positions",
        "rows beyond the original length with long rope",
    ),
    "olmo2": ("norms after attention and mlp; q and k normalised over all heads", ""),
    "olmo3": ("`olmo2` with windows in three of four layers, whose rotary positions are not stretched", ""),
    "exaone4": ("norms after attention and mlp; q and k normalised; rotary positions only in layers with a window", ""),
    "smollm3": ("layers without rotary positions, which may have a window; mlp bias", ""),
    "ernie4_5": ("neighbours are the pairs of rotary positions; biases", ""),
    "qwen2_moe": ("experts and a weighted shared expert; bias on q, k, v", ""),
    "qwen3_moe": ("`qwen3` with experts in all layers or some; one window on all layers", "layer types"),
    "qwen3_next": (
        "gated delta nets in most layers; else attention with a gate and partial rotary positions; 1 + w in norms, "
        "experts, a weighted shared expert",
        "drafts",
    ),
    "qwen3_5_text": (
        "`qwen3_next` with dense mlps, and its projections apart; files with a tower too",
        "images, drafts",
    ),
    "qwen3_5_moe_text": ("the same with experts in all layers and a weighted shared expert", "images, drafts"),
    "mixtral": ("`mistral` with experts", "layer types"),
    "olmoe": ("q and k normalised over all heads, experts", "clipped q, k, v"),
    "gpt_oss": (
        "attention sinks, a window on every other layer; experts with biases and a clamped gate; files in MXFP4",
        "XLA",
    ),
    "glm4_moe": ("partial rotary positions; experts by sigmoid and bias, a shared expert, first layers dense", ""),
    "minimax_m2": ("partial rotary positions, q and k normalised over all heads; experts by sigmoid and bias", ""),
    "ernie4_5_moe": ("`ernie4_5` with experts by softmax and bias beside a shared one, in every n-th layer", "biases"),
    "deepseek_v2": (
        "latent attention, experts by softmax, grouped routing, a shared expert; `yarn`",
        "`norm_topk_prob`, attention bias",
    ),
    "deepseek_v3": (
        "latent attention, experts by sigmoid and bias, grouped routing, a shared expert, first layers dense; `yarn`",
        "other routing, attention bias",
    ),
    "granite": ("factors of embeddings, branches, attention and logits; mlp bias", ""),
    "gemma": ("GELU, 1 + w in norms, scaled embeddings", "bidirectional attention"),
    "gemma2": (
        "GELU, norms on both sides, 1 + w in norms, scaled embeddings, soft caps, a window on every other layer",
        "bidirectional attention",
    ),
    "gemma3_text": (
        "the same with q and k normalised, and another rotary base in layers with a window",
        "caps of attention logits",
    ),
    "gemma3": (
        "`gemma3_text` with a vision tower, and tokens of a picture that see one another ([pictures](vision.md))",
        "sp; pan and scan; caps of attention logits",
    ),
    "gemma4_text": (
        "heads of another size in layers without a window, whose values may be the keys; last layers that attend to "
        "keys of earlier ones; vectors of each layer; experts beside a dense mlp; files with towers too",
        "pictures and sound, other stretched rotary positions",
    ),
}


def table(compared: Sequence[Mapping[str, Any]], meshes: Mapping[str, Sequence[str]]) -> str:
    """The table of the page.

    Args:
      compared: configurations that tests compare with transformers.
      meshes: by the names of families, the ones that tests compare with one device.
    """
    rows = []
    for family, (beyond, refused) in NOTES.items():
        count = sum(raw["model_type"] == family for raw in compared)
        there = ", ".join(f"`{mesh}`" for mesh in dict.fromkeys(meshes.get(family, ()))) or SWITCHES
        rows.append(f"| `{family}` | {beyond} | {refused} | {count} | {there} |")
    return "\n".join([HEAD, *rows])


def drawn(text: str) -> str:
    """A page with the table between its marks, from the tests of this checkout.

    Raises:
      ValueError: it has no marks.
    """
    sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests" / "models")]
    import family_configs
    import test_expert_families
    import test_families
    import test_models_transformers
    import test_qwen3_next

    tests = (test_families, test_expert_families, test_qwen3_next, test_models_transformers)
    compared = [*family_configs.ALL.values(), *(raw for test in tests for raw in test.CONFIGS.values())]
    meshes: dict[str, list[str]] = {}
    for name, some in family_configs.MESHES.items():
        meshes.setdefault(family_configs.ALL[name]["model_type"], []).extend(some)
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise ValueError(f"the page has no lines {BEGIN!r} and {END!r}")
    return f"{before}{BEGIN}\n\n{table(compared, meshes)}\n\n{END}{after}"


if __name__ == "__main__":
    PAGE.write_text(drawn(PAGE.read_text()))
