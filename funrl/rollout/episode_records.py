"""Records of episodes as JSON, for files."""

from __future__ import annotations

import base64
import dataclasses
import json
from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any

import numpy as np
import torch
from torch import Tensor

from funrl.compiled_kernels.truncated_scores import KeptTokens
from funrl.kinds import OwnedLines
from funrl.rollout.episodes import EpisodeRecord
from funrl.rollout.sampling_parameters import Sampling


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
