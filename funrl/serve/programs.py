"""Environments of programs that talk to an endpoint.

async def agent(messages, *, base_url, api_key, model, answer, **fields):
client = openai.AsyncOpenAI(base_url=base_url, api_key=api_key)
...
return 1.0  # the reward

environment = endpoint_environment(agent)
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from funrl.data.prompts import Example
from funrl.environments.adapters import example_messages
from funrl.environments.calls import call
from funrl.environments.environment import Environment
from funrl.environments.workers import WorkerClient, open_workers
from funrl.rollout.episodes import Episode, Message
from funrl.rollout.policy import Policy
from funrl.serve.endpoint import check_installed, serve_policy

AGENT = "policy"


def endpoint_environment(program: Callable[..., object]) -> Environment:
    """An environment whose episode is whatever a program asks an endpoint.

    Args:
      program: (messages of the example, base_url=, api_key=, model=, **fields of its record) -> the reward, or None:
        unscored. It may be `async`; a plain one runs in a thread.

    Raises:
      ImportError: the packages of the extra `serve` are missing.
    """
    check_installed()
    return _Program(program)


@contextlib.contextmanager
def open_program(program: Callable[..., object], workers: int, memory_bytes: int = 1 << 30) -> Iterator[Environment]:
    """As `endpoint_environment`, with the program in processes of its own, which ask the endpoint over loopback.

    Enter it before the process has threads, as `open_environment`.

    Args:
      program: may hang, crash or take all the memory that it is given; then its episode fails.
      workers: bound on the processes, at least 1.
      memory_bytes: that a process may take, beyond what it has when it is forked.
    """
    check_installed()
    with open_workers(functools.partial(_Held, program), workers, memory_bytes) as client:
        yield _Program(functools.partial(_run_there, client))


class _Program:
    def __init__(self, program: Callable[..., Any]):
        self._program = program

    async def run(self, policy: Policy, example: Example, seed: int) -> Episode:
        """Run the program with an endpoint of its own."""
        async with serve_policy(policy) as (endpoint, session):
            reward = None
            try:
                reward = await call(self._program, example_messages(example), **endpoint._asdict(), **example.fields)
            except Exception:
                if session.limit is None:
                    raise
            ends = session.trajectories()
            if not ends:
                raise ValueError("the program has not asked the endpoint for a reply")
            parts = {"forks": float(session.forks)}
            return Episode(ends, {AGENT: reward}, parts=parts, status=session.limit or "done")


class _Held:
    """A program in a worker process."""

    def __init__(self, program: Callable[..., Any]):
        self._program = program

    async def run(self, messages: Sequence[Message], named: Mapping[str, object]) -> Any:
        return await call(self._program, messages, **named)


async def _run_there(client: WorkerClient, messages: Sequence[Message], **named: object) -> Any:
    """Run the program in a worker process, which is killed if the episode ends before it answers."""
    session = client.session()
    try:
        return await client.call(session, "run", (messages, named))
    finally:
        client.end(session)
