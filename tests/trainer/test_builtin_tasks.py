"""The embedded tasks with environments make episodes that can be trained on, and are learned."""

import functools
from importlib.util import find_spec

import pytest
from selection import quick
from small_runs import GRPO, SMALL, begin, scored_batch

import funrl
from funrl.mesh.mesh import single
from funrl.tasks.embedded import TASK_NAMES, embedded_task
from funrl.trainer.jobs.prepare import prepare
from funrl.trainer.settings.settings import settings_of

NAMES = [name for name in TASK_NAMES if embedded_task(name).environment is not None]


def skip_without_library(task):
    if task == "search" and find_spec("bm25s") is None:
        pytest.skip("bm25s is not installed: pip install 'funrl[environments]'")


@pytest.mark.parametrize("task", quick(NAMES, ["retry", "search", "guessing"]))
def test_an_untrained_decoder_makes_episodes(task):
    skip_without_library(task)
    flags = SMALL | {"task": task, "batch_prompts": 2, "samples_per_prompt": 2, "max_new_tokens": None}
    job = prepare(settings_of(**flags), functools.partial(GRPO, kl_coef=0.0))
    batch = scored_batch(*begin(job, single()))[0].batch
    assert ((batch.score >= 0) & (batch.score <= 1)).all() and len(batch.score) >= 4
    assert job.task.embedded and job.warmstart_steps == SMALL["warmstart_steps"]


@pytest.mark.slow
def test_a_few_steps_improve_on_the_demonstrator(tmp_path):
    skip_without_library("search")
    flags = {"task": "search", "steps": 6, "batch_prompts": 64, "eval_prompts": 64}
    run = funrl.train("grpo", run_dir=str(tmp_path / "run"), **flags)
    assert run.metrics[-1]["reward/mean"] > run.metrics[0]["reward/mean"] + 0.2
