"""Rows of a run's steps beside its checkpoints: when they are kept, and for how long."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import torch

from funrl.environments.agents import with_environment
from funrl.trainer.checkpoints.checkpoint import sweep
from funrl.trainer.checkpoints.saved_episodes import write_episodes
from funrl.trainer.checkpoints.saved_rows import ROLLOUTS, draft_folder, forget_rows, keep_newest, save_rows
from funrl.trainer.checkpoints.weight_digests import weight_digests
from funrl.trainer.jobs.job import Job, RLJob
from funrl.trainer.sources.observing import Observer
from funrl.trainer.sources.source import Source
from funrl.trainer.steps.clock import Clock
from funrl.trainer.steps.parts import GeneratingParts, Parts
from funrl.trainer.steps.roles import State
from funrl.trainer.steps.step_rows import StepRecord


class RowKeeper:
    """Keeps the rows of every `--save_rollouts` steps, the newest `--keep_rollouts` of them."""

    def __init__(self, job: Job, parts: Parts, checkpoints: str | None, observer: Observer) -> None:
        """Keep the rows of a run.

        Args:
          job: of the run.
          parts: of the run.
          checkpoints: their folder; None: nothing is saved.
          observer: receives the size of a step.
        """
        self.job = job
        self.settings = job.settings
        self.agents: list[str] = []
        if isinstance(job, RLJob) and job.task.environment is not None:
            self.agents = list(with_environment(job.agents, job.task.environment).models)
        self.parts = parts
        self.observer = observer
        self.size_noted = False
        self.folder = None if checkpoints is None else Path(checkpoints).with_name(ROLLOUTS)

    def save(self, state: State, record: StepRecord, source: Source, clock: Clock) -> None:
        """Write the rows of a step, with digests of the weights after it, if it is to be kept. Collective.

        Args:
          state: after the step's updates.
          record: the step's rows and metrics.
          source: that gave the rows, with the episodes of this replica and the log of groups.
          clock: times it.

        Raises:
          CheckpointError: a rank cannot write; on every rank.
        """
        every = self.settings.run.save_rollouts
        if self.folder is not None and every > 0 and state.step % every == 0 and len(record.rows.owner):
            with clock.phase("save_rollouts"):
                self._save(self.folder, state, record, source)

    def _save(self, folder: Path, state: State, step: StepRecord, source: Source) -> None:
        roles = self.parts.roles
        mesh = self.parts.mesh
        record: dict[str, Any] = {
            "step": state.step,
            "metrics": {stage: {name: float(x) for name, x in values.items()} for stage, values in step.stages.items()},
            "weights": {n: weight_digests(role.params, roles[n].stored, mesh) for n, role in state.roles.items()},
            "dtype": self.settings.models.dtype,
            "threads": torch.get_num_threads(),
        }
        if isinstance(self.parts, GeneratingParts):
            record["published"] = self.parts.generator.proof.published_lists()
        groups = source.log.groups()
        if groups is not None:
            record["groups"] = groups
        writer = None
        elsewhere = 0
        if isinstance(self.parts, GeneratingParts) and self.agents:
            record["agents"] = self.agents
            if source.log.write_episodes is not None:
                elsewhere = source.log.write_episodes(draft_folder(folder, state.step))
            else:
                writer = functools.partial(write_episodes, episodes=source.log.episodes, mesh=self.parts.generator.mesh)
        nbytes = elsewhere + save_rows(folder, step.drawn, step.rows, record=record, beside=writer)
        if mesh.rank == 0 and self.settings.run.keep_rollouts is not None:
            keep_newest(folder, self.settings.run.keep_rollouts)
        if not self.size_noted:
            self.size_noted = True
            tokens = max(1, int(step.drawn.lengths.sum()))
            self.observer.note(
                f"--save_rollouts: step {state.step} takes {nbytes / 1e6:.3g} MB, {nbytes / tokens:.0f} bytes a token"
            )

    def sweep(self) -> None:
        """Remove what interrupted writes have left. Called by rank 0."""
        if self.folder is not None:
            sweep(self.folder)

    def forget(self, after: int) -> None:
        """Remove the rows of steps after one, which are made again."""
        if self.folder is not None and self.parts.mesh.rank == 0:
            forget_rows(self.folder, after)
