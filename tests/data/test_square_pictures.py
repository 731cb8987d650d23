"""Pictures of Gemma 3: squashed to a square as transformers does, and the text of its processor around them."""

import json

import pytest
import torch
from tiny_pictures import picture

from funrl.data.json_lines import DataError
from funrl.data.pictures import (
    PROCESSOR,
    expand_placeholders,
    flags_after,
    patches_of,
    picture_form,
    with_most_pixels,
    with_picture_form,
)
from funrl.data.prompts import Prompt, encode
from funrl.data.supervised import text_example
from funrl.data.tokenizer import character_tokenizer
from funrl.environments.chat import collapsed_tokens, expanded_tokens
from funrl.models import decoder_config
from funrl.models.vision.config import PictureLayout, TowerConfig, TowerForm, with_tower
from funrl.models.vision.tower import normalized
from funrl.rollout.episodes import Node

SIDE, MERGE, PATCH = 4, 2, 6  # patches of a side, of a token, and pixels of one
TOKENS = (SIDE // MERGE) ** 2
MARKS = ("<bos>", "<start_of_image>", "<image_soft_token>", "<end_of_image>")
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for c in m.content %}{{ '<start_of_image>' if c.type == 'image' else c.text }}{% endfor %}{% endif %}"
    ":{% endfor %}"
)


@pytest.fixture
def tokenizer():
    made = character_tokenizer("abcd:\n<>ofimgestrn_")
    made.add_special_tokens({"bos_token": MARKS[0], "additional_special_tokens": list(MARKS[1:])})
    made.chat_template = TEMPLATE
    return with_picture_form(made, picture_form(config_of(made)))


def config_of(tokenizer):
    bos, begin, placeholder, end = tokenizer.convert_tokens_to_ids(list(MARKS))
    sizes = {"vocab": 48, "embed": 16, "layers": 1, "heads": 1, "kv_heads": 1, "head": 16, "mlp": 16}
    config = decoder_config(**sizes, max_positions=64, family="gemma3", bos=bos)
    tower = TowerConfig(
        layers=1,
        embed=8,
        heads=1,
        inner=8,
        patch=PATCH,
        merge=MERGE,
        window=None,
        placeholder=placeholder,
        begin=begin,
        end=end,
        form=TowerForm(mean=(0.5,) * 3, std=(0.5,) * 3),
        layout=PictureLayout(side=SIDE, frame="\n\n", mutual=True),
    )
    return with_tower(config, tower)


@pytest.mark.parametrize("size", [(24, 24), (48, 20), (7, 91), (300, 1), (200, 200)])
def test_pixels_are_those_of_transformers(size, tokenizer, tmp_path):
    from transformers import AutoImageProcessor

    form = tokenizer.picture_form
    ((name, text),) = form.files
    (tmp_path / name).write_text(text)
    processor = AutoImageProcessor.from_pretrained(tmp_path, backend="pil")
    theirs = processor([picture(size)], return_tensors="pt")["pixel_values"]
    patches, grid = patches_of(picture(size), form)
    assert grid == (SIDE, SIDE) and processor.image_seq_length == TOKENS
    ours = normalized(torch.from_numpy(patches), torch.float32, form.tower.form)
    blocks = SIDE // MERGE
    ours = ours.view(blocks, blocks, MERGE, MERGE, 3, PATCH, PATCH).permute(4, 0, 2, 5, 1, 3, 6)
    assert (ours.reshape(1, 3, SIDE * PATCH, SIDE * PATCH) - theirs).abs().max() < 1e-6


