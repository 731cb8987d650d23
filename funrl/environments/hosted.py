"""Whole episodes in processes of their own, so that an environment that computes does not hold up the engine.

An episode runs in a worker: its environment, its policy with the chat template, its endpoints. Only requests for
completions and these cross to the rank, as token ids, so that tokens and rewards are those of a run without workers.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import pickle
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import cloudpickle
import numpy as np
import torch

from funrl.data.prompts import Example
from funrl.environments.attempt import guarded_episode
from funrl.environments.environment import Environment, ScoringEnvironment
from funrl.processes.worker_pool import (
    AskRank,
    CallLostError,
    Lane,
    WorkerAnswer,
    WorkerCall,
    WorkerClient,
    open_workers,
)
from funrl.rollout.episodes import Episode
from funrl.rollout.policy import Chat, EpisodeLimits, Policy, PolicySetup, RunEndingError, Serve
from funrl.rollout.requests import Completion, Request
from funrl.rollout.sampling_parameters import Sampling

HOST_BYTES = 4 << 30  # that a worker may take, beyond what it has when it is forked
MOST_EPISODES = 1 << 16  # of a worker
CLOSE_S = 2.0  # for a cancelled episode to clean up


class _Terms(NamedTuple):
    """Attributes of a policy that its copy in a worker needs."""

    sampling: Sampling
    models: Mapping[str, str] | None
    limits: EpisodeLimits


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
        questions = _Questions(client, policy)
        call = client.begin(WorkerCall(payload=cloudpickle.dumps((terms, example, seed))), questions.hear)
        answer = asyncio.wrap_future(call.future)
        try:
            problem, episode = await asyncio.shield(answer)
        except CallLostError as lost:
            raise RuntimeError(f"the process of the environment ended {lost}") from lost
        except asyncio.CancelledError:
            client.send(WorkerCall(call.number, "cancel"))
            await asyncio.wait({answer}, timeout=CLOSE_S)  # then `end` kills the worker
            raise
        finally:
            client.end(call.number)
            answer.cancel()
            questions.close()
        if problem:
            raise RunEndingError(problem)
        return episode


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
    """Open the workers of an environment. Enter it before the process has threads; see `open_workers`.

    Args:
      chat, serve: of the policies, as in `PolicySetup`.
      memory_bytes: that a worker may take, beyond what it has when it is forked.
    """
    run = functools.partial(_run_there, hosted.environment, chat, serve)
    lane = Lane(run, hosted.workers, hosted.workers, room=MOST_EPISODES, memory_bytes=memory_bytes)
    with open_workers([lane], "environment workers") as client:
        hosted.client = client
        try:
            yield
        finally:
            hosted.client = None


async def _run_there(
    environment: Environment, chat: Chat | None, serve: Serve | None, payload: bytes, ask: AskRank
) -> tuple[str, Any]:
    """Run an episode in a worker; returns the problem that ends the run, or "", and the episode."""
    terms, example, seed = pickle.loads(payload)
    setup = PolicySetup(terms.sampling, chat, terms.models, serve)
    policy = Policy(functools.partial(_ask, ask), setup, seed, terms.limits)
    try:
        episode = await guarded_episode(lambda: environment.run(policy, example, seed), policy)
    except RunEndingError as error:
        return str(error), None
    return "", episode


async def _ask(ask: AskRank, request: Request) -> Completion:
    """Complete a request of a policy in a worker; an array is pickled sooner than a list."""
    arrays, fields = await ask((np.asarray(request.prompt, np.int64), request._replace(prompt=())))
    return Completion(**{name: torch.from_numpy(array) for name, array in arrays.items()}, **fields)


class _Questions:
    """The questions of an episode in a worker, while the rank answers them."""

    def __init__(self, client: WorkerClient, policy: Policy):
        self._client = client
        self._policy = policy
        self._loop = asyncio.get_running_loop()
        self._tasks: dict[int, asyncio.Task[None]] = {}

    def hear(self, message: WorkerAnswer) -> None:
        """Begin to answer a question; called in a thread."""
        with contextlib.suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(self._take, message)

    def close(self) -> None:
        """Stop answering."""
        for task in self._tasks.values():
            task.cancel()

    def _take(self, message: WorkerAnswer) -> None:
        number, question = pickle.loads(message.payload)
        self._tasks[number] = self._loop.create_task(self._reply(message.number, number, question))

    async def _reply(self, call: int, number: int, question: tuple[np.ndarray, Request]) -> None:
        value = error = None
        try:
            prompt, request = question
            values = (await self._policy.complete(request._replace(prompt=prompt.tolist())))._asdict()
            arrays = {name: value.numpy() for name, value in values.items() if isinstance(value, torch.Tensor)}
            value = arrays, {name: value for name, value in values.items() if name not in arrays}
        except ValueError as raised:
            error = ValueError(str(raised))
        except Exception as raised:
            error = RuntimeError(repr(raised))
        self._tasks.pop(number, None)
        self._client.send(WorkerCall(call, "reply", pickle.dumps((number, value, error))))
