"""Saves of a run: when they are due, which are kept, and the way on from one."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from funrl.mesh.collectives import gather_objects, pmax
from funrl.mesh.mesh import AXES, Mesh
from funrl.mesh.rules import Layout
from funrl.processes import heartbeat, stall_monitor
from funrl.processes.processor import other_processor, processor_facts
from funrl.processes.stall_monitor import GAP_S, duration
from funrl.processes.workers import stop_asked
from funrl.trainer.checkpoints.base_model import check_base
from funrl.trainer.checkpoints.checkpoint import (
    CHECKPOINT_FORMAT,
    Recorded,
    adopt_rescued,
    complete_checkpoints,
    load,
    newest_checkpoint,
    numbers_of,
    recorded,
    state_layouts,
    sweep,
)
from funrl.trainer.checkpoints.export import check_outline, write_outline
from funrl.trainer.checkpoints.resumable import check_facts, check_frozen, other_held_out, run_facts, weights_changed
from funrl.trainer.checkpoints.row_keeper import RowKeeper
from funrl.trainer.checkpoints.snapshot import Snapshot, held_rows, snapshot_of
from funrl.trainer.jobs.job import Job
from funrl.trainer.settings.records import save_interval
from funrl.trainer.sources.observing import Observer
from funrl.trainer.sources.source import Source
from funrl.trainer.steps.parts import GeneratingParts, Parts
from funrl.trainer.steps.roles import State
from funrl.trainer.storage.shard_server import CheckpointError, Commit, DamagedError
from funrl.trainer.storage.shards import Memory, ShardError, ShardServer

BETTER = {"eval/reward": 1.0, "eval/loss": -1.0}  # numbers by which a checkpoint is the best: larger, smaller
POLL_S = 0.01
MINUTE_S = 60.0  # of --timeout
HURRY_S = 3.0  # for a save that is under way when the run fails


class Evaluations(NamedTuple):
    """Held-out numbers of a run.

    Attributes:
      first: before its first step.
      last: the newest after it; empty at first.
      unfinished: metrics of the newest step while the evaluation after it runs; None: none does.
    """

    first: dict[str, float]
    last: dict[str, float]
    unfinished: dict[str, float] | None = None


class Saver:
    """Saves states beside the run: a save copies this rank's part, and a process of its own writes it.

    Attributes:
      folder: of the checkpoints; None: nothing is saved, as the run has no directory.
      rows: keeps the rows of steps beside them.
      saved: the step of the newest checkpoint that this run has begun to write or was resumed from; -1: none.
    """

    def __init__(
        self,
        job: Job,
        parts: Parts,
        source: Source,
        state: State,
        folder: str | None,
        observer: Observer,
        frozen: Mapping[str, Any] | None = None,
    ) -> None:
        """Prepare to save a run. Collective.

        Args:
          job: of the run.
          parts: of the run.
          source: of the run.
          state: of the run, whose names, shapes and layouts stay as they are.
          folder: the same on every rank.
          observer: receives what happens.
          frozen: facts of checkpoints on the weights that do not learn.

        Raises:
          CheckpointError: the state has a leaf that cannot be saved.
        """
        self.job = job
        self.settings = job.settings
        self.parts = parts
        self.mesh = parts.mesh
        model = parts.roles[job.main_role].placed.model
        self.model = model if model.adapters is None else model.adapters.plain
        self.source = source
        self.folder = folder
        self.observer = observer
        self.frozen = {"frozen": {}, **(frozen or {})}
        self.layouts: dict[str, Layout] = state_layouts(parts, state)
        self.every = save_interval(job.settings.run.save_every)
        self.server = ShardServer()
        self.memory: Memory | None = None
        self.writing = str(folder)  # what the process of this rank writes
        self.saved = -1
        self.attempt = 0
        self.began = time.monotonic()
        self.scores: dict[int, float | None] = {}
        self.rows = RowKeeper(job, parts, folder, observer=observer)
        numbers_of(state)
        self.outline: dict[str, str] | None = None  # digests of the files of `OUTLINE`, once they are as they should be
        if folder is not None and self.mesh.rank == 0:
            for remark in adopt_rescued(folder) if job.settings.run.resume else ():
                observer.note(remark)
            sweep(folder)
            self.rows.sweep()
        gather_objects(None, self.mesh)  # nobody writes before rank 0 has swept

    def resumed(self, state: State) -> tuple[State, Evaluations | None]:
        """The newest checkpoint that can be read, where `--resume` is given and there is one; else the given state.

        Args:
          state: before the first step.

        Returns: the state, and the evaluations so far of a run that continues; empty ones where these are on other
          held-out data.

        Raises:
          CheckpointError: on every rank, where no checkpoint can be read or one is of another run.
        """
        if not self.settings.run.resume or self.folder is None:
            return state, None
        damaged: dict[Path, str] = {}
        while (record := self._newest(damaged)) is not None:
            check_facts(record, self.job)
            check_frozen(record, self.frozen["frozen"], self.job)
            if "base" in self.frozen:
                digests = self.frozen["base"]["digests"]
                check_base(record.path, record.facts, digests, directory=self.settings.models.model)
            held = held_rows(self.source, state)
            try:
                state = load(record, state, self.layouts, mesh=self.mesh, server=self.server, held=held)
            except DamagedError as error:
                damaged[record.path] = str(error)
                self.observer.note(f"{error}; the checkpoint before it is taken")
                continue
            if self.mesh.rank == 0:
                self._compare_outline(record)
            return self._continued(record, state), self._comparable(record)
        if damaged:
            raise CheckpointError(
                f"--resume: {list(damaged.values())[-1]}; no other checkpoint is left: give another --run_dir"
            )
        self.rows.forget(0)
        self.observer.resumed(-1)  # nothing of what a run without a checkpoint has written counts
        self.observer.note(f"--resume: there is no checkpoint in {self.folder} yet; the run begins")
        return state, None

    def _compare_outline(self, record: Recorded) -> None:
        """Keep the outline of a checkpoint if it is as it was; else it is written anew with the first save."""
        try:
            check_outline(record)
            self.outline = record.facts.get("outline")
        except DamagedError as error:
            self.observer.note(f"{error}; it is written anew")

    def _continued(self, record: Recorded, state: State) -> State:
        """The state to continue with, after the observer has received where it is from."""
        self.saved = state.step
        self.rows.forget(state.step)
        evaluated = record.facts.get("unfinished") is None  # else the evaluation is made first
        self.observer.resumed(state.step, record.facts.get("metrics") if evaluated else None)
        steps = self.settings.run.steps
        rest = f"; --steps={steps}: nothing is left to do" if state.step >= steps else ""
        if isinstance(self.parts, GeneratingParts):
            self.parts.generator.proof.restore(record.facts.get("published", {}))
        self.observer.note(f"resumed after step {state.step} from {record.path}{rest}")
        if remark := other_processor(record.facts.get("processor")):
            self.observer.note(remark)
        return state._replace(source=self.source.stored.restored(state.source))

    def _comparable(self, record: Recorded) -> Evaluations:
        """The evaluations of a checkpoint, as far as those of this run can be compared with them."""
        if weights_changed(record, self.job):
            self.observer.note(
                f"the weights that this run would begin with are not those that {record.path} began with; those that "
                "learn are the checkpoint's"
            )
        unfinished = record.facts.get("unfinished")
        if not other_held_out(record, self.job):
            return Evaluations(record.facts["first"], record.facts["last"], unfinished)
        self.observer.note(
            "held-out examples, their rewards or their sampling are not as they were: evaluations are compared from "
            f"step {record.facts['step']} on"
        )
        return Evaluations({}, {}, unfinished)

    def _newest(self, damaged: dict[Path, str]) -> Recorded | None:
        """The newest checkpoint whose record and sizes are whole, the same on every rank.

        Args:
          damaged: checkpoints to pass over and what is wrong with them; newly found ones are added.
        """
        record = None
        refusal = None
        known = set(damaged)
        if self.mesh.rank == 0:
            try:
                record = newest_checkpoint(str(self.folder), damaged)
            except CheckpointError as error:
                refusal = str(error)
        record, all_damaged, refusal = gather_objects((record, damaged, refusal), self.mesh)[0]
        damaged.update(all_damaged)
        for path in damaged.keys() - known:
            self.observer.note(f"{damaged[path]}; the checkpoint before it is taken")
        if refusal is not None:
            raise CheckpointError(f"--resume: {refusal}")
        unseen = None
        if record is not None and not record.path.is_dir():
            unseen = f"--resume: rank {self.mesh.rank} does not see {record.path}, every rank must"
        for problem in gather_objects(unseen, self.mesh):
            if problem is not None:
                raise CheckpointError(problem)
        return record

    def after_step(self, state: State, complete: Callable[[], tuple[Mapping[str, float], Evaluations]]) -> bool:
        """Save the state after a step if it is time to; True if the run was asked to stop, and its state is saved.

        Collective: one small sum over all ranks.

        Args:
          state: after the step.
          complete: () -> metrics of the step and the evaluations so far, once that of the step has ended.

        Raises:
          CheckpointError: a save has failed, on every rank.
        """
        if self.folder is None:
            return self._agree(stop_asked())[0]
        problems = self.server.answers(wait=False)
        every = self.every
        due = self.mesh.rank == 0 and every.seconds > 0 and time.monotonic() - self.began >= every.seconds
        stop, due, failed = self._agree(stop_asked(), due, bool(problems))
        if failed:
            self._raise(problems)
        last = state.step == self.settings.run.steps and (every.steps > 0 or self.saved >= 0)
        if stop or due or last or (every.steps and state.step % every.steps == 0):
            metrics, evaluations = complete()
            self.save(state, evaluations, score_of(metrics))
        if stop:
            self.wait()
        return stop

    def save(self, state: State, evaluations: Evaluations, score: float | None = None) -> None:
        """Begin to save a state; a copy is made at once. Every rank takes part.

        Raises:
          CheckpointError: the save before it has failed.
        """
        if self.folder is None or state.step == self.saved:
            return
        self.wait()
        stored = self.source.stored.saved(state.source, self._largest)
        state = state._replace(source=stored)
        snapshot, memory = self._prepare(state)
        snapshot.copy(memory)
        self.attempt += 1
        draft = str(Path(self.folder) / f".step-{state.step}.{self.attempt}")
        self.writing = draft
        self._send(snapshot.request(draft, memory))
        if self.mesh.rank == 0:
            self._commit(draft, state.step, snapshot, evaluations=evaluations, score=score)
        self.saved = state.step
        self.began = time.monotonic()

    def _commit(
        self, draft: str, step: int, snapshot: Snapshot, *, evaluations: Evaluations, score: float | None
    ) -> None:
        """Have rank 0 make a checkpoint of what all ranks write, and remove older ones beyond --keep."""
        folder = Path(str(self.folder))
        existing = complete_checkpoints(folder)
        for old, path in existing.items():
            if old not in self.scores:
                try:
                    self.scores[old] = recorded(path).facts["score"]
                except CheckpointError:
                    self.scores[old] = None
        self.scores = {old: self.scores[old] for old in existing if old != step} | {step: score}
        kept = kept_steps(self.scores, self.settings.run.keep_checkpoints)
        self._send(
            Commit(
                draft,
                path=str(folder / f"step-{step}"),
                processes=self.mesh.world,
                arrays=snapshot.arrays,
                facts=self.facts(step, self.mesh, evaluations, score=score),
                removed=tuple(str(existing[old]) for old in existing if old != step and old not in kept),
                synced=tuple(str(path) for path in sorted(folder.parent.glob("*.jsonl"))),
                timeout_s=MINUTE_S * self.settings.waiting.timeout,
            )
        )

    def _published(self) -> dict[str, Any]:
        """The fact of which weights engines were given: rows that wait are of these."""
        parts = self.parts
        return {"published": parts.generator.proof.published_lists()} if isinstance(parts, GeneratingParts) else {}

    def facts(self, step: int, mesh: Mesh, evaluations: Evaluations, *, score: float | None) -> dict[str, Any]:
        """The record of a checkpoint but for its arrays and files.

        Args:
          step: of the state.
          mesh: whose ranks write it.
          evaluations: so far.
          score: of this very step; None: unknown.
        """
        return {
            "format": CHECKPOINT_FORMAT,
            "step": step,
            "score": score,
            "mesh": str(mesh),
            "world": mesh.world,
            "dtype": self.settings.models.dtype,
            "lead": self.job.main_role,
            "run": run_facts(self.job),
            "outline": self.outline or {},
            "processor": processor_facts(),
            "provenance": self.job.provenance._asdict(),
            **evaluations._asdict(),
            **self.frozen,
            **self._published(),
        }

    def wait(self) -> None:
        """Wait until everything is on disk. Every rank takes part, and none leaves before the others.

        Raises:
          CheckpointError: on every rank, where it is not.
        """
        limits = self.settings.waiting
        timeout_s = MINUTE_S * limits.timeout
        waited_s = 0.0
        line_s = limits.heartbeat
        polled = time.monotonic()
        while True:  # one that has failed may be what rank 0's process waits for
            problems = self.server.answers(wait=False)
            if self.server.waiting and self.server.process is not None:
                heartbeat.beat()  # it is the writer that is waited for
                now = time.monotonic()
                waited_s += min(now - polled, GAP_S)  # time in which this process was stopped itself does not count
                polled = now
                writer = f"process {self.server.process.pid}, which writes {self.writing}"
                if waited_s >= line_s:
                    line_s = 2 * waited_s
                    end = f"the run ends after {duration(timeout_s)} of that (--timeout)"
                    line = f"no progress for {waited_s:.0f} s: rank {self.mesh.rank} waits for {writer}; {end}"
                    stall_monitor.say(line)
                if waited_s >= timeout_s:
                    problems.append(f"{writer}, has not ended within {duration(timeout_s)} (--timeout)")
            pending, failed = self._agree(self.server.waiting > 0, bool(problems))
            if failed:
                self._raise(problems)
            if not pending:
                return
            time.sleep(POLL_S)

    def __enter__(self) -> Saver:
        """Begin to save."""
        return self

    def __exit__(self, kind: Any, *_: Any) -> None:
        """Wait until everything is on disk; after an exception, which other ranks may not know of, not for long."""
        timeout_s = HURRY_S
        try:
            if kind is None:
                self.wait()
                timeout_s = None
        finally:
            self.server.close(timeout_s)
            if self.memory is not None:
                self.memory.close()

    def _prepare(self, state: State) -> tuple[Snapshot, Memory]:
        """This rank's part of a state, and the memory for it."""
        snapshot = snapshot_of(state, self.source, self.layouts, mesh=self.mesh, join=True)
        if self.outline is None and self.mesh.rank == 0 and self.folder is not None:
            try:
                self.outline = write_outline(self.folder, self.model, self.job)
            except OSError as error:
                raise CheckpointError(_explained(self.folder, str(error))) from error
        nbytes = snapshot.own.nbytes
        if self.memory is None or self.memory.nbytes < nbytes:
            if self.memory is not None:
                self.memory.close()
            self.memory = Memory(nbytes)
        return snapshot, self.memory

    def _send(self, request: Any) -> None:
        try:
            self.server.send(request)
        except ShardError as error:
            raise CheckpointError(_explained(str(self.folder), str(error))) from error

    def _largest(self, number: int) -> int:
        """The largest number of any rank."""
        return int(pmax(torch.tensor(number, device=self.mesh.device), self.mesh, AXES))

    def _agree(self, *flags: bool) -> list[bool]:
        """Flags that are true on any rank."""
        x = torch.tensor([float(flag) for flag in flags], device=self.mesh.device)
        return [bool(flag) for flag in pmax(x, self.mesh, AXES).tolist()]

    def _raise(self, problems: list[str]) -> None:
        """Raise what went wrong on any rank, on every rank."""
        everyone = [problem for of_rank in gather_objects(problems, self.mesh) for problem in of_rank]
        if everyone:
            raise CheckpointError(_explained(str(self.folder), everyone[0]))


def kept_steps(scores: Mapping[int, float | None], count: int) -> set[int]:
    """The steps whose checkpoints are kept: the newest `count`, and the one with the best score."""
    best = [step for step, score in scores.items() if score is not None]
    return {*sorted(scores)[-count:], *sorted(best, key=lambda step: (scores[step], step))[-1:]}


def score_of(metrics: Mapping[str, float]) -> float | None:
    """Score of a checkpoint, larger is better: the held-out reward, or loss, of its very step; None: unknown."""
    scores = [sign * metrics[name] for name, sign in BETTER.items() if name in metrics]
    return scores[0] if scores else None


def _explained(folder: str, problem: str) -> str:
    return f"{folder}: the checkpoint cannot be written: {problem}"


def shared_folder(observer: Observer, mesh: Mesh) -> str | None:
    """The folder of the checkpoints, which rank 0 knows."""
    return gather_objects(observer.checkpoint_folder(), mesh)[0]
