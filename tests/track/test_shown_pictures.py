"""Pictures of samples: what is kept of them, and where they are shown."""

import base64
import dataclasses
import io

import numpy as np
from PIL import Image
from rich.console import Console

from funrl.data.pictures import expand_placeholders
from funrl.data.processors.form import PictureForm
from funrl.data.processors.thumbnails import THUMBNAIL_BYTES
from funrl.data.prompts import Example
from funrl.environments.conversation import MOST_SEEN, conversation_of
from funrl.models.vision.config import PictureLayout, TowerConfig
from funrl.models.vision.tiles import Tiles
from funrl.rollout.episodes import Episode, Node, Trajectory
from funrl.track.progress import Progress
from funrl.track.records.samples import Sample, first_and_last, open_samples, read_samples
from funrl.track.records.shown_pictures import LONGEST_NAME, MOST_SHOWN, shown_pictures

FORM = PictureForm(
    TowerConfig(layers=1, embed=16, heads=2, inner=16, patch=4, window=16, placeholder=9), 64, max_pixels=1 << 18
)


def example_of(pictures, form=FORM, **fields):
    tokens, owned = expand_placeholders([1, 2], pictures, form)
    return Example(tokens, "ab", fields, owned=owned)


def noise(height, width):
    return np.random.default_rng(width).integers(0, 256, (height, width, 3), dtype=np.uint8)


def seen(picture):
    head, _, data = picture.thumbnail.partition(",")
    assert head == "data:image/png;base64"
    file = base64.b64decode(data)
    assert len(file) <= THUMBNAIL_BYTES
    return np.asarray(Image.open(io.BytesIO(file)))


def test_pictures_are_shown_as_the_model_gets_them():
    pictures = [noise(8, 16), noise(24, 32)]
    shown = shown_pictures(example_of(pictures, images=["a/b.png", {"bytes": b"x"}]), FORM)
    assert [(picture.name, picture.size) for picture in shown] == [("a/b.png", "16x8"), ("", "32x24")]
    assert all((seen(picture) == pixels).all() for picture, pixels in zip(shown, pictures, strict=True))
    other = shown_pictures(example_of([noise(8, 16), noise(24, 40)]), FORM)
    assert other[0].digest == shown[0].digest != other[1].digest != shown[1].digest


def test_the_overview_of_a_picture_in_tiles_is_shown():
    layout = PictureLayout(tiles=Tiles(pixels=9, states=2, canvases=((1, 1), (2, 2)), most=9))
    form = FORM._replace(tower=dataclasses.replace(FORM.tower, merge=1, window=None, layout=layout))
    (shown,) = shown_pictures(example_of([noise(18, 18)], form), form)
    whole = np.asarray(Image.fromarray(noise(18, 18)).resize((9, 9), Image.Resampling.BICUBIC))
    assert shown.size == "8x8" and (seen(shown) == whole[:8, :8]).all()


def test_what_is_kept_of_pictures_is_bounded():
    shown = shown_pictures(example_of([noise(480, 512)] * 6), FORM)
    assert len(shown) == MOST_SHOWN and max(seen(shown[0]).shape) <= 128
    assert (
        shown_pictures(example_of([]), FORM) == shown_pictures(None, FORM) == shown_pictures(example_of([]), None) == ()
    )


def test_samples_keep_pictures_and_the_terminal_names_them(tmp_path):
    pictures = shown_pictures(example_of([noise(8, 16)], image="cat.png"), FORM)
    sample = Sample(3, "how many?", "2", 1.0, pictures=pictures)
    writer = open_samples(tmp_path / "samples.jsonl")
    writer.write(sample)
    writer.write(Sample(3, "text", "2", 1.0))
    writer.close()
    again, plain = read_samples(tmp_path / "samples.jsonl")
    assert again == sample and plain.pictures == ()
    assert "pictures" not in (tmp_path / "samples.jsonl").read_text().splitlines()[1]
    text = io.StringIO()
    progress = Progress(4, Console(file=text, width=200))
    progress.sample(again)
    assert f"[cat.png 16x8 {pictures[0].digest}]" in text.getvalue() and "base64" not in text.getvalue()


def test_names_are_bounded_and_shown_without_what_moves_a_terminal():
    hostile = "x" * 300 + "\x1b[2J\u202e.png"
    (picture,) = shown_pictures(example_of([noise(8, 16)], image={"bytes": b"", "path": hostile}), FORM)
    assert picture.name == hostile[-LONGEST_NAME:]
    text = io.StringIO()
    progress = Progress(4, Console(file=text, width=200))
    progress.sample(Sample(3, "how many?", "2", 1.0, pictures=(picture,)))
    assert r"\x1b[2J\u202e.png 16x8" in text.getvalue() and "\x1b[2J" not in text.getvalue()


def test_pictures_of_later_turns_are_shown_where_they_are(tmp_path):
    def turn(parent, pictures, *words):
        parts = [{"type": "image"}] * len(pictures)
        messages = [{"role": "user", "content": [*parts, {"type": "text", "text": "a"}]}]
        messages += [{"role": "user", "content": word} for word in words]
        return Node(parent, [1], sampled=False, messages=messages, owned=example_of(pictures).owned)

    first = turn(None, [noise(8, 16)])
    second = turn(first, [noise(8, 24), noise(8, 32)], "more")
    other = turn(first, [noise(8, 40)] * MOST_SEEN)
    episode = Episode([Trajectory("policy", leaf) for leaf in (second, other)], {"policy": 1.0})
    conversation = conversation_of(episode, str, FORM)
    single, two = ([len(entry.get("pictures", ())) for entry in branch["says"]] for branch in conversation["branches"])
    assert single == [1, 2, 0] and two == [0, MOST_SEEN - 3]  # what an earlier branch shows is not shown again
    assert "pictures" not in conversation_of(episode, str)["branches"][0]["says"][0]
    writer = open_samples(tmp_path / "samples.jsonl")
    writer.write(Sample(3, "a", "b", 1.0, conversation=conversation, pictures=shown_pictures(example_of([]), FORM)))
    writer.close()
    (sample,) = read_samples(tmp_path / "samples.jsonl")
    says = sample.conversation["branches"][0]["says"]
    assert [picture.size for entry in says for picture in entry.get("pictures", ())] == ["16x8", "24x8", "32x8"]
    assert sample._replace(pictures=says[0]["pictures"]).pictures_above == ()
    plain = sample._replace(conversation=None, pictures=says[0]["pictures"])
    assert plain.pictures_above == plain.pictures


def test_the_same_words_about_another_picture_are_another_question():
    first, other = (shown_pictures(example_of([noise(8, width)]), FORM) for width in (16, 24))
    rows = [
        Sample(step, "how many?", "2", 1.0, pictures=x) for step, x in ((1, first), (1, other), (9, other), (9, first))
    ]
    early, late = first_and_last(rows, 2)
    assert [sample.pictures for sample in early] == [sample.pictures for sample in late] == [first, other]
