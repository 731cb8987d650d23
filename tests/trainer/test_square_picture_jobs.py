"""Runs of models with pictures of fixed sizes from files: squares of a Gemma 3, and tiles of a LLaVA-OneVision."""

import json

import numpy as np
import pytest
import torch
from picture_runs import save_square_model, save_tiled_model
from PIL import Image
from selection import quick
from small_runs import GRPO, SMALL

import funrl
from funrl.algos.recipes.sft import sft
from funrl.data.pictures import PROCESSOR
from funrl.mesh.mesh import single
from funrl.models.huggingface.directories import load
from funrl.trainer.jobs.prepare import prepare
from funrl.trainer.jobs.row_source import text_rows
from funrl.trainer.settings.settings import settings_of

SAVE = {"square": save_square_model, "tiled": save_tiled_model}
SQUARES = pytest.mark.parametrize("folder", ["square"], indirect=True)


@pytest.fixture(scope="module", params=quick(SAVE, ["square"]))
def folder(request, tmp_path_factory):
    path = tmp_path_factory.mktemp(request.param)
    SAVE[request.param](path / "model")
    draw = np.random.default_rng(0)
    for number, size in enumerate(((16, 16), (40, 9), (5, 31))):
        pixels = draw.integers(0, 256, (*size[::-1], 3), dtype=np.uint8)
        Image.fromarray(pixels).save(path / f"{number}.png")
    shown = [["0.png"], [], ["1.png", "2.png"]]
    prompts = [{"prompt": "a cab ?", "images": [str(path / x) for x in shown[i % 3]]} for i in range(12)]
    write(path / "prompts.jsonl", prompts)
    write(path / "texts.jsonl", [{**record, "completion": "b"} for record in prompts])
    (path / "reward.py").write_text("def score(prompt, completion, **fields):\n    return len(completion)\n")
    return path


def write(path, records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def given(folder):
    return {"model": str(folder / "model"), "prompts": str(folder / "prompts.jsonl"), "reward_workers": 0} | {
        "reward": f"{folder / 'reward.py'}:score"
    }


@SQUARES
def test_all_pictures_of_files_have_one_size(folder):
    job = prepare(settings_of(**SMALL | given(folder)), GRPO)
    tower = job.model.config.tower
    for example in (*job.task.prompts, *job.task.heldout):
        grids = example.owned.values["grids"].tolist()
        assert grids == [[4, 4]] * len(example.fields["images"])
        assert example.tokens.count(tower.placeholder) == 4 * len(grids)
    texts = {name: x for name, x in SMALL.items() if name not in ("samples_per_prompt", "max_new_tokens")}
    job = prepare(settings_of(**texts, model=str(folder / "model"), data=str(folder / "texts.jsonl")), sft)
    batch = text_rows(job, single(), list(job.task.examples)[:3]).batch
    assert batch.mask.sum(1).tolist() == [2, 2, 2]


@pytest.mark.parametrize("folder", ["tiled"], indirect=True)
def test_a_picture_alone_has_tiles_and_several_are_overviews(folder):
    job = prepare(settings_of(**SMALL | given(folder)), GRPO)
    tower = job.model.config.tower
    shown = {tuple(map(tuple, x.owned.values["grids"].tolist())): x.tokens for x in job.task.prompts}
    tokens = {grids: ids.count(tower.placeholder) for grids, ids in shown.items()}
    assert tokens == {((16, 16),): 4 + 4 + 2, (): 0, ((0, 0), (0, 0)): 2 * (4 + 1)}
    with pytest.raises(ValueError, match="--max_pixels=256: the model takes pictures in tiles of 8 x 8 pixels"):
        prepare(settings_of(**SMALL | given(folder), max_pixels=256), GRPO)


@SQUARES
@pytest.mark.parametrize(
    "flags,words",
    [
        ({"mesh": "sp2", "generate_mesh": "dp2"}, "the policy is a gemma3, whose tokens of a picture see one another"),
        ({"max_pixels": 256}, "--max_pixels=256: the model takes every picture as 16 x 16 pixels; leave it out"),
    ],
)
def test_what_it_cannot_do_is_refused_by_name(folder, flags, words):
    with pytest.raises(ValueError, match=words):
        prepare(settings_of(**SMALL | given(folder) | flags), GRPO)


@pytest.mark.gloo
@pytest.mark.slow
def test_it_learns_on_two_ranks_and_what_it_saves_opens_in_transformers(folder, tmp_path):
    from transformers import AutoImageProcessor, AutoModelForImageTextToText

    small = SMALL | given(folder) | {"mesh": "dp2", "steps": 2, "dtype": "float64"}
    result = funrl.train("grpo", run_dir=str(tmp_path / "run"), **small)
    assert all(row["rollout/logprob_gap_max"] < 1e-12 for row in result.metrics)
    saved = tmp_path / "run" / "model"
    theirs = AutoModelForImageTextToText.from_pretrained(saved)
    first = AutoModelForImageTextToText.from_pretrained(folder / "model")
    changed = {
        n for (n, x), y in zip(first.named_parameters(), theirs.parameters(), strict=True) if not torch.equal(x, y)
    }
    assert any("projector" in name for name in changed) and not any("encoder" in name for name in changed)
    tower = load(saved)[0].config.tower
    side = 16 if tower.layout.tiles is None else tower.layout.tiles.pixels
    assert AutoImageProcessor.from_pretrained(saved, backend="pil").size.height == side
    assert (saved / PROCESSOR).read_text() == (folder / "model" / PROCESSOR).read_text()


def test_it_generates_from_messages_with_pictures(folder):
    def messages(*names):
        parts = [{"type": "image", "image": str(folder / name)} for name in names]
        return [{"role": "user", "content": [*parts, {"type": "text", "text": "a cab"}]}]

    prompts = [messages("0.png"), messages("1.png", "2.png"), messages(), "a cab", messages("0.png")]
    texts = funrl.generate(folder / "model", prompts, max_new_tokens=12)
    assert texts[0] == texts[4] and len(set(texts)) > 1
    assert texts == funrl.generate(folder / "model", prompts, max_new_tokens=12, mesh="dp2")
