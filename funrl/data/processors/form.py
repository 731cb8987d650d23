"""The form and the size in which a model takes a picture, and the parts that its patches are of."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from funrl.data.json_lines import DataError
from funrl.data.processors.square_pictures import check_square_file, square_file_text, square_side
from funrl.data.processors.tiled_pictures import check_tiled_file, cut_into_tiles, tile_side, tiled_file_text

if TYPE_CHECKING:
    from funrl.models.vision.config import TowerConfig

MOST_RATIO = 200  # of the sides of a picture, as in transformers


class PictureForm(NamedTuple):
    """Form in which a model takes pictures.

    Attributes:
      tower: its sizes and tokens.
      min_pixels, max_pixels: bounds on the pixels of a resized picture.
      files: names and texts of the files that tell transformers of this form.
      bos: token that a text may begin with, before its pictures; None: there is none.
    """

    tower: TowerConfig
    min_pixels: int
    max_pixels: int
    files: tuple[tuple[str, str], ...] = ()
    bos: int | None = None

    @property
    def factor(self) -> int:
        """Pixels that both sides are multiples of."""
        return self.tower.patch * self.tower.merge

    def counts_as_alone(self, together: int) -> bool:
        """True if a picture that stands with others, itself among them, is cut into tiles, or none is cut."""
        return together == 1 or self.tower.layout.tiles is None


class FixedSize(NamedTuple):
    """Ways of models whose pictures have the sizes that config.json gives, so that no bound on pixels changes them.

    Attributes:
      pixels: of a side of a picture, or of each tile.
      words: for these pictures.
      check: `(name of a file, its fields, tower)`; raises DataError where a processor's file says otherwise.
      text: `(tower, processor_class)` -> the text of a processor's file.
    """

    pixels: int
    words: str
    check: Callable[[str, Mapping[str, Any], TowerConfig], None]
    text: Callable[[TowerConfig, str], str]


def fixed_size(tower: TowerConfig) -> FixedSize | None:
    """Ways of a tower whose pictures have fixed sizes; None: they keep their proportions, within bounds."""
    if (side := square_side(tower)) is not None:
        return FixedSize(side, f"every picture as {side} x {side} pixels", check_square_file, square_file_text)
    if (side := tile_side(tower)) is not None:
        return FixedSize(side, f"pictures in tiles of {side} x {side} pixels", check_tiled_file, tiled_file_text)
    return None


def picture_parts(picture: Any, form: PictureForm, alone: bool) -> tuple[list[Any], tuple[int, int]]:
    """Pictures of Pillow that the patches of a picture are of, end to end, and its grid.

    Args:
      picture: of Pillow.
      form: of the model.
      alone: the prompt has no other picture.

    Raises:
      DataError: it is too long for its width.
    """
    tower = form.tower
    if (tiles := tower.layout.tiles) is not None:
        _check_ratio(picture.height, picture.width)
        return cut_into_tiles(picture, tiles, alone)
    picture = fitted(picture, form)
    return [picture], (picture.height // tower.patch, picture.width // tower.patch)


def fitted(picture: Any, form: PictureForm) -> Any:
    """A picture of Pillow in the size in which the model takes it; one that has it, or is cut into tiles, stays.

    Raises:
      DataError: it is too long for its width.
    """
    if tile_side(form.tower) is not None:
        return picture
    square = square_side(form.tower)
    height, width = (square, square) if square else fitting_size(picture.height, picture.width, form)
    if (width, height) == picture.size:
        return picture
    from PIL import Image

    ways = Image.Resampling
    return picture.resize((width, height), ways.BICUBIC if square is None else ways.BILINEAR)


def fitting_size(height: int, width: int, form: PictureForm) -> tuple[int, int]:
    """Sides of a picture after it is resized: multiples of a token's side, with pixels within the bounds.

    Raises:
      DataError: one side is more than 200 times the other.
    """
    factor = form.factor
    _check_ratio(height, width)
    sides = [max(factor, round(side / factor) * factor) for side in (height, width)]
    if math.prod(sides) > form.max_pixels:
        scale = math.sqrt(height * width / form.max_pixels)
        sides = [max(factor, math.floor(side / scale / factor) * factor) for side in (height, width)]
    elif math.prod(sides) < form.min_pixels:
        scale = math.sqrt(form.min_pixels / (height * width))
        sides = [math.ceil(side * scale / factor) * factor for side in (height, width)]
    return sides[0], sides[1]


def _check_ratio(height: int, width: int) -> None:
    if max(height, width) > MOST_RATIO * min(height, width):
        raise DataError(f"a picture of {width} x {height} pixels: one side is more than {MOST_RATIO} times the other")
