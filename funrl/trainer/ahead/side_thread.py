"""Programs beside the trainer: they run in a thread, and generators of other jobs complete their requests meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import torch

from funrl.mesh.collectives import AXES, gather_objects, pmax
from funrl.mesh.mesh import Mesh
from funrl.processes.heartbeat import beside_the_program
from funrl.rollout.certificate import SyncError
from funrl.rollout.joined.engine import JoinedEngine, NoGeneratorError
from funrl.rollout.policy import RunEndingError

_ENDING = (RunEndingError, SyncError, NoGeneratorError)  # errors that end a run on all ranks


class SideProgram(NamedTuple):
    """A program that was begun.

    Attributes:
      engine: that completes its requests; None: another tensor rank runs it.
      future: of its result; None likewise.
    """

    engine: JoinedEngine | None = None
    future: Future[Any] | None = None


class SideThread:
    """The thread of a replica's first tensor rank in which programs run, one after the other.

    Each has the weights of its begin: new ones wait until it has ended.
    """

    def __init__(self, engine: JoinedEngine) -> None:
        """Begin without a program.

        Args:
          engine: of the generators.
        """
        self._engine = engine
        self._threads = ThreadPoolExecutor(1, "beside") if engine.mesh.index("tensor") == 0 else None
        self._engines: set[JoinedEngine] = set()  # of programs that have not ended

    def begin(self, program: Callable[[JoinedEngine], Any]) -> SideProgram:
        """Begin a program after those before it. On all tensor ranks of a replica.

        Args:
          program: runs on an engine of its own, on the first one.
        """
        if self._threads is None:
            return SideProgram()
        engine = self._engine.beside()
        self._engines.add(engine)
        return SideProgram(engine, self._threads.submit(self._run, engine, program))

    def result(self, program: SideProgram) -> Any:
        """Wait for the result of a program; None on the other tensor ranks. Collective over the mesh.

        Raises:
          RunEndingError, SyncError, NoGeneratorError: on all ranks, where the program of one replica has failed so.
        """
        self._engine.finish_program(program.engine)
        result = None
        failure = None
        try:
            result = None if program.future is None else program.future.result()
        except _ENDING as error:
            failure = error
        _raise_on_all_ranks(failure, self._engine.mesh)
        return result

    def close(self) -> None:
        """End the running work."""
        for engine in list(self._engines):
            engine.stop()
        if self._threads is not None:
            self._threads.shutdown(cancel_futures=True)

    def _run(self, engine: JoinedEngine, program: Callable[[JoinedEngine], Any]) -> Any:
        try:
            with beside_the_program():
                return program(engine)
        finally:
            self._engines.discard(engine)
            self._engine.leave(engine)


def _raise_on_all_ranks(failure: Exception | None, mesh: Mesh) -> None:
    """Raise what has failed on one rank on every rank, so that none is left waiting in a collective."""
    failed = torch.tensor(float(failure is not None), device=mesh.device)
    if not pmax(failed, mesh, AXES):
        return
    kind = next((i for i, kind in enumerate(_ENDING) if isinstance(failure, kind)), None)
    faults = gather_objects(None if kind is None else (kind, str(failure)), mesh)
    kind, words = next(fault for fault in faults if fault is not None)
    raise _ENDING[kind](words) from failure
