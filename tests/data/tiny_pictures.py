"""Pictures, and a tokenizer of characters for a model that sees them."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
from PIL import Image

from funrl.data.pictures import with_picture_form
from funrl.data.processors.form import PictureForm
from funrl.data.tokenizer import character_tokenizer
from funrl.models.vision.config import TowerConfig

LETTERS = "abcd:\n"
PLACEHOLDER = 2 + len(LETTERS)
TOWER = TowerConfig(layers=1, embed=8, heads=1, inner=8, patch=4, window=16, placeholder=PLACEHOLDER)
FORM = PictureForm(TOWER, min_pixels=64, max_pixels=4096)
TEMPLATE = (
    "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}{% for c in m.content %}"
    "{% if c.type == 'image' %}<|image|>{% else %}{{ c.text }}{% endif %}{% endfor %}{% endif %}:{% endfor %}"
)


def tokenizer(form: PictureForm | None = FORM) -> Any:
    """One token a letter, and a placeholder."""
    made = character_tokenizer(LETTERS)
    made.add_special_tokens({"additional_special_tokens": ["<|image|>"]})
    assert made.convert_tokens_to_ids("<|image|>") == PLACEHOLDER
    made.chat_template = TEMPLATE
    return with_picture_form(made, form)


def picture(size: tuple[int, int], seed: int = 0) -> Image.Image:
    """A random picture of some width and height."""
    draw = np.random.default_rng(seed)
    return Image.fromarray(draw.integers(0, 256, (size[1], size[0], 3), dtype=np.uint8))


def png(image: Image.Image) -> bytes:
    """The bytes of a PNG file."""
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return buffer.getvalue()
