"""An environment whose answers are those of a log, so that every token of the policy can be compared with it."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from funrl.data.prompts import Example
from funrl.rollout.episode_replay import completion_of
from funrl.rollout.episodes import Episode, Node, Trajectory
from funrl.rollout.policy import Policy, RunEndingError
from funrl.rollout.requests import Completion

PROMPT_CHARACTERS = 40  # characters of a prompt in the name of an episode
SAMPLED_FIELDS = ("raw_logp", "sampling_logp", "versions", "routes", "kept", "finish")  # of a turn and its completion


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


class MissingEpisodeError(RunEndingError):
    """A log does not have an episode that is to be repeated."""


def logged_episode(episodes: Mapping[int, LoggedEpisode], seed: int, example: Example) -> LoggedEpisode:
    """The episode of a seed.

    Args:
      episodes: of a log, by their seeds.
      example: its prompt.

    Raises:
      MissingEpisodeError: the log does not have it.
    """
    if seed not in episodes:
        raise MissingEpisodeError(
            f"the log has no episode of the prompt {example.text!r:.{PROMPT_CHARACTERS}} with the seed {seed}: it is "
            "of another run, or prompts, --seed or the steps before it are not as they were"
        )
    return episodes[seed]


class LoggedEnvironment:
    """An `Environment` that repeats the episodes of a log: no other environment is called.

    Each turn is asked for after the tokens of the log, so that it is compared by itself; one that differs is noted.

    Attributes:
      agents: names of the agents, as those of the environment that made the log.
      unlike: turns that differed, in words.
      compared: number of the turns that were sampled again.
    """

    def __init__(self, agents: Sequence[str] = ()):
        """Begin without a log; `open` gives one."""
        self.agents = tuple(agents)
        self.unlike: list[str] = []
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
        logged = logged_episode(self._logged, seed, example)
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
        name = f"episode {logged.number} ({example.text!r:.{PROMPT_CHARACTERS}})"
        again: dict[Node, Node] = {}
        for end in logged.episode.ends:
            for node in end.nodes():
                if node in again:
                    continue
                now = dataclasses.replace(node, parent=None if node.parent is None else again[node.parent])
                if node.sampled:
                    now = self._compared(node, now, completions[node], name=name, agent=end.agent)
                again[node] = now
        return dataclasses.replace(
            logged.episode,
            ends=[dataclasses.replace(end, leaf=again[end.leaf]) for end in logged.episode.ends],
            turn_rewards={again[node]: reward for node, reward in logged.episode.turn_rewards.items()},
            states={again[node]: state for node, state in logged.episode.states.items()},
        )

    def _compared(self, node: Node, now: Node, done: Completion, *, name: str, agent: str) -> Node:
        """A turn as it was sampled again; as it is in the log where they differ, which is noted.

        Args:
          node: of the log.
          now: the same, after the turns before it as they are now.
          done: what was sampled.
          name: of the episode, in words.
          agent: who speaks.
        """
        self.compared += 1
        before = list(node.tokens)
        after = done.tokens.tolist()
        if before == after:
            return dataclasses.replace(now, **{name: getattr(done, name) for name in SAMPLED_FIELDS})
        path = node.path()
        turn = path[0].turns_before + sum(earlier.sampled for earlier in path[:-1])
        pairs = itertools.zip_longest(after, before, fillvalue="nothing")
        token, (ours, theirs) = next((i, pair) for i, pair in enumerate(pairs) if pair[0] != pair[1])
        self.unlike.append(f"{name}, turn {turn} of {agent}, token {token}: {ours} now, {theirs} in the log")
        return now


async def _sample_again(policy: Policy, end: Trajectory, node: Node) -> Completion:
    """A sampled node of a trajectory again, after the tokens that the log has before it."""
    if node.parent is None or node.sampling is None or node.seed is None:
        raise ValueError("a sampled node has no request, so it cannot be sampled again")
    _, longer = await policy.request(dataclasses.replace(end, leaf=node.parent), node.sampling, node.seed)
    return completion_of(longer.leaf)
