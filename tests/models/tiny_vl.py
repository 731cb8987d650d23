"""Tiny vision-language models of transformers, and rows with pictures for them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from einops import rearrange
from torch import Tensor

from funrl.batch import Batch, declare
from funrl.kinds import Ragged
from funrl.models.vision.config import TowerConfig
from funrl.models.vision.grids import picture_patches, picture_tokens
from funrl.models.vision.inputs import GRIDS, PATCHES
from funrl.models.vision.tiles import NO_TILES
from funrl.models.vision.tower import normalized
from funrl.trainer.steps.step_rows import owned_fields

VOCAB = 48
PLACEHOLDER, VIDEO, BEGIN, END = 40, 41, 42, 43
PATCH, MERGE = 4, 2
# rows of a batch: text (ids) and pictures (height and width in patches), in turn
ROWS = (
    (3, (4, 6), 2, (2, 2), 4),
    (5,),
    (1, (8, 4), 0, (6, 10), 1, (2, 8), 3),
    (2, (10, 10), 2),
)


QWENS = ("qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe")
FAMILIES = (*QWENS, "gemma3", "llava_onevision")
SQUARE = 4  # patches of a side of every picture of gemma3
SQUARE_ROWS = (  # rows for it
    (3, (4, 4), 2, (4, 4), 4),
    (5,),
    (1, (4, 4), 1, (4, 4), 1, (4, 4), 3),
    (2, (4, 4), 2),
)
TILED_ROWS = (  # heights and widths in pixels, for llava_onevision; pictures without tiles are several
    (3, (17, 40), 2, (14, 14), 4),
    (5,),
    (1, NO_TILES, 0, NO_TILES, 1, NO_TILES, 3),
    (2, (50, 61), 1, (80, 9), 1, (3, 30), 2),
)
TEXT = {
    **{"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4},
    **{"num_key_value_heads": 2, "max_position_embeddings": 512, "vocab_size": VOCAB},
    **{"bos_token_id": 1, "eos_token_id": 2},
}
ROPE = {"rope_type": "default", "rope_theta": 1e4}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
TOWER = {
    **{"depth": 3, "hidden_size": 32, "intermediate_size": 40, "num_heads": 2, "patch_size": PATCH},
    **{"spatial_merge_size": MERGE, "out_hidden_size": 32},
}


GEMMA = {
    **{"head_dim": 8, "query_pre_attn_scalar": 12, "sliding_window": 6},
    **{"layer_types": ["sliding_attention", "full_attention"]},
}
SIGLIP = {
    **{"model_type": "siglip_vision_model", "num_hidden_layers": 2, "hidden_size": 20, "intermediate_size": 28},
    **{"num_attention_heads": 2, "patch_size": PATCH, "image_size": SQUARE * PATCH, "vision_use_head": False},
}
PIXELS = 14  # of a side of a tile of llava_onevision: 3 patches, and two pixels more
TILED = {
    "image_grid_pinpoints": [[PIXELS * y, PIXELS * x] for y, x in ((1, 1), (1, 2), (2, 1), (2, 2), (3, 2), (1, 3))],
    "vision_aspect_ratio": "anyres_max_2",
}


def rows_of(family: str) -> tuple:
    """Rows for a family."""
    return {"gemma3": SQUARE_ROWS, "llava_onevision": TILED_ROWS}.get(family, ROWS)


def llava_config(text: dict[str, Any], vision: dict[str, Any], **outer: Any) -> Any:
    """The config of a tiny LLaVA-OneVision."""
    import transformers

    return transformers.LlavaOnevisionConfig(
        text_config=TEXT | {"model_type": "qwen2", "rope_parameters": ROPE} | text,
        vision_config=SIGLIP | {"image_size": PIXELS} | vision,
        **{"image_token_index": PLACEHOLDER, "video_token_index": VIDEO} | TILED | outer,
    )


def gemma3_config(text: dict[str, Any], vision: dict[str, Any], **outer: Any) -> Any:
    """The config of a tiny Gemma 3."""
    import transformers

    tokens = {"image_token_index": PLACEHOLDER, "boi_token_index": BEGIN, "eoi_token_index": END}
    sizes = {"mm_tokens_per_image": (SQUARE // MERGE) ** 2}
    return transformers.Gemma3Config(
        text_config=TEXT | GEMMA | text, vision_config=SIGLIP | vision, **sizes | tokens | outer
    )


def transformers_config(family: str, text: dict[str, Any] | None = None, vision: dict[str, Any] | None = None) -> Any:
    """The config of a tiny vision-language model."""
    import transformers

    if family == "gemma3":
        return gemma3_config(text or {}, vision or {})
    if family == "llava_onevision":
        return llava_config(text or {}, vision or {})
    config = TEXT | {"rope_parameters": {**ROPE, "mrope_section": [2, 1, 1]}}
    if family == "qwen2_5_vl":
        name = "Qwen2_5_VL"
        tower = TOWER | {"window_size": 16, "fullatt_block_indexes": [1]}
    else:
        name = "Qwen3VLMoe" if family.endswith("moe") else "Qwen3VL"
        rope = {**ROPE, "mrope_section": [3, 3, 2], "mrope_interleaved": True}
        config |= {"head_dim": 16, "rope_parameters": rope} | (EXPERTS if family.endswith("moe") else {})
        tower = TOWER | {"num_position_embeddings": 36, "deepstack_visual_indexes": [0, 2]}
    return getattr(transformers, f"{name}Config")(
        text_config=config | (text or {}),
        vision_config=tower | (vision or {}),
        image_token_id=PLACEHOLDER,
        video_token_id=VIDEO,
        vision_start_token_id=BEGIN,
        vision_end_token_id=END,
    )


def transformers_model(config: Any, seed: int = 0) -> Any:
    """A random model of transformers, in float32."""
    import transformers

    torch.manual_seed(seed)
    model = transformers.AutoModelForImageTextToText.from_config(config).eval()
    for x in model.parameters():  # norms and biases that are all equal would hide mistakes
        x.data += 0.1 * torch.randn(x.shape)
    return model


def saved_model(folder: Path, family: str) -> Any:
    """A model, which is in a directory too."""
    model = transformers_model(transformers_config(family))
    model.save_pretrained(folder)
    return model


def picture_rows(tower: TowerConfig, rows: tuple, seed: int = 0) -> list[tuple[list[int], list[tuple[int, int]]]]:
    """Tokens and grids of each row."""
    draw = torch.Generator().manual_seed(seed)
    made = []
    for row in rows:
        tokens: list[int] = []
        for part in row:
            if isinstance(part, int):
                tokens += torch.randint(3, 40, (part,), generator=draw).tolist()
            else:
                tokens += [BEGIN, *[PLACEHOLDER] * picture_tokens(part, tower), END]
        made.append((tokens, [part for part in row if not isinstance(part, int)]))
    return made


def picture_batch(tower: TowerConfig, rows: tuple, seed: int = 0) -> tuple[Batch, list[int]]:
    """Rows [B, T] with their pictures, all sampled but for placeholders and first tokens; and their lengths."""
    made = picture_rows(tower, rows, seed)
    lengths = [len(tokens) for tokens, _ in made]
    width = max(lengths)
    tokens = torch.tensor([row + [0] * (width - len(row)) for row, _ in made])
    real = torch.arange(width) < torch.tensor(lengths)[:, None]
    mask = real & (tokens < PLACEHOLDER)
    mask[:, 0] = False
    grids = [grid for _, row in made for grid in row]
    patches = [sum(picture_patches(grid, tower) for grid in row) for _, row in made]
    draw = torch.Generator().manual_seed(seed + 1)
    pixels = torch.randint(0, 256, (sum(patches), 3, tower.patch, tower.patch), generator=draw, dtype=torch.uint8)
    batch = Batch(tokens=tokens, mask=mask, segments=real.long())
    fields = owned_fields({PATCHES: pixels, GRIDS: torch.tensor(grids)})
    batch = declare(batch, fields)._replace(
        patches=Ragged(pixels, offsets_of(patches)),
        grids=Ragged(torch.tensor(grids, dtype=torch.int64).reshape(-1, 2), offsets_of([len(row) for _, row in made])),
    )
    return batch, lengths


def merge_of(config: Any) -> int:
    """Patches of a side of a token of a Gemma 3."""
    vision = config.vision_config
    return vision.image_size // vision.patch_size // round(config.mm_tokens_per_image**0.5)


def offsets_of(counts: list[int]) -> Tensor:
    """Offsets of rows that own these numbers of values."""
    return torch.tensor([0, *torch.tensor(counts).cumsum(0).tolist()])


def tiled_pixels(tower: TowerConfig, pixels: Tensor, grids: Tensor) -> dict[str, Any]:
    """Tiles of pictures as a LLaVA-OneVision of transformers takes them."""
    tiles = tower.layout.tiles
    assert tiles is not None
    order = "(n rows columns) c h w -> n c (rows h) (columns w)"
    whole = rearrange(pixels, order, rows=tiles.states, columns=tiles.states)
    beside = tiles.pixels - whole.shape[-1]
    runs = [len(grids)] if not grids.any() else [1] * len(grids)
    return {
        "pixel_values": torch.nn.functional.pad(whole, (0, beside, 0, beside), value=7.0),  # not seen
        "image_sizes": grids.where(grids > 0, 5),
        "batch_num_images": torch.tensor(runs),
    }


def transformers_logits(model: Any, tower: TowerConfig, batch: Batch, row: int, length: int) -> Tensor:
    """Logits [T, V] of one row by transformers."""
    tokens = batch.tokens[row : row + 1, :length]
    begin, end = batch.patches.offsets[row : row + 2].tolist()
    pixels = normalized(batch.patches.values[begin:end], torch.float32, tower.form)
    kw: dict[str, Any] = {}
    if end > begin and model.config.model_type == "llava_onevision":
        kw = tiled_pixels(tower, pixels, batch.grids.values[slice(*batch.grids.offsets[row : row + 2].tolist())])
    elif end > begin and model.config.model_type == "gemma3":
        merge, side = merge_of(model.config), model.config.vision_config.image_size // pixels.shape[-1]
        order = "(n rows columns y x) c h w -> n c (rows y h) (columns x w)"
        sides = {"rows": side // merge, "columns": side // merge, "y": merge, "x": merge}
        kw = {"pixel_values": rearrange(pixels, order, **sides), "token_type_ids": (tokens == PLACEHOLDER).int()}
    elif end > begin:
        first, last = batch.grids.offsets[row : row + 2].tolist()
        grids = batch.grids.values[first:last]
        kw = {
            "pixel_values": pixels.unsqueeze(2).expand(-1, -1, 2, -1, -1).reshape(end - begin, -1),
            "image_grid_thw": torch.cat([torch.ones_like(grids[:, :1]), grids], 1),
            "mm_token_type_ids": (tokens == PLACEHOLDER).int(),
        }
    with torch.no_grad():
        return model(input_ids=tokens, **kw, use_cache=False).logits[0]
