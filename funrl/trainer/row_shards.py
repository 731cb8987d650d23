"""Rows that ranks hold each for itself, in a checkpoint: every rank writes its own, and reads as many of any mesh's.

A tensor of R rows is one array [R, ...], of which each row is a chunk: whoever has it writes it. Nothing is gathered.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from torch import Tensor

from funrl.mesh.collectives import gather_objects
from funrl.mesh.mesh import AXES, Mesh
from funrl.mesh.sums import own_range
from funrl.trainer.shard_server import Array, ReadShards, ShardPart
from funrl.trainer.shards import NAMES, SHARD_ALIGNMENT, TENSOR_DTYPES, Memory, OwnShards, ShardError, ShardServer


class HeldRows(NamedTuple):
    """Leaves of a source's state that hold rows, of which each rank has its own.

    Attributes:
      names: of the leaves, [b, ...] on this rank; their further dims are the same on every rank.
      owner: [R] the rank that has each row, by its index over the row axes of `mesh`.
      mesh: whose ranks hold the rows; those that differ in other axes hold the same.
    """

    names: frozenset[str]
    owner: np.ndarray
    mesh: Mesh

    @property
    def own(self) -> np.ndarray:
        """Numbers of this rank's rows, ascending."""
        return np.flatnonzero(self.owner == int(self.mesh.index(self.mesh.row_axes)))

    @property
    def writes(self) -> bool:
        """True on one of the ranks that hold the same rows."""
        return not any(int(self.mesh.index(axis)) for axis in AXES if axis not in self.mesh.row_axes)


def own_row_shards(tensors: Mapping[str, Tensor], held: HeldRows) -> OwnShards:
    """The rows that this rank writes.

    Args:
      tensors: [b, ...] this rank's rows, by name.
    """
    arrays, parts, created, offset = {}, [], set(), 0
    numbers = held.own.tolist() if held.writes else []
    for name, x in tensors.items():
        rest = tuple(x.shape[1:])
        arrays[name] = Array((len(held.owner), *rest), NAMES[x.dtype], (1, *rest))
        for number in numbers:
            parts.append(ShardPart(name, ((number, number + 1), *((0, n) for n in rest)), offset))
            offset += -(-x[0].numel() * x.element_size() // SHARD_ALIGNMENT) * SHARD_ALIGNMENT
        if 0 in numbers or (not len(held.owner) and held.mesh.rank == 0):
            created.add(name)
    return OwnShards(arrays, tuple(parts), frozenset(created), offset)


def copy_rows(shards: OwnShards, tensors: Mapping[str, Tensor], held: HeldRows, memory: Memory) -> None:
    """Copy this rank's rows to the shared memory.

    Args:
      shards: of these tensors, or of these and others.
      tensors: [b, ...] this rank's rows, by name.
    """
    places = {number: at for at, number in enumerate(held.own.tolist())}
    for part in (part for part in shards.parts if part.name in tensors):
        at = places[part.box[0][0]]
        row = tensors[part.name][at : at + 1].detach()
        memory.tensor(part.offset, row.dtype, row.shape).copy_(row)


def read_held_rows(
    path: str, arrays: Mapping[str, Array], held: HeldRows, mesh: Mesh, server: ShardServer
) -> dict[str, Tensor]:
    """This rank's share of the rows of a checkpoint, as many on each rank: [b, ...]. Collective.

    Args:
      arrays: of the checkpoint.
      held: its names and its mesh count.
      mesh: all ranks.

    Raises:
      ShardError: on every rank, naming what one of them cannot read.
    """
    parts, offset = [], 0
    for name in sorted(held.names):
        count, *rest = arrays[name].shape
        share = own_range(count, held.mesh, held.mesh.row_axes)
        parts.append(ShardPart(name, ((share.start, share.stop), *((0, n) for n in rest)), offset))
        size = len(share) * int(np.prod(rest, dtype=np.int64)) * TENSOR_DTYPES[arrays[name].dtype].itemsize
        offset += -(-size // SHARD_ALIGNMENT) * SHARD_ALIGNMENT
    memory, found = Memory(offset), dict[str, Tensor]()
    some = tuple(part for part in parts if all(low < high for low, high in part.box))
    server.send(ReadShards(path, memory.path, {part.name: arrays[part.name] for part in parts}, some))
    problems = [problem for problem in gather_objects(server.answer(), mesh) if problem is not None]
    if problems:
        raise ShardError(problems[0])
    for part in parts:
        shape = [high - low for low, high in part.box]
        values = memory.tensor(part.offset, TENSOR_DTYPES[arrays[part.name].dtype], shape)
        found[part.name] = values.to(device=mesh.device, copy=True)
        del values
    memory.close()
    return found
