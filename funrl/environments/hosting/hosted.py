"""Whole episodes in processes of their own, so that an environment that computes does not hold up the engine.

An episode runs in a worker: its environment, its policy with the chat template, its endpoints. Only requests for
completions and these cross to the rank, as token ids, so that tokens and rewards are those of a run without workers.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from funrl.data.prompts import Example
from funrl.environments.attempt import guarded_episode
from funrl.environments.environment import Environment, ScoringEnvironment
from funrl.environments.worker import asker
from funrl.environments.workers import CLOSE_S, WorkerClient, open_workers
from funrl.kinds import OwnedLines
from funrl.rollout.episode_records import from_record, to_record
from funrl.rollout.episodes import Episode
from funrl.rollout.policy import Chat, EpisodeLimits, Policy, PolicySetup, RunEndingError, Serve
from funrl.rollout.requests import Completion
from funrl.rollout.sampling_parameters import Sampling

HOST_BYTES = 4 << 30  # that a worker may take, beyond what it has when it is forked


class _Terms(NamedTuple):
    """Attributes of a policy that its copy in a worker needs."""

    sampling: Sampling
    models: Mapping[str, str] | None
    limits: EpisodeLimits


class _Question(NamedTuple):
    """A request of a policy in a worker; `prompt` are int64 token ids, the others as of `Complete`."""

    agent: str
    prompt: np.ndarray
    sampling: Sampling
    seed: int
    computed: int
    owned: OwnedLines | None


class HostedEnvironment:
    """An environment whose episodes run in workers while `open_hosted` is open, and else in this process.

    Attributes:
      environment: that makes the episodes.
      workers: bound on the processes.
    """

    def __init__(self, environment: Environment, workers: int):
        self.environment = environment
        self.workers = workers
        self.agents = getattr(environment, "agents", None)
        self.tools = getattr(environment, "tools", ())
        self.client: WorkerClient | None = None

    async def run(self, policy: Policy, example: Example, seed: int) -> Episode:
        """Run an episode in a worker.

        Raises:
          RuntimeError: the worker has ended, or was killed.
          RunEndingError: the environment cannot work in this run.
        """
        client = self.client
        if client is None:
            return await self.environment.run(policy, example, seed)
        terms = _Terms(policy.setup.sampling, policy.setup.models, policy.limits)
        session = client.session()
        reply = functools.partial(_complete, policy)
        call = asyncio.ensure_future(client.call(session, "run", (terms, example, seed), reply))
        try:
            problem, record = await asyncio.shield(call)
        except asyncio.CancelledError:
            client.cancel(session)
            await asyncio.wait({call}, timeout=CLOSE_S)  # then `end` kills the worker
            raise
        finally:
            client.end(session)
            call.cancel()
        if problem:
            raise RunEndingError(problem)
        return from_record(record)


class HostedScoringEnvironment(HostedEnvironment):
    """The same with `score`, which runs on the rank."""

    async def score(self, episodes: Sequence[Episode]) -> Sequence[float | None]:
        """As of the environment."""
        assert isinstance(self.environment, ScoringEnvironment)
        return await self.environment.score(episodes)


def hosted_environment(environment: Environment, workers: int) -> HostedEnvironment:
    """An environment whose episodes run in workers.

    Raises:
      ValueError: it scores groups by what their episodes left in the process.
    """
    if not isinstance(environment, ScoringEnvironment):
        return HostedEnvironment(environment, workers)
    if getattr(environment, "scores_by_state", False):
        raise ValueError("the rewards of its groups need all their episodes in one process; leave workers out")
    return HostedScoringEnvironment(environment, workers)


@contextlib.contextmanager
def open_hosted(
    hosted: HostedEnvironment, chat: Chat | None, serve: Serve | None = None, memory_bytes: int = HOST_BYTES
) -> Iterator[None]:
    """Open the workers of an environment. Enter it before the process has threads; see `open_environment`.

    Args:
      chat, serve: of the policies, as in `PolicySetup`.
      memory_bytes: that a worker may take, beyond what it has when it is forked.
    """
    make = functools.partial(_Host, hosted.environment, chat, serve)
    with open_workers(make, hosted.workers, memory_bytes) as client:
        hosted.client = client
        try:
            yield
        finally:
            hosted.client = None


class _Host:
    """The environment in a worker."""

    def __init__(self, environment: Environment, chat: Chat | None, serve: Serve | None):
        self._environment = environment
        self._chat = chat
        self._serve = serve

    async def run(self, terms: _Terms, example: Example, seed: int) -> tuple[str, Any]:
        """Run an episode; returns the problem that ends the run, or "", and the record of the episode."""
        setup = PolicySetup(terms.sampling, self._chat, terms.models, self._serve)
        ask = asker()
        frozen = {agent: functools.partial(_ask, ask, agent) for agent, model in (terms.models or {}).items() if model}
        policy = Policy(functools.partial(_ask, ask, ""), setup, seed, terms.limits, frozen)
        try:
            episode = await guarded_episode(lambda: self._environment.run(policy, example, seed), policy)
        except RunEndingError as error:
            return str(error), None
        return "", to_record(episode)


async def _ask(ask: Callable[[Any], Awaitable[Any]], agent: str, prompt: Sequence[int], *request: Any) -> Completion:
    """Complete a prompt of a policy in a worker; "" is any agent that the policy answers for."""
    arrays, fields = await ask(_Question(agent, np.asarray(prompt, np.int64), *request))
    return Completion(**{name: torch.from_numpy(array) for name, array in arrays.items()}, **fields)


async def _complete(policy: Policy, question: _Question) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """The completion that a worker asks for, as arrays and other fields."""
    agent, prompt, sampling, seed, computed, owned = question
    values = (await policy.completer(agent)(prompt.tolist(), sampling, seed, computed, owned))._asdict()
    arrays = {name: value.numpy() for name, value in values.items() if isinstance(value, torch.Tensor)}
    return arrays, {name: value for name, value in values.items() if name not in arrays}
