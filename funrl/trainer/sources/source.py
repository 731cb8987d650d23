"""The contract of a source of rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from funrl import trees
from funrl.trainer.sources.observing import Show
from funrl.trainer.steps.roles import RoleState
from funrl.trainer.steps.step_rows import Rows
from funrl.trainer.storage.row_shards import HeldRows

SKIPPED = "filter_groups/skipped"  # metric of a source: 1 where the filter kept nothing and nothing is trained on


class Source(NamedTuple):
    """A source of rows.

    Attributes:
      init: () -> the source's state before the first step.
      next_rows: (source's state, step) -> (rows, source's state, metrics). Do not train on the rows where the metric
        `SKIPPED` is 1.
      evaluate: (states of the roles, step) -> metrics on held-out data.
      saved: source's state -> the same as a checkpoint has it.
      rows: such a state -> its leaves that are rows, of which each rank has its own; None: all is alike on every rank.
      restored: a state that was read from a checkpoint, of whose rows each rank has a share -> the source's state.
      observed: (source's state, metrics of a step) -> the source's state after it. All ranks call it together.
      spread: whether ranks have different parts of the state.
    """

    init: Callable[[], trees.Tree]
    next_rows: Callable[[trees.Tree, int], tuple[Rows, trees.Tree, dict[str, float]]]
    evaluate: Callable[[Mapping[str, RoleState], int], dict[str, float]]
    saved: Callable[[trees.Tree], trees.Tree] = lambda state: state
    rows: Callable[[trees.Tree], HeldRows | None] = lambda state: None
    restored: Callable[[trees.Tree], trees.Tree] = lambda state: state
    observed: Callable[[trees.Tree, Mapping[str, float]], trees.Tree] = lambda state, metrics: state
    spread: bool = False


def same_order(order: int, show: Show, state: trees.Tree) -> trees.Tree:
    """The state of a checkpoint, with a remark where it was in another order of prompts or texts."""
    if state["order"] != order:
        show.note(
            "--resume: the data, or --seed, are not those that the run has had so far: it goes on at the same place of "
            "another order"
        )
    return {**state, "order": order}
