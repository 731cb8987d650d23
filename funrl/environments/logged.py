"""An environment whose answers are those of a log, so that every token of the policy can be compared with it."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from funrl.data.prompts import Example
from funrl.rollout.episode_replay import completion_of
from funrl.rollout.episodes import Episode, Node, Trajectory
from funrl.rollout.policy import Policy, RunEndingError
from funrl.rollout.requests import Completion

PROMPT_CHARACTERS = 40  # characters of a prompt in the name of an episode


class LoggedEpisode(NamedTuple):
    """An episode as a run has made it.

    Attributes:
      number: index among the episodes that ran together.
      seed: of the episode.
      episode: itself, with its rewards.
    """

    number: int
    seed: int
    episode: Episode


class UnlikeTurn(NamedTuple):
    """A turn that is sampled differently.

    Attributes:
      episode: which one it is, in words.
      agent: who speaks.
      turn: number of the turn in its trajectory.
      token: number of the first differing token in it.
      before, now: token ids of the turn.
    """

    episode: str
    agent: str
    turn: int
    token: int
    before: Sequence[int]
    now: Sequence[int]

    def __str__(self) -> str:
        before, now = (str(ids[self.token]) if self.token < len(ids) else "nothing" for ids in (self.before, self.now))
        return f"{self.episode}, turn {self.turn} of {self.agent}, token {self.token}: {now} now, {before} in the log"


class MissingEpisodeError(RunEndingError):
    """A log does not have an episode that is to be repeated."""


class LoggedEnvironment:
    """An `Environment` that repeats the episodes of a log: no other environment is called.

    Each turn is asked for after the tokens of the log, so that it is compared by itself; one that differs is noted.

    Attributes:
      agents: names of the agents, as those of the environment that made the log.
      unlike: turns that differed.
      compared: number of the turns that were sampled again.
    """

    def __init__(self, agents: Sequence[str] = ()):
        """Begin without a log; `open` gives one."""
        self.agents = tuple(agents)
        self.unlike: list[UnlikeTurn] = []
        self.compared = 0
        self._logged: Mapping[int, LoggedEpisode] = {}

    def open(self, episodes: Sequence[LoggedEpisode]) -> None:
        """Repeat these episodes from now on; nothing has differed yet."""
        self._logged = {logged.seed: logged for logged in episodes}
        self.forget()

    def forget(self) -> None:
        """Begin a step: nothing has differed yet."""
        self.unlike = []
        self.compared = 0

    async def run(self, policy: Policy, example: Example, seed: int) -> Episode:
        """Repeat the episode of a seed.

        Raises:
          MissingEpisodeError: the log does not have it.
        """
        logged = self._logged.get(seed)
        if logged is None:
            raise MissingEpisodeError(
                f"the log has no episode of the prompt {example.text!r:.{PROMPT_CHARACTERS}} with the seed {seed}: it "
                "is of another run, or prompts, --seed or the steps before it are not as they were"
            )
        ends = {node: end for end in reversed(logged.episode.ends) for node in end.nodes() if node.sampled}
        tasks = [asyncio.create_task(_sample_again(policy, end, node)) for node, end in ends.items()]
        try:
            completions = await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
        return self.resampled(logged, example, dict(zip(ends, completions, strict=True)))

    def resampled(self, logged: LoggedEpisode, example: Example, completions: Mapping[Node, Completion]) -> Episode:
        """An episode of a log with its turns as they are sampled now.

        Args:
          logged: the episode.
          example: its prompt.
          completions: of each sampled node, after the tokens that the log has before it.
        """
        name = episode_name(logged, example)
        again: dict[Node, Node] = {}
        for end in logged.episode.ends:
            for node in end.nodes():
                if node in again:
                    continue
                now = dataclasses.replace(node, parent=None if node.parent is None else again[node.parent])
                if node.sampled:
                    done = completions[node]
                    sampled = dataclasses.replace(
                        now,
                        tokens=done.tokens.tolist(),
                        raw_logp=done.raw_logp,
                        sampling_logp=done.sampling_logp,
                        versions=done.versions,
                        routes=done.routes,
                        finish=done.finish,
                    )
                    now = self._compared(end.agent, node, sampled, name)
                again[node] = now
        return with_nodes(logged.episode, again)

    def _compared(self, agent: str, node: Node, again: Node, name: str) -> Node:
        """The turn that was sampled again; the one of the log where they differ, which is noted."""
        self.compared += 1
        now = list(again.tokens)
        if now == list(node.tokens):
            return again
        token = next((i for i, (a, b) in enumerate(zip(node.tokens, now, strict=False)) if a != b), None)
        path = node.path()
        turn = path[0].turns_before + sum(earlier.sampled for earlier in path[:-1])
        first = min(len(now), len(node.tokens)) if token is None else token
        self.unlike.append(UnlikeTurn(name, agent, turn, first, list(node.tokens), now))
        return dataclasses.replace(node, parent=again.parent)


async def _sample_again(policy: Policy, end: Trajectory, node: Node) -> Completion:
    """A sampled node of a trajectory again, after the tokens that the log has before it."""
    if node.parent is None or node.sampling is None or node.seed is None:
        raise ValueError("a sampled node has no request, so it cannot be sampled again")
    _, longer = await policy.request(dataclasses.replace(end, leaf=node.parent), node.sampling, node.seed)
    return completion_of(longer.leaf)


def episode_name(logged: LoggedEpisode, example: Example) -> str:
    """Name of an episode in messages."""
    return f"episode {logged.number} ({example.text!r:.{PROMPT_CHARACTERS}})"


def with_nodes(episode: Episode, again: Mapping[Node, Node]) -> Episode:
    """An episode with other nodes in place of its own."""
    ends = [dataclasses.replace(end, leaf=again[end.leaf]) for end in episode.ends]
    turn_rewards = {again[node]: reward for node, reward in episode.turn_rewards.items()}
    states = {again[node]: state for node, state in episode.states.items()}
    return dataclasses.replace(episode, ends=ends, turn_rewards=turn_rewards, states=states)
