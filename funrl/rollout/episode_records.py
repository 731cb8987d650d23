"""Episodes as flat records, for processes and files: a chain of nodes is as deep as its episode has turns."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from funrl.rollout.episodes import Episode, Node, Trajectory

ROOT_PARENT = -1


class EpisodeRecord(NamedTuple):
    """An episode without references from node to node.

    Attributes:
      nodes: fields of each node, parents before children.
      parents: index of each node's parent; `ROOT_PARENT`: it has none.
      ends: (agent, index of the leaf, tools) of each trajectory.
      turn_rewards, states: by index of a node.
      rest: the other fields of the episode.
    """

    nodes: Sequence[Mapping[str, Any]]
    parents: Sequence[int]
    ends: Sequence[tuple[str, int, Sequence[Mapping[str, Any]]]]
    turn_rewards: Mapping[int, float]
    states: Mapping[int, str]
    rest: Mapping[str, Any]


def to_record(episode: Episode) -> EpisodeRecord:
    """Flatten an episode. Nodes that trajectories share are recorded once."""
    numbers: dict[Node, int] = {}
    for end in episode.ends:
        for node in end.leaf.path():
            numbers.setdefault(node, len(numbers))
    for node in (*episode.turn_rewards, *episode.states):
        for before in node.path():
            numbers.setdefault(before, len(numbers))
    return EpisodeRecord(
        nodes=[_fields(node, "parent") for node in numbers],
        parents=[ROOT_PARENT if node.parent is None else numbers[node.parent] for node in numbers],
        ends=[(end.agent, numbers[end.leaf], end.tools) for end in episode.ends],
        turn_rewards={numbers[node]: reward for node, reward in episode.turn_rewards.items()},
        states={numbers[node]: state for node, state in episode.states.items()},
        rest=_fields(episode, "ends", "turn_rewards", "states"),
    )


def from_record(record: EpisodeRecord) -> Episode:
    """The episode of a record, with nodes of its own."""
    nodes: list[Node] = []
    for fields, parent in zip(record.nodes, record.parents, strict=True):
        nodes.append(Node(None if parent == ROOT_PARENT else nodes[parent], **fields))
    return Episode(
        ends=[Trajectory(agent, nodes[leaf], tools) for agent, leaf, tools in record.ends],
        turn_rewards={nodes[number]: reward for number, reward in record.turn_rewards.items()},
        states={nodes[number]: state for number, state in record.states.items()},
        **record.rest,
    )


def _fields(value: Any, *but: str) -> dict[str, Any]:
    """Fields of a dataclass by name, without some."""
    return {field.name: getattr(value, field.name) for field in dataclasses.fields(value) if field.name not in but}
