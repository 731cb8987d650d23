"""Pictures of records: read, resized as transformers does, cut into patches, or refused in one line."""

import base64
import contextlib
import dataclasses
import io
import json
import threading

import numpy as np
import pytest
import torch
from PIL import Image
from tiny_pictures import FORM, PLACEHOLDER, TEMPLATE, TOWER, picture, png, tokenizer

from funrl.data.json_lines import DataError
from funrl.data.order import ReorderedItems
from funrl.data.pictures import (
    PROCESSOR,
    PROCESSOR_CLASSES,
    WHOLE_PROCESSOR,
    expand_placeholders,
    patches_of,
    picture_form,
    picture_form_of,
    read_picture,
    with_picture_form,
)
from funrl.data.processors.form import fitting_size
from funrl.data.processors.reading import PictureReading, read_ahead
from funrl.data.prompt_format import PLAIN_PROMPTS
from funrl.data.prompts import Prompt, PromptError, check_prompts, encode, encode_prompts
from funrl.data.supervised import join_files, load_examples, text_example
from funrl.data.text_lengths import examples_ahead
from funrl.models import decoder_config
from funrl.models.vision.config import TowerForm, with_tower
from funrl.models.vision.tower import normalized


@pytest.mark.parametrize("size", [(32, 32), (48, 20), (37, 91), (300, 200), (8, 8)])
def test_patches_are_those_of_transformers(size):
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    bounds = {"shortest_edge": FORM.min_pixels, "longest_edge": FORM.max_pixels}
    processor = Qwen2VLImageProcessorPil(patch_size=4, merge_size=2, size=bounds)
    theirs = processor([picture(size)], return_tensors="pt")
    patches, grid = patches_of(picture(size), FORM)
    assert theirs["image_grid_thw"].tolist() == [[1, *grid]]
    ours = normalized(torch.from_numpy(patches), torch.float32).unsqueeze(2).expand(-1, -1, 2, -1, -1).flatten(1)
    assert (ours - theirs["pixel_values"]).abs().max() < 1e-6


def test_a_picture_comes_as_bytes_base64_an_object_an_array_or_a_file(tmp_path):
    whole = picture((12, 9))
    (tmp_path / "a.png").write_bytes(png(whole))
    given = [
        png(whole),
        "data:image/png;base64," + base64.b64encode(png(whole)).decode(),
        {"bytes": png(whole), "path": None},
        {"bytes": None, "path": str(tmp_path / "a.png")},
        str(tmp_path / "a.png"),
        np.asarray(whole),
        whole,
    ]
    assert all(np.array_equal(np.asarray(read_picture(x)), np.asarray(whole)) for x in given)


@pytest.mark.parametrize("mode", ["L", "RGBA", "P", "LA", "1"])
def test_grey_and_transparent_pictures_are_read_in_colours(mode):
    assert np.asarray(read_picture(png(picture((12, 8)).convert(mode)))).shape == (8, 12, 3)


def test_what_cannot_be_used_is_one_line(tmp_path):
    (tmp_path / "broken.png").write_bytes(png(picture((40, 40)))[:60])
    bad = {
        "is not there": str(tmp_path / "absent.png"),
        "cannot be read": str(tmp_path / "broken.png"),
        "cannot identify image file": b"no picture",
        "no base64": "data:image/png;base64,%%%",
        "not NoneType": {"bytes": None},
        "not int": 3,
        "cannot identify": b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n%%EndComments\n",
        r"an array \[4, 4, 3\] of int64 is no picture": np.zeros((4, 4, 3), dtype=np.int64),
    }
    for words, given in bad.items():
        with pytest.raises(DataError, match=words) as error:
            read_picture(given)
        assert "\n" not in str(error.value)
    with pytest.raises(DataError, match="4000 x 1 pixels: one side is more than 200 times"):
        fitting_size(1, 4000, FORM)


def test_a_huge_picture_is_refused_by_its_head(monkeypatch):
    monkeypatch.setattr("funrl.data.pictures.MOST_STORED_PIXELS", 100)
    with pytest.raises(DataError, match="has 40 x 40 pixels; resize it"):
        read_picture(png(picture((40, 40))))


