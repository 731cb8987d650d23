"""A policy that answers from a log: environments run again without an engine, and what they do is compared."""

import asyncio

import numpy as np
import pytest
import torch

from funrl.rollout.episode_replay import EpisodeLog, LogError, LoggedPolicy, logged_answer
from funrl.rollout.policy import Policy, PolicySetup
from funrl.rollout.requests import Completion
from funrl.rollout.sampling_parameters import Sampling

SETUP = PolicySetup(Sampling(max_new_tokens=4))


async def completed(request):
    """Tokens that depend on all of the request."""
    tokens = torch.tensor([len(request.prompt), request.seed % 97, request.sampling.max_new_tokens])
    logp = torch.arange(3.0)
    return Completion(0, tokens, logp, logp - 1, torch.full((3,), 5), finish="length")


async def talk(policy, heard, answer):
    first, two = await asyncio.gather(*(policy.sample(policy.start([1, 2])) for _ in range(2)))
    policy.answered(answer)
    _, end = await policy.sample(policy.extend(first[1], heard), max_tokens=2)
    return [two[1], end]


class Keeping(Policy):
    def answered(self, answer):
        self.answers = [logged_answer(answer)]


@pytest.fixture
def log():
    policy = Keeping(completed, SETUP, seed=3)
    ends = asyncio.run(talk(policy, [8], {"said": (1, 2.5)}))
    return EpisodeLog([*policy._sampled], policy.answers), ends


def test_the_same_environment_gets_the_same_turns(log):
    log, ends = log
    policy = LoggedPolicy(log, SETUP, seed=3)
    again = asyncio.run(talk(policy, [8], {"said": [1, 2.5]}))
    assert policy.difference == ""
    for item, other in zip(again, ends, strict=True):
        assert item.token_ids() == other.token_ids()
        assert torch.equal(item.leaf.raw_logp, other.leaf.raw_logp) and item.leaf.seed == other.leaf.seed
        assert torch.equal(item.leaf.versions, other.leaf.versions) and item.leaf.finish == "length"


def test_what_differs_is_named(log):
    policy = LoggedPolicy(log[0], SETUP, seed=3)
    with pytest.raises(LogError, match="a turn after 6 tokens that its log does not have"):
        asyncio.run(talk(policy, [9], {"said": [1, 2.5]}))
    assert policy.difference == "the environment has not asked for 1 of 3 turns again"
    policy = LoggedPolicy(log[0], SETUP, seed=3)
    asyncio.run(talk(policy, [8], "nothing"))
    assert policy.difference == 'answer 0 of the environment is "nothing", it was {"said": [1, 2.5]}'


def test_answers_are_compared_as_json():
    assert logged_answer((np.float64(0.1), torch.tensor([1, 2]), object())) == '[0.1, [1, 2], "object"]'
    itself = []
    itself.append(itself)
    assert logged_answer(itself) == '"list"'
