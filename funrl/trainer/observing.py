"""What a run tells about itself, and to whom."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from funrl import trees
from funrl.models.placed import Placed
from funrl.trainer.generation import Example


class WarmstartObserver(Protocol):
    """Where a warm start shows its progress."""

    def note(self, text: str) -> None: ...

    def supervised(self, step: int, steps: int, metrics: dict[str, float]) -> None: ...


class Observer(WarmstartObserver, Protocol):
    """Where a run shows and writes what happens. Every rank has one; those of other ranks than 0 show nothing."""

    def samples(
        self, step: int, examples: Sequence[Example], texts: Sequence[str], scores: Sequence[float | None]
    ) -> None: ...

    def step(self, step: int, metrics: dict[str, float], seconds: dict[str, float]) -> None: ...

    def resumed(self, step: int) -> None:
        """What was told of later steps is repeated from here on."""
        ...

    def checkpoint_folder(self) -> str | None:
        """Where rank 0 writes checkpoints; None: nowhere."""
        ...

    def finish(self, placed: Placed, params: trees.Tree, error: str | None) -> None:
        """Takes the weights of the trained model, in which every rank takes part."""
        ...
