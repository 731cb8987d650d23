"""Pictures of samples as small files of their own, for people to see."""

from __future__ import annotations

import base64
import hashlib
import io
from collections.abc import Mapping
from typing import Any, NamedTuple

from einops import rearrange

from funrl.data.pictures import PICTURE_COLUMNS
from funrl.data.processors.form import PictureForm
from funrl.data.prompts import Example

MOST_SHOWN = 4  # pictures of a sample
LONGEST_SIDE = 128  # pixels of a thumbnail
THUMBNAIL_BYTES = 8192  # of a thumbnail's file; a larger one is shown smaller
LONGEST_NAME = 200  # characters of a path, its last ones
_PNG = "data:image/png;base64,"


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


def shown_pictures(example: Example | None, form: PictureForm | None) -> tuple[ShownPicture, ...]:
    """The first pictures of a prompt, as the model gets them; () without any."""
    if form is None or example is None or example.owned is None:
        return ()
    from funrl.models.vision.grids import seen_grids  # here, for a report is written without torch
    from funrl.models.vision.inputs import GRIDS, PATCHES, grids_of, split_pictures

    tower = form.tower
    names = _names(example.fields)
    shown = []
    for number, lines in enumerate(split_pictures(tower, example.owned.values)[:MOST_SHOWN]):
        (grid,) = grids_of(lines[GRIDS])
        height, width = seen_grids(grid, tower)[0]  # all of it, or its overview
        own = lines[PATCHES][: height * width].numpy()
        order = "(rows columns y x) c h w -> (rows y h) (columns x w) c"
        pixels = rearrange(own, order, rows=height // tower.merge, y=tower.merge, x=tower.merge)
        digest = hashlib.sha256(pixels.tobytes()).hexdigest()[:12]
        size = f"{width * tower.patch}x{height * tower.patch}"
        shown.append(ShownPicture(names.get(number, ""), size, digest, _thumbnail(pixels)))
    return tuple(shown)


def read_shown(line: Any) -> tuple[ShownPicture, ...]:
    """Pictures in a line of samples.jsonl; an entry without a PNG inside is left out, for a page loads no others."""
    entries = [x for x in line if isinstance(x, Mapping)] if isinstance(line, list) else []
    pictures = [ShownPicture(*(str(entry.get(field, "")) for field in ShownPicture._fields)) for entry in entries]
    return tuple(x for x in pictures if x.thumbnail.startswith(_PNG))


def _names(fields: Mapping[str, Any]) -> dict[int, str]:
    """Paths of the pictures of a record that have one, by their number."""
    given = next((fields[name] for name in PICTURE_COLUMNS if fields.get(name) is not None), None)
    pictures = given if isinstance(given, list | tuple) else [given]
    paths = [x.get("path") if isinstance(x, Mapping) else x for x in pictures]
    return {i: x[-LONGEST_NAME:] for i, x in enumerate(paths) if isinstance(x, str) and not x.startswith("data:")}


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
            return _PNG + base64.b64encode(file.getvalue()).decode()
        side //= 2
