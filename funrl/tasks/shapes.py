"""The embedded task with pictures: how many red squares are there?

A picture of 32 x 32 pixels has 4 cells; some hold a square or a triangle in red, green or blue, of a shade and
at a place that vary. The demonstrator describes pictures well, and counts badly: it often overlooks one. A small
decoder with a vision tower that imitates it sees what is there and counts, with the demonstrator's errors;
reinforcement removes these.

A cell is one token, merged from 4 patches.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from funrl.data.pictures import picture_url
from funrl.data.prompts import Prompt
from funrl.data.tokenizer import END, PAD
from funrl.tasks.arithmetic import HELD_OUT, Split
from funrl.tasks.task import EmbeddedTask

if TYPE_CHECKING:
    from funrl.models.vision.config import VisionLanguageConfig

COLORS = {"red": (230, 120, 110), "green": (110, 230, 120), "blue": (120, 130, 230)}
SHAPE_NAMES = ("squares", "triangles")
COLORED_SHAPES = [(color, shape) for color in COLORS for shape in SHAPE_NAMES]
CELL = 16  # pixels of a cell's side
SIDE = 2  # cells of a picture's side
CELLS = SIDE**2
MERGE = 2  # patches of a cell's side
STAMP = 12  # pixels of a shape's side
BACKGROUND = 115  # near 0 once normalized, and darker than the colors
SHADE = 25  # by which each channel of a color may differ
MOST_OF_A_KIND = 3  # of a kind in a picture
OVERLOOKS = 0.6  # share of the counts in which the demonstrator overlooks one
COUNTS_A_PICTURE = 6  # demonstrations of counts that a picture has, beside two descriptions
TRAINING_PICTURES = 4096
DESCRIBING_STEPS = 500
DESCRIBING_DEMONSTRATIONS = 64_000
DESCRIBING_FLAGS = {"batch_prompts": 128, "lr": 3e-3, "freeze": "none"}
COUNT_TOKENS = 2  # a digit and the end of text

VISION_START, PLACEHOLDER, VISION_END, VIDEO = "<|vision_start|>", "<|image_pad|>", "<|vision_end|>", "<|video_pad|>"
SHAPE_WORDS = (
    *("how", " many", "?", "colors", "shapes", ":", " nothing"),
    *(f" {word}" for word in (*COLORS, *SHAPE_NAMES)),
    *map(str, range(MOST_OF_A_KIND + 1)),
)
SPECIAL = (VISION_START, PLACEHOLDER, VISION_END, VIDEO)
VOCABULARY = {token: i for i, token in enumerate((PAD, END, *SHAPE_WORDS, *SPECIAL))}


class Drawing(NamedTuple):
    """A picture and what is in it.

    Attributes:
      pixels: uint8 [32, 32, 3].
      cells: kind of the shape in each of the 4 cells, row by row; -1: nothing.
    """

    pixels: np.ndarray
    cells: np.ndarray

    @property
    def counts(self) -> np.ndarray:
        """Number of shapes of each of the `COLORED_SHAPES`."""
        return np.bincount(self.cells[self.cells >= 0], minlength=len(COLORED_SHAPES))


def stamps() -> dict[str, np.ndarray]:
    """The pixels of each shape, bool [12, 12]."""
    y, x = np.mgrid[0:STAMP, 0:STAMP]
    triangle = np.abs(x - (STAMP - 1) / 2) <= (y + 1) / 2
    return {"squares": np.ones((STAMP, STAMP), bool), "triangles": triangle}


def drawings(seed: int, split: Split = "train") -> Iterator[Drawing]:
    """Random pictures without an end; the two splits share none, by a checksum of the pixels."""
    rng = np.random.default_rng((seed, 3))
    shapes = stamps()
    while True:
        drawing = _draw(rng, shapes)
        if (zlib.crc32(drawing.pixels.tobytes()) % HELD_OUT == 0) == (split == "heldout"):
            yield drawing


def _draw(rng: np.random.Generator, shapes: dict[str, np.ndarray]) -> Drawing:
    """A picture of 2 to 4 shapes; about half are of one kind."""
    pixels = np.full((SIDE * CELL, SIDE * CELL, 3), BACKGROUND, np.uint8)
    cells = np.full(CELLS, -1)
    frequent = rng.integers(len(COLORED_SHAPES))
    for cell in rng.permutation(CELLS)[: rng.integers(2, CELLS + 1)]:
        kind = frequent if rng.random() < 0.5 else rng.integers(len(COLORED_SHAPES))
        if (cells == kind).sum() == MOST_OF_A_KIND:
            continue
        color, shape = COLORED_SHAPES[kind]
        y, x = np.array(divmod(cell, SIDE)) * CELL + rng.integers(0, CELL - STAMP + 1, 2)
        shade = np.clip(np.array(COLORS[color]) + rng.integers(-SHADE, SHADE + 1, 3), 0, 255)
        pixels[y : y + STAMP, x : x + STAMP][shapes[shape]] = shade
        cells[cell] = kind
    return Drawing(pixels, cells)


def question(kind: int) -> str:
    """The question how many there are of a kind."""
    return "how many {} {}?".format(*COLORED_SHAPES[kind])


def _asked(rng: np.random.Generator, drawing: Drawing) -> int:
    """A kind to ask about: three of four times that of a random shape, so that large numbers are frequent."""
    there = drawing.cells[drawing.cells >= 0]
    return int(rng.choice(there) if rng.random() < 0.75 else rng.integers(len(COLORED_SHAPES)))


def prompts(seed: int, count: int, split: Split = "train") -> list[Prompt]:
    """Pictures with a question each, three of four about a kind that is there, and the field "answer"."""
    rng = np.random.default_rng((seed, 4))
    examples = []
    for drawing, _ in zip(drawings(seed, split), range(count), strict=False):
        kind = _asked(rng, drawing)
        fields = {"images": [picture_url(drawing.pixels)], "answer": str(drawing.counts[kind])}
        examples.append(Prompt(question(kind), fields))
    return examples


def picture_demonstrations(seed: int, count: int, overlooks: float = OVERLOOKS) -> list[dict[str, Any]]:
    """Descriptions of training pictures and counts by the demonstrator, as records of `funrl sft`.

    Args:
      seed: fixes the pictures and where it overlooks one.
      count: how many.
      overlooks: share of the counts that are one too small, of a kind that is there.
    """
    rng = np.random.default_rng((seed, 5))
    records: list[dict[str, Any]] = []
    for drawing in drawings(seed):
        if len(records) >= count:
            break
        images = [picture_url(drawing.pixels)]
        named = [COLORED_SHAPES[kind] if kind >= 0 else ("nothing", "nothing") for kind in drawing.cells]
        texts = [(f"{what}:", "".join(f" {pair[i]}" for pair in named)) for i, what in enumerate(("colors", "shapes"))]
        for kind in (_asked(rng, drawing) for _ in range(COUNTS_A_PICTURE)):
            number = int(drawing.counts[kind])
            texts.append((question(kind), str(number - (number > 0 and rng.random() < overlooks))))
        records += [{"prompt": prompt, "completion": completion, "images": images} for prompt, completion in texts]
    return records[:count]


def right_counts(seed: int, count: int, split: Split = "train") -> list[dict[str, Any]]:
    """Questions with their answers, without errors, as records of `funrl sft`."""
    examples = prompts(seed if split == "train" else 0, count, split)
    return [{"prompt": x.prompt, "completion": x.fields["answer"], "images": x.fields["images"]} for x in examples]


def exact_count(prompt: str, completion: str, answer: str, **fields: Any) -> float:
    """1.0 if the completion is exactly the number, else 0.0."""
    return float(completion == answer)


def shapes_tokenizer() -> Any:
    """One token a word, a digit or a mark."""
    from tokenizers import Regex, Tokenizer, decoders, pre_tokenizers
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(WordLevel(VOCABULARY))
    words.pre_tokenizer = pre_tokenizers.Split(Regex(r" ?[a-z]+|[\s\S]"), "isolated")
    words.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token=PAD, eos_token=END, clean_up_tokenization_spaces=False
    )
    fast.add_special_tokens({"additional_special_tokens": list(SPECIAL)})
    return fast


def shapes_model(head: int = 16) -> VisionLanguageConfig:
    """The small decoder and its tower, in the form of Qwen2.5-VL.

    Args:
      head: size of a head, at least.
    """
    from funrl.models.decoder.config import decoder_config  # here, for flags are read without torch
    from funrl.models.vision.config import TowerConfig, with_tower

    head = max(head, 16)
    half = head // 2
    decoder = decoder_config(
        vocab=len(VOCABULARY),
        embed=64,
        layers=2,
        heads=4,
        kv_heads=64 // head,
        head=head,
        mlp=128,
        attention_bias=True,
        rope_theta=10.0,
        rope_axes=(0,) * (half // 4) + (1,) * (half * 3 // 8) + (2,) * (half * 3 // 8),
        max_positions=64,
        eos=(VOCABULARY[END],),
        pad=VOCABULARY[PAD],
        tied=True,
        family="qwen2_5_vl",
    )
    tower = TowerConfig(
        layers=2,
        embed=64,
        heads=4,
        inner=128,
        patch=CELL // MERGE,
        merge=MERGE,
        window=CELL,
        whole_layers=(1,),
        placeholder=VOCABULARY[PLACEHOLDER],
        banned=(VOCABULARY[VIDEO],),
        begin=VOCABULARY[VISION_START],
        end=VOCABULARY[VISION_END],
    )
    return with_tower(decoder, tower)


def shapes_task() -> EmbeddedTask:
    """The task."""
    return EmbeddedTask(
        name="shapes",
        training_prompts=lambda seed: prompts(seed, TRAINING_PICTURES),
        heldout_prompts=lambda count: prompts(0, count, "heldout"),
        reward=exact_count,
        demonstrations=picture_demonstrations,
        texts={"demonstrations": right_counts},
        tokenizer=shapes_tokenizer,
        tokens=frozenset(VOCABULARY),
        model_config=shapes_model,
        max_new_tokens=COUNT_TOKENS,
        warmstart_steps=DESCRIBING_STEPS,
        warmstart_demonstrations=DESCRIBING_DEMONSTRATIONS,
        warmstart_flags=DESCRIBING_FLAGS,
        readable=None,
    )
