"""Runs on the embedded task with pictures, and learning from pictures of one color."""

import functools
import json

import numpy as np
import pytest
from small_runs import GRPO, SMALL, begin, scored_batch

import funrl
from funrl.api.warm_start import sft_flags
from funrl.data.pictures import picture_url
from funrl.mesh.mesh import single
from funrl.models.huggingface.directories import save
from funrl.tasks import shapes
from funrl.trainer.jobs.prepare import prepare
from funrl.trainer.settings.settings import settings_of
from funrl.trainer.startup import random_weights


def test_an_untrained_decoder_answers_questions_about_pictures(monkeypatch):
    monkeypatch.setattr(shapes, "TRAINING_PICTURES", 64)
    flags = SMALL | {"task": "shapes", "max_new_tokens": None}
    job = prepare(settings_of(**flags), functools.partial(GRPO, kl_coef=0.0))
    batch = scored_batch(*begin(job, single()))[0].batch
    assert job.task.embedded and batch.grids.values.tolist() == [[4, 4]] * len(batch.score)
    assert ((batch.score == 0) | (batch.score == 1)).all()


def colors(path, seed, count):
    """Write pictures of one color with noise, the same question about each, and the color's name."""
    draw, records = np.random.default_rng(seed), []
    for name in (list(shapes.COLORS) * count)[:count]:
        noise = draw.integers(-shapes.SHADE, shapes.SHADE + 1, (32, 32, 3))
        pixels = np.clip(shapes.COLORS[name] + noise, 0, 255).astype(np.uint8)
        records.append({"prompt": "colors:", "completion": f" {name}", "images": [picture_url(pixels)]})
    path.write_text("\n".join(map(json.dumps, records)))
    return str(path)


def names_it(prompt, completion, answer, **fields):
    return float(completion == answer)


@pytest.mark.slow
def test_imitation_and_reinforcement_learn_from_pictures(tmp_path, monkeypatch):
    monkeypatch.setattr(shapes, "TRAINING_PICTURES", 64)
    blind = 1 / 3  # share of the right answers of a model that does not see the pictures
    job = prepare(settings_of(task="shapes", warmstart_steps=12, device="cpu"), GRPO)
    save(tmp_path / "initial", job.model, random_weights(job), job.tokenizer)
    flags = {"device": "cpu", "compile": "off", "eval_data": colors(tmp_path / "heldout.jsonl", 1, 24)}
    flags |= sft_flags(job) | {"batch_prompts": 24, "lr_schedule": "constant"}
    shown = colors(tmp_path / "shown.jsonl", 0, 240)
    sft = funrl.train("sft", model=str(tmp_path / "initial"), data=shown, run_dir=str(tmp_path / "sft"), **flags)
    asked = {"prompts": colors(tmp_path / "asked.jsonl", 2, 96), "fields": "answer:completion", "reward": names_it}
    asked |= {"batch_prompts": 12, "samples_per_prompt": 6, "minibatches": 1, "max_new_tokens": 2, "steps": 8}
    run = funrl.train("grpo", model=f"{sft.run_dir}/model", run_dir=str(tmp_path / "grpo"), **flags | asked)
    assert run.outcome.first["eval/accuracy"] > 2 * blind
    rewards = [row["reward/mean"] for row in run.metrics]
    assert sum(rewards[:2]) / 2 + 0.15 < sum(rewards[-2:]) / 2 > blind + 0.1
