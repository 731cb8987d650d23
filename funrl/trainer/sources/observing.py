"""Observers of a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from funrl import trees
from funrl.data.prompts import Example
from funrl.models.placed import Placed
from funrl.trainer.sources.evaluation import EvalRow


class WarmstartObserver(Protocol):
    """Observer of a warm start's progress."""

    def note(self, text: str) -> None: ...

    def supervised(self, step: int, steps: int, metrics: dict[str, float]) -> None: ...


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


class Observer(WarmstartObserver, Show, Protocol):
    """Observer of a run, which shows and writes what happens. Every rank has one; that of rank 0 shows it."""

    def step(self, step: int, metrics: dict[str, float], seconds: dict[str, float]) -> None: ...

    def resumed(self, step: int, metrics: Mapping[str, float] | None = None) -> None:
        """Forget later steps, which are repeated from here on.

        Args:
          metrics: of this step, where its line may be missing, as the run had failed before it was written.
        """
        ...

    def began(self, step: int, inputs: Mapping[str, str]) -> None:
        """Record that the run begins after `step`, with files and weights of these digests.

        It is recorded only where the run has a directory; what it continues from has been accepted.
        """
        ...

    def checkpoint_folder(self) -> str | None:
        """Folder in which rank 0 writes checkpoints; None: nowhere."""
        ...

    def finish(self, placed: Placed, params: trees.Tree, error: str | None) -> None:
        """Take the weights of the trained model, in which every rank takes part."""
        ...


def shows_samples(steps: int, every: int, step: int) -> bool:
    """True if a step shows samples: the first, the last, and every `every`-th one."""
    return step in (1, steps) or step % every == 0
