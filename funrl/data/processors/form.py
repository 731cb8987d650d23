"""The form and the size in which a model takes a picture."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

from funrl.data.json_lines import DataError
from funrl.data.processors.square_pictures import square_side

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


def fitted(picture: Any, form: PictureForm) -> Any:
    """A picture of Pillow in the size in which the model takes it; one that has it stays.

    Raises:
      DataError: it is too long for its width.
    """
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
    if max(height, width) > MOST_RATIO * min(height, width):
        raise DataError(f"a picture of {width} x {height} pixels: one side is more than {MOST_RATIO} times the other")
    sides = [max(factor, round(side / factor) * factor) for side in (height, width)]
    if math.prod(sides) > form.max_pixels:
        scale = math.sqrt(height * width / form.max_pixels)
        sides = [max(factor, math.floor(side / scale / factor) * factor) for side in (height, width)]
    elif math.prod(sides) < form.min_pixels:
        scale = math.sqrt(form.min_pixels / (height * width))
        sides = [math.ceil(side * scale / factor) * factor for side in (height, width)]
    return sides[0], sides[1]
