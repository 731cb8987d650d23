"""Random episodes: branches, retries, several agents, parallel calls, cut-off turns, and waits of any length."""

import asyncio
import os
import random
import time
from pathlib import Path

import pytest
import torch
from small_chats import SETUP, differing_turns, engine_of, examples_of

from funrl.data.prompts import Prompt, encode
from funrl.data.tokenizer import load_tokenizer
from funrl.environments.adapters import message_environment
from funrl.environments.chat import TemplateChat
from funrl.environments.hosted import hosted_environment, open_hosted
from funrl.environments.run import episode_groups, run_episodes
from funrl.mesh.mesh import SINGLE
from funrl.models.huggingface.directories import load
from funrl.rollout.engine import complete
from funrl.rollout.episodes import Episode
from funrl.rollout.native.engine import NativeOptions, native_engine
from funrl.rollout.policy import EpisodeLimits, LimitReached, PolicySetup
from funrl.rollout.requests import Request
from funrl.rollout.resident import ResidentEngine
from funrl.rollout.sampling_parameters import Sampling


class Anything:
    """What happens is decided by the seed; how long it takes is not."""

    def __init__(self, wait_s):
        self.wait_s = wait_s

    async def run(self, policy, example, seed):
        chance = random.Random(seed)
        ends = [policy.start([{"role": "user", "content": example.text}])]
        if chance.random() < 0.3:
            ends.append(policy.start([{"role": "system", "content": "judge"}], agent="judge"))
        for _ in range(chance.randrange(1, 5)):
            picked = [chance.choice(ends) for _ in range(chance.randrange(1, 4))]
            asked = [
                (self.said(policy, end, chance), chance.choice([None, 2, 30]), chance.choice([(), ("e",)]))
                for end in picked
            ]
            await asyncio.sleep(self.wait_s * random.random())
            ends += await asyncio.gather(*(self.sampled(policy, *item) for item in asked))
        ends = [end for end in ends if end.leaf.sampled]
        if not ends:
            ends = [(await policy.sample(policy.start(example.tokens)))[1]]
        rewards = {end.agent: chance.choice([None, 0.5]) for end in ends}
        return Episode(ends, rewards, {ends[0].leaf: 1.0})

    def said(self, policy, end, chance):
        kind = chance.choice(["nothing", "user", "tool", "tokens"])
        if not end.leaf.sampled or kind == "nothing":
            return end
        if kind == "tokens":
            return policy.extend(end, [5, 6])
        return policy.extend(end, [{"role": kind, "content": str(chance.randrange(100))}] * chance.randrange(1, 3))

    async def sampled(self, policy, trajectory, most, stop):
        try:
            return (await policy.sample(trajectory, most, stop))[1]
        except LimitReached:
            return trajectory


def run(engine, count, wait_s, limits=EpisodeLimits(turns=3, length=200)):  # noqa: B008
    groups = episode_groups(examples_of(*map(str, range(count))), 2, 11)
    done = run_episodes(engine, SINGLE, Anything(wait_s), groups, SETUP, limits)
    assert [number for number, _ in done.episodes] == list(range(2 * count))
    return [episode for _, episode in done.episodes]


@pytest.mark.slow
def test_random_episodes_are_what_the_engine_sampled():
    """In few slots, with drafts and a small cache, however long environments take: the same, and again from nodes."""
    engine, count = engine_of(), 16
    small = engine_of(max_rows=7, speculate=2, cache_bytes=60 * engine._backend.page_bytes)
    first, other = run(engine, count, 0.0), run(small, count, 0.01)
    nodes = [list(dict.fromkeys(n for end in x.ends for n in end.nodes() if n.sampled)) for x in first]
    others = [list(dict.fromkeys(n for end in x.ends for n in end.nodes() if n.sampled)) for x in other]
    assert {x.status for x in first} == {"done"} and sum(map(len, nodes)) > 4 * count
    assert max(len(x.agents()) for x in first) == 2 and {n.finish for x in nodes for n in x} == {
        "stop",
        "length",
        "string",
    }
    for x, y in zip(nodes, others, strict=True):
        assert [n.tokens for n in x] == [n.tokens for n in y]
        assert all(torch.equal(a.raw_logp, b.raw_logp) for a, b in zip(x, y, strict=True))
    assert differing_turns(engine_of(), first) == [] and small.cost().recomputed > 0
    for episode in first[:5]:  # also where it is computed from nothing
        for end in episode.ends:
            ids = end.token_ids()
            begin = len(ids) - len(end.leaf.tokens)
            assert end.leaf.sampling is not None and end.leaf.seed is not None
            (alone,) = complete(engine_of(), [Request(0, ids[:begin], end.leaf.sampling, end.leaf.seed)])
            assert torch.equal(alone.raw_logp, end.leaf.raw_logp) and torch.equal(
                alone.sampling_logp, end.leaf.sampling_logp
            )


