"""Prompts that a curriculum chooses ahead: by what is known when the first group of their batch may begin."""

import dataclasses
import functools
import json

import pytest
import torch
from small_runs import GRPO, remove_later_checkpoints, small_job
from test_asynchronous_replay import repeated, trained
from test_refilled_runs import stale_dapo

from funrl.algos.recipes.rollout_is import rollout_is
from funrl.data.order import places_in_order
from funrl.mesh.launch import launch
from funrl.mesh.mesh import single
from funrl.trainer.placement.groups import ChosenPrompts
from funrl.trainer.placement.logged import read_groups
from funrl.trainer.settings.declaration import SettingsError
from funrl.trainer.sources.curriculum import PromptSchedule, weighing

STALENESS, STEPS = 1, 4
SETTINGS = {"minibatches": 1, "steps": STEPS, "max_new_tokens": 12, "eval_every": 9, "save_rollouts": 1}
SETTINGS |= {"place": "train:dp1 generate:dp2", "staleness": STALENESS}


def wanted(prompt, step):
    """True of the prompts of a step: by their first digit, which is not that of the steps around it."""
    return prompt["prompt"][0] in "13579" if step % 2 else prompt["prompt"][0] in "02468"


def weighed_job(folder, **flags):
    """A run whose curriculum notes the step that it is called for, and the newest metric of a step that it knows."""

    def choose(prompts, metrics, step, pass_rates):
        measured = int((pass_rates == pass_rates).sum())
        with (folder / "calls.jsonl").open("a") as file:
            file.write(json.dumps([step, metrics.get("response_length/mean"), measured]) + "\n")
        return [float(wanted(prompt, step)) for prompt in prompts]

    job = small_job(rollout_is, **SETTINGS | flags)
    return dataclasses.replace(job, task=job.task._replace(curriculum=choose))


def check_prompts(job, log):
    """Each group has a prompt of its step's weights, and none comes twice."""
    positions = []
    for step, groups in log.by_step.items():
        for group in groups:
            place = int(places_in_order(job.task.prompts, 1, 0, group.position)[0])
            assert wanted({"prompt": job.task.prompts[place].text}, step), (step, group.position)
        positions += [group.position for group in groups]
        ages = [step - version for group in groups for sample in group.switches for _, version in sample]
        assert min(ages) >= 0 and max(ages) <= STALENESS
    assert len(positions) == len(set(positions)) == STEPS * 4 and positions == sorted(positions)


@pytest.mark.gloo
@pytest.mark.slow
def test_a_batch_is_chosen_by_the_steps_that_are_known_when_it_begins(tmp_path):
    job = weighed_job(tmp_path)
    error, steps = launch(functools.partial(trained, tmp_path, job), job.launched, "cpu")
    assert error is None and [step for step, _ in steps] == list(range(1, STEPS + 1))
    lengths = [None] * (STALENESS + 1) + [metrics["response_length/mean"] for _, metrics in steps]
    calls = [json.loads(line) for line in (tmp_path / "calls.jsonl").read_text().splitlines()]
    assert [step for step, _, _ in calls] == list(range(1, STEPS + 1))
    assert [length for _, length, _ in calls] == lengths[:STEPS]
    assert [measured for _, _, measured in calls] == [0] * (STALENESS + 1) + [4, 8]
    log = read_groups(tmp_path)
    check_prompts(job, log)
    assert all(metrics["curriculum/chosen_share"] < 1 for _, metrics in steps[: STEPS - STALENESS])
    done = repeated(tmp_path, weighed_job(tmp_path, place=None, staleness=0, save_rollouts=0), single())
    assert [
        (step_again.step, str(part)) for step_again in done for part in step_again.differences if not part.agrees(0.0)
    ] == []
    assert len(done) == STEPS and len((tmp_path / "calls.jsonl").read_text().splitlines()) == STEPS


@pytest.mark.gloo
@pytest.mark.slow
def test_a_resumed_run_keeps_the_prompts_that_were_chosen(tmp_path):
    flags = {"save_every": "1", "keep_checkpoints": 9}
    job = weighed_job(tmp_path, **flags)
    launch(functools.partial(trained, tmp_path, job), job.launched, "cpu")
    remove_later_checkpoints(tmp_path / "checkpoints", 2)
    again = weighed_job(tmp_path, **flags, resume=True, run_dir=str(tmp_path))
    error, steps = launch(functools.partial(trained, tmp_path, again), again.launched, "cpu")
    assert error is None and [step for step, _ in steps] == list(range(3, STEPS + 1))
    check_prompts(job, read_groups(tmp_path))
    calls = [json.loads(line)[0] for line in (tmp_path / "calls.jsonl").read_text().splitlines()]
    assert calls == [*range(1, STEPS + 1), *range(3 + STALENESS, STEPS + 1)]


def test_further_batches_are_chosen_once():
    job = small_job(GRPO)
    schedule = PromptSchedule(
        job.task.prompts, 4, 0, weighing(job.task.prompts, lambda step: called(step), None, (), single())
    )
    steps = []

    def called(step):
        steps.append(step)
        return [float(wanted({"prompt": prompt.text}, step)) for prompt in job.task.prompts]

    empty = ChosenPrompts(torch.zeros(0, dtype=torch.int64))
    chosen, memory, metrics = empty.extended(schedule, schedule.weighing.init(), range(1, 3))
    assert steps == [1, 2] and len(chosen.positions) == 8 and chosen.end == chosen.positions[-1] + 1
    assert metrics["curriculum/passed_over"] == int(chosen.end - 1 - chosen.positions[3]) - 4
    later, _, metrics = chosen._replace(positions=chosen.positions[4:]).extended(schedule, memory, range(2, 4))
    assert steps == [1, 2, 3] and later.positions[:4].tolist() == chosen.positions[4:].tolist()
    assert chosen.extended(schedule, memory, range(1, 3))[2] == {}


REFUSED = [
    ({"window": 2}, rollout_is, "--staleness=1 with --difficulty=0.2,0.8 and --window=2: the batches"),
    ({}, stale_dapo, "and --max_refills=8: what takes the place of a prompt"),
]


@pytest.mark.parametrize("flags,compose,problem", REFUSED)
def test_what_other_prompts_may_come_between_is_refused(flags, compose, problem):
    with pytest.raises(SettingsError, match=problem):
        small_job(compose, **{"place": "generate:1", "staleness": 1, "difficulty": "0.2,0.8"} | flags)
