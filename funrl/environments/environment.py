"""The contract of environments: what turns a policy's replies into episodes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from funrl.data.prompts import Example
from funrl.rollout.episodes import Episode, Message
from funrl.rollout.policy import Policy, Tools


class Environment(Protocol):
    """A maker of episodes: many of them concurrently on one event loop, so `run` keeps its state to itself.

    It may also have `async score(episodes) -> list[float | None]`; see `ScoringEnvironment`.
    """

    async def run(self, policy: Policy, example: Example, seed: int) -> Episode:
        """Run one episode.

        Args:
          policy: of this episode.
          example: the prompt, and the other fields of its record.
          seed: of the episode's own randomness, a signed 64-bit number.

        Raises:
          Exception: the episode fails; it is tried again with a new call.
        """
        ...


@runtime_checkable
class ScoringEnvironment(Protocol):
    """An environment that scores the episodes of an example together, when all of them have ended."""

    async def score(self, episodes: Sequence[Episode]) -> Sequence[float | None]:
        """A reward of each episode, which replaces those of all its agents; None: unscored."""
        ...


@runtime_checkable
class PromptingEnvironment(Protocol):
    """An environment with prompts of its own, for a run without --prompts."""

    def prompts(self, seed: int) -> Sequence[Mapping[str, Any]]:
        """Records as those of --prompts: each has a "prompt" and further fields. The seed is that of the run."""
        ...


class ReturnError(TypeError):
    """A method of an environment returned something else than it has to; the message names class, value and remedy."""


class MessageEnvironment(Protocol):
    """The other side of one conversation. A new one is made for each attempt at an episode.

    It may have an attribute `state`, a text that names the state in which the policy replies next (`Episode.states`).
    """

    async def reset(self, example: Example, seed: int) -> tuple[Sequence[Message], Tools]:
        """Begin; returns the first messages, and descriptions of the tools that the chat template shows."""
        ...

    async def step(self, message: Message) -> tuple[Sequence[Message], float | None, bool]:
        """Answer a reply of the policy; returns the next messages, the reply's reward, and whether the episode ends.

        A message with calls of tools has "tool_calls", and "problems", a list of texts, if a part of it could not be
        read. The reward of the episode is the sum over its turns; it is unscored if all of them are None.
        """
        ...

    async def close(self) -> None:
        """Free what it holds. Called once, however the episode ends."""
        ...


class PlainEnvironment(Protocol):
    """A `MessageEnvironment` whose methods are plain: each call is in a thread, beside the engine."""

    def reset(self, example: Example, seed: int) -> tuple[Sequence[Message], Tools]:
        """As of `MessageEnvironment`."""
        ...

    def step(self, message: Message) -> tuple[Sequence[Message], float | None, bool]:
        """As of `MessageEnvironment`."""
        ...

    def close(self) -> None:
        """As of `MessageEnvironment`."""
        ...
