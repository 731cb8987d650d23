"""Rows handed over between two meshes of different ranks, from the rank that has a row to each rank that needs it.

Both sides know which rank has each row and which ranks it goes to, and start only the messages that there are: one
from a rank to another, whatever the number of rows. Nothing passes through a third rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from funrl.kinds import FieldKind, Value
from funrl.mesh.mesh import Mesh, MeshError
from funrl.mesh.rows import ROW_MULTIPLE, blank_rows, pack_rows, packed_bytes, row_indices, unpack_rows
from funrl.processes.heartbeat import entered, left

TAG = 1 << 20  # of these messages; those of a reshard count from 0


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


def send_rows(fields: Mapping[str, Tensor], kinds: Mapping[str, FieldKind], way: Handover) -> int:
    """Send this rank's rows; returns the bytes sent. Every rank of the source calls it while the target receives.

    Args:
      fields: per token, of this rank's rows in the order of their numbers.
      kinds: by field.

    Raises:
      MeshError: the other rank has failed.
    """
    own = np.flatnonzero(way.owner == int(way.source.index(way.source.row_axes)))
    messages = list(messages_to(way))
    packed = [pack_rows(fields, kinds, np.searchsorted(own, rows), way.lengths[rows]) for _, rows in messages]
    _exchange(way.source, [(message.peer, x) for message, x in zip(messages, packed, strict=True)], [])
    return sum(x.numel() for x in packed)


def receive_rows(
    like: Mapping[str, Tensor], kinds: Mapping[str, FieldKind], way: Handover
) -> tuple[dict[str, Value], int]:
    """Receive rows that the source sends; returns the fields of this rank's rows and the bytes received.

    Args:
      like: fields of the dtypes and trailing shapes that arrive, on this rank's device.
      kinds: by field.

    Raises:
      MeshError: the other rank has failed.
    """
    coming = np.flatnonzero(way.to == int(way.target.index(way.target.row_axes)))
    width = -(-int(way.lengths[coming].max(initial=1)) // ROW_MULTIPLE) * ROW_MULTIPLE
    out = blank_rows(like, kinds, way.lengths[coming], width)
    line = packed_bytes(like, kinds)
    messages = list(messages_from(way))
    device = way.target.device
    arrived = [torch.empty(int(way.lengths[x.rows].sum()), line, dtype=torch.uint8, device=device) for x in messages]
    _exchange(way.target, [], [(message.peer, x) for message, x in zip(messages, arrived, strict=True)])
    for (_, rows), x in zip(messages, arrived, strict=True):
        unpack_rows(x, out, kinds, np.searchsorted(coming, rows), way.lengths[rows])
    return out, sum(x.numel() for x in arrived)


def _sender(way: Handover, holders: np.ndarray, place: int) -> int:
    """The rank of the run that sends rows to the rank at a place of the target.

    Args:
      holders: places of the ranks of the source that hold these rows, which take turns.
    """
    return way.source.ranks[int(holders[place % len(holders)])]


def _exchange(mesh: Mesh, sends: list[tuple[int, Tensor]], receives: list[tuple[int, Tensor]]) -> None:
    if mesh.device.type == "cpu":
        handles = [(peer, dist.irecv(x, peer, tag=TAG)) for peer, x in receives]
        handles += [(peer, dist.isend(x, peer, tag=TAG)) for peer, x in sends]
    else:
        operations = [dist.P2POp(dist.irecv, x, peer) for peer, x in receives]
        operations += [dist.P2POp(dist.isend, x, peer) for peer, x in sends]
        works = dist.batch_isend_irecv(operations) if operations else []
        peers = [peer for peer, _ in (*receives, *sends)]
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
