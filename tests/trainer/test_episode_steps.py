"""Algorithms with turns on rows of episodes: who wrote what, states, and runs on the calculator."""

import math

import pytest
import torch
from small_runs import begin, one_step, scored_batch
from test_episode_runs import episode_job

from funrl.algos import acted_tokens, echo, observed_tokens, recipe
from funrl.environments.adapters import message_environment
from funrl.mesh.mesh import single
from funrl.rollout.episodes import Episode, Node, Trajectory
from funrl.tasks.calculator import calculator_environment
from funrl.trainer.sources.episode_rows import rows_of_episodes
from funrl.trainer.sources.generation import RowForm

RECIPES = ("gigpo", "mt_grpo", "hierarchical_grpo", "rae", "echo")


def reply(parent, *tokens):
    logp = torch.zeros(len(tokens))
    return Node(parent, tokens, True, logp, logp, torch.ones(len(tokens), dtype=torch.int64), finish="stop")


def heard(parent, role, *tokens):
    return Node(parent, tokens, False, messages=[] if role is None else [{"role": role, "content": ""}])


def test_authors_and_states_of_tokens():
    """What several rows share is in the first; the state is what was said since the reply before, or its name."""
    prompt = heard(None, "user", 1, 2)
    first = reply(prompt, 3)
    tool = heard(first, "tool", 4, 5)
    left, right = reply(tool, 6), reply(tool, 7)
    end = reply(heard(heard(left, "user", 8), None, 9), 6)
    other = reply(heard(reply(heard(None, "user", 1, 3), 3), "tool", 4, 5), 9)
    named = Episode([Trajectory("policy", x) for x in (end, right)], {"policy": 1.0}, states={right: "room"})
    episodes = [(0, named), (1, Episode([Trajectory("policy", other)], {"policy": 0.0}))]
    batch = rows_of_episodes(episodes, 2, 2, RowForm(), single())[0].batch
    assert batch.author[:, :9].tolist() == [
        [0, 0, 1, 2, 2, 1, 3, 2, 1],  # raw tokens are a tool's
        [0, 0, 0, 0, 0, 1, 0, 0, 0],
        [0, 0, 1, 2, 2, 1, 0, 0, 0],
    ]
    states = batch.state.tolist()
    assert states[0][5] == states[2][5] != states[0][2] and states[0][2] != states[2][2]
    assert states[1][5] not in (0, states[0][5]) and 0 < states[0][8] < 2**31


class Rooms:
    """Two rooms; an even reply leads out of the first."""

    def reset(self, example, seed):
        self.state, self.turns = "hall", 0
        return [{"role": "user", "content": example.text}], []

    def step(self, message):
        self.turns += 1
        self.state = "garden" if len(message["content"]) % 2 else "hall"
        return [{"role": "user", "content": str(self.turns)}], float(len(message["content"]) % 2), self.turns == 3

    def close(self): ...


def test_a_message_environment_names_its_states():
    job = episode_job(recipe("gigpo"), message_environment(Rooms), samples_per_prompt=4)
    run, state = begin(job, single())
    batch = scored_batch(run, state)[0].batch
    assert len(batch.state[batch.mask].unique()) == 2
    assert batch.advantage[batch.mask].unique().numel() > 4


def test_observations_are_learned_and_counted_once():
    """What tools wrote is in the mask beside the policy's own tokens, with no advantage."""
    job = episode_job(echo, calculator_environment(), samples_per_prompt=4)
    run, state = begin(job, single())
    batch = scored_batch(run, state)[0].batch
    observed, acted = observed_tokens(batch), acted_tokens(batch) & batch.mask
    assert torch.equal(acted, batch.sampled) and torch.equal(batch.mask, acted | observed)
    assert torch.equal(observed, ~batch.sampled & (batch.author == 2))
    assert (batch.advantage[observed] == 0).all()


@pytest.mark.parametrize("name", [*RECIPES[:1], *(pytest.param(n, marks=pytest.mark.slow) for n in RECIPES[1:])])
def test_a_recipe_trains_on_the_calculator(name):
    job = episode_job(recipe(name), calculator_environment(), samples_per_prompt=4, max_new_tokens=12)
    run, state = begin(job, single())
    for _ in range(2):
        state, metrics = one_step(run, state)
        assert all(math.isfinite(x) for x in metrics.values())
        assert metrics["actor/grad_norm"] >= 0
