"""The state of a run that fails: saved by the ranks that still have all of it, without a collective.

The program of a rank may be waiting in a collective for one that has failed, so the save runs beside it, in the thread
that `heartbeat` keeps. The ranks of one replica hold every part of the state; each writes its own as if there were no
others, and the one that commits finds their parts in the folder. The process that watches the run chooses a replica
whose ranks all live and hold the state after the same step; where there is none, nothing is saved.
"""

from __future__ import annotations

import contextlib
import functools
import os
import shlex
import shutil
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError

from funrl.mesh.mesh import AXES, Mesh
from funrl.mesh.rules import Layout
from funrl.processes import heartbeat
from funrl.processes.heartbeat import NOBODY
from funrl.trainer.checkpoints.checkpoint import complete_checkpoints
from funrl.trainer.checkpoints.export import outline_digests, write_outline
from funrl.trainer.checkpoints.saver import Evaluations, Saver
from funrl.trainer.checkpoints.snapshot import Snapshot, snapshot_of
from funrl.trainer.steps.roles import State
from funrl.trainer.storage.shard_server import CheckpointError, Commit
from funrl.trainer.storage.shards import Memory, ShardError, ShardServer

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
      mesh: of the run.
      layouts: of its state.
      spread: whether every rank has rows of its own; then all ranks are one replica.
    """
    used = set(AXES) if spread else {axis for layout in layouts.values() for axis in layout.axes}
    axes = tuple(axis for axis in AXES if axis in used)
    sizes = {axis: mesh.sizes[axis] if axis in used else 1 for axis in AXES}
    number = int(mesh.index(tuple(axis for axis in AXES if axis not in used)))
    own = Mesh(sizes, int(mesh.index(axes)), mesh.device)
    own_layouts = {name: Layout(x.shape, x.spec, tuple(sizes.values())) for name, x in layouts.items()}
    return Replica(number, own, own_layouts)


class RecoverableState:
    """The state that a run would be resumed from, as this rank has it; none while it changes."""

    def __init__(self, saver: Saver) -> None:
        """Begin without a state.

        Args:
          saver: of the run.
        """
        self.saver = saver
        self.replica = replica_of(saver.mesh, saver.layouts, saver.source.stored.spread)
        self.state: State | None = None
        self.evaluations = Evaluations({}, {})
        self.metrics: Mapping[str, float] = {}  # of the step, whose line may not have been written
        self.lock = threading.Lock()  # while it is held, nothing of the state changes

    def keep(self, state: State, evaluations: Evaluations, metrics: Mapping[str, float] | None = None) -> None:
        """Keep a state that is whole, and stays as it is until `release`.

        Args:
          state: of the run.
          evaluations: so far.
          metrics: of the step that has led to it; None: as before.
        """
        with self.lock:
            self.state = state
            self.evaluations = evaluations
            self.metrics = self.metrics if metrics is None else metrics
            heartbeat.mark_recoverable(state.step)

    def release(self) -> None:
        """Release the state, which changes from here on."""
        heartbeat.mark_recoverable(-1)
        with self.lock:
            self.state = None

    def save(self, elsewhere: bool = False, folder: str | None = None) -> str:
        """Save this rank's part of the state, while the ranks of its replica do the same.

        Args:
          elsewhere: whether the run's own folder cannot be written.
          folder: another one that they all see; None: there is none.

        Returns: a message on where it is, or why it is lost; "" where the checkpoint is where it is expected.
        """
        with self.lock:
            state = self.state
            own = self.saver.folder
            if state is None or own is None or state.step == 0:  # nothing has been learned
                return ""
            problem = ""
            if not elsewhere:
                if self._exists(state.step):
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

    def _exists(self, step: int) -> bool:
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
        except (OSError, CheckpointError, SafetensorError) as error:
            shutil.rmtree(folder, ignore_errors=True)
            return f"{problem}nor can the state after step {state.step} be saved in {folder}: {error}"
        if self.replica.mesh.rank:
            return ""
        places = shlex.quote(f"{folder}/step-{state.step}"), shlex.quote(str(self.saver.folder))
        return (
            f"{problem}the state after step {state.step} is saved in {folder}; "
            f"`mkdir -p {places[1]} && mv {places[0]} {places[1]}` moves it to the run, and --resume continues"
        )

    def _write(self, state: State, folder: str) -> None:
        """Write a checkpoint of the state. Raises: CheckpointError."""
        saver = self.saver
        replica = self.replica
        numbers = Path(folder) / f".step-{state.step}.numbers"
        stored = saver.source.stored.saved(state.source, functools.partial(self._largest, numbers))
        snapshot = snapshot_of(state._replace(source=stored), saver.source, replica.layouts, mesh=replica.mesh)
        server = ShardServer()
        memory = Memory(snapshot.own.nbytes)
        try:
            with _own_stream(replica.mesh.device):
                snapshot.copy(memory)
            draft = str(Path(folder) / f".step-{state.step}.last")
            server.send(snapshot.request(draft, memory))
            if replica.mesh.rank == 0:
                outline = saver.outline if folder == saver.folder else None
                outline = outline or outline_digests(folder) or write_outline(folder, saver.model, saver.job)
                path = str(Path(folder) / f"step-{state.step}")
                server.send(self._commit(draft, path, snapshot, step=state.step, outline=outline))
            self._wait(server, folder)
            if replica.mesh.rank == 0:
                shutil.rmtree(numbers, ignore_errors=True)
        except (ShardError, OSError) as error:
            raise CheckpointError(f"{folder}: the state cannot be saved: {error}") from error
        finally:
            server.close(0.0)
            memory.close()

    def _largest(self, folder: Path, number: int) -> int:
        """The largest number of any rank of the replica, by files: a collective may wait for a rank that has failed."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{self.replica.mesh.rank}-{number}").touch()
        deadline = time.monotonic() + ARRIVE_S
        while len(names := os.listdir(folder)) < self.replica.mesh.world:
            if time.monotonic() > deadline:
                raise CheckpointError(f"{folder}: other ranks have not left their numbers within {ARRIVE_S:.0f} s")
            time.sleep(0.02)
        return max(int(name.partition("-")[2]) for name in names)

    def _commit(self, draft: str, path: str, snapshot: Snapshot, *, step: int, outline: dict[str, str]) -> Commit:
        """The request to make a checkpoint of what the ranks of the replica write, beside an outline."""
        mesh = self.replica.mesh
        facts = self.saver.facts(step, mesh, self.evaluations, score=None) | {"outline": outline}
        if self.metrics:
            facts["metrics"] = dict(self.metrics)
        return Commit(
            draft,
            path=path,
            processes=mesh.world,
            arrays=snapshot.arrays,
            facts=facts,
            timeout_s=ARRIVE_S,
        )

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
def saved_on_failure(saver: Saver) -> Iterator[RecoverableState]:
    """A place for the state of a run.

    Where the context ends by an error, of this rank or of another one, what it holds is saved; an interrupt ends it at
    once.
    """
    held = RecoverableState(saver)
    unsaved = saver.folder is None
    heartbeat.set_rescue(None if unsaved else held.save, NOBODY if unsaved else held.replica.number)
    try:
        yield held
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        cause = error.__cause__
        unwritable = isinstance(error, CheckpointError) or isinstance(cause, OSError | SafetensorError)
        if not heartbeat.failed(error, unwritable) and saver.mesh.world == 1 and held.state is not None:
            state = held.state
            held.keep(state, held.evaluations)
            with contextlib.suppress(Exception):  # which would hide the failure
                if message := held.save(unwritable):
                    error.add_note(message)
        raise
    finally:
        heartbeat.set_rescue(None, NOBODY)
        held.release()
