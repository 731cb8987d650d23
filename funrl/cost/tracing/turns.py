"""Turns that a dry run assumes of an episode."""

from __future__ import annotations

from typing import NamedTuple

from funrl.tasks.embedded import embedded_task
from funrl.trainer.jobs.job import RLJob
from funrl.trainer.settings.declaration import SettingsError
from funrl.trainer.settings.scorers import has_environment
from funrl.trainer.settings.settings import Settings

TURNS = 2  # a call of a tool and an answer, unless a flag or the embedded task gives it
TURN_TOKENS = 64  # of a tool's answer with the template around it, in the same case


class Turns(NamedTuple):
    """Turns of an episode; without an environment there is one reply.

    Attributes:
      replies: of the policy.
      context: tokens that come before each reply but the first.
      seconds: of the environment before each reply but the first.
    """

    replies: int = 1
    context: int = 0
    seconds: float = 0.0

    @property
    def gaps(self) -> int:
        """Times that an episode waits for its environment."""
        return self.replies - 1

    def row_tokens(self, prompt: int, reply: int) -> int:
        """Tokens of an episode."""
        return prompt + self.replies * reply + self.gaps * self.context

    def begins(self, prompt: int, reply: int) -> list[int]:
        """The place of each reply's first token."""
        return [prompt + turn * (reply + self.context) for turn in range(self.replies)]


ONE_REPLY = Turns()


class EpisodeCost(NamedTuple):
    """Episodes of one rank of the engine.

    Attributes:
      turns: what is assumed of each.
      tokens: of an episode's row.
      running: episodes that generate at a time.
      open: unfinished episodes at a time: running ones, and as many that wait as keep the engine busy and as
        --max_waiting lets begin.
      read: tokens of later turns that the engine reads, those that are computed again left out.
      recomputed: tokens whose pages were evicted while their episode waited.
      waited: seconds in which every unfinished episode waits for its environment.
      overlapped: other seconds of environments: an episode waits, others generate.
      cache: bytes of the pages of waiting episodes.
    """

    turns: Turns
    tokens: int
    running: int
    open: int
    read: int
    recomputed: int
    waited: float
    overlapped: float
    cache: float


def turns_of(settings: Settings) -> Turns:
    """The turns that flags and the embedded task give, else defaults.

    Raises:
      SettingsError: there are more than --episode_turns.
    """
    if not has_environment(settings):
        return ONE_REPLY
    own = settings.environments.env is None and settings.examples.prompts is None
    turns, context = embedded_task(settings.examples.task).turns if own else (TURNS, TURN_TOKENS)
    assumed = settings.estimate
    most = settings.environments.episode_turns
    if (assumed.assume_turns or 1) > most:
        raise SettingsError(
            f"--assume_turns={assumed.assume_turns} is more than --episode_turns={most}; raise that one"
        )
    return Turns(
        assumed.assume_turns or min(turns, most),
        context if assumed.assume_turn_tokens is None else assumed.assume_turn_tokens,
        assumed.assume_tool_seconds or 0.0,
    )


def written_tokens(job: RLJob) -> int:
    """Tokens that the policy writes in a row."""
    return turns_of(job.settings).replies * job.sampling.max_new_tokens
