"""Paths of an episode that become rows, each sampled node trained in one of them."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import NamedTuple

from funrl.environments.run import EpisodeSpending
from funrl.rollout.episodes import Episode, Node, Trajectory


class RowPath(NamedTuple):
    """A row: a path, and the sampled nodes of it that are trained in this row."""

    trajectory: Trajectory
    nodes: list[Node]
    trained: frozenset[Node]

    @property
    def length(self) -> int:
        """Tokens of the row."""
        return sum(len(node.tokens) for node in self.nodes)


def paths_of(episode: Episode, frozen: Collection[str] = ()) -> list[RowPath]:
    """The rows of an episode in canonical order.

    A trajectory without a sampled node of its own gives none, nor does one whose last reply others went on from: it
    does not matter how much of a path an environment lists again.

    Args:
      frozen: agents that are not trained, whose trajectories give no rows.
    """
    paths: list[RowPath] = []
    ends = [end for end in episode.ends if end.agent not in frozen]
    sampled = [[node for node in end.leaf.path() if node.sampled] for end in ends]
    continued = {node for nodes in sampled for node in nodes[:-1]}
    seen: set[Node] = set()
    for end, nodes in zip(ends, sampled, strict=True):
        trained = frozenset(nodes) - seen
        if trained and nodes[-1] not in continued:
            paths.append(RowPath(end, nodes[-1].path(), trained))  # context after it is read by nobody
            seen |= trained
    return paths


def episode_totals(
    episodes: Sequence[Episode], frozen: Collection[str], costs: Sequence[EpisodeSpending] = ()
) -> dict[str, tuple[float, int]]:
    """Totals of what episodes have: calls of tools, forks by cause, tokens of others, and what they cost.

    Args:
      episodes: some episodes.
      frozen: agents that are not trained.
      costs: of each of them; none: they are not known.
    """
    if not episodes:
        return {}
    paths = [path for episode in episodes for path in paths_of(episode, frozen)]
    sampled = sum(len(node.tokens) for path in paths for node in path.trained)
    sums = {"context_tokens": float(sum(path.length for path in paths) - sampled)}
    if costs:
        sums["recomputed_tokens"] = float(sum(cost.recomputed for cost in costs))
        sums["environment_s"] = math.fsum(cost.environment_s for cost in costs)
    has_tools = any(end.tools for episode in episodes for end in episode.ends)
    for episode in episodes:
        for name, number in episode.counts.items():
            if number or has_tools:
                sums[name] = sums.get(name, 0.0) + number
    return {name: (value, len(episodes)) for name, value in sums.items()}
