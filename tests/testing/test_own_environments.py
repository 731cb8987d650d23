"""`check_environment` passes good environments, and finds each fault that is planted in one, by its property."""

import asyncio
import itertools
import os
import random
import subprocess
import threading
import time

import pytest
from selection import quick

from funrl.environments.adapters import tool_environment
from funrl.rollout.episodes import Episode
from funrl.rollout.policy import LimitReached
from funrl.testing import check_environment
from funrl.testing.environment_properties import ENVIRONMENT_PROPERTIES

COUNT = itertools.count()
KEPT = []  # what environments do not free


class Turns:
    """Three replies; each earns the share of its characters that are digits."""

    def reset(self, example, seed):
        self.left = 3
        return [{"role": "user", "content": example.text}], []

    def step(self, message):
        self.left -= 1
        text = message["content"]
        return [{"role": "user", "content": "on"}], sum(map(str.isdigit, text)) / max(len(text), 1), self.left == 0

    def close(self):
        pass


class Forgets(Turns):
    def step(self, message):
        return [{"role": "user", "content": {"of": message["content"]}["of"][1000]}], 0.0, False


class NotFinite(Turns):
    def step(self, message):
        return [], float(message["content"] or "nan") if message["content"] == "nan" else 0.0, True


class NoRole(Turns):
    def reset(self, example, seed):
        return [{"content": example.text}], []


class Counts(Turns):
    def step(self, message):
        return [{"role": "user", "content": str(next(COUNT))}], 0.0, False


class GlobalRandom(Turns):
    def step(self, message):
        return [{"role": "user", "content": "on"}], random.random(), True


class Slow(Turns):
    def step(self, message):
        time.sleep(0.3)
        return super().step(message)


class Opens(Turns):
    def reset(self, example, seed):
        KEPT.append(os.open(os.devnull, os.O_RDONLY))
        return super().reset(example, seed)


class Threads(Turns):
    ends = threading.Event()

    def reset(self, example, seed):
        threading.Thread(target=self.ends.wait, daemon=True).start()
        return super().reset(example, seed)


class Processes(Turns):
    def reset(self, example, seed):
        KEPT.append(subprocess.Popen(["sleep", "60"]))
        return super().reset(example, seed)


class Tasks(Turns):
    async def reset(self, example, seed):
        KEPT.append(asyncio.ensure_future(asyncio.sleep(60)))
        return super().reset(example, seed)


class OneTurn:
    async def run(self, policy, example, seed):
        _, end = await policy.sample(policy.start(example.tokens))
        return Episode([end], {"policy": 1.0})


class SwallowsLimits(OneTurn):
    """Gives an episode without an end where a limit stops it."""

    async def run(self, policy, example, seed):
        trajectory, last = policy.start(example.tokens), None
        try:
            for _ in range(3):
                _, last = await policy.sample(trajectory)
                trajectory = policy.extend(last, [{"role": "user", "content": "on"}])
        except LimitReached:
            return Episode([], {})
        return Episode([last], {"policy": 1.0})


class SwallowsCancellation(OneTurn):
    async def run(self, policy, example, seed):
        trajectory = policy.start(example.tokens)
        for _ in range(2):
            try:
                _, end = await policy.sample(trajectory)
                trajectory = policy.extend(end, [{"role": "user", "content": "on"}])
            except asyncio.CancelledError:
                await asyncio.sleep(60)
        return Episode([end], {"policy": 1.0})


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: the first.
        b: the second.
    """
    return a + b


CALL = '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>'
FAULTS = {
    Forgets: ("completed", "IndexError"),
    NotFinite: ("completed", "the reward nan; a finite number"),
    NoRole: ("completed", "role"),
    Counts: ("deterministic", "seed 0: "),
    GlobalRandom: ("deterministic", "and then"),
    SwallowsLimits: ("limited", "at least one trajectory"),
    SwallowsCancellation: ("cancellable", "it swallows asyncio.CancelledError"),
    Opens: ("leaks", "3 open files"),
    Threads: ("leaks", "3 threads"),
    Processes: ("leaks", "3 processes"),
    Tasks: ("leaks", "tasks are left: .*sleep"),
}


@pytest.mark.slow
def test_good_environments_have_all_properties():
    check_environment(OneTurn)
    environment = tool_environment([add], lambda messages, answer: float(messages[-1]["content"] == answer))
    check_environment(environment, [("What is 1 + 2?", {"answer": "3"})], [CALL, "3"])
    check_environment(lambda messages: float(len(messages)) if len(messages) > 3 else "on")


@pytest.mark.parametrize("environment", quick(FAULTS, [Forgets, Counts, SwallowsLimits, SwallowsCancellation, Opens]))
def test_a_fault_is_found_by_the_property_that_it_breaks(environment, monkeypatch):
    monkeypatch.setattr("funrl.testing.environment_properties.LEAK_WAIT_S", 0.2)
    monkeypatch.setattr("funrl.testing.environment_properties.CLEAN_UP_S", 0.2)
    Threads.ends.clear()
    name, problem = FAULTS[environment]
    others = set(ENVIRONMENT_PROPERTIES) - {name} if environment in (Threads, Processes, Tasks) else ()
    try:
        with pytest.raises(AssertionError, match=rf"environment {environment.__name__}.*: {name} \(") as raised:
            check_environment(environment, without=others)
        assert raised.match(problem)
    finally:
        Threads.ends.set()
        for kept in KEPT:
            if isinstance(kept, int):
                os.close(kept)
            elif isinstance(kept, subprocess.Popen):
                kept.kill()
                kept.wait()
        KEPT.clear()


@pytest.mark.slow
def test_an_environment_that_takes_too_long_is_found():
    with pytest.raises(AssertionError, match=r"completed .* took longer than 0.1 s between two calls"):
        check_environment(Slow, limit_s=0.1)
    check_environment(Counts, without=["deterministic"])
    with pytest.raises(ValueError, match="without='fast': the properties of environments are completed, deterministic"):
        check_environment(Turns, without=["fast"])
    assert {name for name, _ in FAULTS.values()} == set(ENVIRONMENT_PROPERTIES)
