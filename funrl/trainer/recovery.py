"""Recovery of a run that fails: which state can be saved at each moment of a step."""

from __future__ import annotations

from typing import TypeVar

from funrl.trainer.checkpoints.rescue import RecoverableState
from funrl.trainer.checkpoints.saver import Evaluations, Saver
from funrl.trainer.offload import Mover
from funrl.trainer.steps.state import State

_Run = TypeVar("_Run")


class Recovery:
    """Keeps the state before a step recoverable while the step runs, except during its update.

    A step's stages move tensors between the device and the host. While they move, and while an update changes them in
    place, there is no complete state; at all other times there is one.

    Args:
      recoverable: holds the complete state, for whoever saves it when the run fails.
      move: moves tensors to where a stage needs them.
      state: before the first step.
      evaluations: so far.
    """

    def __init__(self, recoverable: RecoverableState, move: Mover, state: State, evaluations: Evaluations) -> None:
        self.recoverable = recoverable
        self.move = move
        self.before = state._replace(roles={})  # all of the state before the step but the weights, which move
        self.evaluations = evaluations

    def enter(self, run: _Run, state: State, stage: str) -> tuple[_Run, State]:
        """Move each tensor to where `stage` needs it. The pre-step state stays recoverable except during an update."""
        self.recoverable.release()
        run, state = self.move(run, state, stage)
        if stage != "update":
            self.recoverable.keep(self.before._replace(roles=state.roles), self.evaluations)
        return run, state

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

    def to_save(self, run: object, state: State) -> State:
        """Move the weights to where they can be saved, and keep the state recoverable if it is complete."""
        complete = self.recoverable.state
        self.recoverable.release()
        _, state = self.move(run, state, "save")
        if complete is not None:
            self.recoverable.keep(complete._replace(roles=state.roles), self.evaluations)
        return state
