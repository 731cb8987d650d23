"""Episodes on an engine: exact tokens, the same on every mesh, and whatever an environment does."""

import asyncio
import collections
import functools
import itertools

import pytest
import torch
from small_chats import (
    CHAT,
    END,
    SAMPLING,
    SETUP,
    TOKENIZER,
    ScriptedEngine,
    engine_of,
    examples_of,
    plain,
    text,
)

from funrl.environments.adapters import message_environment, single_turn
from funrl.environments.run import episode_groups, run_episodes
from funrl.mesh.mesh import SINGLE, parse
from funrl.mesh.launch import launch
from funrl.rollout.engine import complete
from funrl.rollout.episodes import Episode
from funrl.rollout.policy import EpisodeLimits, PolicySetup
from funrl.rollout.requests import requests_of

PROMPTS = ["12+34=", "say it", "a b c", "xyz"]
USER = [{"role": "user", "content": "go on"}]


class Talk:
    """A conversation of some turns, with a reward for each reply."""

    def __init__(self, turns=3, wait_s=0.0):
        self.turns, self.wait_s = turns, wait_s

    async def reset(self, example, seed):
        self.count = 0
        return [{"role": "user", "content": example.text}], ()

    async def step(self, message):
        await asyncio.sleep(self.wait_s)
        self.count += 1
        return [{"role": "user", "content": f"{self.count}. more"}], len(message["content"]) / 8, self.count == self.turns

    async def close(self):
        pass


def run(environment, examples, samples=3, engine=None, setup=SETUP, limits=EpisodeLimits(), seed=4):
    groups = episode_groups(examples, samples, seed)
    return run_episodes(engine or engine_of(), SINGLE, environment, groups, setup, limits)


def test_an_episode_of_one_turn_has_the_tokens_of_a_completion():
    examples = examples_of(*PROMPTS)
    done = complete(engine_of(), requests_of([x.tokens for x in examples], SAMPLING, 4))
    episodes = run(single_turn(), examples).episodes
    assert [number for number, _ in episodes] == list(range(12))
    for completion, (_, episode) in zip(done, episodes, strict=True):
        (end,) = episode.ends
        prompt, reply = end.nodes()
        assert prompt.tokens == examples[completion.number // 3].tokens and not prompt.sampled
        assert reply.tokens == completion.tokens.tolist() and reply.finish == completion.finish
        assert torch.equal(reply.raw_logp, completion.raw_logp) and torch.equal(reply.versions, completion.versions)
        assert torch.equal(reply.sampling_logp, completion.sampling_logp) and episode.rewards == {"policy": None}


def test_a_turn_continues_what_the_engine_has_seen():
    """The concatenation of nodes is what was asked for, and a turn is what a fresh engine computes from it."""
    engine = engine_of()
    seen = []
    submit = engine.submit
    engine.submit = lambda requests: (seen.extend(requests), submit(requests))[1]
    episodes = run(message_environment(Talk), examples_of(*PROMPTS), engine=engine).episodes
    for _, episode in episodes:
        (end,) = episode.ends
        ids = []
        assert [node.sampled for node in end.nodes()] == [False, True] * 3
        for node in end.nodes():
            if node.sampled:
                same = [request for request in seen if request.prompt == ids]
                again = {tuple(one.tokens.tolist()): one for one in complete(engine_of(), same)}
                assert torch.equal(again[tuple(node.tokens)].raw_logp, node.raw_logp)
            ids += node.tokens
        assert ids == end.token_ids() and sum(episode.turn_rewards.values()) == pytest.approx(episode.rewards["policy"])
        last = [node.tokens[-1] for node in end.nodes() if node.sampled][0]
        first, second = text(end.token_ids()).split("u>1. more</s>\na>")[0], text(list(end.nodes())[2].tokens)
        assert second == ("\n" if last == END else "</s>\n") + "u>1. more</s>\na>" and first.startswith("u>")
