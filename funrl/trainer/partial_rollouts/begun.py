"""Begun prompts, as the source of partial rollouts sees them, whatever their rows are made of."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol, TypeVar

import numpy as np
from torch import Tensor

from funrl import trees
from funrl.data.order import places_in_order
from funrl.data.prompts import Example
from funrl.trainer.sources.curriculum import PromptSchedule
from funrl.trainer.sources.pending_rewards import Totals
from funrl.trainer.steps.step_rows import Rows
from funrl.trainer.storage.row_shards import HeldRows


class Begun(Protocol):
    """Prompts that were begun and are not trained on yet, in the order of the prompts; an immutable value.

    Attributes:
      places: [P] position of each prompt in the order of the prompts.
      entries: totals of further numbers of rewards that came with the writing of this step.
    """

    @property
    def places(self) -> np.ndarray: ...
    @property
    def entries(self) -> Totals: ...


HeldT = TypeVar("HeldT", bound=Begun)


class NewPrompts(NamedTuple):
    """Prompts to begin.

    Attributes:
      begin: next position in the order of the prompts.
      count: how many to begin.
      weights: sampling weights of the prompts in this step; see `take_next`.
    """

    begin: int
    count: int = 0
    weights: np.ndarray | None = None


class Examined(NamedTuple):
    """Finished prompts that the filter has seen.

    Attributes:
      places: [P] as in `Begun`.
      rows: with all scores.
      kept_PS: [P, S] samples that the filter keeps.
      scores: [P * S, K] of each sample; None: there are no reward functions.
      failed: [P * S] bool, samples without a usable score; None: a failure ends the run.
      entries: totals of further numbers of rewards.
      episodes: totals of facts about episodes.
    """

    places: np.ndarray
    rows: Rows
    kept_PS: np.ndarray
    scores: Tensor | None = None
    failed: Tensor | None = None
    entries: Totals = {}  # noqa: RUF012  (never mutated)
    episodes: Totals = {}  # noqa: RUF012  (never mutated)


class RowWriter(Protocol[HeldT]):
    """Writer of the rows of begun prompts. All methods are collective.

    Attributes:
      longest: bound on the tokens that are sampled for a row.
      most_new: bound on the prompts begun in a step; None: as many as a batch needs.
    """

    longest: int
    most_new: int | None

    def nothing(self) -> HeldT:
        """No prompts."""
        ...

    def ready(self, held: HeldT) -> np.ndarray:
        """[P] bool, prompts whose samples are all finished."""
        ...

    def select(self, held: HeldT, prompts: np.ndarray) -> HeldT:
        """Some prompts by their indices in `places`."""
        ...

    def write(self, held: HeldT, going_on: np.ndarray, new: NewPrompts, tokens: int | None) -> tuple[HeldT, int]:
        """Continue some prompts and begin some; return all, and the next position in the order of the prompts.

        Args:
          held: begun prompts.
          going_on: [P] bool, prompts whose unfinished rows to continue.
          new: prompts to begin.
          tokens: bound on the new tokens of each row; None: write to its end.
        """
        ...

    def examine(self, held: HeldT) -> Examined:
        """Score finished prompts with all rewards and apply the filter."""
        ...

    def metrics(self, held: HeldT) -> dict[str, float]:
        """Metrics of the prompts that are begun at the end of a step."""
        ...

    def tree(self, held: HeldT) -> dict[str, trees.Tree]:
        """Begun prompts as a tree of tensors."""
        ...

    def held(self, tree: dict[str, trees.Tree]) -> HeldT:
        """The begun prompts of such a tree."""
        ...

    def saved(self, tree: dict[str, trees.Tree]) -> dict[str, trees.Tree]:
        """The form of it that a checkpoint stores. Not collective."""
        ...

    def rows(self, tree: dict[str, trees.Tree]) -> HeldRows:
        """The leaves of the stored tree that hold rows, by their names in it."""
        ...

    def close(self) -> None:
        """End all running work."""
        ...


def examples_at(schedule: PromptSchedule, places: np.ndarray) -> list[Example]:
    """The prompts at these positions of the order."""
    return [schedule.prompts[number] for number in prompt_numbers(schedule, places).tolist()]


def prompt_numbers(schedule: PromptSchedule, places: np.ndarray) -> np.ndarray:
    """Indices of the prompts at these positions of the order."""
    if not len(places):
        return places
    first = int(places.min())
    return places_in_order(schedule.prompts, int(places.max()) + 1 - first, schedule.seed, position=first)[
        places - first
    ]


def sample_numbers(prompts: Sequence[int] | np.ndarray, samples: int) -> np.ndarray:
    """Sample indices of some prompts."""
    return (np.asarray(prompts)[:, None] * samples + np.arange(samples)).flatten()
