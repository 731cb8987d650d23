"""The embedded task with pictures: drawings, demonstrator, reward, and that its text fits its tokenizer and model."""

import itertools

import numpy as np
import pytest
from einops import rearrange

from funrl.data.pictures import expand_placeholders, picture_form, read_picture
from funrl.models.vision.model import model_of_config
from funrl.tasks import shapes as s
from funrl.tasks.embedded import embedded_task, has_tokenizer_of

TASK = embedded_task("shapes")


def drawn(seed, count, split="train"):
    return list(itertools.islice(s.drawings(seed, split), count))


def test_pictures_hold_what_their_cells_say():
    stamps = s.stamps()
    assert [stamps[name].sum() for name in s.SHAPE_NAMES] == [144, 84]
    for drawing in drawn(0, 50):
        assert 1 <= (drawing.cells >= 0).sum() <= 4 and drawing.counts.max() <= s.MOST_OF_A_KIND
        cells = rearrange(drawing.pixels.astype(int), "(rows h) (columns w) c -> (rows columns) h w c", h=16, w=16)
        for inside, kind in zip(cells, drawing.cells, strict=True):
            painted = (inside != s.BACKGROUND).any(-1)
            if kind < 0:
                assert not painted.any()
                continue
            color, shape = s.COLORED_SHAPES[kind]
            assert painted.sum() == stamps[shape].sum()
            assert (np.abs(inside[painted] - s.COLORS[color]) <= s.SHADE).all()


@pytest.mark.slow
def test_the_splits_share_no_picture():
    splits = [{x.pixels.tobytes() for x in drawn(seed, 300, split)} for seed, split in ((0, "train"), (0, "heldout"))]
    assert len(splits[0]) == len(splits[1]) == 300 and not splits[0] & splits[1]
    assert TASK.heldout_prompts(5) == TASK.heldout_prompts(9)[:5]


def test_the_demonstrator_describes_well_and_counts_badly():
    records = s.picture_demonstrations(0, 800)
    right = s.picture_demonstrations(0, 800, overlooks=0.0)
    assert records == s.picture_demonstrations(0, 800) != s.picture_demonstrations(1, 800)
    short = 0
    for number, (record, truth) in enumerate(zip(records, right, strict=True)):
        place = number % (2 + s.COUNTS_A_PICTURE)
        if place < 2:
            assert record == truth and len(record["completion"].split()) == s.CELLS
            continue
        assert record["prompt"] == truth["prompt"] and record["images"] == truth["images"]
        short += int(truth["completion"]) - int(record["completion"])
        assert int(truth["completion"]) - int(record["completion"]) in (0, 1)
    assert 0.15 < short / 600 < s.OVERLOOKS


@pytest.mark.parametrize("completion,score", [("3", 1.0), ("2", 0.0), ("3 ", 0.0), ("", 0.0)])
def test_only_the_exact_number_is_rewarded(completion, score):
    assert s.exact_count("how many red squares?", completion, answer="3", images=[]) == score


@pytest.mark.slow
def test_the_text_fits_the_tokenizer_and_the_model(tmp_path):
    tokenizer = TASK.tokenizer()
    config = model_of_config(TASK.model_config(32)).config
    assert config.attention.head == 32 and len(tokenizer) == config.vocab
    assert (tokenizer.pad_token_id, (tokenizer.eos_token_id,)) == (config.special_tokens.pad, config.special_tokens.eos)
    form = picture_form(config)
    for record in TASK.demonstrations(0, 40):
        text = record["prompt"] + record["completion"]
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text
        expanded = expand_placeholders(ids, record["images"], form)
        assert expanded.tokens.count(config.tower.placeholder) == s.CELLS
        assert len(expanded.tokens) < config.max_positions
    for prompt in (*TASK.training_prompts(3)[:20], *TASK.heldout_prompts(20)):
        answer = prompt.fields["answer"]
        assert TASK.reward(prompt.prompt, answer, **prompt.fields) == 1.0
        assert len(tokenizer.encode(answer)) < TASK.max_new_tokens
        assert read_picture(prompt.fields["images"][0]).size == (32, 32)
    tokenizer.save_pretrained(tmp_path)
    assert has_tokenizer_of("shapes", tmp_path)
    assert TASK.tokens != embedded_task("arithmetic").tokens
