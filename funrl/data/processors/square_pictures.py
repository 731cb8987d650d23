"""Pictures of models that squash each to a square of one size, such as Gemma 3: their processor's file, and their text.

A chat template has one token for such a picture, and transformers' processor makes text, placeholders and a closing
token of it.
"""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from funrl.data.json_lines import DataError

if TYPE_CHECKING:  # a record is read before torch is imported
    from funrl.models.vision.config import TowerConfig

BILINEAR = 2  # number of Pillow's way of resizing


def square_side(tower: TowerConfig) -> int | None:
    """Pixels of a side of every picture; None: pictures keep their proportions."""
    return None if tower.layout.side is None else tower.layout.side * tower.patch


def check_square_file(name: str, got: Mapping[str, object], tower: TowerConfig) -> None:
    """Check that a processor's file takes pictures as they are read here.

    Args:
      name: of the file.
      got: its fields.
      tower: that squashes pictures.

    Raises:
      DataError: a field has another value.
    """
    side = square_side(tower)
    assert tower.layout.side is not None
    tokens = (tower.layout.side // tower.merge) ** 2
    wanted = {"size": {"height": side, "width": side}, "resample": BILINEAR, "image_seq_length": tokens}
    switches = {"do_resize": True, "do_pan_and_scan": False}
    check_processor_fields(name, got, {**wanted, **switches})


def check_processor_fields(name: str, got: Mapping[str, object], wanted: Mapping[str, object]) -> None:
    """Check that a processor's file has no other values of some fields. Raises: DataError."""
    for field, value in wanted.items():
        if got.get(field) not in (None, value):
            given = textwrap.shorten(str(got[field]), 80, placeholder="...")
            raise DataError(
                f"{name} has {field} {given}, but the model takes {value!s:.80}; write that, or leave it out"
            )


def square_file_text(tower: TowerConfig, processor_class: str) -> str:
    """The preprocessor_config.json by which a processor of transformers takes pictures as they are read here."""
    side = square_side(tower)
    assert tower.layout.side is not None
    values = {
        "image_processor_type": f"{processor_class.removesuffix('Processor')}ImageProcessor",
        "processor_class": processor_class,
        "image_mean": list(tower.form.mean),
        "image_std": list(tower.form.std),
        "image_seq_length": (tower.layout.side // tower.merge) ** 2,
        "resample": BILINEAR,
        "size": {"height": side, "width": side},
    }
    return json.dumps(values, indent=2) + "\n"


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