def test_a_placeholder_becomes_one_for_each_token_of_its_picture():
    seen = expand_placeholders([5, PLACEHOLDER, 6, PLACEHOLDER], [picture((16, 8)), picture((8, 8), 1)], FORM)
    assert seen.tokens == [5, PLACEHOLDER, PLACEHOLDER, 6, PLACEHOLDER]
    assert seen.owned.values["grids"].tolist() == [[2, 4], [2, 2]]
    assert seen.owned.digest != expand_placeholders([PLACEHOLDER], [picture((8, 8), 2)], FORM).owned.digest


def test_prompts_have_pictures_where_they_say_or_before_the_text():
    both = {"images": [picture((16, 8)), png(picture((8, 8)))]}
    parts = [{"type": "text", "text": "a"}, {"type": "image"}, {"type": "text", "text": "b"}, {"type": "image"}]
    chat = encode(Prompt([{"role": "user", "content": parts}], both), tokenizer())
    verl = encode(Prompt([{"role": "user", "content": "a<image>b<image>"}], both), tokenizer())
    inner = [{**part, "image": x} for part, x in zip([parts[1], parts[3]], both["images"], strict=True)]
    own = encode(Prompt([{"role": "user", "content": [parts[0], inner[0], parts[2], inner[1]]}], {}), tokenizer())
    assert chat.tokens == verl.tokens == own.tokens and chat.tokens.count(PLACEHOLDER) == 3
    assert chat.owned is not None and own.owned is not None and chat.owned.digest == own.owned.digest
    text = encode(Prompt("ab", {"image": picture((16, 8))}), tokenizer())
    placed = encode(Prompt("<image>ab", {"image": picture((16, 8))}), tokenizer())
    assert text.tokens == placed.tokens and text.tokens.count(PLACEHOLDER) == 2


def test_a_prompt_without_pictures_owns_none():
    example = encode(Prompt("ab", {}), tokenizer())
    assert example.owned is not None and example.owned.empty


@pytest.mark.parametrize(
    "record,words",
    [
        ({"prompt": "a<|image|>b"}, "1 places for pictures .* and 0 pictures; a text may not hold"),
        ({"prompt": "a", "images": ["/no/such.png"]}, "is not there"),
        ({"prompt": "a", "images": "x.png"}, "'images' must be a list of pictures, not str"),
        ({"prompt": [{"role": "user", "content": [{"type": "image"}]}], "images": []}, "1 places"),
    ],
)
def test_records_are_refused_by_file_and_line(record, words):
    (prompt,) = check_prompts([record])
    with pytest.raises(PromptError, match=f"prompt 1: .*{words}"):
        encode(prompt, tokenizer())


def test_a_tokenizer_forgets_the_form_of_another_model():
    assert picture_form_of(with_picture_form(tokenizer(), None)) is None


def test_a_model_of_text_refuses_pictures():
    with pytest.raises(PromptError, match="the model reads text only"):
        encode(Prompt("a", {"images": [picture((8, 8))]}), tokenizer(form=None))


def test_a_demonstration_learns_its_completion_only():
    example = text_example(
        {"prompt": "ab", "completion": "cd", "images": [picture((16, 8))]}, "demonstrations", tokenizer()
    )
    (text,) = example.texts
    assert len(text.tokens) == len(text.trained) and sum(text.trained) == 3
    assert text.trained[-3:] == [True] * 3 and text.tokens.count(PLACEHOLDER) == 2
    with pytest.raises(DataError, match="preferences have no pictures"):
        record = {"prompt": "a", "chosen": "b", "rejected": "c", "images": [picture((8, 8))]}
        text_example(record, "preferences", tokenizer())


def test_threads_read_each_picture_once_ahead_of_its_use():
    reads = []

    def read(given, alone):
        assert alone
        reads.append((given, threading.current_thread().name.split("_")[0]))
        if given == "absent":
            raise DataError("it is not there")
        return np.zeros((4, 1), np.uint8), (2, 2)

    items = ["a", "b", "a", "absent", *"bca" * 30]
    for item, ready in read_ahead(items, lambda item: [item], PictureReading(read, lambda count: count == 1)):
        with pytest.raises(DataError, match="not there") if item == "absent" else contextlib.nullcontext():
            assert ready is not None and ready(item, True)[1] == (2, 2)
    assert sorted(reads) == [(name, "pictures") for name in ("a", "absent", "b", "c")]


