"""Rows that the filter drops, and steps without a row to train on: it kept none, or no episode can be trained on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from funrl.rewards.call import RewardError
from funrl.trainer.sources.observing import Show
from funrl.trainer.sources.pending_rewards import Totals
from funrl.trainer.sources.source import EMPTY

MOST_EMPTY = 5  # steps in a row


class FilterError(RuntimeError):
    """The algorithm's filter kept no row of a step."""


def skips_empty(when_empty: str, step: int, prompts: int, show: Show) -> bool:
    """True if a step whose rows were all dropped by the filter has no update; shows a remark.

    Args:
      when_empty: "skip", "stop" or "use".
      step: its number.
      prompts: sampled in the step.
      show: receives the remark.

    Raises:
      FilterError: `when_empty` is "stop".
    """
    dropped = f"step {step}: the filter dropped all of {prompts} prompts"
    if when_empty == "stop":
        raise FilterError(f"{dropped} (--empty_filter=stop)")
    used = "the last of them are used unfiltered" if when_empty == "use" else "the step has no update"
    show.note(f"{dropped}; {used} (--empty_filter={when_empty})")
    return when_empty == "skip"


def count_empty(
    state: Mapping[str, Any], step: int, unusable: int, facts: Totals, show: Show
) -> tuple[dict[str, Any], dict[str, float]]:
    """Count steps in a row without a usable episode, which have no update; shows a remark.

    Args:
      state: of a source; without "empty_steps" it has no episodes, and stays as it is.
      step: number of the step.
      unusable: episodes that were run in it if none of them can be trained on; else 0.
      facts: totals of the step's episodes, of which "failed" and "unscored" are shown.
      show: receives the remark.

    Returns: the state, and metrics.

    Raises:
      RewardError: there have been `MOST_EMPTY` of them in a row.
    """
    if "empty_steps" not in state:
        return dict(state), {}
    count = state["empty_steps"] + 1 if unusable else 0
    failed, unscored = (int(facts.get(name, (0.0, 0))[0]) for name in ("failed", "unscored"))
    problem = f"step {step}: none of {unusable} episodes can be trained on: {failed} failed, {unscored} are unscored"
    if failed:
        problem += "; a failed one leaves out its group"
    if unscored:
        problem += "; one that a limit ends before any reward is unscored, return 0.0 to count it as a failure"
    if count >= MOST_EMPTY:
        raise RewardError(
            f"{problem}; the {count - 1} steps before had none either: see the remarks on failed episodes, and try the "
            "environment with funrl generate --env"
        )
    if count:
        show.note(f"{problem}; the step has no update, and the run ends after {MOST_EMPTY} such steps in a row")
    return {**state, "empty_steps": count}, {EMPTY: float(count > 0)}


def filter_metrics(kept: int, sampled: int, dropped_rows: int) -> dict[str, float]:
    """Metrics of a filter.

    Args:
      kept, sampled: prompts.
      dropped_rows: of the prompts that are kept.
    """
    return {
        "filter_groups/kept_share": kept / sampled,
        "filter_groups/sampled_prompts": sampled,
        "filter_groups/dropped_prompts": sampled - kept,
        "filter_groups/dropped_rows": dropped_rows,
    }
