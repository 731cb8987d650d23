"""Saves of a run: when they are due, which are kept, and the way on from one."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from funrl.mesh.collectives import gather_objects, pmax
from funrl.mesh.mesh import AXES, Mesh, single
from funrl.mesh.processes import stop_asked
from funrl.mesh.rules import Layout
from funrl.trainer.base_model import check_base
from funrl.trainer.build import Parts
from funrl.trainer.checkpoint import (
    CHECKPOINT_FORMAT,
    Recorded,
    complete_checkpoints,
    load,
    numbers_of,
    recorded,
    scalar_arrays,
    state_layouts,
    sweep,
    tensors_of,
)
from funrl.trainer.export import write_outline
from funrl.trainer.job import Job
from funrl.trainer.job_settings import save_interval
from funrl.trainer.observing import Observer
from funrl.trainer.resumable import check_facts, check_frozen, run_facts
from funrl.trainer.row_keeper import RowKeeper
from funrl.trainer.row_shards import HeldRows, copy_rows, own_row_shards
from funrl.trainer.shard_server import CheckpointError, Commit, DamagedError, Reserve, WriteShards
from funrl.trainer.shards import (
    Memory,
    OwnShards,
    ShardError,
    ShardServer,
    copy_to_memory,
    joined_shards,
    own_shards,
)
from funrl.trainer.sources import Source
from funrl.trainer.state import State

BETTER = {"eval/reward": 1.0, "eval/loss": -1.0}  # numbers by which a checkpoint is the best: larger, smaller
POLL_S = 0.01
HURRY_S = 3.0  # for a save that is under way when the run fails


class Evaluations(NamedTuple):
    """Held-out numbers of a run: before its first step, and the newest."""

    first: dict[str, float]
    last: dict[str, float]


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
        frozen: Mapping[str, str] | None = None,
        adapters: Mapping[str, Any] | None = None,
    ) -> None:
        """Collective.

        Args:
          source: of the run.
          frozen: digests of the weights that do not learn, by role.
          state: of the run, whose names, shapes and layouts stay as they are.
          folder: the same on every rank.
          adapters: by `adapter_facts`, of a run in which adapters learn.

        Raises:
          CheckpointError: the state has a leaf that cannot be saved.
        """
        self.job, self.settings, self.mesh = job, job.settings, parts.mesh
        model = parts.roles[job.lead].placed.model
        self.model = model if model.adapters is None else model.adapters.plain
        self.source, self.folder, self.observer, self.frozen = source, folder, observer, dict(frozen or {})
        self.adapters = dict(adapters or {})
        self.layouts: dict[str, Layout] = state_layouts(parts, state)
        self.every = save_interval(job.settings.save_every)
        self.server, self.memory, self.reserved = ShardServer(), None, 0
        self.saved, self.attempt, self.began = -1, 0, time.monotonic()
        self.scores: dict[int, float | None] = {}
        self.rows = RowKeeper(job, parts, folder, observer)
        numbers_of(state)
        if folder is not None and self.mesh.rank == 0:
            sweep(folder)
            self.rows.sweep()
        gather_objects(None, self.mesh)  # nobody writes before rank 0 has swept

    def resumed(self, state: State) -> tuple[State, Evaluations | None]:
        """The newest checkpoint that can be read, where `--resume` is given and there is one; else the given state.

        Args:
          state: before the first step.

        Returns: the state, and the evaluations so far of a run that goes on.

        Raises:
          CheckpointError: on every rank, where no checkpoint can be read or one is of another run.
        """
        if not self.settings.resume or self.folder is None:
            return state, None
        problems: list[str] = []
        while True:
            found = self._newest(problems)
            if found is None:
                break
            check_facts(found, self.job)
            check_frozen(found, self.frozen, self.job)
            if self.adapters:
                check_base(found.path, found.facts, self.adapters["base"]["digests"], self.settings.model)
            try:
                state = load(found, state, self.layouts, self.mesh, self.server, self.held_rows(state))
            except DamagedError as error:
                problems.append(str(error))
                self.observer.note(f"{error}; the checkpoint before it is taken")
                continue
            self.saved = state.step
            self.rows.forget(state.step)
            self.observer.resumed(state.step, found.facts.get("metrics"))
            done = state.step >= self.job.settings.steps
            rest = f"; --steps={self.job.settings.steps}: nothing is left to do" if done else ""
            self.observer.note(f"resumed after step {state.step} from {found.path}{rest}")
            state = state._replace(source=self.source.restored(state.source))
            return state, Evaluations(found.facts["first"], found.facts["last"])
        if problems:
            raise CheckpointError(f"--resume: {problems[-1]}; no other checkpoint is left: give another --run_dir")
        self.rows.forget(0)
        self.observer.resumed(-1)  # nothing of what a run without a checkpoint has written counts
        self.observer.note(f"--resume: there is no checkpoint in {self.folder} yet; the run begins")
        return state, None

    def _newest(self, problems: list[str]) -> Recorded | None:
        """The newest checkpoint that is not damaged as far as its record tells, the same on every rank."""
        found, problem, fault = None, None, None
        while self.mesh.rank == 0:
            steps = complete_checkpoints(str(self.folder))
            left = [path for path in steps.values() if not any(one.startswith(str(path)) for one in problems)]
            if not left:
                break
            try:
                found = recorded(left[-1])
                break
            except DamagedError as error:
                problems.append(str(error))
                self.observer.note(f"{error}; the checkpoint before it is taken")
            except CheckpointError as error:
                fault = str(error)
                break
        told = (found, problems, fault) if self.mesh.rank == 0 else None
        found, problems[:], fault = gather_objects(told, self.mesh)[0]
        if fault is not None:
            raise CheckpointError(f"--resume: {fault}")
        if found is not None and not found.path.is_dir():
            problem = f"--resume: rank {self.mesh.rank} does not see {found.path}, every rank must"
        for one in gather_objects(problem, self.mesh):
            if one is not None:
                raise CheckpointError(one)
        return found

    def after_step(self, state: State, metrics: Mapping[str, float], evaluations: Evaluations) -> bool:
        """Save the state after a step if it is time to; True if the run was asked to stop, and its state is saved.

        Collective: one small sum over all ranks.

        Raises:
          CheckpointError: a save has failed, on every rank.
        """
        if self.folder is None:
            return self._agree(stop_asked())[0]
        problems = self.server.answers(wait=False)
        now, every = time.monotonic(), self.every
        due = self.mesh.rank == 0 and every.seconds > 0 and now - self.began >= every.seconds
        stop, due, failed = self._agree(stop_asked(), due, bool(problems))
        if failed:
            self._raise(problems)
        last = state.step == self.settings.steps and (every.steps > 0 or self.saved >= 0)
        if stop or due or last or (every.steps and state.step % every.steps == 0):
            self.save(state, evaluations, score_of(metrics))
        elif every.steps and self.memory is None:
            self._prepare(state)
        if stop:
            self.wait()
        return stop

    def save(self, state: State, evaluations: Evaluations, score: float | None = None) -> None:
        """Begin to save a state, of which a copy is made at once. Every rank takes part.

        Raises:
          CheckpointError: the save before it has failed.
        """
        if self.folder is None or state.step == self.saved:
            return
        self.wait()
        state = state._replace(source=self.source.saved(state.source))
        own, memory = self._prepare(state)
        numbers, whole, rows = numbers_of(state), *self.divided(state)
        copy_to_memory(own, whole, self.layouts, self.mesh, memory)
        if (held := self.held_rows(state)) is not None:
            copy_rows(own, rows, held, memory)
        self.attempt += 1
        beside = str(Path(self.folder) / f".step-{state.step}.{self.attempt}")
        scalars, rank = scalar_arrays(numbers), self.mesh.rank
        names = {part.name for part in own.parts} | own.created
        mine = {name: own.arrays[name] for name in names} | (scalars if rank == 0 else {})
        created = own.created | (set(scalars) if rank == 0 else set())
        told = numbers if rank == 0 else {}
        self._send(WriteShards(beside, rank, memory.path, mine, own.parts, frozenset(created), told))
        if rank == 0:
            self._commit(beside, state.step, own.arrays | scalars, evaluations, score)
        self.saved, self.began = state.step, time.monotonic()

    def _commit(self, beside: str, step: int, arrays: Any, evaluations: Evaluations, score: float | None) -> None:
        """Have rank 0 make a checkpoint of what all ranks write, and remove those that are not kept."""
        folder = Path(str(self.folder))
        there = complete_checkpoints(folder)
        for old, path in there.items():
            if old not in self.scores:
                try:
                    self.scores[old] = recorded(path).facts["score"]
                except CheckpointError:
                    self.scores[old] = None
        scores = {old: self.scores[old] for old in there if old != step} | {step: score}
        self.scores, kept = scores, kept_steps(scores, self.settings.keep_checkpoints)
        removed = [str(there[old]) for old in there if old != step and old not in kept]
        facts = facts_of(self.job, self.mesh, step, evaluations, score, self.frozen, self.adapters)
        synced = tuple(str(path) for path in sorted(folder.parent.glob("*.jsonl")))
        path = str(folder / f"step-{step}")
        timeout_s = 60.0 * self.settings.timeout
        self._send(Commit(beside, path, self.mesh.world, arrays, facts, tuple(removed), synced, timeout_s))

    def wait(self) -> None:
        """Wait until everything is on disk. Every rank takes part, and none leaves before the others.

        Raises:
          CheckpointError: on every rank, where it is not.
        """
        while True:  # one that has failed may be what rank 0's process waits for
            problems = self.server.answers(wait=False)
            pending, failed = self._agree(self.server.waiting > 0, bool(problems))
            if failed:
                self._raise(problems)
            if not pending:
                return
            time.sleep(POLL_S)

    def __enter__(self) -> Saver:
        return self

    def __exit__(self, kind: Any, *_: Any) -> None:
        """Wait until everything is on disk; after an exception, of which other ranks need not know, not for long."""
        timeout_s = HURRY_S
        try:
            if kind is None:
                self.wait()
                timeout_s = None
        finally:
            self.server.close(timeout_s)
            if self.memory is not None:
                self.memory.close()

    def _prepare(self, state: State) -> tuple[OwnShards, Memory]:
        """Own shards of a state, and the memory for them, which is made while the run computes.

        What the source holds changes in size: rank 0 writes what is alike on every rank, and every rank its rows.
        """
        whole, rows = self.divided(state)
        of_source = {name: x for name, x in whole.items() if name.startswith("source/")}
        own = own_shards({n: x for n, x in whole.items() if n not in of_source}, self.layouts, self.mesh)
        if self.mesh.rank == 0:
            own = joined_shards(own, own_shards(of_source, {}, single()))
        if (held := self.held_rows(state)) is not None:
            own = joined_shards(own, own_row_shards(rows, held))
        if self.memory is None and self.mesh.rank == 0 and self.folder is not None:
            try:
                write_outline(self.folder, self.model, self.job.tokenizer)
            except OSError as error:
                raise CheckpointError(_explained(self.folder, str(error))) from error
        if self.memory is None or self.reserved < own.nbytes:
            if self.memory is not None:
                self.memory.close()
            self.memory, self.reserved = Memory(own.nbytes), own.nbytes
            if own.nbytes:
                self._send(Reserve(self.memory.path, own.nbytes))
        return own, self.memory

    def held_rows(self, state: State) -> HeldRows | None:
        """The rows that the source's state holds, by the names that they have in the state."""
        held = self.source.rows(state.source)
        return held and held._replace(names=frozenset(f"source/{name}" for name in held.names))

    def divided(self, state: State) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """The tensors of a state: those that are laid out, or alike on every rank; and rows that a rank has alone."""
        tensors, held = tensors_of(state), self.held_rows(state)
        rows = {name: x for name, x in tensors.items() if held is not None and name in held.names}
        return {name: x for name, x in tensors.items() if name not in rows}, rows

    def _send(self, request: Any) -> None:
        try:
            self.server.send(request)
        except ShardError as error:
            raise CheckpointError(_explained(str(self.folder), str(error))) from error

    def _agree(self, *flags: bool) -> list[bool]:
        """Flags that are true on any rank."""
        x = torch.tensor([float(flag) for flag in flags], device=self.mesh.device)
        return [bool(flag) for flag in pmax(x, self.mesh, AXES).tolist()]

    def _raise(self, problems: list[str]) -> None:
        """Raise what went wrong on any rank, on every rank."""
        everyone = [problem for found in gather_objects(problems, self.mesh) for problem in found]
        if everyone:
            raise CheckpointError(_explained(str(self.folder), everyone[0]))


