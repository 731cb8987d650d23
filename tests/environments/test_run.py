"""Episodes on an engine: exact tokens, the same on every mesh, and whatever an environment does."""

import asyncio
import collections
import functools
import itertools
import pickle
import random
import time
from typing import ClassVar

import pytest
import torch
from small_chats import (
    CHAT,
    END,
    SAMPLING,
    SETUP,
    STATES,
    ScriptedEngine,
    differing_turns,
    engine_of,
    examples_of,
    plain,
    text,
)

from funrl.environments.adapters import message_environment, single_turn
from funrl.environments.calls import call
from funrl.environments.run import episode_groups, run_episodes
from funrl.mesh.collectives import gather_objects
from funrl.mesh.launch import launch
from funrl.mesh.mesh import SINGLE, parse
from funrl.rollout.engine import complete
from funrl.rollout.episodes import Episode, from_record, to_record
from funrl.rollout.policy import EPISODE_LIMITS, EpisodeLimits
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
        return (
            [{"role": "user", "content": f"{self.count}. more"}],
            len(message["content"]) / 8,
            self.count == self.turns,
        )

    async def close(self):
        pass


def run(environment, examples, samples=3, engine=None, setup=SETUP, limits=EPISODE_LIMITS, seed=4):
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
                again = {tuple(completion.tokens.tolist()): completion for completion in complete(engine_of(), same)}
                assert torch.equal(again[tuple(node.tokens)].raw_logp, node.raw_logp)
            ids += node.tokens
        assert ids == end.token_ids() and sum(episode.turn_rewards.values()) == pytest.approx(episode.rewards["policy"])
        last = next(node.tokens[-1] for node in end.nodes() if node.sampled)
        first, second = text(end.token_ids()).split("u>1. more</s>\na>")[0], text(list(end.nodes())[2].tokens)
        assert second == ("\n" if last == END else "</s>\n") + "u>1. more</s>\na>" and first.startswith("u>")


class Branches:
    """An environment that retries its first turn, and lets a second agent read both answers."""

    def __init__(self, order=lambda calls: calls):
        self.order = order

    async def run(self, policy, example, seed):
        opened = policy.start([{"role": "user", "content": example.text}])
        calls = [policy.sample(opened), policy.sample(opened, max_tokens=5), policy.sample(opened, stop=("e",))]
        tasks = [asyncio.ensure_future(call) for call in self.order(calls)]
        turns = self.order(await asyncio.gather(*tasks))
        retry = policy.sample(opened, seed=3)
        (reply, again), (same, _) = await asyncio.gather(retry, policy.sample(opened, seed=3))
        assert reply == same and again.leaf.parent is turns[0][1].leaf.parent
        ends = [(await policy.sample(policy.extend(end, USER)))[1] for _, end in turns[:2]]
        judge = policy.start([{"role": "user", "content": turns[0][0].message["content"][:5] or "?"}], agent="judge")
        judge = policy.extend(judge, USER)  # rendered together with what comes before
        assert judge.token_ids() == CHAT.opening([*judge.messages()]) and len(judge.messages()) == 2
        _, judge = await policy.sample(judge)
        return Episode([*ends, turns[2][1], again, judge], {"policy": 0.5, "judge": None}, parts={"turns": 3.0})


def test_branches_share_nodes_and_the_order_of_calls_changes_nothing():
    examples = examples_of(*PROMPTS)
    episodes = run(Branches(), examples).episodes
    others = run(Branches(lambda calls: calls[::-1]), examples).episodes
    done = complete(
        engine_of(), requests_of([CHAT.opening([{"role": "user", "content": p}]) for p in PROMPTS], SAMPLING, 4)
    )
    for completion, (_, episode), (_, other) in zip(done, episodes, others, strict=True):
        assert_equal(plain(episode), plain(other))
        roots = {next(end.nodes()) for end in episode.ends[:4]}
        assert len(roots) == 1 and episode.agents() == ["policy", "judge"]
        first = [list(end.nodes())[1] for end in episode.ends[:4]]
        assert len({tuple(node.tokens) for node in first}) >= 3  # each call has noise of its own
        assert first[0].tokens == completion.tokens.tolist() and len(first[1].tokens) <= 5


def test_saved_episodes_are_sampled_again_without_environments():
    episodes = [episode for _, episode in run(Branches(), examples_of(*PROMPTS)).episodes]
    records = pickle.loads(pickle.dumps([to_record(episode) for episode in episodes]))
    again = [from_record(record) for record in records]
    assert differing_turns(engine_of(), again) == []
    node = again[2].ends[1].leaf
    object.__setattr__(node, "seed", 3)
    ((episode, turn, completion),) = differing_turns(engine_of(), again)
    assert (episode, turn) == (2, node) and completion.tokens.tolist() != node.tokens
    object.__setattr__(node, "seed", None)
    with pytest.raises(ValueError, match="cannot be sampled again"):
        differing_turns(engine_of(), again)