def test_tokens_are_those_of_transformers_processor(tokenizer):
    # what Gemma3Processor makes of the template's text, which has one token for a picture
    whole = f"\n\n{MARKS[1]}{MARKS[2] * TOKENS}{MARKS[3]}\n\n"
    parts = [{"type": "text", "text": "a"}, {"type": "image"}, {"type": "image"}, {"type": "text", "text": "b"}]
    images = {"images": [picture((9, 5)), picture((24, 24), 1)]}
    chat = encode(Prompt([{"role": "user", "content": parts}], images), tokenizer)
    expected = tokenizer.encode(f"<bos>a{whole}{whole}b:", add_special_tokens=False)
    assert chat.tokens == expected
    marked = encode(Prompt("a<image><image>b", images), tokenizer)
    assert marked.tokens == expected[1:-1]
    before = encode(Prompt("ab", {"image": picture((9, 5))}), tokenizer)
    assert before.tokens[:2] == [tokenizer.picture_form.tower.begin, tokenizer.picture_form.tower.placeholder]


def test_pictures_without_a_place_come_after_the_token_that_begins_a_text(tokenizer):
    form = tokenizer.picture_form
    tower = form.tower
    seen = expand_placeholders([form.bos, 5, 6], [picture((9, 5))], form)
    assert seen.tokens == [form.bos, tower.begin, *[tower.placeholder] * TOKENS, tower.end, 5, 6]
    flags = flags_after([form.bos, 5, 6], [True, False, True], seen, form)
    assert flags == [True, *[False] * (TOKENS + 3), True]


def test_words_of_a_user_that_read_as_a_picture_stay_text(tokenizer):
    message = {"role": "user", "content": f"a{MARKS[1]}"}
    example = encode(Prompt([message], {}), tokenizer)
    assert tokenizer.picture_form.tower.begin not in example.tokens and example.owned.empty


def test_a_demonstration_and_a_turn_of_an_episode_have_the_same_tokens(tokenizer):
    content = [{"type": "image", "image": picture((9, 5))}, {"type": "text", "text": "a"}]
    messages = [{"role": "user", "content": content}]
    prompt = encode(Prompt(messages, {}), tokenizer)
    text = text_example({"prompt": messages, "completion": "b"}, "demonstrations", tokenizer)
    assert text.texts[0].tokens[: len(prompt.tokens)] == prompt.tokens and text.owned[0].digest == prompt.owned.digest
    node = Node(None, tuple(prompt.tokens), False, owned=prompt.owned)
    once = list(collapsed_tokens(node, tokenizer))
    assert once.count(tokenizer.picture_form.tower.placeholder) == 1
    assert expanded_tokens(once, messages, tokenizer)[0] == prompt.tokens


@pytest.mark.parametrize(
    "fields,words",
    [
        ({"size": {"height": 20, "width": 20}}, "size {'height': 20, 'width': 20}, but the model takes {'height': 24"),
        ({"resample": 3}, "resample 3, but the model takes 2"),
        ({"image_seq_length": 256}, "image_seq_length 256, but the model takes 4"),
        ({"do_pan_and_scan": True}, "do_pan_and_scan True, but the model takes False"),
        ({"image_std": [0.2, 0.2, 0.2]}, "image_std"),
    ],
)
def test_files_of_another_processor_are_refused(fields, words, tokenizer, tmp_path):
    (tmp_path / PROCESSOR).write_text(json.dumps(fields))
    with pytest.raises(DataError, match=words):
        picture_form(config_of(tokenizer), str(tmp_path))


def test_a_published_file_is_taken_and_no_bound_on_pixels(tokenizer, tmp_path):
    published = {
        "do_pan_and_scan": None,
        "do_resize": True,
        "resample": 2,
        "image_mean": [0.5] * 3,
        "do_normalize": True,
    }
    (tmp_path / PROCESSOR).write_text(json.dumps({**published, "size": {"height": 24, "width": 24}}))
    form = picture_form(config_of(tokenizer), str(tmp_path))
    assert (form.min_pixels, form.max_pixels) == (576, 576)
    with pytest.raises(DataError, match="the model takes every picture as 24 x 24 pixels; leave it out"):
        with_most_pixels(form, 1024)
