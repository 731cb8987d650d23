"""Environments of programs that talk to an endpoint.

async def agent(messages, *, base_url, api_key, model, answer, **fields):
client = openai.AsyncOpenAI(base_url=base_url, api_key=api_key)
...
return 1.0  # the reward

environment = endpoint_environment(agent)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from funrl.data.prompts import Example
from funrl.environments.adapters import example_messages
from funrl.environments.calls import call
from funrl.environments.environment import Environment
from funrl.rollout.episodes import Episode
from funrl.rollout.policy import Policy
from funrl.serve.endpoint import check_installed, serve_policy

AGENT = "policy"


def endpoint_environment(program: Callable[..., object]) -> Environment:
    """An environment whose episode is whatever a program asks an endpoint.

    With `hosted_environment` it runs in processes of its own.

    Args:
      program: (messages of the example, base_url=, api_key=, model=, **fields of its record) -> the reward, or None:
        unscored. It may be `async`; a plain one runs in a thread.

    Raises:
      ImportError: the packages of the extra `serve` are missing.
    """
    check_installed()
    return _Program(program)


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