@pytest.mark.slow
@pytest.mark.gloo
@pytest.mark.parametrize("mesh", ["tp2", "dp2"])
def test_ranks_run_the_episodes_of_one_process(mesh):
    examples = examples_of(*PROMPTS)

    def program(mesh):
        engine = engine_of(mesh, torch.float64)
        groups = episode_groups(examples, 2, 4)
        seen = []
        for fixed, environment in (
            (True, Branches()),
            (False, message_environment(functools.partial(Talk, wait_s=0.02))),
        ):
            done = run_episodes(engine, mesh, environment, groups, SETUP, EpisodeLimits(fixed=fixed))
            assert not fixed or len(done.episodes) == 8 // mesh.size("data")
            assert engine.unfinished() == 0
            seen.append([(number, plain(episode)) for number, episode in done.episodes])
        return seen

    ranks = launch(lambda mesh: gather_objects(program(mesh), mesh), parse(mesh), "cpu")
    if "tp2" in mesh:
        assert_equal(ranks[::2], ranks[1::2])
        ranks = ranks[::2]
    for n, expected in enumerate(program(SINGLE)):
        assert all(rank[n] for rank in ranks)
        assert_equal(sorted(itertools.chain(*(rank[n] for rank in ranks)), key=lambda pair: pair[0]), expected)


def assert_equal(first, other, path=()):
    """Equal values, numbers up to 1e-9. pytest's own comparison takes minutes to explain a difference."""
    assert type(first) is type(other), path
    if isinstance(first, list | tuple):
        assert len(first) == len(other), path
        for i, (a, b) in enumerate(zip(first, other, strict=True)):
            assert_equal(a, b, (*path, i))
    elif isinstance(first, float):
        assert abs(first - other) < 1e-9, path
    else:
        assert bool(first == other), path


class Faulty:
    """An environment that fails in a way that the example names, on its first attempts."""

    attempts: ClassVar = collections.Counter()
    closed: ClassVar = collections.Counter()

    async def reset(self, example, seed):
        self.kind, self.key = example.fields["kind"], (example.fields["kind"], seed)
        Faulty.attempts[self.key] += 1
        self.fails = Faulty.attempts[self.key] <= example.fields["times"]
        return USER, ()

    async def step(self, message):
        if self.fails:
            if self.kind == "raises":
                raise KeyError("no such square")
            if self.kind == "exits":
                raise SystemExit(3)
            if self.kind == "hangs":
                await asyncio.sleep(1e3)
            if self.kind == "blocks a thread":
                await call(time.sleep, 30)
            if self.kind == "cancels":
                asyncio.current_task().cancel()
                await asyncio.sleep(0)
            if self.kind == "nonsense":
                return "nothing"
            if self.kind == "not a number":
                return [], float("nan"), True
        return [], 1.0, True

    async def close(self):
        Faulty.closed[self.key] += 1


KINDS = {
    "raises": "KeyError('no such square')",
    "exits": "SystemExit(3)",
    "hangs": "longer than 0.2 s between two calls",
    "blocks a thread": "longer than 0.2 s between two calls",
    "cancels": "cancelled itself",
    "nonsense": "return a tuple: messages, reward, whether the episode ends",
    "not a number": "nan; a finite number is needed",
}


