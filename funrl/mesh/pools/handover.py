"""Rows handed over between two meshes of different ranks, from the rank that has a row to each rank that needs it.

Both sides know which rank has each row and which ranks it goes to, and start only the messages that there are: one
from a rank to another for all fields per token, whatever the number of rows, and where there are ragged fields one for
each, after one that says how many lines each row has of them. Nothing passes through a third rank.
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

TAG = 1 << 20  # of the first message to a rank; those of a reshard count from 0
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


def send_rows(fields: Mapping[str, Value], kinds: Mapping[str, FieldKind], way: Handover) -> int:
    """Send this rank's rows; returns the bytes sent. Every rank of the source calls it while the target receives.

    Args:
      fields: of this rank's rows in the order of their numbers; none is known everywhere.
      kinds: by field.

    Raises:
      MeshError: the other rank has failed.
    """
    own = np.flatnonzero(way.owner == int(way.source.index(way.source.row_axes)))
    messages = list(messages_to(way))
    device = way.source.device
    of_row = {name: kinds[name].counts(x, way.lengths[own]) for name, x in fields.items() if not kinds[name].per_token}
    places = [np.searchsorted(own, rows) for _, rows in messages]
    if of_row:
        tables = [torch.from_numpy(np.stack([x[here] for x in of_row.values()])).to(device) for here in places]
        _exchange(way.source, _numbered(messages, [tables]), [])
    packed = []
    for names in _sent_together(fields, kinds):
        some = {name: fields[name] for name in names}
        counts = of_row.get(names[0], way.lengths[own])
        packed.append([pack_rows(some, kinds, here, counts[here]) for here in places])
    _exchange(way.source, _numbered(messages, packed), [])
    return sum(x.numel() for of_messages in packed for x in of_messages)


def receive_rows(
    like: Mapping[str, Value], kinds: Mapping[str, FieldKind], way: Handover
) -> tuple[dict[str, Value], int]:
    """Receive rows that the source sends; returns the fields of this rank's rows and the bytes received.

    Args:
      like: fields of the dtypes and trailing shapes that arrive, in the order of those sent, on this rank's device.
      kinds: by field.

    Raises:
      MeshError: the other rank has failed.
    """
    coming = np.flatnonzero(way.to == int(way.target.index(way.target.row_axes)))
    width = -(-int(way.lengths[coming].max(initial=1)) // ROW_MULTIPLE) * ROW_MULTIPLE
    messages = list(messages_from(way))
    places = [np.searchsorted(coming, rows) for _, rows in messages]
    of_row = _received_counts([name for name in like if not kinds[name].per_token], way, messages, places)
    groups = [{name: like[name] for name in names} for names in _sent_together(like, kinds)]
    counts = [of_row.get(next(iter(group)), way.lengths[coming]) for group in groups]
    arrived = [
        [
            torch.empty(int(lines[here].sum()), packed_bytes(group, kinds), dtype=torch.uint8, device=way.target.device)
            for here in places
        ]
        for group, lines in zip(groups, counts, strict=True)
    ]
    _exchange(way.target, [], _numbered(messages, arrived))
    out = dict[str, Value]()
    for group, lines, of_messages in zip(groups, counts, arrived, strict=True):
        blank = blank_rows(group, kinds, lines, width)
        for here, x in zip(places, of_messages, strict=True):
            unpack_rows(x, blank, kinds, here, lines[here])
        out |= blank
    return {name: out[name] for name in like}, sum(x.numel() for of_messages in arrived for x in of_messages)


def _received_counts(
    names: Sequence[str], way: Handover, messages: Sequence[RowMessage], places: Sequence[np.ndarray]
) -> dict[str, np.ndarray]:
    """[b] lines of each row that comes, of each field that is not per token."""
    if not names:
        return {}
    tables = [torch.empty(len(names), len(x.rows), dtype=torch.int64, device=way.target.device) for x in messages]
    _exchange(way.target, [], _numbered(messages, [tables]))
    counts = np.zeros((len(names), sum(map(len, places))), dtype=np.int64)
    for here, table in zip(places, tables, strict=True):
        counts[:, here] = table.cpu().numpy()
    return dict(zip(names, counts, strict=True))


def _sent_together(fields: Mapping[str, Value], kinds: Mapping[str, FieldKind]) -> list[list[str]]:
    """Names of the fields of each message to a rank: those per token together, any other alone."""
    per_token = [name for name in fields if kinds[name].per_token]
    return [*([per_token] if per_token else []), *([name] for name in fields if not kinds[name].per_token)]


class _Parcel(NamedTuple):
    """Bytes or numbers to or from a rank of the run, and the tag that tells them from others of the exchange."""

    peer: int
    tag: int
    content: Tensor


def _numbered(messages: Sequence[RowMessage], contents: Sequence[Sequence[Tensor]]) -> list[_Parcel]:
    """Parcels of messages that have several contents each, given as contents of all messages."""
    return [
        _Parcel(message.peer, TAG + place, x)
        for place, of_messages in enumerate(contents)
        for message, x in zip(messages, of_messages, strict=True)
    ]


def _sender(way: Handover, holders: np.ndarray, place: int) -> int:
    """The rank of the run that sends rows to the rank at a place of the target.

    Args:
      holders: places of the ranks of the source that hold these rows, which take turns.
    """
    return way.source.ranks[int(holders[place % len(holders)])]


def _exchange(mesh: Mesh, sends: Sequence[_Parcel], receives: Sequence[_Parcel]) -> None:
    if mesh.device.type == "cpu":
        handles = [(peer, dist.irecv(x, peer, tag=tag)) for peer, tag, x in receives]
        handles += [(peer, dist.isend(x, peer, tag=tag)) for peer, tag, x in sends]
    else:
        operations = [dist.P2POp(dist.irecv, x, peer) for peer, _, x in receives]
        operations += [dist.P2POp(dist.isend, x, peer) for peer, _, x in sends]
        works = dist.batch_isend_irecv(operations) if operations else []
        peers = [parcel.peer for parcel in (*receives, *sends)]
        handles: list[tuple[int, Any]] = [(peers[0] if peers else 0, work) for work in works]
    for peer, handle in handles:
        entered(f"rows of rank {peer}" if receives else f"rows for rank {peer}")
        try:
            handle.wait()
        except RuntimeError as error:
            raise MeshError(
                f"rank {mesh.process} and rank {peer}, which has failed, exchanged rows: {error}"
            ) from error
        left()
