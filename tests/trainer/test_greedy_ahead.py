"""Runs that write ahead, of an algorithm that compares rows with greedy completions: each group has one of its own."""

import dataclasses
import functools

import pytest
from selection import quick
from small_runs import small_job
from test_asynchronous_replay import repeated, trained
from test_episode_runs import Branching
from test_refilled_runs import ONE, TWO, equal, reward

from funrl.algos import corrected, importance_weights
from funrl.algos.filters.by_group import unequal_scores
from funrl.algos.recipes.remax import remax
from funrl.environments.logged import LoggedEnvironment
from funrl.mesh.launch import launch
from funrl.mesh.mesh import single
from funrl.rollout.episodes import Episode
from funrl.trainer.checkpoints.saved_rows import open_rows
from funrl.trainer.placement.logged import read_groups

pytestmark = pytest.mark.gloo
STEPS = 3
SETTINGS = {"minibatches": 1, "steps": STEPS, "max_new_tokens": 12, "eval_every": 9, "save_rollouts": 1}
EPISODES = {"task": "calculator", "reward": None, "samples_per_prompt": 3}


def stale_remax():
    return corrected(remax(kl_coef=0.0), importance_weights("token", high=2.0))


def filtered_remax():
    return dataclasses.replace(stale_remax(), filter=unequal_scores())


RUNS = {
    "strict": (stale_remax, ONE),
    "filter, window": (filtered_remax, TWO),
    "episodes": (filtered_remax, TWO | EPISODES),
}


def job_of(compose, **settings):
    return small_job(compose, **{"reward": reward} | SETTINGS | settings)


class Sequential(Branching):
    """One turn after another; many episodes have the same reward."""

    agents = ("policy",)

    async def run(self, policy, example, seed):
        first, trajectory = await policy.sample(policy.start(example.tokens), max_tokens=3)
        last, trajectory = await policy.sample(policy.extend(trajectory, [5, 6]), max_tokens=3)
        return Episode([trajectory], {"policy": float(sum(example.tokens + first.tokens + last.tokens) % 3 == 0)})


def with_environment(job, environment):
    return dataclasses.replace(job, task=job.task._replace(environment=environment))


@pytest.mark.parametrize("name", quick(RUNS, []))
def test_a_run_with_greedy_completions_is_repeated_with_the_same_bits(name, tmp_path):
    compose, settings = RUNS[name]
    episodes = "episodes" in name
    job = job_of(compose, **settings)
    again = job_of(compose, **{**(EPISODES if episodes else {}), "save_rollouts": 0})
    if episodes:
        again = with_environment(again, LoggedEnvironment(Branching.agents))
        job = with_environment(job, Sequential())
    error, steps = launch(functools.partial(trained, tmp_path, job), job.launched, "cpu")
    assert error is None and len(steps) == STEPS
    log = read_groups(tmp_path)
    assert log is not None
    scores = set()
    for step, groups in log.by_step.items():
        assert len(groups) == 4 and (episodes or all(len(group.switches) == 3 for group in groups))
        table = open_rows(tmp_path / "rollouts", step).row_fields("drawn")
        scores |= set(table["greedy_score"].tolist())
    assert len(scores) > 1
    done = repeated(tmp_path, again, single())
    assert [
        (step_again.step, str(part)) for step_again in done for part in step_again.differences if not part.agrees(0.0)
    ] == []
    assert {"greedy_score", "advantage", "tokens"} <= {part.name for part in done[-1].differences}


def constant(prompt, completion, **fields):
    return 0.25 + equal(prompt)


@pytest.mark.slow
def test_a_greedy_score_is_that_of_the_prompt_of_its_rows(tmp_path):
    job = small_job(stale_remax, reward=constant, **SETTINGS | TWO)
    error, _ = launch(functools.partial(trained, tmp_path, job), job.launched, "cpu")
    assert error is None
    for step in range(1, STEPS + 1):
        table = open_rows(tmp_path / "rollouts", step).row_fields("drawn")
        assert table["greedy_score"].tolist() == table["score"].tolist()
    assert len(set(table["score"].tolist())) == 2