class Mortal:
    """Kills its process in 10 % of its attempts."""

    async def reset(self, example, seed):
        self.left, self.dies = 3, random.Random(time.monotonic_ns() + seed).random() < 0.1
        return [{"role": "user", "content": example.text}], ()

    async def step(self, message):
        await asyncio.sleep(0.01)
        self.left -= 1
        if self.dies:
            os.kill(os.getpid(), 9)
        return [{"role": "user", "content": "on"}], 1.0, not self.left

    async def close(self):
        pass


@pytest.mark.slow
def test_of_many_episodes_in_processes_that_die_none_is_lost_or_doubled(monkeypatch):
    environment = hosted_environment(message_environment(Mortal), workers=4)
    run = environment.run
    attempts = []

    def counted_run(policy, example, seed):
        attempts.append(seed)
        return run(policy, example, seed)

    monkeypatch.setattr(environment, "run", counted_run)
    with open_hosted(environment, SETUP.chat):
        groups = episode_groups(examples_of(*map(str, range(20))), 4, 11)
        limits = EpisodeLimits(retries=8, waiting=8)
        done = run_episodes(engine_of(), SINGLE, environment, groups, SETUP, limits)
    assert [number for number, _ in done.episodes] == list(range(80)) and len(attempts) > 80
    assert [(x.status, x.rewards) for _, x in done.episodes] == [("done", {"policy": 3.0})] * 80


DATA = Path(os.environ.get("FUNRL_DATA") or Path(__file__).parents[2].parent / "shared" / "data")


class Slow:
    """Eight turns of 16 to 56 tokens; each answer takes 50 ms. Episodes begin at different times."""

    attempts = 0

    async def run(self, policy, example, seed):
        self.attempts += 1
        chance = random.Random(seed)
        await asyncio.sleep(chance.random())
        trajectory = policy.start([{"role": "user", "content": example.text}])
        for turn in range(8):
            if turn:
                trajectory = policy.extend(trajectory, [{"role": "user", "content": "And then the dog said"}])
            _, trajectory = await policy.sample(trajectory, chance.randrange(16, 57))
            await asyncio.sleep(0.05)
        return Episode([trajectory], {"policy": 1.0})


@pytest.mark.data
@pytest.mark.timed
@pytest.mark.slow
def test_the_engine_runs_while_environments_take_their_time(monkeypatch):
    """256 concurrent episodes whose environments take 50 ms between turns: it idles in less than 10 % of the time."""
    folder = DATA / "stories260k"
    if not folder.is_dir():
        pytest.skip(f"{folder} is not there; FUNRL_DATA names another place")
    model, params = load(folder)
    tokenizer = load_tokenizer(folder)
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}</s>{% endfor %}"
    engine = native_engine(model, options=NativeOptions(decode=tokenizer.decode, max_rows=256))
    engine.load(engine.weights.named(params), 1)
    setup = PolicySetup(Sampling(max_new_tokens=64), TemplateChat(tokenizer))
    examples = [encode(Prompt("Once upon a time", {}), tokenizer)] * 64
    limits = EpisodeLimits(length=model.config.max_positions)
    iterate = ResidentEngine.iterate
    idle_s = []

    async def timed(resident, *args):
        is_idle = not resident._new and not engine.unfinished()
        begin = time.perf_counter()
        await iterate(resident, *args)
        if is_idle:
            idle_s.append(time.perf_counter() - begin)

    monkeypatch.setattr(ResidentEngine, "iterate", timed)
    environment = Slow()
    begin = time.perf_counter()
    done = run_episodes(engine, SINGLE, environment, episode_groups(examples, 4, 0), setup, limits)
    wall_s = time.perf_counter() - begin
    assert {x.status for _, x in done.episodes} == {"done"} and environment.attempts == 256
    assert sum(idle_s) < 0.1 * wall_s, (sum(idle_s), wall_s)