@pytest.mark.parametrize("times", [1, 2])
def test_a_failure_is_tried_again_and_then_said(times):
    Faulty.attempts.clear()
    Faulty.closed.clear()
    examples = [example for kind in KINDS for example in examples_of(kind, kind=kind, times=times)]
    engine = ScriptedEngine(lambda prompt: "yes")
    done = run(message_environment(Faulty), examples, 2, engine, limits=EpisodeLimits(environment_s=0.2))
    assert [number for number, _ in done.episodes] == list(range(2 * len(KINDS)))
    assert Faulty.closed == Faulty.attempts and list(Faulty.attempts.values()) == [2] * 2 * len(KINDS)
    for number, episode in done.episodes:
        if times == 1:
            assert (episode.status, episode.rewards, episode.problem) == ("done", {"policy": 1.0}, "")
        else:
            assert (episode.status, len(episode.ends)) == ("failed", 0)
            assert list(KINDS.values())[number // 2] in episode.problem


def test_an_environment_s_waiting_policy_calls_are_cancelled():
    class Gives:
        async def run(self, policy, example, seed):
            opened = policy.start(USER)
            self.other = asyncio.ensure_future(policy.sample(opened))
            task = asyncio.ensure_future(policy.sample(opened))
            await asyncio.sleep(0.01)
            task.cancel()
            raise ValueError("gives up")

    engine = ScriptedEngine(lambda prompt: "yes", passes=10**9)
    done = run(Gives(), examples_of("a"), 1, engine, limits=EpisodeLimits(retries=0))
    assert done.episodes[0][1].status == "failed" and engine.unfinished() == 0 and len(engine.cancelled) == 2


class Unsteady(Talk):
    """Fails at random in 10 % of its attempts, and waits at random."""

    attempts: ClassVar = collections.Counter()

    async def step(self, message):
        await asyncio.sleep(self.random.random() * 0.02)
        if self.fails:
            raise OSError("lost")
        return await super().step(message)

    async def reset(self, example, seed):
        Unsteady.attempts[seed] += 1
        self.random = random.Random(seed + Unsteady.attempts[seed])
        self.fails = self.random.random() < 0.1
        return await super().reset(example, seed)


def test_of_many_concurrent_episodes_none_is_lost_or_doubled():
    samples = 4
    Unsteady.attempts.clear()
    engine = ScriptedEngine(lambda prompt: str(len(prompt)))
    examples = examples_of(*(f"{n}" for n in range(50)))
    done = run(message_environment(Unsteady), examples, samples, engine, limits=EpisodeLimits(retries=1, waiting=10**6))
    count = 50 * samples
    assert [number for number, _ in done.episodes] == list(range(count))
    failed = [episode for _, episode in done.episodes if episode.status == "failed"]
    assert 0.05 * count < Unsteady.attempts.total() - count < 0.16 * count and len(failed) <= 0.03 * count
    for number, episode in done.episodes:
        if episode.status == "done":
            assert text(episode.ends[0].token_ids()).startswith(f"u>{number // samples}</s>\na>")
            assert len(episode.turn_rewards) == 3


def test_limits_end_an_episode_with_what_it_has():
    engine = ScriptedEngine(lambda prompt: "123456789")
    for limits, status, turns, last in [
        (EpisodeLimits(turns=2), "turns", 2, "stop"),
        (EpisodeLimits(tokens=25), "tokens", 3, "length"),
        (EpisodeLimits(length=42), "tokens", 2, "stop"),
        (EpisodeLimits(episode_s=0.6), "time", 2, "stop"),
    ]:
        environment = message_environment(functools.partial(Talk, turns=99, wait_s=0.4 * (status == "time")))
        ((_, episode),) = run(environment, examples_of("a"), 1, engine, limits=limits).episodes
        (end,) = episode.ends
        assert (episode.status, len(episode.turn_rewards), end.leaf.finish) == (status, turns, last)
        assert end.leaf.sampled and len(end.token_ids()) <= (limits.length or 10**9)

    class Endless:
        async def run(self, policy, example, seed):
            trajectory = policy.start(USER)
            while True:
                _, trajectory = await policy.sample(policy.extend(trajectory, USER))

    ((_, episode),) = run(Endless(), examples_of("a"), 1, engine).episodes
    assert (episode.status, episode.rewards) == ("turns", {"policy": None}) and len(episode.ends) == 1


def test_a_group_is_scored_together():
    class Ranked:
        async def run(self, policy, example, seed):
            _, trajectory = await policy.sample(policy.start(example.tokens))
            return Episode([trajectory], {"policy": None})

        async def score(self, episodes):
            lengths = [len(episode.ends[0].token_ids()) for episode in episodes]
            if max(lengths) > 25:
                raise ValueError("too long")
            return [None if length == min(lengths) else length / 2 for length in lengths]

    engine = ScriptedEngine(lambda prompt: "x" * (1 + len(engine.seen) % 7))
    done = run(Ranked(), examples_of("a", "b" * 25), 3, engine).episodes
    lengths = [len(episode.ends[0].token_ids()) for _, episode in done[:3]]
    expected = [None if length == min(lengths) else length / 2 for length in lengths]
    assert [episode.rewards["policy"] for _, episode in done[:3]] == expected and None in expected
    assert [episode.status for _, episode in done[3:]] == ["failed"] * 3 and "too long" in done[3][1].problem


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"config": STATES, "snapshot_tokens": 16}], ids=["pages", "states"])
def test_a_turn_computes_only_what_is_new(options):
    """Whoever waits for an environment occupies no slot and keeps its pages; a growing cache begins anew."""
    engine = engine_of(max_rows=4, **options)
    environment = message_environment(functools.partial(Talk, turns=6, wait_s=0.01))
    computed = []
    for seed in (4, 5, 6, 7):
        before = engine.cost()
        done = run(environment, examples_of(*PROMPTS), engine=engine, seed=seed)
        cost = engine.cost()
        ends = [episode.ends[0] for _, episode in done.episodes]
        context = sum(len(node.tokens) for end in ends for node in end.nodes() if not node.sampled)
        turns = sum(1 for end in ends for node in end.nodes() if node.sampled)
        again = cost.recomputed - before.recomputed
        assert turns == 12 * 6 and max(len(end.token_ids()) for end in ends) > 8 * cost.page_tokens
        # besides the context, the last token of each turn that is continued, which was never fed back
        prompts = sum(len(next(end.nodes()).tokens) for end in ends)
        assert 0 <= context + turns - len(ends) - (cost.prefilled - before.prefilled - again) <= prompts
        computed.append(again)
    assert 0 in computed[2:]  # on a slow machine more rows may wait at once, and the cache grows again
    assert cost.rows == 4
