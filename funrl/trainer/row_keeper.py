"""Rows of a run's steps beside its checkpoints: when they are kept, and for how long."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from funrl.trainer.build import Parts
from funrl.trainer.checkpoint import sweep
from funrl.trainer.job import Job
from funrl.trainer.observing import Observer
from funrl.trainer.saved_rows import ROLLOUTS, forget_rows, keep_newest, save_rows
from funrl.trainer.state import State
from funrl.trainer.step_rows import Rows
from funrl.trainer.weight_digests import weight_digests


class RowKeeper:
    """Keeps the rows of every `--save_rollouts` steps, the newest `--keep_rollouts` of them."""

    def __init__(self, job: Job, parts: Parts, checkpoints: str | None, observer: Observer) -> None:
        """
        Args:
          checkpoints: their folder; None: nothing is saved.
        """
        self.settings, self.parts, self.observer, self.told = job.settings, parts, observer, False
        self.folder = None if checkpoints is None else Path(checkpoints).with_name(ROLLOUTS)

    def due(self, step: int) -> bool:
        """True if the rows of a step are to be kept."""
        every = self.settings.save_rollouts
        return self.folder is not None and every > 0 and step % every == 0

    def save(self, state: State, drawn: Rows, scored: Rows, metrics: Mapping[str, Mapping[str, float]]) -> None:
        """Write the rows of a step, with digests of the weights after it. Collective.

        Args:
          state: after the step's updates.
          drawn, scored: its rows as the source gave them, and as they were learned from.
          metrics: of both stages, and those of the updates as "learned".

        Raises:
          CheckpointError: a rank cannot write; on every rank.
        """
        assert self.folder is not None
        roles, mesh = self.parts.roles, self.parts.mesh
        weights = {name: weight_digests(role.params, roles[name].stored, mesh) for name, role in state.roles.items()}
        told = {stage: {name: float(x) for name, x in of_stage.items()} for stage, of_stage in metrics.items()}
        record = {"step": state.step, "metrics": told, "weights": weights, "dtype": self.settings.dtype}
        nbytes = save_rows(self.folder, drawn, scored, record)
        if mesh.rank == 0 and self.settings.keep_rollouts is not None:
            keep_newest(self.folder, self.settings.keep_rollouts)
        if not self.told:
            tokens, self.told = max(1, int(drawn.lengths.sum())), True
            self.observer.note(
                f"--save_rollouts: step {state.step} takes {nbytes / 1e6:.3g} MB, {nbytes / tokens:.0f} bytes a token"
            )

    def sweep(self) -> None:
        """Remove what writes that were interrupted have left. Called by rank 0."""
        if self.folder is not None:
            sweep(self.folder)

    def forget(self, after: int) -> None:
        """Remove the rows of steps after one, which are made again."""
        if self.folder is not None and self.parts.mesh.rank == 0:
            forget_rows(self.folder, after)
