"""Rows handed over between two meshes of different ranks, from the rank that has a row to each rank that needs it.

Both sides know which rank has each row and which ranks it goes to, and start only the messages that there are: one
from a rank to another for all fields per token, whatever the number of rows, and for each ragged field one, after one
that says how many lines of it each row has. Nothing passes through a third rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from funrl.kinds import FieldKind, Value
from funrl.mesh.mesh import Mesh, MeshError
from funrl.mesh.rows import ROW_MULTIPLE, blank_rows, pack_rows, packed_bytes, row_indices, unpack_rows
from funrl.processes.heartbeat import entered, left

TAG = 1 << 20  # of all messages; those of a reshard count from 0
LineForm = tuple[torch.dtype, tuple[int, ...]]  # dtype and trailing shape of the lines of a field


class Handover(NamedTuple):
    """Rows on their way from the ranks of one mesh to those of another.

    Attributes:
      lengths: [B] tokens of each row.
      owner: [B] the rank that has it, by its index over the row axes of `source`.
      to: [B] the ranks that get it, by their index over the row axes of `target`.
    """

    lengths: np.ndarray
    owner: np.ndarray
    to: np.ndarray
    source: Mesh
    target: Mesh


class RowMessage(NamedTuple):
    """One message.

    Attributes:
      peer: the other rank, by its number in the run.
      rows: numbers of the rows in it, ascending.
    """

    peer: int
    rows: np.ndarray


def messages_to(way: Handover) -> Iterator[RowMessage]:
    """Messages that this rank of the source sends."""
    own = np.flatnonzero(way.owner == int(way.source.index(way.source.row_axes)))
    has = row_indices(way.source)
    wants = row_indices(way.target)
    for index in np.unique(way.to[own]).tolist():
        rows = own[way.to[own] == index]
        for place in np.flatnonzero(wants == index).tolist():
            if _sender(way, np.flatnonzero(has == way.owner[rows[0]]), place) == way.source.process:
                yield RowMessage(way.target.ranks[place], rows)


def messages_from(way: Handover) -> Iterator[RowMessage]:
    """Messages that this rank of the target receives."""
    coming = np.flatnonzero(way.to == int(way.target.index(way.target.row_axes)))
    has = row_indices(way.source)
    for index in np.unique(way.owner[coming]).tolist():
        sender = _sender(way, np.flatnonzero(has == index), way.target.rank)
        yield RowMessage(sender, coming[way.owner[coming] == index])


def line_forms(fields: Mapping[str, Value], kinds: Mapping[str, FieldKind]) -> dict[str, LineForm]:
    """Form of the lines of each field, by which ranks without the rows make `blank_fields`."""
    lines = {name: kinds[name].lines(x) for name, x in fields.items()}
    return {name: (x.dtype, tuple(x.shape[1:])) for name, x in lines.items()}


def blank_fields(
    forms: Mapping[str, LineForm], kinds: Mapping[str, FieldKind], device: torch.device
) -> dict[str, Value]:
    """Fields of these forms without rows."""
    none = np.zeros(0, dtype=np.int64)
    return {
        name: kinds[name].blank(torch.empty(0, *shape, dtype=dtype, device=device), none, ROW_MULTIPLE)
        for name, (dtype, shape) in forms.items()
    }


def send_rows(fields: Mapping[str, Value], kinds: Mapping[str, FieldKind], way: Handover) -> None:
    """Send this rank's rows. Every rank of the source calls it while the target receives.

    Args:
      fields: of this rank's rows in the order of their numbers; none is known everywhere.
      kinds: by field.

    Raises:
      MeshError: the other rank has failed.
    """
    own = np.flatnonzero(way.owner == int(way.source.index(way.source.row_axes)))
    messages = list(messages_to(way))
    places = [np.searchsorted(own, rows) for _, rows in messages]
    for names in _sent_together(fields, kinds):
        some = {name: fields[name] for name in names}
        lines = way.lengths[own]
        if not kinds[names[0]].per_token:
            lines = kinds[names[0]].counts(fields[names[0]], lines)
            _exchange(way.source, messages, [torch.from_numpy(lines[here]).to(way.source.device) for here in places])
        _exchange(way.source, messages, [pack_rows(some, kinds, here, lines[here]) for here in places])


def receive_rows(like: Mapping[str, Value], kinds: Mapping[str, FieldKind], way: Handover) -> dict[str, Value]:
    """Receive rows that the source sends; returns the fields of this rank's rows.

    Args:
      like: fields of the dtypes and trailing shapes that arrive, in the order of those sent, on this rank's device.
      kinds: by field.

    Raises:
      MeshError: the other rank has failed.
    """
    coming = np.flatnonzero(way.to == int(way.target.index(way.target.row_axes)))
    width = -(-int(way.lengths[coming].max(initial=1)) // ROW_MULTIPLE) * ROW_MULTIPLE
    device = way.target.device
    messages = list(messages_from(way))
    places = [np.searchsorted(coming, rows) for _, rows in messages]
    out = dict[str, Value]()
    for names in _sent_together(like, kinds):
        group = {name: like[name] for name in names}
        lines = way.lengths[coming]
        if not kinds[names[0]].per_token:
            counts = [torch.empty(len(here), dtype=torch.int64, device=device) for here in places]
            _exchange(way.target, messages, counts, receives=True)
            lines = np.zeros(len(coming), dtype=np.int64)
            for here, count in zip(places, counts, strict=True):
                lines[here] = count.cpu().numpy()
        width_bytes = packed_bytes(group, kinds)
        arrived = [torch.empty(int(lines[x].sum()), width_bytes, dtype=torch.uint8, device=device) for x in places]
        _exchange(way.target, messages, arrived, receives=True)
        blank = blank_rows(group, kinds, lines, width)
        for here, x in zip(places, arrived, strict=True):
            unpack_rows(x, blank, kinds, here, lines[here])
        out |= blank
    return {name: out[name] for name in like}


def _sent_together(fields: Mapping[str, Value], kinds: Mapping[str, FieldKind]) -> list[list[str]]:
    """Names of the fields of each message to a rank: those per token together, any other alone."""
    per_token = [name for name in fields if kinds[name].per_token]
    return [*([per_token] if per_token else []), *([name] for name in fields if not kinds[name].per_token)]


def _sender(way: Handover, holders: np.ndarray, place: int) -> int:
    """The rank of the run that sends rows to the rank at a place of the target.

    Args:
      holders: places of the ranks of the source that hold these rows, which take turns.
    """
    return way.source.ranks[int(holders[place % len(holders)])]


def _exchange(mesh: Mesh, messages: Sequence[RowMessage], contents: Sequence[Tensor], receives: bool = False) -> None:
    """Send or receive the content of each message."""
    start = dist.irecv if receives else dist.isend
    peers = [message.peer for message in messages]
    if mesh.device.type == "cpu":
        handles: list[Any] = [start(x, peer, tag=TAG) for peer, x in zip(peers, contents, strict=True)]
    else:
        operations = [dist.P2POp(start, x, peer) for peer, x in zip(peers, contents, strict=True)]
        handles = dist.batch_isend_irecv(operations) if operations else []
        peers = peers[:1] * len(handles)
    for peer, handle in zip(peers, handles, strict=True):
        entered(f"rows of rank {peer}" if receives else f"rows for rank {peer}")
        try:
            handle.wait()
        except RuntimeError as error:
            raise MeshError(
                f"rank {mesh.process} and rank {peer}, which has failed, exchanged rows: {error}"
            ) from error
        left()
