"""Runs whose rows generators of other jobs write: the source of the ranks that train, and a generator's program."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np

from funrl import trees
from funrl.data.order import take_next
from funrl.mesh.collectives import from_first, gather_objects
from funrl.mesh.mesh import AXES, Mesh
from funrl.mesh.sums import own_range
from funrl.processes.connections import (
    Addresses,
    ConnectionServer,
    PeerError,
    new_secret,
    read_addresses,
    write_addresses,
)
from funrl.processes.heartbeat import at_step, beat
from funrl.processes.workers import stop_asked, stops_when_asked
from funrl.rollout.joined.engine import JoinedEngine
from funrl.rollout.joined.generator import Counts, serve_run
from funrl.rollout.requests import RequestGroups
from funrl.seeds import derived_seed
from funrl.trainer.checkpoints.saver import shared_folder
from funrl.trainer.jobs.build import Parts, build
from funrl.trainer.jobs.job import Job, RLJob
from funrl.trainer.jobs.row_source import filter_of, make_source
from funrl.trainer.settings.declaration import SettingsError
from funrl.trainer.sources.observing import Observer
from funrl.trainer.sources.source import Source
from funrl.trainer.steps.clock import Clock
from funrl.trainer.steps.step_rows import Rows

ADDRESSES = "join.json"  # in the directory of a run
MESSAGE_S = 60.0  # for a generator to take or send some bytes of a message
ADDRESS_LOOK_S = 0.5  # between two looks for a run that can be joined


def joinable_source(job: Job, parts: Parts, frozen: Mapping[str, trees.Tree], clock: Clock, show: Observer) -> Source:
    """The source of a run that generators join; a `MakeSource`. They find the ranks by a file in the run's directory.

    Raises:
      SettingsError: the run has no directory.
    """
    assert isinstance(job, RLJob) and parts.generator is not None
    engine: object = parts.generator.engine
    assert isinstance(engine, JoinedEngine)
    folder = shared_folder(show, parts.mesh)
    if folder is None:
        raise SettingsError("--place=generate:join needs --run_dir: generators find the run by a file in its directory")
    source = make_source(job, parts, frozen, clock, show)
    engine.note = show.note
    mesh = parts.mesh
    secret = from_first(new_secret() if mesh.rank == 0 else None, mesh, AXES)
    board = ConnectionServer(engine.serve, secret, MESSAGE_S)
    hosts = gather_objects((own_host_name(), board.port), mesh)
    file = Path(folder).with_name(ADDRESSES)
    if mesh.rank == 0:
        write_addresses(file, Addresses(hosts, secret))

    ahead = RowsAhead(job, engine)

    def next_rows(state: trees.Tree, step: int) -> tuple[Rows, trees.Tree, dict[str, float]]:
        rows, state, metrics = source.next_rows(state, step)
        ahead.write(state["prompts_consumed"], step)
        return rows, state, metrics

    def move(rows: Rows, to: np.ndarray, mesh: Mesh) -> Rows:
        return ahead.aged(source.move(rows, to, mesh))

    def close() -> None:
        source.close()
        engine.close()
        board.close()
        if mesh.rank == 0:
            file.unlink(missing_ok=True)

    if not job.settings.asynchrony.staleness:
        return source._replace(close=close)
    return source._replace(next_rows=next_rows, move=move, close=close)


class RowsAhead:
    """Rows of later steps, which generators write during the update of this one."""

    def __init__(self, job: RLJob, engine: JoinedEngine) -> None:
        """Begin with none.

        Args:
          job: the run, with --staleness.
          engine: of its generators.
        """
        self.job = job
        self.engine = engine

    def write(self, consumed: int, step: int) -> None:
        """Let generators write the rows of as many steps after `step` as --staleness says, this replica's share.

        Where a filter may take further prompts for a step, only the next one's prompts are known.

        Args:
          consumed: prompts taken up to `step`.
          step: whose rows are complete.
        """
        run = self.job.settings.run
        staleness = self.job.settings.asynchrony.staleness
        known = staleness if filter_of(self.job) is None else min(staleness, 1)
        mesh = self.engine.mesh
        for _ in range(min(known, run.steps - step)):
            taken = take_next(self.job.task.prompts, run.batch_prompts, run.seed, position=consumed)
            prompts = [self.job.task.prompts[place].tokens for place in taken.places.tolist()]
            groups = RequestGroups(prompts, self.job.sampling, derived_seed(run.seed, consumed))
            share = own_range(len(groups), mesh, mesh.row_axes)
            for group in groups[share.start : share.stop]:
                self.engine.write_ahead(group)
            consumed = taken.end

    def aged(self, rows: Rows) -> Rows:
        """Rows that say which of their tokens are of other weights than the newest.

        Raises:
          RuntimeError: a token that was sampled is older than it may be.
        """
        staleness = self.job.settings.asynchrony.staleness
        mask_bT = rows.batch.mask
        age_bT = (self.engine.version or 0) - rows.batch.version
        oldest = int(age_bT[mask_bT].max()) if mask_bT.any() else 0
        if oldest > staleness:
            raise RuntimeError(f"a token is {oldest} versions old; --staleness={staleness}")
        return rows.with_fields(stale=mask_bT & (age_bT != 0))


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
    assert parts.generator is not None
    engine = parts.generator.whole
    tried = None
    with stops_when_asked():
        at_step(0)
        while True:
            addresses = _new_addresses(Path(run_dir) / ADDRESSES, tried, mesh, wait_s=wait_s)
            if addresses is None:
                return "left", Counts()
            tried = addresses.secret
            try:
                return serve_run(engine, addresses, 60.0 * job.settings.waiting.timeout, stop_asked, note)
            except PeerError as error:  # the run may be started again
                if mesh.world > 1:  # the other ranks of this generator wait for this one
                    raise
                note(f"the run does not answer any more ({error}); waiting for it to be started again")
                engine.cancel(range(1 << 20))


def _new_addresses(file: Path, tried: str | None, mesh: Mesh, *, wait_s: float) -> Addresses | None:
    """Addresses of a run that has not been tried yet; None where this generator is to go before there are any.

    Args:
      tried: secret of the run that does not answer any more.
    """
    deadline = time.monotonic() + wait_s
    while True:
        news: Addresses | str | None = None
        if mesh.rank == 0:
            news = read_addresses(file)
            news = None if news is not None and news.secret == tried else news
            if news is None and stop_asked():
                news = "left"
            elif news is None and time.monotonic() > deadline:
                news = f"{file}: no run that generators can join for {wait_s:.0f} s; a longer --wait waits longer"
        news = from_first(news, mesh, AXES)
        if isinstance(news, Addresses):
            return news
        if news == "left":
            return None
        if news is not None:
            raise PeerError(news)
        beat()
        time.sleep(ADDRESS_LOOK_S)


def own_host_name() -> str:
    """The name by which other machines call this one; the loopback where it has none."""
    name = os.environ.get("SLURMD_NODENAME") or socket.gethostname()
    try:
        socket.getaddrinfo(name, None, socket.AF_INET)
    except OSError:
        return "127.0.0.1"
    return name
