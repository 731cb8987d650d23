"""Episodes as flat records, for processes and files: a chain of nodes is as deep as its episode has turns."""

from __future__ import annotations

import base64
import dataclasses
import json
from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from funrl.compiled_kernels.truncated_scores import KeptTokens
from funrl.kinds import OwnedLines
from funrl.rollout.episodes import Episode, Node, Trajectory
from funrl.rollout.sampling_parameters import Sampling

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


def to_json(value: object) -> str:
    """Write records of episodes, in mappings and sequences, as JSON. Mappings and sequences lose their type.

    Raises:
      TypeError: a message has what JSON cannot hold.
    """
    return json.dumps(value, default=_plain)


def record_from_json(value: Any) -> EpisodeRecord:
    """The record that `to_json` wrote, as `json.loads` reads it."""
    record = EpisodeRecord(*value)
    by_node = {
        name: {int(number): x for number, x in field.items()}
        for name, field in record._asdict().items()
        if isinstance(field, Mapping) and name != "rest"
    }
    nodes = [{name: _value(x) for name, x in fields.items()} for fields in record.nodes]
    for fields in nodes:
        if (owned := fields.get("owned")) is not None:
            fields["owned"] = OwnedLines({name: _value(x) for name, x in owned[0].items()}, owned[1])
        if (kept := fields.get("kept")) is not None:
            fields["kept"] = KeptTokens(*map(_value, kept))
    return record._replace(nodes=nodes, ends=[(agent, leaf, tools) for agent, leaf, tools in record.ends], **by_node)


def _plain(value: object) -> Any:
    if isinstance(value, Tensor):
        array = value.cpu().numpy()
        data = base64.b64encode(array.tobytes()).decode()
        return {"tensor": data, "dtype": array.dtype.str, "shape": array.shape}
    if isinstance(value, Sampling):
        return {"sampling": dataclasses.asdict(value)}
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, Sequence):
        return list(value)
    if isinstance(value, Real):
        return float(value)
    raise TypeError(
        f"a message of an environment has a {type(value).__name__}, which a checkpoint in the middle of an episode "
        "cannot hold; give text, numbers, lists and dicts"
    )


def _value(value: object) -> Any:
    """A field of a node, as `_plain` wrote it."""
    if isinstance(value, Mapping) and "tensor" in value:
        array = np.frombuffer(base64.b64decode(value["tensor"]), dtype=value["dtype"])
        return torch.from_numpy(array.reshape(value["shape"]).copy())
    if isinstance(value, Mapping) and "sampling" in value:
        fields: dict[str, Any] = dict(value["sampling"])
        fields.update({name: tuple(x) for name, x in fields.items() if isinstance(x, list)})
        return Sampling(**fields)
    return value
