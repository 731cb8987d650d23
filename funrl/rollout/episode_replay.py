"""Environments that run again with logged turns of the policy, and requests of these turns."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import torch

from funrl.kinds import joined_lines
from funrl.rollout.episodes import Node, Trajectory
from funrl.rollout.policy import EPISODE_LIMITS, EpisodeLimits, Policy, PolicySetup
from funrl.rollout.requests import Completion, Finish, Request
from funrl.rollout.sampling_parameters import Sampling


def turn_request(node: Node) -> Request:
    """The request that sampled a node. Raises ValueError: it has no sampling parameters or no seed."""
    if node.sampling is None or node.seed is None:
        raise ValueError("a sampled node has no sampling parameters and seed, so it cannot be sampled again")
    owned = joined_lines([before.owned for before in node.path()[:-1]])
    return Request(0, _tokens_before(node), node.sampling, node.seed, owned=owned)


class EpisodeLog(NamedTuple):
    """Everything that was said in an episode so far.

    Attributes:
      calls: a trajectory for each call of the policy, which ends with the turn that it sampled. A turn with the finish
        "paused" has not ended, and may have no token yet.
      answers: of the environment, as `logged_answer` writes them.
    """

    calls: Sequence[Trajectory] = ()
    answers: Sequence[str] = ()


class LogError(Exception):
    """The environment of an episode does not behave as its log says."""


class LoggedPolicy(Policy):
    """A policy whose calls are answered from a log: the environment runs again, and the engine does not.

    A call that the log does not have, or has in part only, raises `LogError`.
    A call is found by its seed, which is a function of the episode's seed and of all that the call depends on.
    """

    def __init__(self, log: EpisodeLog, setup: PolicySetup, seed: int, limits: EpisodeLimits = EPISODE_LIMITS):
        """Make it.

        Args:
          log: of the episode.
          setup, seed, limits: as in `Policy`.
        """
        super().__init__(_unlogged, setup, seed, limits)
        self.answers: list[str] = []
        self._log = log
        self._turns = {call.leaf.seed: call.leaf for call in log.calls}
        self._left = set(self._turns)  # seeds of calls that have not been made again

    @property
    def difference(self) -> str:
        """Difference between what the environment has done and the log; "" if it did all of that again."""
        for number, logged in enumerate(self._log.answers):
            answer = self.answers[number] if number < len(self.answers) else "nothing"
            if answer != logged:
                return f"answer {number} of the environment is {answer:.200}, it was {logged:.200}"
        if self._left:
            return f"the environment has not asked for {len(self._left)} of {len(self._turns)} turns again"
        return ""

    def answered(self, answer: object) -> None:
        """Take note of an answer of the environment."""
        self.answers.append(logged_answer(answer))

    async def _completion(self, trajectory: Trajectory, tokens: list[int], sampling: Sampling, seed: int) -> Completion:
        turn = self._logged(tokens, sampling, seed)
        if turn is not None and turn.finish != "paused":
            return completion_of(turn)
        return await super()._completion(trajectory, tokens, sampling, seed)

    def _logged(self, tokens: Sequence[int], sampling: Sampling, seed: int) -> Node | None:
        """The turn of a call in the log; None: it is not there."""
        turn = self._turns.get(seed)
        if turn is None or turn.sampling != sampling or _tokens_before(turn) != list(tokens):
            return None
        self._left.discard(seed)
        return turn


def logged_answer(answer: object) -> str:
    """An answer of an environment as JSON, with the type's name in place of what JSON does not know."""
    try:
        return json.dumps(answer, default=_listed, skipkeys=True)
    except (ValueError, RecursionError):
        return json.dumps(type(answer).__name__)


def completion_of(turn: Node) -> Completion:
    """The completion of a request that sampled a node."""
    numbers = turn.numbers
    tokens = torch.tensor(turn.tokens, dtype=torch.int64)
    logps = numbers.sampling_logp, numbers.raw_logp
    finish = cast(Finish, turn.finish)
    completion = Completion(0, tokens, *logps, numbers.versions, finish=finish, routes=turn.routes, kept=turn.kept)
    return completion._replace(digests=numbers.digests)


def _tokens_before(turn: Node) -> list[int]:
    return [token for node in turn.path()[:-1] for token in node.tokens]


def _listed(value: Any) -> Any:
    return value.tolist() if hasattr(value, "tolist") else type(value).__name__


async def _unlogged(request: Request) -> Completion:
    raise LogError(f"the environment asks for a turn after {len(request.prompt)} tokens that its log does not have")
