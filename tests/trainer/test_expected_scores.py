"""The expected score of a prompt, by its earlier samples, beside a loop over the steps of a run."""

import dataclasses

import pytest
from selection import quick
from small_runs import assert_same, begin, one_step, run_steps, scored_batch, small_job

from funrl.algos.recipes.spo import spo
from funrl.mesh.mesh import single
from funrl.trainer.jobs.job import RLJob
from funrl.trainer.settings.declaration import SettingsError

GIVEN = {"compose": spo, "samples_per_prompt": 1, "batch_prompts": 8}


def test_each_measurement_halves_the_weight_of_the_earlier_ones():
    job = small_job(reward=lambda prompt, completion, **_: len(completion) - 2, **GIVEN)
    assert isinstance(job, RLJob)
    few = job.task.prompts[:12]
    run, state = begin(dataclasses.replace(job, task=job.task._replace(prompts=few)), single())
    passes, samples = {}, {}
    seen = 0
    for _ in range(4):
        rows, _, _ = scored_batch(run, state)
        batch = rows.batch
        prompts = [tuple(batch.tokens[i, : int(batch.mask[i].int().argmax())].tolist()) for i in range(8)]
        rates = [passes[p] / samples[p] for p in passes]
        prior = sum(rates) / len(rates) if rates else 0.5
        for prompt, value in zip(prompts, batch.prompt_value.tolist(), strict=True):
            known = prompt in passes
            seen += known
            assert value == pytest.approx(passes[prompt] / samples[prompt] if known else prior, abs=1e-12)
        for prompt in set(prompts):  # one may come twice in a step
            scores = [score for p, score in zip(prompts, batch.score.tolist(), strict=True) if p == prompt]
            passes[prompt] = passes.get(prompt, 0.0) / 2 + sum(scores)
            samples[prompt] = samples.get(prompt, 0.0) / 2 + len(scores)
        state, _ = one_step(run, state)
    assert seen > 10


@pytest.mark.parametrize("mesh", quick(["dp2", "tp2"], ["dp2"]))
def test_a_run_has_the_same_numbers_on_every_mesh(mesh):
    assert_same(run_steps(2, **GIVEN), run_steps(2, mesh=mesh, **GIVEN), 1e-9)


def test_what_measures_nothing_is_refused():
    with pytest.raises((SettingsError, ValueError), match="prompt_value"):
        small_job(**GIVEN, new_tokens_per_step=2)
