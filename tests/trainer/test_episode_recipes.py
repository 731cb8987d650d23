"""Every recipe that samples trains on rows of episodes, or is refused before the run."""

import math

import pytest
import torch
from small_runs import SMALL, begin, one_step, scored_batch
from test_episode_runs import Branching, episode_job

from funrl.algos.recipes import NAMES, recipe
from funrl.mesh.mesh import single
from funrl.trainer.jobs.prepare import prepare
from funrl.trainer.settings.declaration import SettingsError, run_kind
from funrl.trainer.settings.settings import settings_of

REFUSED = {
    "online_dpo": "--task=calculator: the algorithm compares two completions",
    "spin": "--task=calculator: the algorithm compares two completions",
    "gdpo": "--task=calculator: the algorithm reads the scores of several reward functions",
    "distillation": "give --teacher=DIR",
    "gkd": "give --teacher=DIR",
}
SAMPLING = [name for name in NAMES if run_kind(recipe(name)(), None) == "rl"]


class Verdicts(Branching):
    """Rewards of 0 and 1, as PRIME needs them."""

    def reward(self, *replies):
        return float(sum(map(sum, replies)) % 2)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in SAMPLING if name not in REFUSED])
def test_a_recipe_trains_on_episodes(name):
    job = episode_job(recipe(name), Verdicts(), samples_per_prompt=4)
    run, state = begin(job, single())
    for _ in range(2):
        state, metrics = one_step(run, state)
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
