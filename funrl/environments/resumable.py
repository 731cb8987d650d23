"""The policy of an episode that spans several calls of the engine: its calls may stop at any token.

A call that has used the tokens which it may sample now is parked: whoever awaits it waits, and is not resumed before
`ResumablePolicy.renew`. What it has sampled keeps its versions; the next weights continue it.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import NamedTuple

import torch

from funrl.rollout.episode_replay import EpisodeLog, LogError, LoggedPolicy, completion_of
from funrl.rollout.episodes import Node, Trajectory
from funrl.rollout.policy import EPISODE_LIMITS, EpisodeLimits, PolicySetup
from funrl.rollout.requests import Completion, Request
from funrl.rollout.sampling_parameters import Sampling

_CALLERS: ContextVar[tuple[asyncio.Task[object], ...]] = ContextVar("callers", default=())
PARKED = 0  # the allowance of an episode that is rebuilt: every call that its log does not answer is parked


class CallHooks(NamedTuple):
    """Callbacks of the calls of a policy.

    Attributes:
      ask: completes a request, perhaps in part.
      timed: entered for as long as a call has not ended.
      parked: called when a call is parked.
    """

    ask: Callable[[Request], Awaitable[Completion]]
    timed: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext
    parked: Callable[[], None] = lambda: None


@dataclasses.dataclass(eq=False)
class _OpenCall:
    """A call that has not ended.

    Attributes:
      trajectory, sampling, seed: of the request.
      begun: what was sampled so far.
      fresh: tokens of it since the last `renew`.
      parked: whether it waits for the next one.
    """

    trajectory: Trajectory
    sampling: Sampling
    seed: int
    begun: Completion | None
    fresh: int = 0
    parked: bool = False
    task: asyncio.Task[object] | None = dataclasses.field(default_factory=asyncio.current_task)

    def turn(self) -> Trajectory:
        """The trajectory with the turn so far."""
        none = torch.zeros(0)
        begun = self.begun or Completion(0, none.long(), none, none, none.long(), finish="paused")
        node = Node(
            self.trajectory.leaf,
            begun.tokens.tolist(),
            sampled=True,
            raw_logp=begun.raw_logp,
            sampling_logp=begun.sampling_logp,
            versions=begun.versions,
            finish="paused",
            sampling=self.sampling,
            seed=self.seed,
        )
        return dataclasses.replace(self.trajectory, leaf=node)


class ResumablePolicy(LoggedPolicy):
    """A policy whose trajectories grow by a bounded number of tokens between two calls of `renew`.

    The bound is of each path from root to leaf, so that it depends on no order in which concurrent calls arrive.

    Attributes:
      allowance: that bound; None: calls run to their end.
    """

    def __init__(
        self,
        hooks: CallHooks,
        setup: PolicySetup,
        seed: int,
        limits: EpisodeLimits = EPISODE_LIMITS,
        log: EpisodeLog = EpisodeLog(),  # noqa: B008  (immutable)
    ):
        """Make it.

        Args:
          hooks: completes requests.
          setup, seed, limits: as in `Policy`.
          log: answers the episode's first calls, which it continues; see `LoggedPolicy`.
        """
        super().__init__(log, setup, seed, limits)
        self.allowance: int | None = PARKED
        self._hooks = hooks
        self._open: list[_OpenCall] = []
        self._fresh: dict[int | None, int] = {}  # by seed of an ended call: its tokens since the last `renew`
        self._renewed: asyncio.Future[None] | None = None
        self._callers: dict[
            asyncio.Task[object], Sequence[asyncio.Task[object]]
        ] = {}  # with the callers that began them
        self._parked_at = 0.0

    @property
    def parked(self) -> bool:
        """True if the episode waits for parked calls and for nothing else that is known.

        A task that has called the policy and is in no call does something else, unless it waits for tasks of its own
        that have. That holds for as long as an environment may take between two calls.
        """
        if not self._open or not all(call.parked for call in self._open):
            return False
        if time.monotonic() > self._parked_at + self.limits.environment_s:
            return True
        self._callers = {task: before for task, before in self._callers.items() if not task.done()}
        waiting = {call.task for call in self._open}
        waiting.update(task for before in self._callers.values() for task in before)
        return waiting.issuperset(self._callers)

    def renew(self, allowance: int | None) -> None:
        """Resume parked calls with a new allowance of tokens."""
        self.allowance = allowance
        self._fresh.clear()
        for call in self._open:
            call.fresh = 0
            call.parked = False
        if self._renewed is not None:
            self._renewed.set_result(None)
            self._renewed = None

    def reject(self) -> None:
        """Make parked calls raise `LogError`, which ends the environment."""
        if self._renewed is not None:
            self._renewed.set_exception(LogError(self.difference))
            self._renewed = None

    def log(self) -> EpisodeLog:
        """The log of everything that was said so far."""
        return EpisodeLog([*self._sampled, *(call.turn() for call in self._open)], self.answers)

    async def _completion(self, trajectory: Trajectory, tokens: list[int], sampling: Sampling, seed: int) -> Completion:
        self._note_caller()
        turn = self._logged(tokens, sampling, seed)
        if turn is not None and turn.finish != "paused":
            return completion_of(turn)
        begun = None if turn is None or not turn.tokens else completion_of(turn)
        call = _OpenCall(trajectory, sampling, seed, begun)
        self._open.append(call)
        try:
            with self._hooks.timed():
                while (completion := await self._continued(call, tokens)) is None:
                    await self._park(call)
            self._fresh[seed] = call.fresh
            return completion
        finally:
            self._open.remove(call)

    async def _continued(self, call: _OpenCall, tokens: list[int]) -> Completion | None:
        """Sample as many tokens as a call may now; None: it has not ended."""
        written = 0 if call.begun is None else len(call.begun.tokens)
        most = None
        if self.allowance is not None:
            path = sum(self._fresh.get(node.seed, 0) for node in call.trajectory.nodes() if node.sampled)
            most = self.allowance - path - call.fresh
            if most < 1:
                return None
        computed = self._prefix(call.trajectory.leaf).computed if call.begun is None else len(tokens) + written - 1
        request = Request(0, tokens, call.sampling, call.seed, begun=call.begun, most=most, computed=computed)
        owned = self._prefix(call.trajectory.leaf).owned
        completion = await self._hooks.ask(request._replace(owned=owned))
        call.fresh += len(completion.tokens) - written
        if completion.finish == "paused":
            call.begun = completion
            return None
        return completion

    def _note_caller(self) -> None:
        """Take note of the task that makes a call. A task inherits the context of the one that begins it."""
        task = asyncio.current_task()
        assert task is not None
        before = _CALLERS.get()
        if task not in before:
            _CALLERS.set((*before, task))
        self._callers[task] = [caller for caller in before if caller is not task]

    async def _park(self, call: _OpenCall) -> None:
        if self._renewed is None:
            self._renewed = asyncio.get_running_loop().create_future()
        call.parked = True
        self._parked_at = time.monotonic()
        self._hooks.parked()
        await asyncio.shield(self._renewed)
