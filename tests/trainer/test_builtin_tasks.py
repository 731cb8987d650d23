"""The embedded tasks with environments make episodes that can be trained on, in which there is something to learn."""

import functools
from importlib.util import find_spec

import pytest
from selection import quick
from small_runs import GRPO, SMALL, begin, scored_batch

from funrl.mesh.mesh import single
from funrl.tasks import search
from funrl.tasks.embedded import TASK_NAMES, embedded_task
from funrl.trainer.jobs.prepare import prepare
from funrl.trainer.settings.settings import settings_of

NAMES = [name for name in TASK_NAMES if embedded_task(name).environment is not None]


def skip_without_library(task):
    if task == "search" and find_spec("bm25s") is None:
        pytest.skip("bm25s is not installed: pip install 'funrl[environments]'")


@pytest.mark.slow
@pytest.mark.parametrize("task", quick(NAMES, ["retry", "search", "guessing"]))
def test_an_untrained_decoder_makes_episodes(task):
    skip_without_library(task)
    flags = SMALL | {"task": task, "batch_prompts": 2, "samples_per_prompt": 2, "max_new_tokens": None}
    job = prepare(settings_of(**flags), functools.partial(GRPO, kl_coef=0.0))
    batch = scored_batch(*begin(job, single()))[0].batch
    assert ((batch.score >= 0) & (batch.score <= 1)).all() and len(batch.score) >= 4
    assert job.task.embedded and job.warmstart_steps == SMALL["warmstart_steps"]


def test_the_environment_pays_who_searches_by_the_whole_question_and_seldom_the_demonstrator():
    skip_without_library("search")
    score = search.search_task().environment()._score
    whole, others = [], []
    for record in search.search_conversations(0, 1000):
        question, first, *_ = [message["content"] for message in record["messages"]]
        paid = score(record["messages"], answer=search.facts()[question])
        (whole if first == f"{search.SEARCH}{question}{search.END_OF_CALL}" else others).append(paid)
    assert len(whole) > 50 and set(whole) == {1.0}
    assert set(others) == {0.0, 1.0} and sum(others) / len(others) < 0.2
