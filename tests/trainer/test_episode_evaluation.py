"""Evaluations by episode: one that failed or is unscored is left out, and never 0."""

import numpy as np
import pytest
from small_runs import GRPO, MEASURED, Quiet, begin
from test_episode_runs import episode_job

from funrl.mesh.launch import launch
from funrl.mesh.mesh import single
from funrl.rollout.episodes import Episode

PROMPTS, SAMPLES = 5, 4


class Moody:
    """Rewards of 0 and 1. Some prompts have only episodes that fail or are unscored, some have a few of these."""

    async def run(self, policy, example, seed):
        _, trajectory = await policy.sample(policy.start(example.tokens), max_tokens=2)
        number = sum(example.tokens) % PROMPTS
        if number == 1 and seed % 2:
            raise RuntimeError("no such place")
        unscored = number == 1 or (number == 2 and seed % 2)
        return Episode([trajectory], {"policy": None if unscored else float(trajectory.leaf.tokens[0] % 2)})


def evaluation(mesh, environment=Moody):
    """Metrics that two runs of the same episodes share, and the table of rows."""
    job = episode_job(
        GRPO,
        environment(),
        mesh=str(mesh),
        eval_samples=SAMPLES,
        eval_temperature=1.0,
        eval_prompts=20,
        episode_retries=0,
    )
    show = Quiet()
    run, state = begin(job, mesh, show)
    metrics = run.source.evaluate(state.roles, 5)
    return {name: metrics[name] for name in metrics if not name.endswith(MEASURED)}, show.table


def test_an_unscored_episode_is_in_no_mean():
    metrics, table = evaluation(single())
    rewards = [row.reward for row in table]
    assert rewards == [None if row.correct is None else float(row.correct) for row in table]
    scored = [[x for x in rewards[i : i + SAMPLES] if x is not None] for i in range(0, 80, SAMPLES)]
    means = [np.mean(own) for own in scored if own]
    assert 0 < metrics["eval/prompts/unscored"] == sum(not own for own in scored) / 20 < 1
    lost = metrics["eval/episodes/failed"] + metrics["eval/episodes/unscored"]
    assert metrics["eval/episodes/failed"] > 0 and lost == pytest.approx(1 - sum(map(len, scored)) / 80)
    assert metrics["eval/accuracy"] == metrics["eval/reward"] == pytest.approx(np.mean(means))
    assert metrics["eval/pass@4"] == pytest.approx(np.mean([max(r) for r in scored if len(r) == 4]))
    assert metrics["eval/accuracy_ci_low"] < metrics["eval/accuracy"] < metrics["eval/accuracy_ci_high"]
    assert {len(own) for own in scored} > {0, 4}, "no prompt lost a part of its episodes"


@pytest.mark.slow
@pytest.mark.gloo
def test_the_same_numbers_on_every_mesh():
    expected = evaluation(single())
    assert launch(evaluation, episode_job(GRPO, Moody(), mesh="dp2").sizes, "cpu") == expected


class Silent(Moody):
    async def run(self, policy, example, seed):
        _, trajectory = await policy.sample(policy.start(example.tokens), max_tokens=2)
        return Episode([trajectory], {"policy": None})


def test_without_any_scored_episode_there_is_no_mean():
    metrics, _ = evaluation(single(), Silent)
    assert metrics["eval/prompts/unscored"] == metrics["eval/episodes/unscored"] == 1
    assert not {"eval/reward", "eval/accuracy", "eval/pass@4"} & metrics.keys()
