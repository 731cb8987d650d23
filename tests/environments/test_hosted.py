"""Whole episodes in processes of their own: the same tokens and rewards, and deaths that are named."""

import asyncio
import dataclasses
import os
import threading
import time

import pytest
from small_chats import SETUP, ScriptedEngine, engine_of, examples_of, plain

from funrl.environments.adapters import tool_environment
from funrl.environments.hosted import hosted_environment, open_hosted
from funrl.environments.run import episode_groups, run_episodes
from funrl.mesh.mesh import SINGLE
from funrl.rollout.episodes import Episode
from funrl.rollout.policy import EpisodeLimits, UnknownAgentError
from funrl.serve.endpoint import serve_agent

LIMITS = EpisodeLimits(environment_s=6, retries=1)


class Branching:
    """Two branches at once, one continued; a second agent; rewards of turns, states, parts."""

    agents = ("policy", "rival")

    def __init__(self):
        self.pids = set()

    async def run(self, policy, example, seed):
        opened = policy.start([{"role": "user", "content": example.text}])
        tries = await asyncio.gather(policy.sample(opened), policy.sample(opened), policy.sample(opened, seed=5))
        _, longer = max(tries, key=lambda attempt: len(attempt[0].tokens))
        again = policy.extend(longer, [{"role": "user", "content": f"so {seed % 10}"}])
        _, final = await policy.sample(again, max_tokens=5, stop=["x"])
        rival = policy.start(final.token_ids(), agent="rival")
        _, answer = await policy.sample(rival)
        ends = [final, *(end for _, end in tries if end is not longer), answer]
        turns = {final.leaf: 0.5, longer.leaf: 0.25}
        states = {final.leaf: "last"}
        parts = {"branches": 3.0, "pid": float(os.getpid())}
        return Episode(ends, {"policy": 2.0, "rival": None}, turns, states=states, parts=parts)


class Scored(Branching):
    async def score(self, episodes):
        return [float(len(episode.ends[0].token_ids())) for episode in episodes]


class Dangerous:
    """Episodes that end as their example says."""

    async def run(self, policy, example, seed):
        _, end = await policy.sample(policy.start([{"role": "user", "content": f"{os.getpid()}"}]))
        kind = example.fields["kind"]
        if kind == "raises":
            raise KeyError("no such square")
        if kind == "exits":
            os._exit(3)
        if kind == "is killed":
            os.kill(os.getpid(), 9)
        if kind == "blocks":
            time.sleep(1e3)
        if kind == "waits":
            await asyncio.sleep(1e3)
        if kind == "cannot be sent":
            return Episode([end], {"policy": 1.0}, parts={"lock": threading.Lock()})
        if kind == "refused":
            await policy.sample(policy.start(list(range(5000))))
        return Episode([end], {"policy": 1.0}, parts={"pid": float(os.getpid())})


KINDS = {
    "raises": "KeyError('no such square')",
    "exits": "the process of the environment ended with exit code 3",
    "is killed": "the process of the environment ended by signal SIGKILL",
    "blocks": "longer than 6 s between two calls",
    "waits": "longer than 6 s between two calls",
    "cannot be sent": "finite number is needed",
    "refused": "ValueError",
    "fine": "",
}


def run(environment, engine, examples, count=3, limits=LIMITS, setup=SETUP):
    groups = episode_groups(examples, count, 0)
    return [episode for _, episode in run_episodes(engine, SINGLE, environment, groups, setup, limits).episodes]


def hosted(environment, workers=2):
    wrapped = hosted_environment(environment, workers)
    return wrapped, open_hosted(wrapped, SETUP.chat, serve_agent)


def without_pid(episode):
    facts, turns, ends, rest = plain(episode)
    parts = {name: number for name, number in rest.parts.items() if name != "pid"}
    return facts, turns, ends, dataclasses.replace(rest, states=list(rest.states.values()), parts=parts)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Branching, Scored])
