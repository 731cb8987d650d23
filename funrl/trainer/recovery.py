"""Recovery of a run that fails: which state can be saved at each moment of a step."""

from __future__ import annotations

from collections.abc import Callable

from funrl.rewards.call import RewardError
from funrl.rollout.certificate import SyncError
from funrl.trainer.checkpoints.rescue import RecoverableState
from funrl.trainer.checkpoints.saver import Evaluations, Saver
from funrl.trainer.gap import GapError
from funrl.trainer.offload import mover
from funrl.trainer.phases import Trainer
from funrl.trainer.sources.curriculum import CurriculumError
from funrl.trainer.sources.selection import FilterError
from funrl.trainer.steps.state import State
from funrl.trainer.steps.step import NotFiniteError

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
