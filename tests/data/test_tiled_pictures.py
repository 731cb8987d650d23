"""Pictures of LLaVA-OneVision: cut into tiles and counted as transformers does."""

import json

import numpy as np
import pytest
import torch
from tiny_pictures import picture

from funrl.data.json_lines import DataError
from funrl.data.pictures import (
    PROCESSOR,
    expand_placeholders,
    patches_of,
    picture_form,
    with_most_pixels,
    with_picture_form,
)
from funrl.data.prompts import Prompt, encode
from funrl.data.tokenizer import character_tokenizer
from funrl.environments.chat import expanded_tokens
from funrl.models import decoder_config
from funrl.models.errors import ModelError
from funrl.models.vision.config import PictureLayout, TowerConfig, TowerForm, with_tower
from funrl.models.vision.grids import picture_tokens
from funrl.models.vision.inputs import GRIDS
from funrl.models.vision.tiles import NO_TILES, Tiles
from funrl.models.vision.tower import normalized

PATCH, SIDE, PIXELS = 4, 3, 14  # pixels of a patch, patches of a side of a tile, and its pixels: two fill no patch
TILES = Tiles(PIXELS, SIDE, ((1, 1), (1, 2), (2, 1), (2, 2), (3, 2), (1, 3)), most=2)
MARKS = ("<image>", "<video>")
SIZES = [(14, 14), (28, 14), (48, 20), (61, 50), (9, 91), (30, 3), (200, 187), (5, 5)]


@pytest.fixture
def tokenizer():
    made = character_tokenizer("abcd:\n")
    made.add_special_tokens({"additional_special_tokens": list(MARKS)})
    made.chat_template = (
        "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}"
        "{% for c in m.content %}{{ '<image>' if c.type == 'image' else c.text }}{% endfor %}{% endif %}:{% endfor %}"
    )
    return with_picture_form(made, picture_form(config_of(made)))


def config_of(tokenizer):
    placeholder, video = tokenizer.convert_tokens_to_ids(list(MARKS))
    sizes = {"vocab": 48, "embed": 16, "layers": 1, "heads": 1, "kv_heads": 1, "head": 16, "mlp": 16}
    tower = TowerConfig(
        layers=1,
        embed=8,
        heads=1,
        inner=8,
        patch=PATCH,
        merge=1,
        window=None,
        placeholder=placeholder,
        banned=(video,),
        form=TowerForm(mean=(0.5,) * 3, std=(0.5,) * 3),
        layout=PictureLayout(tiles=TILES),
    )
    return with_tower(decoder_config(**sizes, max_positions=64, family="llava_onevision"), tower)


@pytest.fixture
def theirs(tokenizer, tmp_path):
    """The processor of transformers, less that of videos, which needs torchvision."""
    from transformers import AutoImageProcessor
    from transformers.models.llava_onevision.processing_llava_onevision import LlavaOnevisionProcessor

    ((name, text),) = tokenizer.picture_form.files
    (tmp_path / name).write_text(text)
    processor = LlavaOnevisionProcessor.__new__(LlavaOnevisionProcessor)
    processor.image_processor = AutoImageProcessor.from_pretrained(tmp_path, backend="pil")
    processor.num_image_tokens, processor.vision_feature_select_strategy = SIDE**2, "full"
    processor.vision_aspect_ratio, processor.image_token = f"anyres_max_{TILES.most}", MARKS[0]
    return processor


def check(theirs, pictures, form, alone):
    """Compare patches and numbers of tokens with those of transformers."""
    seen = theirs.image_processor(pictures if alone else [pictures], return_tensors="pt")
    for number, given in enumerate(pictures):
        patches, grid = patches_of(given, form, alone)
        ours = normalized(torch.from_numpy(patches), torch.float32, form.tower.form)
        ours = ours.view(-1, SIDE, SIDE, 3, PATCH, PATCH).permute(0, 3, 1, 4, 2, 5).flatten(4).flatten(2, 3)
        expected = seen["pixel_values"][number][: len(ours), :, : SIDE * PATCH, : SIDE * PATCH]
        assert (ours - expected).abs().max() < 1e-6 and not seen["pixel_values"][number][len(ours) :].any()
        text = theirs.replace_image_token(seen, number)
        assert text == MARKS[0] * picture_tokens(grid, form.tower)


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_tiles_and_tokens_are_those_of_transformers(size, tokenizer, theirs):
    check(theirs, [picture(size)], tokenizer.picture_form, alone=True)


