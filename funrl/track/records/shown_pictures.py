"""Pictures of samples, for people to see."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from funrl.data.pictures import PICTURE_COLUMNS
from funrl.data.processors.form import PictureForm
from funrl.data.processors.thumbnails import ShownPicture, thumbnails
from funrl.data.prompts import Example

MOST_SHOWN = 4  # pictures of a prompt
LONGEST_NAME = 200  # characters of a path, its last ones


def shown_pictures(example: Example | None, form: PictureForm | None) -> tuple[ShownPicture, ...]:
    """The first pictures of a prompt, as the model gets them; () without any."""
    if form is None or example is None or example.owned is None:
        return ()
    return tuple(thumbnails(example.owned.values, form, MOST_SHOWN, _names(example.fields)))


def read_shown(entries: Sequence[Mapping[str, str]]) -> tuple[ShownPicture, ...]:
    """Pictures in a line of samples.jsonl."""
    return tuple(ShownPicture(*(entry[field] for field in ShownPicture._fields)) for entry in entries)


def _names(fields: Mapping[str, object]) -> dict[int, str]:
    """Paths of the pictures of a record that have one, by their number."""
    given = next((fields[name] for name in PICTURE_COLUMNS if fields.get(name) is not None), None)
    pictures = given if isinstance(given, list | tuple) else [given]
    paths = [x.get("path") if isinstance(x, Mapping) else x for x in pictures]
    return {i: x[-LONGEST_NAME:] for i, x in enumerate(paths) if isinstance(x, str) and not x.startswith("data:")}
