"""Agents that frozen models answer for: an earlier self of the policy, one that is renewed, a model of a directory."""

import functools

import pytest
import torch
from small_runs import GRPO, SIZES, SMALL, assert_same, resized, steps_program

from funrl.mesh.launch import launch
from funrl.rollout.episodes import Episode
from funrl.trainer.jobs.prepare import prepare
from funrl.trainer.jobs.provenance import Given
from funrl.trainer.settings.settings import settings_of


class Rivals:
    """Two agents write in turn after each other's tokens; each earns the share of its tokens that are odd."""

    agents = ("policy", "rival")

    async def run(self, policy, example, seed):
        mine = policy.start(example.tokens)
        theirs = policy.start(example.tokens, agent="rival")
        for _ in range(2):
            said, mine = await policy.sample(mine, max_tokens=3)
            answer, theirs = await policy.sample(policy.extend(theirs, said.tokens), max_tokens=3)
            mine = policy.extend(mine, answer.tokens)
        own = [node for node in mine.nodes() if node.sampled]
        rewards = {"policy": self.odd(own), "rival": self.odd(node for node in theirs.nodes() if node.sampled)}
        return Episode([mine, theirs], rewards)

    def odd(self, nodes):
        tokens = [token for node in nodes for token in node.tokens]
        return sum(token % 2 for token in tokens) / len(tokens)


def job_of(environment=None, **settings):
    given = Given(environment=environment or Rivals(), records=[{"prompt": f"{n}+{n}="} for n in range(24)])
    flags = SMALL | {"samples_per_prompt": 3, "agents": "rival:frozen"} | settings
    return resized(prepare(settings_of(**flags), functools.partial(GRPO, kl_coef=0.0), given), SIZES)


@functools.cache
def steps_of_mesh(mesh, agents):
    job = job_of(agents=agents, mesh=mesh)
    return launch(steps_program(job, 3), job.sizes, "cpu")


MESHES = ["dp2", *(pytest.param(mesh, marks=pytest.mark.slow) for mesh in ("tp2", "dp2,tp2", "sp2"))]


@pytest.mark.gloo
@pytest.mark.parametrize("mesh", MESHES)
def test_frozen_agents_give_the_same_numbers_on_every_mesh(mesh):
    one, other = steps_of_mesh(mesh, "rival:frozen:2"), steps_of_mesh("dp1", "rival:frozen:2")
    assert_same(one, other, 1e-9)
    for metrics in other["metrics"]:
        assert metrics["episodes/turns"] == 2 and metrics["rollout/logprob_gap_max"] < 1e-10


def test_only_the_policys_turns_have_rows():
    for batch in steps_of_mesh("dp1", "rival:frozen")["batches"]:
        assert not batch.agent.any() and len(batch.score) == 12
        assert (batch.mask.sum(1) <= 6).all()


def test_an_earlier_self_stays_or_is_renewed():
    kept, renewed, same = (
        steps_of_mesh("dp1", f"rival:{role}")["batches"] for role in ("frozen", "frozen:2", "policy")
    )
    for one, other in zip(kept[:2], renewed[:2], strict=True):
        assert torch.equal(one.tokens, other.tokens)  # both are the first weights
    assert not torch.equal(kept[2].tokens, renewed[2].tokens)
    assert same[0].agent.max() == 1