def test_tokens_and_rewards_are_those_of_this_process(kind):
    examples = examples_of("one", "two", "three")
    setup = SETUP._replace(models={"policy": "", "rival": ""})
    here = run(kind(), engine_of(), examples, setup=setup)
    wrapped, opened = hosted(kind())
    assert wrapped.agents == ("policy", "rival")
    with opened:
        there = run(wrapped, engine_of(), examples, setup=setup)
        pids = {episode.parts["pid"] for episode in there}
        assert len(pids) == 2 and os.getpid() not in pids
    assert [without_pid(x) for x in there] == [without_pid(x) for x in here]
    shared, other = (next(end.nodes()) for end in there[0].ends[:2])
    assert shared is other and there[0].status == "done"
    assert all(not os.path.exists(f"/proc/{int(pid)}") for pid in pids)
    assert [without_pid(x) for x in run(wrapped, engine_of(), examples, setup=setup)] == [without_pid(x) for x in here]


@pytest.mark.slow
def test_a_death_fails_its_own_episodes_and_is_named():
    examples = [example for kind in KINDS for example in examples_of(kind, kind=kind)]
    wrapped, opened = hosted(Dangerous(), workers=16)
    with opened:
        limits = LIMITS._replace(retries=0)
        done = run(wrapped, ScriptedEngine(lambda prompt: "yes"), examples, count=2, limits=limits)
    for number, episode in enumerate(done[:-2]):
        assert episode.status == "failed" and list(KINDS.values())[number // 2] in episode.problem
    assert [episode.rewards for episode in done[-2:]] == [{"policy": 1.0}] * 2


def test_an_episode_that_waits_is_cancelled_and_its_process_goes_on():
    wrapped, opened = hosted(Dangerous(), workers=1)
    examples = examples_of("a", kind="waits") + examples_of("b", kind="fine")
    with opened:
        limits = LIMITS._replace(retries=0)
        done = run(wrapped, ScriptedEngine(lambda prompt: "yes"), examples, count=1, limits=limits)
        after = run(wrapped, ScriptedEngine(lambda prompt: "yes"), examples[1:], count=1)
    assert [episode.status for episode in done] == ["failed", "done"]
    assert after[0].parts["pid"] == done[1].parts["pid"]


def add(left: int, right: int) -> int:
    """Add.

    Args:
        left: one.
        right: other.
    """
    return left + right


def test_limits_and_tools_hold_in_a_worker():
    environment = tool_environment([add], lambda messages: float(len(messages)))
    replies = ['<tool_call>{"name": "add", "arguments": {"left": 1, "right": 2}}</tool_call>', "3"]
    setup = SETUP._replace(sampling=dataclasses.replace(SETUP.sampling, max_new_tokens=200, stop=(1,)))

    def answer(prompt):
        return replies[prompt.count("a>") > 1]

    wrapped, opened = hosted(environment)
    assert wrapped.tools == environment.tools
    for limits in (LIMITS, LIMITS._replace(turns=1)):
        here = run(environment, ScriptedEngine(answer), examples_of("go"), limits=limits, setup=setup)
        with opened if limits is LIMITS else hosted(environment)[1]:
            there = run(wrapped, ScriptedEngine(answer), examples_of("go"), limits=limits, setup=setup)
        assert [without_pid(x) for x in there] == [without_pid(x) for x in here]
        assert {x.status for x in there} == {"done" if limits is LIMITS else "turns"}


class Unknown:
    async def run(self, policy, example, seed):
        return policy.start([5], agent="nobody")


def test_what_ends_the_run_ends_it():
    wrapped, opened = hosted(Unknown())
    setup = SETUP._replace(models={"policy": ""})
    with opened, pytest.raises(ValueError, match="nobody"):
        run(wrapped, engine_of(), examples_of("go"), setup=setup)
    with pytest.raises(UnknownAgentError):
        run(wrapped, engine_of(), examples_of("go"), setup=setup)
