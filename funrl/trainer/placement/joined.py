"""Runs whose rows generators of other jobs write: the source of the trainer ranks, and a generator's program."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

from funrl import trees
from funrl.mesh.collectives import from_first, gather_objects
from funrl.mesh.mesh import AXES, Mesh
from funrl.processes.connections import (
    Addresses,
    ConnectionServer,
    PeerError,
    new_secret,
    read_addresses,
    write_addresses,
)
from funrl.processes.heartbeat import at_step, beat
from funrl.processes.store import LOOPBACK
from funrl.processes.workers import stop_asked, stops_when_asked
from funrl.rewards.pool import Pool
from funrl.rollout.joined.engine import JoinedEngine
from funrl.rollout.joined.generator import Counts, NotJoinedError, serve_run
from funrl.trainer.ahead.rows import source_ahead
from funrl.trainer.checkpoints.saver import shared_folder
from funrl.trainer.jobs.build import build
from funrl.trainer.jobs.job import Job, RLJob
from funrl.trainer.loop import Outcome, train_loop
from funrl.trainer.settings.declaration import SettingsError
from funrl.trainer.sources.observing import Observer
from funrl.trainer.sources.source import Source
from funrl.trainer.steps.clock import Clock
from funrl.trainer.steps.parts import GeneratingParts, Parts

ADDRESSES = "join.json"  # in the directory of a run
MESSAGE_S = 60.0  # for a generator to take or send some bytes of a message
ADDRESS_LOOK_S = 0.5  # between two looks for a run that can be joined
HOST_VARIABLE = "FUNRL_HOST"  # of the environment of a rank that trains: how generators call its machine


class JoinListener(NamedTuple):
    """The way into a run for generators.

    Attributes:
      engine, board: that serve them.
      file: with the addresses; None: another rank's.
    """

    engine: JoinedEngine
    board: ConnectionServer
    file: Path | None

    def close(self, *, complete: bool) -> None:
        """Admit no further generator.

        Args:
          complete: whether the run is, so that they end too; otherwise they wait for it to be started again.
        """
        self.engine.close(complete=complete)
        self.board.close()
        if self.file is not None:
            self.file.unlink(missing_ok=True)


def train_joined(job: Job, mesh: Mesh, observer: Observer, pool: Pool | None = None) -> Outcome:
    """`train_loop` of a run that generators join."""
    listeners: list[JoinListener] = []

    def make(job: Job, parts: Parts, frozen: Mapping[str, trees.Tree], clock: Clock, show: Observer) -> Source:
        assert isinstance(job, RLJob) and isinstance(parts, GeneratingParts)
        engine: object = parts.generator.engine
        assert isinstance(engine, JoinedEngine)
        source = source_ahead(job, parts, engine, frozen, clock, show)
        listeners.append(_open_listener(engine, parts.mesh, show))
        return source

    complete = False
    try:
        outcome = train_loop(job, mesh, observer, make, pool)
        complete = outcome.error is None and outcome.stopped is None
    finally:
        for listener in listeners:
            listener.close(complete=complete)
    return outcome


def _open_listener(engine: JoinedEngine, mesh: Mesh, show: Observer) -> JoinListener:
    """Admit generators, which find the ranks by a file in the run's directory. Collective.

    Raises:
      SettingsError: the run has no directory.
    """
    folder = shared_folder(show, mesh)
    if folder is None:
        raise SettingsError("--place=generate:join needs --run_dir: generators find the run by a file in its directory")
    engine.note = show.note
    secret = from_first(new_secret() if mesh.rank == 0 else None, mesh, AXES)
    host = own_host_name()
    if host == LOOPBACK:
        show.note(
            f"rank {mesh.rank} has no name that others can look up: only generators on its machine can join; the "
            f"environment variable {HOST_VARIABLE} may give its name or address"
        )
    board = ConnectionServer(engine.serve, secret, MESSAGE_S)
    hosts = gather_objects((host, board.port), mesh)
    file = Path(folder).with_name(ADDRESSES)
    if mesh.rank == 0:
        write_addresses(file, Addresses(hosts, secret))
    return JoinListener(engine, board, file if mesh.rank == 0 else None)


def join_run(job: RLJob, run_dir: str, mesh: Mesh, note: Callable[[str], None], wait_s: float) -> tuple[str, Counts]:
    """Generate for a run until it ends, or SIGTERM asks this generator to go. On every rank of the generator.

    Args:
      job: of the run, on this generator's mesh.
      run_dir: of the run.
      mesh: of the generator: one replica.
      note: receives remarks, on the first rank.
      wait_s: seconds to wait for a run that can be joined, at the start and where it does not answer any more.

    Returns: "ended" or "left", and what was done.

    Raises:
      PeerError: there is no run to join in this time.
      ValueError: the run has another model.
    """
    parts = build(job, mesh, note)
    engine = parts.generator.whole
    file = Path(run_dir) / ADDRESSES
    deadline = time.monotonic() + wait_s
    noted = False
    with stops_when_asked():
        at_step(0)
        while True:
            addresses = _addresses(file, mesh, deadline, wait_s)
            if addresses is None:
                return "left", Counts()
            try:
                return serve_run(engine, addresses, 60.0 * job.settings.waiting.timeout, stop_asked, note)
            except PeerError as error:  # the run may be started again
                if mesh.world > 1:  # the other ranks of this generator wait for this one
                    raise
                if not isinstance(error, NotJoinedError):
                    deadline = time.monotonic() + wait_s
                    noted = False
                if time.monotonic() > deadline:
                    raise PeerError(f"{_no_run(file, wait_s)}; {error}") from error
                if not noted:
                    note(f"the run does not answer any more ({error}); waiting for it to be started again")
                noted = True
            time.sleep(ADDRESS_LOOK_S)


def _addresses(file: Path, mesh: Mesh, deadline: float, wait_s: float) -> Addresses | None:
    """Addresses of a run; None where this generator is to go before there are any. Collective.

    Raises:
      PeerError: there are none at the deadline, which is `wait_s` after the wait began.
    """
    while True:
        news: Addresses | str | None = None
        if mesh.rank == 0:
            news = "left" if stop_asked() else read_addresses(file)
            if news is None and time.monotonic() > deadline:
                news = _no_run(file, wait_s)
        news = from_first(news, mesh, AXES)
        if isinstance(news, Addresses):
            return news
        if news == "left":
            return None
        if news is not None:
            raise PeerError(news)
        beat()
        time.sleep(ADDRESS_LOOK_S)


def _no_run(file: Path, wait_s: float) -> str:
    return f"{file}: no run that generators can join for {wait_s:.0f} s; a longer --wait waits longer"


def own_host_name() -> str:
    """The name or address by which other machines call this one; the loopback's where it has none."""
    name = os.environ.get(HOST_VARIABLE)
    if name:
        return name
    name = os.environ.get("SLURMD_NODENAME") or socket.getfqdn()
    if name.partition(".")[0] == "localhost":  # the first name of its address in /etc/hosts
        name = socket.gethostname()
    try:
        socket.getaddrinfo(name, None, socket.AF_INET)
    except OSError:
        return LOOPBACK
    return name
