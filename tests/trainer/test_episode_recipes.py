"""Recipes that sample train on rows of episodes, or are refused before the run."""

import collections
import math

import pytest
import torch
from selection import unlike_recipes
from small_runs import SMALL, begin, one_step, scored_batch
from test_episode_runs import Branching, episode_job

from funrl.algos.recipes import NAMES, recipe
from funrl.mesh.mesh import single
from funrl.rollout.episodes import Episode
from funrl.trainer.jobs.prepare import prepare
from funrl.trainer.settings.declaration import SettingsError, run_kind
from funrl.trainer.settings.settings import settings_of

REFUSED = {
    "online_dpo": "--task=calculator: the algorithm compares two completions",
    "spin": "--task=calculator: the algorithm compares two completions",
    "gdpo": "--task=calculator: the algorithm reads the scores of several reward functions",
    "distillation": "give --teacher=DIR",
    "gkd": "give --teacher=DIR",
    "sdpo": "give --teacher=DIR",
    "iw_opd": "give --teacher=DIR",
    "mopd": "give --teacher=DIR",
}
OF_TURNS = ("gigpo", "mt_grpo", "hierarchical_grpo", "echo", "rae")  # which read the turns of episodes
TRAINED = [
    name
    for name in NAMES
    if run_kind(recipe(name)(), None) == "rl" and name in {*unlike_recipes(), *OF_TURNS} - {*REFUSED}
]


class Verdicts(Branching):
    """Rewards of 0 and 1, as PRIME needs them."""

    def reward(self, *replies):
        return float(sum(map(sum, replies)) % 2)


@pytest.mark.slow
@pytest.mark.parametrize("name", TRAINED)
def test_a_recipe_trains_on_episodes(name):
    job = episode_job(recipe(name), Verdicts(), samples_per_prompt=4)
    run, state = begin(job, single())
    _, metrics = one_step(run, state)
    assert all(math.isfinite(x) for x in metrics.values())


@pytest.mark.parametrize("name", REFUSED)
def test_a_recipe_that_cannot_is_refused(name):
    with pytest.raises(SettingsError, match=REFUSED[name]):
        prepare(settings_of(**SMALL | {"task": "calculator"}), recipe(name))


def test_a_demonstration_is_an_episode_of_its_own():
    run, state = begin(episode_job(recipe("chord"), Branching()), single())
    batch = scored_batch(run, state)[0].batch
    given = batch.demonstration.any(1)
    assert given.sum() == len(set(batch.episode[given].tolist()) - set(batch.episode[~given].tolist())) == 4
    assert batch.episode_first[given].all() and (batch.advantage[given] == 0).all()
    assert torch.equal(batch.episode_tokens[given], batch.mask[given].sum(1))


class Moody:
    """Two agents with a reward each; the third episode of a prompt of an odd sum fails, which is the greedy one."""

    agents = ("policy", "other")

    def __init__(self):
        self.runs = collections.Counter()

    async def run(self, policy, example, seed):
        _, first = await policy.sample(policy.start(example.tokens), max_tokens=2)
        _, second = await policy.sample(policy.start([7, *example.tokens], agent="other"), max_tokens=2)
        self.runs[example.text] += 1
        if self.runs[example.text] > 2 and sum(example.tokens) % 2:
            raise RuntimeError("no such place")
        return Episode([first, second], {"policy": 1.0, "other": 3.0})


def test_a_greedy_baseline_is_of_the_same_agent_and_none_where_its_episode_failed():
    job = episode_job(recipe("remax"), Moody(), samples_per_prompt=2, batch_prompts=8)
    run, state = begin(job, single())
    batch = scored_batch(run, state)[0].batch
    assert 0 < len(batch.group.unique()) < 8
    assert torch.equal(batch.greedy_score, 1 + 2 * batch.agent.double())
