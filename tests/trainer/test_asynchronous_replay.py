"""An asynchronous run is written and trained again, from the log of its groups, with the same bits."""

import asyncio
import dataclasses
import functools
import random
from typing import Any

import pytest
import torch
from selection import quick
from small_runs import Quiet, remove_later_checkpoints, small_job
from test_episode_runs import Branching

from funrl.algos.recipes.rollout_is import rollout_is
from funrl.environments.logged import LoggedEnvironment
from funrl.mesh.launch import launch
from funrl.mesh.mesh import single
from funrl.trainer.checkpoints.saved_episodes import read_episodes
from funrl.trainer.checkpoints.saved_rows import open_rows
from funrl.trainer.placement.logged import logged_source, read_groups
from funrl.trainer.placement.ranks import run_rank
from funrl.trainer.replay import replay

pytestmark = pytest.mark.gloo
STEPS = 4
SETTINGS = {"minibatches": 1, "steps": STEPS, "max_new_tokens": 12, "eval_every": 9, "save_every": "2"}
WINDOW = {"place": "train:dp1 generate:dp2", "staleness": 1, "window": 3}
MASKS = {"top_p": 0.8, "mask_replay": True}
RUNS = {
    "strict": ({"place": "train:dp1 generate:dp1", "staleness": 2}, {}),
    "dp2": ({"place": "train:dp2 generate:1", "staleness": 2, **MASKS}, {"mesh": "dp2", **MASKS}),
}


def trained(folder, job, mesh):
    observer = Quiet(str(folder / "checkpoints"))
    outcome = run_rank(job, mesh, observer)
    return outcome.error, observer.steps


def repeated(folder, job, mesh):
    source = functools.partial(logged_source, read_groups(folder))
    return replay(job, folder, None, mesh, Quiet(), source)


@pytest.mark.slow
@pytest.mark.parametrize("name", quick(RUNS, ["strict"]))
def test_a_run_written_ahead_is_repeated_with_the_same_bits(name, tmp_path):
    placed, together = RUNS[name]
    job = small_job(rollout_is, save_rollouts=1, **SETTINGS, **placed)
    error, steps = launch(functools.partial(trained, tmp_path, job), job.launched, "cpu")
    assert error is None and len(steps) == STEPS
    log = read_groups(tmp_path)
    assert log is not None
    bound = 2
    for step, groups in log.by_step.items():
        assert len(groups) == 4 and len({group.position for group in groups}) == 4
        ages = [step - version for group in groups for sample in group.switches for _, version in sample]
        assert min(ages) >= 0 and max(ages) <= bound
    assert sorted(group.position for groups in log.by_step.values() for group in groups) == list(range(4 * STEPS))
    again = small_job(rollout_is, **SETTINGS, **together)
    program = functools.partial(repeated, tmp_path, again)
    done = launch(program, again.launched, "cpu") if together else program(single())
    assert [item.step for item in done] == list(range(1, STEPS + 1))
    assert [
        (step_again.step, str(part)) for step_again in done for part in step_again.differences if not part.agrees(0.0)
    ] == []
    compared = {part.name for part in done[-1].differences}
    assert {"tokens", "version", "rollout_logp", "age/mean", "weights of policy by their digests"} <= compared
    assert ({"kept", "kept_counts"} <= compared) == ("mask_replay" in together)


class Delayed:
    """An environment whose turns take random times, so that no two runs are written alike."""

    def __init__(self, environment):
        self.environment = environment
        self.agents = getattr(environment, "agents", ())

    async def run(self, policy, example, seed):
        request = policy.request

        async def later(*arguments):
            await asyncio.sleep(random.SystemRandom().uniform(0, 0.03))
            return await request(*arguments)

        policy.request = later
        return await self.environment.run(policy, example, seed)


def episode_run(environment, **settings):
    """A job of episodes."""
    settings = {"task": "calculator", "reward": None, "episode_turns": 3, "samples_per_prompt": 3} | settings
    job: Any = small_job(rollout_is, save_rollouts=1, **SETTINGS | settings)
    return dataclasses.replace(job, task=job.task._replace(environment=environment))


@pytest.mark.slow
def test_episodes_written_ahead_are_repeated_with_the_same_bits(tmp_path):
    job = episode_run(Delayed(Branching()), place="train:dp1 generate:dp2", staleness=1)
    error, steps = launch(functools.partial(trained, tmp_path, job), job.launched, "cpu")
    assert error is None and len(steps) == STEPS
    versions = [
        set(torch.as_tensor(node.versions).tolist())
        for step in range(1, STEPS + 1)
        for logged in read_episodes(tmp_path / "rollouts", step)
        for end in logged.episode.ends
        for node in end.nodes()
        if node.sampled
    ]
    assert len(set.union(*versions)) > 2
    done = repeated(tmp_path, episode_run(LoggedEnvironment(Branching.agents)), single())
    assert [item.step for item in done] == list(range(1, STEPS + 1))
    assert [(element.step, str(part)) for element in done for part in element.differences if not part.agrees(0.0)] == []
    turns = [part.total for step_again in done for part in step_again.differences if part.kind == "turns"]
    assert len(turns) == STEPS and min(turns) >= 12
    compared = {part.name for part in done[-1].differences}
    assert {"tokens", "version", "rollout_logp", "age/mean", "episodes/turns", "turns of the episodes"} <= compared


@pytest.mark.slow
def test_a_resumed_run_takes_each_group_once(tmp_path):
    check_resumed(tmp_path, functools.partial(small_job, rollout_is, **SETTINGS | WINDOW))


def check_resumed(folder, job_of):
    """A run of four steps that is resumed after two takes each of its 16 groups once."""
    job_of = functools.partial(job_of, save_rollouts=1, save_every="1", keep_checkpoints=4)
    job = job_of()
    launch(functools.partial(trained, folder, job), job.launched, "cpu")
    remove_later_checkpoints(folder / "checkpoints", 2)
    again = job_of(resume=True, run_dir=str(folder))
    error, steps = launch(functools.partial(trained, folder, again), again.launched, "cpu")
    assert error is None and [step for step, _ in steps] == [3, 4]
    log = read_groups(folder)
    assert log is not None
    assert sorted(group.position for groups in log.by_step.values() for group in groups) == list(range(4 * STEPS))


def test_a_run_by_turns_has_no_log_of_groups(tmp_path):
    job = small_job(rollout_is, save_rollouts=1, minibatches=1, steps=1, eval_every=9)
    trained(tmp_path, job, single())
    assert "groups" not in open_rows(tmp_path / "rollouts", 1).record and read_groups(tmp_path) is None
