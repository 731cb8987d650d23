"""Evaluations of a run, between its steps or beside the next one, and the state that is saved if it fails."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import NamedTuple

from funrl.rewards.call import RewardError
from funrl.rollout.certificate import SyncError
from funrl.trainer.checkpoints.rescue import RecoverableState
from funrl.trainer.checkpoints.saver import Evaluations, Saver
from funrl.trainer.gap import GapError
from funrl.trainer.offload import mover
from funrl.trainer.phases import Trainer
from funrl.trainer.settings.settings import Settings
from funrl.trainer.sources.curriculum import CurriculumError
from funrl.trainer.sources.observing import Observer
from funrl.trainer.sources.selection import FilterError
from funrl.trainer.sources.source import Source
from funrl.trainer.steps.clock import memory_metrics
from funrl.trainer.steps.parts import Parts
from funrl.trainer.steps.roles import State
from funrl.trainer.steps.step import NotFiniteError
from funrl.trainer.steps.sync import proof_metrics

Enter = Callable[[Trainer, State, str], tuple[Trainer, State]]
ENDING = (RewardError, CurriculumError, FilterError, NotFiniteError, SyncError, GapError)  # what was learned is kept


class Recovery:
    """Keeps the state before a step recoverable while the step runs, except during its update.

    A step's stages move tensors between the device and the host. While they move, and while an update changes them in
    place, there is no complete state; at all other times there is one.

    Args:
      recoverable: holds the complete state, for whoever saves it when the run fails.
      trainer: of the run, whose flags say which tensors a stage offloads.
      state: before the first step.
      evaluations: so far.
      note: receives a remark where nothing can be offloaded.
    """

    def __init__(
        self,
        recoverable: RecoverableState,
        trainer: Trainer,
        state: State,
        evaluations: Evaluations,
        note: Callable[[str], None],
    ) -> None:
        self.recoverable = recoverable
        self.move = mover(trainer.job.settings.devices.offload, trainer.parts, note)
        self.before = state._replace(roles={})  # all of the state before the step but the weights, which move
        self.evaluations = evaluations

    def enter(self, trainer: Trainer, state: State, stage: str) -> tuple[Trainer, State]:
        """Move each tensor to where `stage` needs it. The pre-step state stays recoverable except during an update."""
        self.recoverable.release()
        trainer, state = self.move(trainer, state, stage)
        if stage != "update":
            self.recoverable.keep(self.before._replace(roles=state.roles), self.evaluations)
        return trainer, state

    def commit(self, state: State, evaluations: Evaluations, metrics: dict[str, float]) -> None:
        """Make the state after a step the recoverable one.

        Args:
          metrics: of the step, whose line may not have been written yet.
        """
        self.before = state._replace(roles={})
        self.evaluations = evaluations
        self.recoverable.keep(state, evaluations, metrics)

    def save_last(self, saver: Saver) -> None:
        """Save the recoverable state, if anything has been learned: its weights are those after the last whole step."""
        state = self.recoverable.state
        if state is not None and state.step > 0:
            saver.save(state, self.evaluations)

    def to_save(self, trainer: Trainer, state: State) -> State:
        """Move the weights to where they can be saved, and keep the state recoverable if it is complete."""
        complete = self.recoverable.state
        self.recoverable.release()
        _, state = self.move(trainer, state, "save")
        if complete is not None:
            self.recoverable.keep(complete._replace(roles=state.roles), self.evaluations)
        return state


class RunningEvaluation(NamedTuple):
    """An evaluation that runs beside the steps.

    Attributes:
      result: waits for it and returns its metrics.
      first: whether it is the one before the first step.
    """

    result: Callable[[], dict[str, float]]
    first: bool


class Evaluator:
    """Evaluates a run, and gives the observer each step's metrics with those of the evaluation that belongs to it.

    An evaluation beside the run ends before the next step is committed, before a checkpoint and before the run ends.
    The metrics of its step wait for it, so that the observer receives all steps in their order.

    Attributes:
      done: evaluations that have ended.
    """

    def __init__(self, source: Source, observer: Observer, recovery: Recovery, settings: Settings) -> None:
        """Begin without a running evaluation.

        Args:
          source: evaluates.
          observer: receives the steps.
          recovery: keeps the state of the newest step, and the evaluations so far.
          settings: of the run.
        """
        self.done = recovery.evaluations
        self._steps = settings.run.steps
        self._every = settings.evaluation.eval_every
        self._source = source
        self._observer = observer
        self._recovery = recovery
        self._running: RunningEvaluation | None = None
        self._state: State | None = None
        self._metrics: dict[str, float] = {}  # of the newest step
        self._seconds: dict[str, float] | None = None  # of it, while the observer waits for its metrics

    def begin_run(self, state: State) -> None:
        """Evaluate before the first step that is left, where no evaluation is known. Collective.

        An evaluation that had not ended when a resumed state was saved is made again, with the metrics of its step.
        """
        if self.done.unfinished is not None:
            metrics = self.done.unfinished
            self._keep(self._source.evaluate(state.roles, state.step), first=False)
            self._observer.resumed(state.step, metrics | self.done.last)
        if not self.done.first and state.step < self._steps:
            self._begin(state, first=True)
        self._recovery.evaluations = self.done

    def end_step(self, parts: Parts, state: State, metrics: dict[str, float], once: dict[str, float]) -> State:
        """Evaluate the weights after a step if it is time to, and make its state the recoverable one. Collective.

        It waits for the evaluation that ran beside the step.

        Args:
          metrics: of the step.
          once: of what came before the run's first step; empty at all others.

        Returns: the state, whose source has observed the metrics.
        """
        self.finish()
        metrics = once | metrics | (self.done.first if state.step == 1 else {})
        if state.step % self._every == 0 or state.step == self._steps:
            metrics |= self._begin(state, first=False)
        metrics = proof_metrics(parts) | metrics
        state = state._replace(source=self._source.observed(state.source, metrics))
        self._state = state
        self._metrics = metrics | memory_metrics(parts.mesh)
        self.done = self.done._replace(unfinished=None if self._running is None else self._metrics)
        self._recovery.commit(state, self.done, self._metrics)
        return state

    def show(self, step: int, seconds: dict[str, float]) -> None:
        """Give the observer the metrics of a step, now or when its evaluation has ended."""
        if self._running is None:
            self._observer.step(step, self._metrics, seconds)
        else:
            self._seconds = seconds

    def finish(self) -> None:
        """Wait for the running evaluation, if there is one. Collective.

        Raises:
          RewardError, SyncError: it has failed.
        """
        if self._running is None:
            return
        running, self._running = self._running, None
        try:
            metrics = running.result()
        except (RewardError, SyncError):
            self._show_waiting()
            raise
        self._keep(metrics, running.first)
        if not running.first:
            self._metrics = self._metrics | metrics
            self._show_waiting()

    def complete(self) -> tuple[dict[str, float], Evaluations]:
        """Wait for the newest step's evaluation. Collective.

        Returns: metrics of the step with those of its evaluation, and all evaluations.
        """
        if self._running is not None and self._state is not None:
            self.finish()
            self._recovery.commit(self._state, self.done, self._metrics)
        return self._metrics, self.done

    def end_early(self) -> None:
        """Wait for the running evaluation of a run that ends before its last step. Collective."""
        with contextlib.suppress(RewardError, SyncError):  # something else has ended the run
            self.finish()
        self._recovery.evaluations = self.done

    def _begin(self, state: State, *, first: bool) -> dict[str, float]:
        if self._source.begin_evaluation is not None:
            self._running = RunningEvaluation(self._source.begin_evaluation(state.step), first)
            return {}
        metrics = self._source.evaluate(state.roles, state.step)
        self._keep(metrics, first)
        return metrics

    def _keep(self, metrics: dict[str, float], first: bool) -> None:
        if first:
            self.done = Evaluations(metrics, {})
        else:
            self.done = Evaluations(self.done.first, metrics)

    def _show_waiting(self) -> None:
        """Give the observer the metrics of the step that waits, if one does."""
        if self._seconds is None or self._state is None:
            return
        self._observer.step(self._state.step, self._metrics, self._seconds)
        self._seconds = None
