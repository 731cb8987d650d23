"""The form and the size in which a model takes a picture, and the parts that its patches are of."""

from __future__ import annotations

import math
import re
import textwrap
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from funrl.data.json_lines import DataError

if TYPE_CHECKING:  # a record is read before torch is imported
    from funrl.models.vision.config import TowerConfig
    from funrl.models.vision.tiles import Tiles

BILINEAR = 2  # number of Pillow's way of resizing
BICUBIC = 3
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
    """Pictures whose sizes config.json gives, so that no bound on pixels changes them.

    Attributes:
      pixels: of a side of a picture, or of each tile.
      words: for these pictures.
      fields: of a processor's file, by which transformers takes pictures as they are read here.
      switches: further ones that have these values where they are given.
    """

    pixels: int
    words: str
    fields: Mapping[str, Any]
    switches: Mapping[str, Any]

    def check(self, name: str, got: Mapping[str, Any]) -> None:
        """Check the fields of a processor's file. Raises: DataError, one has another value."""
        for field, value in {**self.fields, **self.switches}.items():
            if got.get(field) not in (None, value):
                given = textwrap.shorten(str(got[field]), 80, placeholder="...")
                raise DataError(
                    f"{name} has {field} {given}, but the model takes {value!s:.80}; write that, or leave it out"
                )


def fixed_size(tower: TowerConfig) -> FixedSize | None:
    """Fixed sizes of the pictures of a tower; None: they keep their proportions, within bounds."""
    tiles = tower.layout.tiles
    if tower.layout.side is not None:
        pixels = tower.layout.side * tower.patch
        words = f"every picture as {pixels} x {pixels} pixels"
        own = {"resample": BILINEAR, "image_seq_length": (tower.layout.side // tower.merge) ** 2}
        switches = {"do_resize": True, "do_pan_and_scan": False}
    elif tiles is not None:
        pixels = tiles.pixels
        words = f"pictures in tiles of {pixels} x {pixels} pixels"
        own = {"resample": BICUBIC, "image_grid_pinpoints": [[y * pixels, x * pixels] for y, x in tiles.canvases]}
        switches = {"do_resize": True, "do_pad": True, "do_center_crop": False}
    else:
        return None
    return FixedSize(pixels, words, {"size": {"height": pixels, "width": pixels}, **own}, switches)


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
    layout = form.tower.layout
    if layout.tiles is not None:
        return picture
    square = None if layout.side is None else layout.side * form.tower.patch
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


def cut_into_tiles(picture: Any, tiles: Tiles, alone: bool) -> tuple[list[Any], tuple[int, int]]:
    """Pictures of Pillow, the overview first, and the grid of the picture.

    A picture alone is scaled onto a canvas of tiles, and its overview is the first tile. Several pictures of a prompt
    are their overviews, each padded to a square, as transformers' processor makes them of those of a conversation.

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


def framed(text: str, tokenizer: Any) -> str:
    """A rendered text in which each token for a whole picture is what the model reads, with one placeholder.

    Args:
      text: by a chat template.
      tokenizer: whose model may see pictures.
    """
    form = getattr(tokenizer, "picture_form", None)
    if form is None or form.tower.layout.frame is None:
        return text
    tower = form.tower
    begin, placeholder, end = tokenizer.convert_ids_to_tokens([tower.begin, tower.placeholder, tower.end])
    frame = tower.layout.frame
    whole = f"{frame}{begin}{placeholder}{end}{frame}"
    return re.sub(f"{re.escape(begin)}(?!{re.escape(placeholder)})", lambda _: whole, text)
