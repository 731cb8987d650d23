"""Pictures of samples, for people to see."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from funrl.data.pictures import PICTURE_COLUMNS
from funrl.data.processors.form import PictureForm
from funrl.data.processors.thumbnails import PNG_URL, ShownPicture, thumbnails
from funrl.data.prompts import Example

MOST_SHOWN = 4  # pictures of a prompt
LONGEST_NAME = 200  # characters of a path, its last ones


def shown_pictures(example: Example | None, form: PictureForm | None) -> tuple[ShownPicture, ...]:
    """The first pictures of a prompt, as the model gets them; () without any."""
    if form is None or example is None or example.owned is None:
        return ()
    return tuple(thumbnails(example.owned.values, form, MOST_SHOWN, _names(example.fields)))


def read_shown(line: Any) -> tuple[ShownPicture, ...]:
    """Pictures in a line of samples.jsonl; an entry without a PNG inside is left out, for a page loads no others."""
    entries = [x for x in line if isinstance(x, Mapping)] if isinstance(line, list) else []
    pictures = [ShownPicture(*(str(entry.get(field, "")) for field in ShownPicture._fields)) for entry in entries]
    return tuple(x for x in pictures if x.thumbnail.startswith(PNG_URL))


def _names(fields: Mapping[str, Any]) -> dict[int, str]:
    """Paths of the pictures of a record that have one, by their number."""
    given = next((fields[name] for name in PICTURE_COLUMNS if fields.get(name) is not None), None)
    pictures = given if isinstance(given, list | tuple) else [given]
    paths = [x.get("path") if isinstance(x, Mapping) else x for x in pictures]
    return {i: x[-LONGEST_NAME:] for i, x in enumerate(paths) if isinstance(x, str) and not x.startswith("data:")}
