"""Pictures of models that see tiles, such as LLaVA-OneVision: how they are cut, and their processor's file.

A picture alone is scaled onto a canvas of tiles, and its overview is the first tile. Several pictures of a prompt are
their overviews, each padded to a square, as transformers' processor makes them of the pictures of a conversation.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from funrl.data.processors.square_pictures import check_processor_fields

if TYPE_CHECKING:  # a record is read before torch is imported
    from funrl.models.vision.config import TowerConfig
    from funrl.models.vision.tiles import Tiles

BICUBIC = 3  # number of Pillow's way of resizing


def tile_side(tower: TowerConfig) -> int | None:
    """Pixels of a side of a tile; None: the tower sees whole pictures."""
    return None if tower.layout.tiles is None else tower.layout.tiles.pixels


def cut_into_tiles(picture: Any, tiles: Tiles, alone: bool) -> tuple[list[Any], tuple[int, int]]:
    """Pictures of Pillow, the overview first, and the grid of the picture.

    Args:
      picture: of Pillow, in red, green and blue.
      tiles: of the tower.
      alone: the prompt has no other picture.
    """
    from PIL import Image

    from funrl.models.vision.tiles import NO_TILES, canvas_of

    side = tiles.pixels
    way = Image.Resampling.BICUBIC
    if not alone:
        longest = max(picture.size)
        whole = Image.new("RGB", (longest, longest), (127, 127, 127))
        whole.paste(picture, ((longest - picture.width) // 2, (longest - picture.height) // 2))
        return [whole.resize((side, side), way)], NO_TILES
    size = (picture.height, picture.width)
    canvas = canvas_of(size, tiles)
    rows, columns = canvas.tiles
    whole = Image.new("RGB", (columns * side, rows * side))
    height, width = canvas.size
    top, left = canvas.begin
    whole.paste(picture.resize((width, height), way), (left, top))
    corners = [(column * side, row * side) for row in range(rows) for column in range(columns)]
    parts = [whole.crop((x, y, x + side, y + side)) for x, y in corners]
    return [picture.resize((side, side), way), *parts], size


def check_tiled_file(name: str, got: Mapping[str, object], tower: TowerConfig) -> None:
    """Check that a processor's file takes pictures as they are read here.

    Args:
      name: of the file.
      got: its fields.
      tower: that sees tiles.

    Raises:
      DataError: a field has another value.
    """
    check_processor_fields(name, got, {**_fields(tower), "do_resize": True, "do_pad": True, "do_center_crop": False})


def tiled_file_text(tower: TowerConfig, processor_class: str) -> str:
    """The preprocessor_config.json by which a processor of transformers takes pictures as they are read here."""
    values = {
        "image_processor_type": f"{processor_class.removesuffix('Processor')}ImageProcessor",
        "processor_class": processor_class,
        "image_mean": list(tower.form.mean),
        "image_std": list(tower.form.std),
        **_fields(tower),
    }
    return json.dumps(values, indent=2) + "\n"


def _fields(tower: TowerConfig) -> dict[str, Any]:
    tiles = tower.layout.tiles
    assert tiles is not None
    return {
        "size": {"height": tiles.pixels, "width": tiles.pixels},
        "resample": BICUBIC,
        "image_grid_pinpoints": [[rows * tiles.pixels, columns * tiles.pixels] for rows, columns in tiles.canvases],
    }
