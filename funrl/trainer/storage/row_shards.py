"""Rows that ranks hold each for itself, in a checkpoint: every rank writes its own, and reads as many of any mesh's.

A tensor of R rows is one array [R, ...] with a chunk per row: whoever has a row writes it. Nothing is gathered.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from torch import Tensor

from funrl.mesh.mesh import AXES, Mesh
from funrl.mesh.reading import agreed
from funrl.mesh.sums import own_range
from funrl.trainer.storage.shard_server import Array
from funrl.trainer.storage.shards import DTYPE_NAMES, Database, Memory, OwnShards, place_parts


class HeldRows(NamedTuple):
    """Leaves of a source's state that hold rows; each rank has its own.

    Attributes:
      names: of the leaves, [b, ...] on this rank; their further dims are the same on every rank.
      owner: [R] the rank that has each row, by its index over the row axes of `mesh`.
      mesh: whose ranks hold the rows; ranks that differ in other axes hold the same.
    """

    names: frozenset[str]
    owner: np.ndarray
    mesh: Mesh

    @property
    def own(self) -> np.ndarray:
        """Indices of this rank's rows, ascending."""
        return np.flatnonzero(self.owner == int(self.mesh.index(self.mesh.row_axes)))

    @property
    def writes(self) -> bool:
        """True on one of the ranks that hold the same rows."""
        return not any(int(self.mesh.index(axis)) for axis in AXES if axis not in self.mesh.row_axes)


def own_row_shards(tensors: Mapping[str, Tensor], held: HeldRows) -> OwnShards:
    """The rows that this rank writes.

    Args:
      tensors: [b, ...] this rank's rows, by name.
      held: says which rows these are.
    """
    arrays = {}
    boxes = []
    created = set()
    numbers = held.own.tolist() if held.writes else []
    for name, x in tensors.items():
        rest = tuple(x.shape[1:])
        arrays[name] = Array((len(held.owner), *rest), DTYPE_NAMES[x.dtype], (1, *rest))
        boxes += [(name, ((number, number + 1), *((0, n) for n in rest))) for number in numbers]
        if 0 in numbers or (not len(held.owner) and held.mesh.rank == 0):
            created.add(name)
    parts, nbytes = place_parts(boxes, arrays)
    return OwnShards(arrays, parts, frozenset(created), nbytes=nbytes)


def copy_rows(shards: OwnShards, tensors: Mapping[str, Tensor], held: HeldRows, memory: Memory) -> None:
    """Copy this rank's rows to the shared memory.

    Args:
      shards: of these tensors, or of these and others.
      tensors: [b, ...] this rank's rows, by name.
      held: says which rows these are.
      memory: for all of `shards`.
    """
    positions = {number: position for position, number in enumerate(held.own.tolist())}
    for part in (part for part in shards.parts if part.name in tensors):
        position = positions[part.box[0][0]]
        row = tensors[part.name][position : position + 1].detach()
        memory.tensor(part.offset, row.dtype, row.shape).copy_(row)


def read_held_rows(database: Database, held: HeldRows, mesh: Mesh) -> dict[str, Tensor]:
    """Read this rank's share of the rows of a checkpoint, as many on each rank: [b, ...]. Collective.

    Args:
      database: the checkpoint.
      held: its names and its mesh count.
      mesh: all ranks.

    Raises:
      ShardError: on every rank, naming what one of them cannot read.
    """
    boxes = {}
    for name in sorted(held.names):
        count, *rest = database.arrays[name].shape
        share = own_range(count, held.mesh, held.mesh.row_axes)
        boxes[name] = ((share.start, share.stop), *((0, n) for n in rest))
    return agreed(lambda: database.begin(boxes, mesh.device)(), mesh)