def test_pictures_that_are_objects_are_read_when_they_are_used():
    """A column of `datasets` makes them anew at each access, so their numbers may be those of others."""
    threads = set()

    def read(given, alone):
        threads.add(threading.current_thread())
        return np.full((4, 1), given.size[0], np.uint8), (2, 2)

    sizes = [8 + n % 5 for n in range(100)]
    reading = PictureReading(read, lambda count: True)
    for size, ready in read_ahead(sizes, lambda size: [picture((size, 8))], reading):
        assert ready is not None and ready(picture((size, 8)), True)[0][0, 0] == size
    assert threads == {threading.main_thread()}


def test_prompts_and_demonstrations_share_the_pictures_of_a_file(tmp_path):
    paths = [tmp_path / f"{seed}.png" for seed in range(2)]
    for seed, path in enumerate(paths):
        picture((16, 8), seed).save(path)
    prompts = [Prompt("a<image>" + "b" * n, {"images": [str(paths[n % 2])]}, f"line {n}") for n in range(6)]
    read = encode_prompts(prompts, tokenizer(), PLAIN_PROMPTS)
    alone = [encode(prompt, tokenizer()) for prompt in prompts]
    assert [x.tokens for x in read] == [x.tokens for x in alone]
    assert [x.owned.digest for x in read] == [x.owned.digest for x in alone]
    assert len({x.owned.values["patches"].data_ptr() for x in read}) == 2
    with pytest.raises(PromptError, match=r"line 9: the picture .*absent.png is not there"):
        encode_prompts([*prompts, Prompt("a", {"image": "absent.png"}, "line 9")], tokenizer(), PLAIN_PROMPTS)
    file = tmp_path / "texts.jsonl"
    file.write_text("".join(f"{json.dumps({'prompt': p.prompt, 'completion': 'c', **p.fields})}\n" for p in prompts))
    texts = [load_examples(file, "demonstrations", tokenizer()) for _ in range(2)]
    mixed = list(examples_ahead(ReorderedItems(join_files(texts, [500, 500]), [7, 0, 8, 9]), range(4)))
    assert [x.owned[0].digest for x in mixed] == [alone[n].owned.digest for n in (1, 0, 2, 3)]
    assert mixed[0].owned[0].values["patches"].data_ptr() == mixed[3].owned[0].values["patches"].data_ptr()


def test_a_drawn_file_reads_as_it_was_saved():
    buffer = io.BytesIO()
    picture((9, 7)).save(buffer, "BMP")
    assert read_picture(buffer.getvalue()).size == (9, 7)
    assert isinstance(read_picture(buffer.getvalue()), Image.Image)


def seeing(family, **form):
    """The config of a tiny model of a family."""
    sizes = {"vocab": 16, "embed": 16, "layers": 1, "heads": 1, "kv_heads": 1, "head": 16, "mlp": 16}
    config = decoder_config(**sizes, rope_axes=(0, 0, 0, 0, 1, 1, 2, 2), max_positions=64, family=family)
    return with_tower(config, dataclasses.replace(TOWER, form=TowerForm(**form)))


@pytest.mark.parametrize("family", [name for name in PROCESSOR_CLASSES if name != "gemma3"])
def test_the_form_of_a_model_without_files_is_written_as_transformers_reads_it(family, tmp_path):
    from transformers import AutoImageProcessor

    form = picture_form(seeing(family, mean=(0.5, 0.4, 0.3), std=(0.5, 0.6, 0.7)))
    ((name, text),) = form.files
    (tmp_path / name).write_text(text)
    theirs = AutoImageProcessor.from_pretrained(tmp_path, backend="pil")([picture((31, 46))], return_tensors="pt")
    patches, grid = patches_of(picture((31, 46)), form)
    assert theirs["image_grid_thw"].tolist() == [[1, *grid]]
    ours = normalized(torch.from_numpy(patches), torch.float32, form.tower.form).unsqueeze(2).expand(-1, -1, 2, -1, -1)
    assert (ours.flatten(1) - theirs["pixel_values"]).abs().max() < 1e-6


def test_bounds_are_those_of_the_file_that_transformers_prefers(tmp_path):
    config = seeing("qwen2_5_vl")
    (tmp_path / PROCESSOR).write_text(json.dumps({"min_pixels": 64, "max_pixels": 1024}))
    (tmp_path / WHOLE_PROCESSOR).write_text(json.dumps({"processor_class": "Qwen2_5_VLProcessor"}))
    form = picture_form(config, str(tmp_path))
    assert (form.min_pixels, form.max_pixels) == (64, 1024) and len(form.files) == 2
    (tmp_path / WHOLE_PROCESSOR).write_text(
        json.dumps({"image_processor": {"size": {"shortest_edge": 128, "longest_edge": 2048}, "patch_size": 4}})
    )
    form = picture_form(config, str(tmp_path))
    assert (form.min_pixels, form.max_pixels) == (128, 2048)
    (tmp_path / PROCESSOR).unlink()
    assert [name for name, _ in picture_form(config, str(tmp_path)).files] == [WHOLE_PROCESSOR]