def facts_of(
    job: Job,
    mesh: Mesh,
    step: int,
    evaluations: Evaluations,
    score: float | None,
    frozen: Mapping[str, str],
    adapters: Mapping[str, Any],
) -> dict[str, Any]:
    """The record of a checkpoint but for its arrays and files.

    Args:
      frozen: digests of the weights that do not learn, by role.
      adapters: by `adapter_facts`; {} where all weights learn.
    """
    return {
        "format": CHECKPOINT_FORMAT, "step": step, "score": score, "mesh": str(mesh), "world": mesh.world,
        "dtype": job.settings.dtype, "lead": job.lead, "run": run_facts(job), "frozen": dict(frozen),
        **evaluations._asdict(), **adapters,
    }  # fmt: skip


def kept_steps(scores: Mapping[int, float | None], count: int) -> set[int]:
    """The steps whose checkpoints are kept: the newest `count`, and the one with the best score."""
    best = [step for step, score in scores.items() if score is not None]
    return {*sorted(scores)[-count:], *sorted(best, key=lambda step: (scores[step], step))[-1:]}


def score_of(metrics: Mapping[str, float]) -> float | None:
    """Score of a checkpoint, larger is better: the held-out reward, or loss, of its very step; None: unknown."""
    found = [sign * metrics[name] for name, sign in BETTER.items() if name in metrics]
    return found[0] if found else None


def _explained(folder: str, problem: str) -> str:
    return f"{folder}: the checkpoint cannot be written: {problem}"


def shared_folder(observer: Observer, mesh: Mesh) -> str | None:
    """The folder of the checkpoints, which rank 0 knows."""
    return gather_objects(observer.checkpoint_folder(), mesh)[0]
