"""Observers of a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from funrl import trees
from funrl.data.prompts import Example
from funrl.models.placed import Placed
from funrl.trainer.sources.evaluation import EvalRow


class Show(Protocol):
    """Observer of a source's completions and remarks."""

    def samples(
        self,
        step: int,
        examples: Sequence[Example],
        texts: Sequence[str],
        scores: Sequence[float | None],
        parts: Sequence[Mapping[str, float]],
    ) -> None: ...

    def evaluated(self, rows: Sequence[EvalRow]) -> None:
        """Take some more rows of an evaluation's table."""
        ...

    def note(self, text: str) -> None: ...


class Observer(Show, Protocol):
    """Observer of a run. Every rank has one; rank 0's shows and writes what happens."""

    def step(self, step: int, metrics: dict[str, float], seconds: dict[str, float]) -> None: ...

    def resumed(self, step: int, metrics: Mapping[str, float] | None = None) -> None:
        """Forget the steps after `step`, which are repeated.

        Args:
          step: the step that the run resumes after.
          metrics: of that step, in case the run failed before it wrote them.
        """
        ...

    def began(self, step: int, inputs: Mapping[str, str]) -> None:
        """Record the digests of the files and weights that the run begins with after `step`.

        Called only for a run with a directory, once its checkpoint has been accepted.
        """
        ...

    def checkpoint_folder(self) -> str | None:
        """Folder for rank 0's checkpoints; None: no checkpoints."""
        ...

    def finish(self, placed: Placed, params: trees.Tree, error: str | None) -> None:
        """Take the weights of the trained model. Collective."""
        ...


def shows_samples(steps: int, every: int, step: int) -> bool:
    """True if a step shows samples: the first, the last and every `every`-th step do."""
    return step in (1, steps) or step % every == 0