@pytest.mark.parametrize(
    "text,words",
    [
        ("{", "preprocessor_config.json is not JSON: "),
        ("[]", "preprocessor_config.json holds list, not an object"),
        (
            '{"patch_size": 14}',
            "preprocessor_config.json has patch_size 14, but the model takes 4; write that, or leave it out",
        ),
        ('{"image_mean": [0.5, 0.5, 0.5]}', r"image_mean \[0.5, 0.5, 0.5\], but the model takes \[0.48"),
        ('{"min_pixels": "64"}', "preprocessor_config.json has min_pixels '64'; it must be a whole number of pixels"),
        ('{"max_pixels": 1024.0}', "preprocessor_config.json has max_pixels 1024.0; it must be a whole number"),
        ('{"max_pixels": true}', "preprocessor_config.json has max_pixels True; it must be"),
        ('{"min_pixels": 0}', "preprocessor_config.json has min_pixels 0; it must be a whole number of pixels from 1"),
        ('{"size": {"longest_edge": -5}}', "preprocessor_config.json has size/longest_edge -5; it must be"),
        ('{"size": 448}', "preprocessor_config.json has size 448, not an object with shortest_edge and longest_edge"),
        ('{"min_pixels": 512, "size": {"longest_edge": 256}}', "min_pixels 512 is above size/longest_edge 256; write"),
        ('{"min_pixels": 100000}', "min_pixels 100000 is above the 81920 that max_pixels is by default; write"),
    ],
)
def test_files_of_another_processor_are_refused(text, words, tmp_path):
    (tmp_path / PROCESSOR).write_text(text)
    with pytest.raises(DataError, match=words):
        picture_form(seeing("qwen2_5_vl"), str(tmp_path))


def test_each_row_of_a_conversation_has_the_pictures_before_it():
    template = TEMPLATE.replace(":{% endfor %}{% endif %}", "{% endfor %}{% endif %}").removesuffix(":{% endfor %}")
    reasons = "{% if loop.last and m.reasoning_content %}{{ m.reasoning_content }}:{% endif %}"
    tokens = tokenizer()
    tokens.chat_template = (
        template.replace("{% if m.content is string %}", f"{reasons}{{% if m.content is string %}}", 1)
        + "{% if m.role == 'assistant' %}</s>{% else %}:{% endif %}{% endfor %}"
    )
    pictures = [png(picture((24, 16), seed)) for seed in range(3)]
    image, text = {"type": "image"}, {"type": "text", "text": "a"}
    messages = [
        {"role": "user", "content": [image, text]},
        {"role": "assistant", "content": "b", "reasoning_content": "c"},
        {"role": "user", "content": [text, image, image]},
        {"role": "assistant", "content": "d", "reasoning_content": "c"},
    ]
    for count, used in ((2, 1), (4, 3)):
        record = {"messages": messages[:count], "images": pictures[:used]}
        example = text_example(record, "demonstrations", tokens)
        last, owned = example.texts[-1], example.owned[-1]
        assert sum(last.trained) == 4 and len(example.texts) == count // 2
        merged = [patches_of(read_picture(x), FORM)[1] for x in pictures[:used]]
        assert last.tokens.count(PLACEHOLDER) == sum(rows * columns // 4 for rows, columns in merged)
        if count == 2:
            first, first_owned = last, owned
    assert example.texts[0] == first and example.owned[0].digest == first_owned.digest
    untrained = {"messages": [*messages[:3], messages[3] | {"train": False}], "images": pictures}
    example = text_example(untrained, "demonstrations", tokens)  # nothing of it is read after the first turn
    assert example.texts == (first,) and example.owned[0].digest == first_owned.digest
    with pytest.raises(DataError, match="pictures"):
        text_example({"messages": messages[:4], "images": pictures[:2]}, "demonstrations", tokens)
    with pytest.raises(DataError, match="pictures"):
        text_example({"messages": messages[:2], "images": pictures[:2]}, "demonstrations", tokens)