def test_several_pictures_of_a_prompt_are_overviews_as_in_transformers(tokenizer, theirs):
    pictures = [picture(size, number) for number, size in enumerate(SIZES[2:5])]
    check(theirs, pictures, tokenizer.picture_form, alone=False)
    assert patches_of(pictures[0], tokenizer.picture_form, alone=False)[1] == NO_TILES


def test_a_conversation_has_the_tokens_of_its_turns(tokenizer):
    """A picture that comes by itself is cut, whatever pictures come after the reply."""
    pictures = [picture(size, number) for number, size in enumerate(((20, 30), (14, 14), (9, 5)))]
    parts = [[{"type": "image", "image": x} for x in given] for given in (pictures[:1], pictures[1:])]
    asked = [[{"role": "user", "content": content}] for content in parts]
    reply = {"role": "assistant", "content": "a"}
    placeholder = tokenizer.picture_form.tower.placeholder
    turns = [expanded_tokens([placeholder] * n, asked[n - 1], tokenizer) for n in (1, 2)]
    tokens, owned = expanded_tokens([placeholder] * 3, [*asked[0], reply, *asked[1]], tokenizer)
    assert tokens == turns[0][0] + turns[1][0]
    assert owned.values[GRIDS].tolist() == [[30, 20], [*NO_TILES], [*NO_TILES]]


def test_tokens_of_prompts_are_those_of_transformers(tokenizer, theirs):
    row, two = {"images": [picture((61, 50))]}, {"images": [picture((9, 5)), picture((24, 24), 1)]}
    chat = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image"}]}]
    for prompt, given, images in ((chat, row, row["images"]), ("<image>a<image>", two, [two["images"]])):
        seen = theirs.image_processor(images, return_tensors="pt")
        text = "a<image>:" if prompt is chat else prompt
        for number in range(text.count(MARKS[0])):
            text = text.replace(MARKS[0], theirs.replace_image_token(seen, number).replace("<image>", "\0"), 1)
        expected = tokenizer.encode(text.replace("\0", "<image>"), add_special_tokens=False)
        assert encode(Prompt(prompt, given), tokenizer).tokens == expected


def test_random_sizes_have_the_tokens_of_transformers(tokenizer, theirs):
    draw = np.random.default_rng(0)
    pinpoints = theirs.image_processor.image_grid_pinpoints
    assert pinpoints == [[rows * PIXELS, columns * PIXELS] for rows, columns in TILES.canvases]
    for height, width in draw.integers(2, 400, (300, 2)).tolist():
        expected = theirs._get_number_of_features(height, width, PIXELS, PIXELS)
        assert picture_tokens((height, width), tokenizer.picture_form.tower) == expected


def test_pictures_that_cannot_be_cut_are_refused(tokenizer):
    form = tokenizer.picture_form
    with pytest.raises(DataError, match="one side is more than 200 times the other"):
        expand_placeholders([form.tower.placeholder], [picture((900, 4))], form)
    with pytest.raises(DataError, match="the model takes pictures in tiles of 14 x 14 pixels; leave it out"):
        with_most_pixels(form, 1024)
    with pytest.raises(ModelError, match="tiles of 14 pixels have 3 patches a side, which are not 2 tokens of 1"):
        TowerConfig(
            layers=1,
            embed=8,
            heads=1,
            inner=8,
            patch=4,
            merge=1,
            placeholder=1,
            layout=PictureLayout(tiles=TILES.__class__(PIXELS, 2, ((1, 1),), 9)),
        )


@pytest.mark.parametrize(
    "fields,words",
    [
        ({"size": {"height": 20, "width": 20}}, "size {'height': 20, 'width': 20}, but the model takes {'height': 14"),
        (
            {"image_grid_pinpoints": [[14, 14]]},
            r"image_grid_pinpoints \[\[14, 14\]\], but the model takes \[\[14, 14\], ",
        ),
        ({"resample": 2}, "resample 2, but the model takes 3"),
        ({"do_pad": False}, "do_pad False, but the model takes True"),
    ],
)
def test_files_of_another_processor_are_refused(fields, words, tokenizer, tmp_path):
    (tmp_path / PROCESSOR).write_text(json.dumps(fields))
    with pytest.raises(DataError, match=words):
        picture_form(config_of(tokenizer), str(tmp_path))
