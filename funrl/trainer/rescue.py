"""The state of a run that fails: saved by the ranks that still have all of it, without a word between them.

The program of a rank may be waiting in a collective for one that has failed, so the save runs beside it, in the thread
that `mesh.heartbeat` keeps. It needs no collective: the ranks of one replica hold every part of the state, each writes
its own as if there were no others, and whoever commits finds their parts in the folder. The launcher, or the first
rank, chooses a replica whose ranks all live and hold the state after the same step; where there is none, nothing is
saved.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError

from funrl.mesh import heartbeat
from funrl.mesh.heartbeat import NOBODY
from funrl.mesh.mesh import AXES, Mesh, single
from funrl.mesh.rules import Layout
from funrl.trainer.checkpoint import complete_checkpoints, numbers_of, scalar_arrays
from funrl.trainer.export import write_outline
from funrl.trainer.row_shards import copy_rows, own_row_shards
from funrl.trainer.saver import Evaluations, Saver, facts_of
from funrl.trainer.shard_server import CheckpointError, Commit, WriteShards
from funrl.trainer.shards import Memory, ShardError, ShardServer, copy_to_memory, joined_shards, own_shards
from funrl.trainer.state import State

ARRIVE_S = 15.0  # for the parts of the other ranks of a replica
WRITE_S = 100.0  # for all of it; `heartbeat.SAVE_S` is longer
UNDER_WAY_S = 3.0  # for a save that has begun before


class Replica(NamedTuple):
    """Ranks that hold every part of a state together, each part once.

    Attributes:
      number: of them, among all such sets of ranks.
      mesh: of these ranks alone, as this one sees it; it has no collectives.
      layouts: of the state on that mesh.
    """

    number: int
    mesh: Mesh
    layouts: Mapping[str, Layout]


def replica_of(mesh: Mesh, layouts: Mapping[str, Layout], spread: bool = False) -> Replica:
    """The replica of this rank: the ranks that have its place on the axes that split nothing of the state.

    Args:
      spread: whether every rank has rows of its own; then all ranks are one replica.
    """
    used = set(AXES) if spread else {axis for layout in layouts.values() for axis in layout.axes}
    axes = tuple(axis for axis in AXES if axis in used)
    sizes = {axis: mesh.sizes[axis] if axis in used else 1 for axis in AXES}
    over = tuple(sizes.values())
    number = int(mesh.index(tuple(axis for axis in AXES if axis not in used)))
    own = Mesh(sizes, int(mesh.index(axes)), mesh.device)
    return Replica(number, own, {name: Layout(x.shape, x.spec, over) for name, x in layouts.items()})


class WholeState:
    """The state that a run would be resumed from, as this rank has it; none while it is being changed."""

    def __init__(self, saver: Saver) -> None:
        self.saver, self.replica = saver, replica_of(saver.mesh, saver.layouts, saver.source.spread)
        self.state: State | None = None
        self.source: tuple[Any, Any] = (None, None)  # a source's state, and the same as a checkpoint has it
        self.evaluations = Evaluations({}, {})
        self.metrics: Mapping[str, float] = {}  # of the step, whose line may not have been written
        self.lock = threading.Lock()  # while it is held, nothing of the state changes

    def keep(self, state: State, evaluations: Evaluations, metrics: Mapping[str, float] | None = None) -> None:
        """From here on `state` is whole, and stays as it is until `release`.

        Collective where ranks have different parts of the source's state: they agree on the width of their rows now, as
        they could not when one has failed.

        Args:
          metrics: of the step that has led to it; None: as before.
        """
        if self.saver.source.spread and self.saver.folder is not None:
            if self.source[0] is not state.source:
                self.source = (state.source, self.saver.source.saved(state.source))
            state = state._replace(source=self.source[1])
        with self.lock:
            self.state, self.evaluations = state, evaluations
            self.metrics = self.metrics if metrics is None else metrics
            heartbeat.holds(state.step)

    def release(self) -> None:
        """From here on the state changes."""
        heartbeat.holds(-1)
        with self.lock:
            self.state = None

    def save(self, elsewhere: bool = False, folder: str | None = None) -> str:
        """Save this rank's part of the state, while the ranks of its replica do the same.

        Args:
          elsewhere: whether the run's own folder cannot be written.
          folder: another one that they all see; None: there is none.

        Returns: what there is to tell of it; "" where the checkpoint is where it is expected.
        """
        with self.lock:
            state, own = self.state, self.saver.folder
            if state is None or own is None:
                return ""
            problem = ""
            if not elsewhere:
                if self._is_there(state.step):
                    return ""
                try:
                    self._write(state, own)
                    return ""
                except CheckpointError as error:
                    problem = f"{error}; "
                    if self.replica.mesh.world > 1:  # the others have not failed, and do not wait
                        return str(error)
            if folder is None and self.replica.mesh.world == 1:
                folder = tempfile.mkdtemp(prefix="funrl-saved-")
            if folder is None:
                return f"{problem}the state after step {state.step} is lost: no other folder is that of all ranks"
            return self._write_elsewhere(state, folder, problem)

    def _is_there(self, step: int) -> bool:
        """True if the run has saved this step; one that it has begun to save is waited for a while."""
        deadline = time.monotonic() + (UNDER_WAY_S if self.saver.saved == step else 0.0)
        while step not in complete_checkpoints(str(self.saver.folder)):
            if time.monotonic() >= deadline:
                return False
            time.sleep(0.05)
        return True

    def _write_elsewhere(self, state: State, folder: str, problem: str) -> str:
        try:
            os.makedirs(folder, mode=0o700, exist_ok=True)
            self._write(state, folder)
            if self.replica.mesh.rank == 0:
                write_outline(folder, self.saver.model, self.saver.job.tokenizer)
        except (OSError, CheckpointError, SafetensorError) as error:
            shutil.rmtree(folder, ignore_errors=True)
            return f"{problem}nor can the state after step {state.step} be saved in {folder}: {error}"
        if self.replica.mesh.rank:
            return ""
        return (
            f"{problem}the state after step {state.step} is saved in {folder}; move it to {self.saver.folder}, and "
            "--resume continues"
        )

    def _write(self, state: State, folder: str) -> None:
        """Write a checkpoint of the state. Raises: CheckpointError."""
        mesh, layouts, saver = self.replica.mesh, self.replica.layouts, self.saver
        numbers, held, (tensors, rows) = numbers_of(state), saver.held_rows(state), saver.divided(state)
        of_source = {name: x for name, x in tensors.items() if name.startswith("source/")}
        own = own_shards({n: x for n, x in tensors.items() if n not in of_source}, layouts, mesh)
        mine = {}
        if mesh.rank == 0:
            own = joined_shards(own, own_shards(of_source, {}, single()))
            mine = scalar_arrays(numbers)
        if held is not None:
            own = joined_shards(own, own_row_shards(rows, held))
        arrays = own.arrays | mine
        server, memory = ShardServer(), Memory(own.nbytes)
        try:
            with _own_stream(mesh.device):
                copy_to_memory(own, tensors, layouts, mesh, memory)
                if held is not None:
                    copy_rows(own, rows, held, memory)
            beside = str(Path(folder) / f".step-{state.step}.last")
            names = {part.name for part in own.parts} | own.created | set(mine)
            created = own.created | set(mine)
            server.send(WriteShards(
                beside, mesh.rank, memory.path, {name: arrays[name] for name in names}, own.parts, frozenset(created),
                numbers if mesh.rank == 0 else {},
            ))  # fmt: skip
            if mesh.rank == 0:
                facts = facts_of(saver.job, mesh, state.step, self.evaluations, None, saver.frozen, saver.adapters)
                facts |= {"metrics": dict(self.metrics)} if self.metrics else {}
                path = str(Path(folder) / f"step-{state.step}")
                server.send(Commit(beside, path, mesh.world, arrays, facts, (), (), ARRIVE_S))
            self._wait(server, folder)
        except (ShardError, OSError) as error:
            raise CheckpointError(f"{folder}: the state cannot be saved: {error}") from error
        finally:
            server.close(0.0)
            memory.close()

    def _wait(self, server: ShardServer, folder: str) -> None:
        deadline = time.monotonic() + WRITE_S
        while server.waiting:
            for problem in server.answers(wait=False):
                raise CheckpointError(f"{folder}: the state cannot be saved: {problem}")
            if time.monotonic() > deadline:
                raise CheckpointError(f"{folder}: the state cannot be saved within {WRITE_S:.0f} s")
            time.sleep(0.02)


def _own_stream(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """A stream that no collective is waited for on, where there are streams."""
    if device.type != "cuda":
        return contextlib.nullcontext()
    return torch.cuda.stream(torch.cuda.Stream(device))


@contextlib.contextmanager
def saved_on_failure(saver: Saver) -> Iterator[WholeState]:
    """A place for the state of a run. Where the context ends by an error, of this rank or of another one, what it holds
    is saved; an interrupt ends it at once."""
    held = WholeState(saver)
    nowhere = saver.folder is None
    heartbeat.last_words(None if nowhere else held.save, NOBODY if nowhere else held.replica.number)
    try:
        yield held
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        cause = error.__cause__
        unwritable = isinstance(error, CheckpointError) or isinstance(cause, OSError | SafetensorError)
        if not heartbeat.failed(error, unwritable) and saver.mesh.world == 1 and held.state is not None:
            state = held.state
            held.keep(state._replace(source=saver.source.saved(state.source)), held.evaluations)
            with contextlib.suppress(Exception):  # which would hide the failure
                if said := held.save(unwritable):
                    error.add_note(said)
        raise
    finally:
        heartbeat.last_words(None, NOBODY)
        held.release()
