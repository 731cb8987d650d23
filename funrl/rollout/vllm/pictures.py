"""Prompts with pictures for vLLM: its processor gets one placeholder a picture, and must expand them as we do.

Pictures are given in the size in which the trainer sees them, which the processor keeps: engine and trainer share one
resize.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from einops import rearrange
from torch import Tensor

from funrl.kinds import OwnedLines
from funrl.models.vision.config import FRAMES, TowerConfig
from funrl.models.vision.grids import Grid
from funrl.models.vision.inputs import GRIDS, PATCHES, collapsed, grids_of, split_pictures

PROCESSOR_TOKENS = ("<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>")
PROCESSORS = {"qwen2_5_vl": "Qwen2_5_VLProcessor", "qwen3_vl": "Qwen3VLProcessor"}


def torchvision_problem() -> str | None:
    """Reason why vLLM's processors cannot be made here, though vLLM can be imported; None: there is none."""
    try:
        import torchvision  # type: ignore[import-not-found] # noqa: F401
    except (ImportError, RuntimeError) as error:
        return (
            "vLLM makes transformers' processors of pictures, which need torchvision, and it cannot be imported: "
            f"{error}. Install the torchvision that was built for this torch, or give --engine=native"
        )
    return None


def write_processor(folder: Path, family: str, tower: TowerConfig, vocab: int, positions: int) -> None:
    """Write the files of a processor that keeps pictures as they are, and of a tokenizer with its placeholders.

    Args:
      folder: of the model.
      family: one of `PROCESSORS`.
      tower: of the model.
      vocab: its number of token ids.
      positions: tokens of its longest sequence: no picture has more.
    """
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    ids = (tower.placeholder, next(iter(tower.banned), None), tower.begin, tower.end)
    named = {number: name for name, number in zip(PROCESSOR_TOKENS, ids, strict=True) if number is not None}
    words = {named.get(number, f"<{number}>"): number for number in range(vocab)}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="<0>")))
    tokenizer.add_special_tokens({"additional_special_tokens": list(named.values())})
    tokenizer.save_pretrained(folder)
    side = tower.patch * tower.merge
    sizes = {
        "patch_size": tower.patch,
        "merge_size": tower.merge,
        "temporal_patch_size": FRAMES,
        "image_mean": list(tower.form.mean),
        "image_std": list(tower.form.std),
        "size": {"shortest_edge": side**2, "longest_edge": positions * side**2},
    }
    kind = {"image_processor_type": "Qwen2VLImageProcessor", "processor_class": PROCESSORS[family]}
    (folder / "preprocessor_config.json").write_text(json.dumps(sizes | kind))
    video = {"video_processor_type": "Qwen3VLVideoProcessor" if family == "qwen3_vl" else "Qwen2VLVideoProcessor"}
    (folder / "video_preprocessor_config.json").write_text(json.dumps(sizes | video))


def vllm_prompt(tower: TowerConfig, tokens: Sequence[int], owned: OwnedLines) -> dict[str, Any]:
    """A prompt for vLLM of token ids with all placeholders, and the pictures that they stand for."""
    grids = grids_of(owned.values[GRIDS])
    patches = [torch.as_tensor(lines[PATCHES]) for lines in split_pictures(tower, owned.values)]
    return {
        "prompt_token_ids": collapsed(tower, tokens, grids),
        "multi_modal_data": {"image": [_picture(tower, x, grid) for x, grid in zip(patches, grids, strict=True)]},
    }


def _picture(tower: TowerConfig, patches_PCHW: Tensor, grid: Grid) -> Any:
    """The picture of Pillow that was cut into these patches."""
    from PIL import Image

    merge = tower.merge
    sides = {"rows": grid[0] // merge, "columns": grid[1] // merge, "y": merge, "x": merge}
    order = "(rows columns y x) c h w -> (rows y h) (columns x w) c"
    return Image.fromarray(np.ascontiguousarray(rearrange(patches_PCHW.cpu().numpy(), order, **sides)))
