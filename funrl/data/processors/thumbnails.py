"""Pictures as the model gets them, as small files of their own, for people to see."""

from __future__ import annotations

import base64
import hashlib
import io
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from einops import rearrange

from funrl.data.processors.form import PictureForm

if TYPE_CHECKING:  # a report is written without torch
    from torch import Tensor

LONGEST_SIDE = 128  # pixels of a thumbnail
THUMBNAIL_BYTES = 8192  # of a thumbnail's file; a larger one is shown smaller
PNG_URL = "data:image/png;base64,"


class ShownPicture(NamedTuple):
    """A picture of a sample.

    Attributes:
      name: the end of its path; "" where it has none.
      size: its width and height in pixels, as the model gets it.
      digest: of its pixels, 12 hexadecimal digits.
      thumbnail: a data URL of at most `THUMBNAIL_BYTES` before base64.
    """

    name: str
    size: str
    digest: str
    thumbnail: str

    def __str__(self) -> str:
        return " ".join(filter(None, (self.name, self.size, self.digest)))


def thumbnails(
    values: Mapping[str, Tensor], form: PictureForm, most: int, names: Mapping[int, str] | None = None
) -> list[ShownPicture]:
    """The first pictures of what a row owns.

    Args:
      values: lines by field.
      form: of the model.
      most: number of pictures.
      names: ends of their paths, by their numbers.
    """
    from funrl.models.vision.grids import seen_grids
    from funrl.models.vision.inputs import GRIDS, PATCHES, grids_of, split_pictures

    tower = form.tower
    shown = []
    for number, lines in enumerate(split_pictures(tower, values)[:most]):
        (grid,) = grids_of(lines[GRIDS])
        height, width = seen_grids(grid, tower)[0]  # all of it, or its overview
        own = lines[PATCHES][: height * width].numpy()
        order = "(rows columns y x) c h w -> (rows y h) (columns x w) c"
        pixels = rearrange(own, order, rows=height // tower.merge, y=tower.merge, x=tower.merge)
        digest = hashlib.sha256(pixels.tobytes()).hexdigest()[:12]
        size = f"{width * tower.patch}x{height * tower.patch}"
        shown.append(ShownPicture((names or {}).get(number, ""), size, digest, _thumbnail(pixels)))
    return shown


def _thumbnail(pixels: Any) -> str:
    """A PNG in base64 of pixels uint8 [H, W, 3], halved until it is small enough."""
    from PIL import Image  # the pictures were read by it

    picture = Image.fromarray(pixels)
    side = LONGEST_SIDE
    while True:
        picture.thumbnail((side, side))
        file = io.BytesIO()
        picture.save(file, "PNG", optimize=True)
        if file.tell() <= THUMBNAIL_BYTES:
            return PNG_URL + base64.b64encode(file.getvalue()).decode()
        side //= 2
