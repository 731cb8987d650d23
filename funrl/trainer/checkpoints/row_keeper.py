"""Rows of a run's steps beside its checkpoints: when they are kept, and for how long."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from funrl.environments.agents import with_environment
from funrl.trainer.checkpoints.checkpoint import sweep
from funrl.trainer.checkpoints.saved_episodes import write_episodes
from funrl.trainer.checkpoints.saved_rows import ROLLOUTS, draft_folder, forget_rows, keep_newest, save_rows
from funrl.trainer.checkpoints.weight_digests import weight_digests
from funrl.trainer.jobs.build import Parts
from funrl.trainer.jobs.job import Job, RLJob
from funrl.trainer.sources.observing import Observer
from funrl.trainer.sources.source import Source
from funrl.trainer.steps.state import State
from funrl.trainer.steps.step_rows import Rows


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

    def due(self, step: int) -> bool:
        """True if the rows of a step are to be kept."""
        every = self.settings.run.save_rollouts
        return self.folder is not None and every > 0 and step % every == 0

    def save(
        self,
        state: State,
        drawn: Rows,
        scored: Rows,
        metrics: Mapping[str, Mapping[str, float]],
        source: Source,
    ) -> None:
        """Write the rows of a step, with digests of the weights after it. Collective.

        Args:
          state: after the step's updates.
          drawn, scored: its rows as the source gave them, and as they were learned from.
          metrics: of both stages, and those of the updates as "learned".
          source: that gave the rows, with the episodes of this replica and the log of groups.

        Raises:
          CheckpointError: a rank cannot write; on every rank.
        """
        assert self.folder is not None
        roles = self.parts.roles
        mesh = self.parts.mesh
        record: dict[str, Any] = {
            "step": state.step,
            "metrics": {stage: {name: float(x) for name, x in values.items()} for stage, values in metrics.items()},
            "weights": {n: weight_digests(role.params, roles[n].stored, mesh) for n, role in state.roles.items()},
            "dtype": self.settings.models.dtype,
            "threads": torch.get_num_threads(),
        }
        groups = source.log()
        if groups is not None:
            record["groups"] = groups
        writer = None
        elsewhere = 0
        if self.parts.generator is not None and self.agents:
            record["agents"] = self.agents
            if source.write_episodes is not None:
                elsewhere = source.write_episodes(draft_folder(self.folder, state.step))
            else:
                writer = functools.partial(write_episodes, episodes=source.episodes, mesh=self.parts.generator.mesh)
        nbytes = elsewhere + save_rows(self.folder, drawn, scored, record=record, beside=writer)
        if mesh.rank == 0 and self.settings.run.keep_rollouts is not None:
            keep_newest(self.folder, self.settings.run.keep_rollouts)
        if not self.size_noted:
            self.size_noted = True
            tokens = max(1, int(drawn.lengths.sum()))
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
