"""Random configurations of vision-language models, and random rows of pictures, against transformers.

Draws 0 to 99 of the Qwens, and 0 to 29 of Gemma 3 and of LLaVA-OneVision, were run once: none exceeded the tolerance.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from selection import quick
from tiny_vl import (
    QWENS,
    gemma3_config,
    llava_config,
    picture_batch,
    transformers_config,
    transformers_logits,
    transformers_model,
)

from funrl.models.huggingface.directories import load, save
from funrl.models.placed import inputs_of
from funrl.models.vision.config import TowerConfig
from funrl.models.vision.inputs import picture_inputs
from funrl.models.vision.tiles import NO_TILES
from funrl.trainer.steps.micro import micro_batch

DRAWS, QUICK = 9, 3
GEMMA_DRAWS, QUICK_GEMMA = 4, 1
TILED_DRAWS, QUICK_TILED = 4, 1


def drawn_config(number: int) -> Any:
    """A small configuration of transformers."""
    pick = random.Random(number)
    family = pick.choice(QWENS)
    heads = pick.choice([2, 4])
    head = pick.choice([8, 12, 16])
    layers = pick.choice([1, 2, 3])
    merge = pick.choice([1, 2, 2, 3])
    patch = pick.choice([2, 3, 4])
    depth = pick.choice([1, 2, 3])
    hidden = heads * head if family == "qwen2_5_vl" else pick.choice([24, 32, 40])
    cuts = sorted(pick.sample(range(1, head // 2), 2))
    sections = [cuts[0], cuts[1] - cuts[0], head // 2 - cuts[1]]
    rope = {"rope_type": "default", "rope_theta": pick.choice([1e3, 1e4, 5e5]), "mrope_section": sections}
    text: dict[str, Any] = {
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": pick.choice([1, 2, heads]),
        "intermediate_size": pick.choice([24, 40]),
        "rms_norm_eps": pick.choice([1e-5, 1e-6]),
        "rope_parameters": rope,
    }
    tower: dict[str, Any] = {
        "depth": depth,
        "num_heads": (tower_heads := pick.choice([1, 2])),
        "hidden_size": tower_heads * pick.choice([8, 12, 16]),
        "intermediate_size": pick.choice([20, 36]),
        "patch_size": patch,
        "spatial_merge_size": merge,
        "out_hidden_size": hidden,
    }
    if family == "qwen2_5_vl":
        tower["window_size"] = pick.choice([1, 2, 3]) * patch * merge
        tower["fullatt_block_indexes"] = sorted(pick.sample(range(depth), pick.randint(0, depth)))
    else:
        text |= {"head_dim": head, "attention_bias": pick.random() < 0.5}
        rope["mrope_interleaved"] = True
        tower["num_position_embeddings"] = pick.choice([1, 2, 5, 8]) ** 2
        tower["deepstack_visual_indexes"] = sorted(pick.sample(range(depth), pick.randint(0, min(depth, layers))))
    if family == "qwen3_vl_moe":
        text["num_experts"] = pick.choice([3, 4])
        text |= {"num_experts_per_tok": pick.choice([1, 2, 3]), "moe_intermediate_size": pick.choice([12, 24])}
        text["mlp_only_layers"] = sorted(pick.sample(range(layers), pick.randint(0, layers - 1)))
    else:
        text["hidden_act"] = pick.choice(["silu", "gelu_pytorch_tanh"])
    config = transformers_config(family, text, tower)
    config.tie_word_embeddings = pick.random() < 0.3
    return config


def drawn_gemma(number: int) -> Any:
    """A small configuration of Gemma 3."""
    pick = random.Random(number)
    heads = pick.choice([2, 4])
    layers = pick.choice([1, 2, 3])
    merge = pick.choice([1, 2, 3])
    tokens = pick.choice([1, 2, 3, 4])  # of a side
    patch = pick.choice([2, 3, 4])
    rope = {"sliding_attention": {"rope_theta": pick.choice([1e3, 1e4]), "rope_type": "default"}}
    rope["full_attention"] = {"rope_theta": 1e6, "rope_type": "default"}
    if pick.random() < 0.5:
        rope["full_attention"] |= {"rope_type": "linear", "factor": 8.0}
    text = {
        "hidden_size": heads * pick.choice([8, 12]),
        "head_dim": pick.choice([8, 12]),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": pick.choice([1, 2, heads]),
        "intermediate_size": pick.choice([24, 40]),
        "query_pre_attn_scalar": pick.choice([8, 12, 20]),
        "sliding_window": pick.choice([2, 5, 11]),
        "layer_types": [pick.choice(["sliding_attention", "full_attention"]) for _ in range(layers)],
        "final_logit_softcapping": None,
        "rope_parameters": rope,
    }
    tower_heads = pick.choice([1, 2, 3])
    vision = {
        "num_hidden_layers": pick.choice([1, 2, 3]),
        "num_attention_heads": tower_heads,
        "hidden_size": tower_heads * pick.choice([5, 8, 12]),
        "intermediate_size": pick.choice([20, 36]),
        "patch_size": patch,
        "image_size": patch * merge * tokens,
        "layer_norm_eps": pick.choice([1e-5, 1e-6]),
    }
    config = gemma3_config(text, vision, mm_tokens_per_image=tokens**2)
    config.tie_word_embeddings = config.text_config.tie_word_embeddings = pick.random() < 0.7
    return config


def drawn_llava(number: int) -> Any:
    """A small configuration of LLaVA-OneVision."""
    pick = random.Random(number)
    heads = pick.choice([2, 4])
    text = {
        "hidden_size": heads * pick.choice([8, 12]),
        "num_hidden_layers": pick.choice([1, 2, 3]),
        "num_attention_heads": heads,
        "num_key_value_heads": pick.choice([1, 2, heads]),
        "intermediate_size": pick.choice([24, 40]),
        "rms_norm_eps": pick.choice([1e-5, 1e-6]),
        "hidden_act": pick.choice(["silu", "gelu_pytorch_tanh"]),
        "rope_parameters": {"rope_type": "default", "rope_theta": pick.choice([1e3, 1e4, 1e6])},
        "tie_word_embeddings": pick.random() < 0.5,
    }
    tower_heads = pick.choice([1, 2, 3])
    patch = pick.choice([2, 3, 4])
    pixels = patch * pick.choice([2, 3, 4]) + pick.randint(0, patch - 1)  # transformers has no lines of 0 states
    vision = {
        "num_hidden_layers": pick.choice([1, 2, 3]),
        "num_attention_heads": tower_heads,
        "hidden_size": tower_heads * pick.choice([5, 8, 12]),
        "intermediate_size": pick.choice([20, 36]),
        "patch_size": patch,
        "image_size": pixels,
        "layer_norm_eps": pick.choice([1e-5, 1e-6]),
    }
    sizes = [(rows, columns) for rows in (1, 2, 3) for columns in (1, 2, 3)]
    points = [[rows * pixels, columns * pixels] for rows, columns in pick.sample(sizes, pick.randint(1, 6))]
    most = f"anyres_max_{pick.choice([1, 2, 9])}"
    return llava_config(text, vision, image_grid_pinpoints=points, vision_aspect_ratio=most)


def drawn_rows(number: int, tower: TowerConfig) -> tuple:
    """Texts and pictures of two to four rows, one of them without pictures."""
    pick = random.Random(number)
    merge, side, tiles = tower.merge, tower.layout.side, tower.layout.tiles

    def row() -> tuple:
        parts: list[Any] = [pick.randint(1, 5)]
        count = pick.randint(1, 3)
        without_tiles = count > 1 and pick.random() < 0.5  # as transformers has them for several pictures alone
        for _ in range(count):
            size = (merge * pick.randint(1, 5), merge * pick.randint(1, 5))
            if tiles is not None:
                size = NO_TILES if without_tiles else (pick.randint(10, 50), pick.randint(10, 50))
            parts += [size if side is None else (side, side), pick.randint(0, 4)]
        return tuple(parts)

    rows = [row() for _ in range(pick.randint(1, 3))]
    rows.insert(pick.randint(0, len(rows)), (pick.randint(1, 9),))
    return tuple(rows)


@pytest.mark.parametrize("number", quick(range(DRAWS), range(QUICK)))
def test_a_draw(number, tmp_path):
    check(drawn_config(number), number, tmp_path)


@pytest.mark.parametrize("number", quick(range(GEMMA_DRAWS), range(QUICK_GEMMA)))
def test_a_draw_of_gemma3(number, tmp_path):
    check(drawn_gemma(number), number, tmp_path)


@pytest.mark.parametrize("number", quick(range(TILED_DRAWS), range(QUICK_TILED)))
def test_a_draw_of_llava_onevision(number, tmp_path):
    check(drawn_llava(number), number, tmp_path)


def check(config, number, tmp_path):
    """Compare logits of packed rows, and saved weights, with those of transformers."""
    from transformers import AutoModelForImageTextToText

    theirs = transformers_model(config, seed=number)
    theirs.save_pretrained(tmp_path / "theirs")
    model, params = load(tmp_path / "theirs")
    tower = model.config.tower
    batch, lengths = picture_batch(tower, drawn_rows(number, tower), number)
    packed = micro_batch(batch._replace(segments=None), np.array(lengths), np.arange(len(lengths)), 2048, 8)
    inputs = picture_inputs(tower, packed.batch, inputs_of(packed.batch))
    with torch.no_grad():
        logits = (model.apply(params, inputs).hidden @ model.unembed(params).T)[0]
    begin = 0
    for row in packed.rows.tolist():
        expected = transformers_logits(theirs, tower, batch, row, lengths[row])
        assert (logits[begin : begin + lengths[row]] - expected).abs().max() < 2e-5
        begin += lengths[row]
    save(tmp_path / "ours", model, params)
    again = AutoModelForImageTextToText.from_pretrained(tmp_path / "ours")
    for (name, x), (_, y) in zip(sorted(theirs.named_parameters()), sorted(again.named_parameters()), strict=True):
        assert torch.equal(x, y), name
