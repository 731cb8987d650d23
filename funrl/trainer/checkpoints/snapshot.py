"""The part of a state that one rank writes to a checkpoint, on any mesh that holds the whole state."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from torch import Tensor

from funrl.mesh.mesh import Mesh, single
from funrl.mesh.rules import Layout
from funrl.processes.device_memory import wait_for_copies
from funrl.trainer.checkpoints.checkpoint import numbers_of, scalar_arrays, tensors_of
from funrl.trainer.sources.source import Source
from funrl.trainer.steps.roles import State
from funrl.trainer.storage.row_shards import HeldRows, copy_rows, own_row_shards
from funrl.trainer.storage.shard_server import Array, WriteShards
from funrl.trainer.storage.shards import Memory, OwnShards, copy_to_memory, joined_shards, own_shards

OF_SOURCE = "source/"  # the names of a source's leaves begin so


class Snapshot(NamedTuple):
    """This rank's part of a state.

    Attributes:
      own: its chunks.
      tensors: all tensors of this rank but rows, by name.
      rows: tensors of rows that this rank has alone, by name.
      numbers: of the state; the first rank writes them, others have none.
      held: says which rows these are; None: there are none.
      layouts: of the tensors that are split over `mesh`.
      mesh: ranks that hold the whole state together.
    """

    own: OwnShards
    tensors: Mapping[str, Tensor]
    rows: Mapping[str, Tensor]
    numbers: Mapping[str, int | float | bool]
    held: HeldRows | None
    layouts: Mapping[str, Layout]
    mesh: Mesh

    @property
    def arrays(self) -> dict[str, Array]:
        """The arrays of the whole checkpoint, on the first rank."""
        return self.own.arrays | scalar_arrays(self.numbers)

    def copy(self, memory: Memory) -> None:
        """Copy the part to the shared memory: what changes afterwards is not written."""
        wait_for_copies()
        copy_to_memory(self.own, self.tensors, self.layouts, mesh=self.mesh, memory=memory)
        if self.held is not None:
            copy_rows(self.own, self.rows, self.held, memory=memory)

    def request(self, folder: str, memory: Memory) -> WriteShards:
        """The request to write the part, from the shared memory to a folder."""
        scalars = scalar_arrays(self.numbers)
        names = {part.name for part in self.own.parts} | self.own.created
        return WriteShards(
            folder,
            process=self.mesh.rank,
            memory=memory.path,
            arrays={name: self.own.arrays[name] for name in names} | scalars,
            parts=self.own.parts,
            created=self.own.created | set(scalars),
            numbers=self.numbers,
        )


def snapshot_of(
    state: State, source: Source, layouts: Mapping[str, Layout], mesh: Mesh, *, join: bool = False
) -> Snapshot:
    """This rank's part of a state, without a copy.

    What a source holds changes in size: the first rank writes what is the same on every rank, and every rank its rows.

    Args:
      state: with the source's state as a checkpoint has it.
      source: of the state.
      layouts: of the state's tensors that are split over `mesh`.
      mesh: ranks that hold the whole state together.
      join: as of `own_shards`; `Snapshot.copy` is then collective.
    """
    held = held_rows(source, state)
    tensors = tensors_of(state)
    rows = {} if held is None else {name: tensors.pop(name) for name in sorted(held.names)}
    of_roles = {name: x for name, x in tensors.items() if not name.startswith(OF_SOURCE)}
    of_source = {name: x for name, x in tensors.items() if name.startswith(OF_SOURCE)}
    own = own_shards(of_roles, layouts, mesh, join=join)
    if mesh.rank == 0:
        own = joined_shards(own, own_shards(of_source, {}, single()))
    if held is not None:
        own = joined_shards(own, own_row_shards(rows, held))
    numbers = numbers_of(state) if mesh.rank == 0 else {}
    return Snapshot(own, tensors, rows, numbers=numbers, held=held, layouts=layouts, mesh=mesh)


def held_rows(source: Source, state: State) -> HeldRows | None:
    """The rows that a source's state holds, by their names in the state; None: it holds none."""
    held = source.stored.rows(state.source)
    return held and held._replace(names=frozenset(f"{OF_SOURCE}{name}" for name in held.names))
