"""Runs on the embedded task with pictures."""

import functools

import pytest
from small_runs import GRPO, SMALL, begin, scored_batch

import funrl
from funrl.mesh.mesh import single
from funrl.trainer.jobs.prepare import prepare
from funrl.trainer.settings.settings import settings_of


def test_an_untrained_decoder_answers_questions_about_pictures():
    flags = SMALL | {"task": "shapes", "max_new_tokens": None}
    job = prepare(settings_of(**flags), functools.partial(GRPO, kl_coef=0.0))
    batch = scored_batch(*begin(job, single()))[0].batch
    assert job.task.embedded and batch.grids.values.tolist() == [[4, 4]] * len(batch.score)
    assert ((batch.score == 0) | (batch.score == 1)).all()


@pytest.mark.slow
def test_reinforcement_removes_the_errors_of_the_demonstrator(tmp_path):
    most_frequent = 0.45  # share of the held-out questions whose answer is 1
    flags = {"task": "shapes", "warmstart_steps": 300, "steps": 15, "eval_every": 15, "device": "cpu"}
    run = funrl.train("grpo", run_dir=str(tmp_path / "run"), **flags)
    first, last = run.outcome.first["eval/accuracy"], run.outcome.last["eval/accuracy"]
    assert first < most_frequent < last - 0.2
