"""Runs on the embedded task with pictures."""

import functools

from small_runs import GRPO, SMALL, begin, scored_batch

from funrl.mesh.mesh import single
from funrl.trainer.jobs.prepare import prepare
from funrl.trainer.settings.settings import settings_of


def test_an_untrained_decoder_answers_questions_about_pictures():
    flags = SMALL | {"task": "shapes", "max_new_tokens": None}
    job = prepare(settings_of(**flags), functools.partial(GRPO, kl_coef=0.0))
    batch = scored_batch(*begin(job, single()))[0].batch
    assert job.task.embedded and batch.grids.values.tolist() == [[1, 6]] * len(batch.score)
    assert ((batch.score == 0) | (batch.score == 1)).all()
