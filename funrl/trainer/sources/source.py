"""The contract of a source of rows."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from funrl import trees
from funrl.environments.logged import LoggedEpisode
from funrl.trainer.sources.observing import Show
from funrl.trainer.steps.roles import RoleState
from funrl.trainer.steps.step_rows import Rows
from funrl.trainer.storage.row_shards import HeldRows

SKIPPED = (
    "filter_groups/skipped"  # metric of a source: 1 if the filter kept nothing, so that the step trains on nothing
)
EMPTY = "episodes/skipped"  # the same where no episode could be trained on, so that there is no row


def is_skipped(metrics: Mapping[str, float]) -> bool:
    """True if a source's metrics say that the step trains on nothing."""
    return bool(metrics.get(SKIPPED) or metrics.get(EMPTY))


class Source(NamedTuple):
    """A source of rows.

    Attributes:
      init: () -> the source's state before the first step.
      next_rows: (source's state, step) -> (rows, source's state, metrics). Do not train on the rows where `is_skipped`.
      evaluate: (states of the roles, step) -> metrics on held-out data.
      saved: source's state -> the form of it that a checkpoint stores.
      rows: stored state -> its leaves that hold rows, different on each rank; None: the state is the same everywhere.
      restored: state read from a checkpoint, with a share of its rows on each rank -> the source's state.
      observed: (source's state, metrics of a step) -> the state after that step. Collective.
      spread: whether each rank holds a different part of the state.
      close: ends what goes on between steps.
      episodes: this replica's episodes of the newest step, where they are kept.
    """

    init: Callable[[], trees.Tree]
    next_rows: Callable[[trees.Tree, int], tuple[Rows, trees.Tree, dict[str, float]]]
    evaluate: Callable[[Mapping[str, RoleState], int], dict[str, float]]
    saved: Callable[[trees.Tree], trees.Tree] = lambda state: state
    rows: Callable[[trees.Tree], HeldRows | None] = lambda state: None
    restored: Callable[[trees.Tree], trees.Tree] = lambda state: state
    observed: Callable[[trees.Tree, Mapping[str, float]], trees.Tree] = lambda state, metrics: state
    spread: bool = False
    close: Callable[[], None] = lambda: None
    episodes: Sequence[LoggedEpisode] = ()


@contextlib.contextmanager
def closed_at_end(source: Source) -> Iterator[None]:
    """Close a source at the end of the context."""
    try:
        yield
    finally:
        source.close()


def same_order(order: int, show: Show, state: trees.Tree) -> trees.Tree:
    """A checkpoint's state; shows a remark if its prompts or texts were in another order."""
    if state["order"] != order:
        show.note(
            "--resume: the data or --seed have changed: the run continues at the same position of a different order"
        )
    return {**state, "order": order}
