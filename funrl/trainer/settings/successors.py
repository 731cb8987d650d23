"""Names that earlier versions had, each with what to write instead: flags, commands and values of flags."""

from __future__ import annotations

from typing import NamedTuple


class RemovedFlag(NamedTuple):
    """A flag of an earlier version.

    Attributes:
      default: its text in a config.json of that version when it was not given; such an entry is skipped.
      successor: a sentence that says what to use instead.
    """

    default: str
    successor: str


REMOVED_FLAGS: dict[str, RemovedFlag] = {
    "latex": RemovedFlag("False", "funrl explain prints the composition, with the formulas of docstrings, as text"),
}
REMOVED_COMMANDS: dict[str, str] = {  # of `funrl`
    "watch": "`funrl report RUN` writes the page during a run, `tensorboard --logdir=RUN` follows its curves",
}
# By flag: values that it no longer takes.
REMOVED_VALUES: dict[str, dict[str, str]] = {
    "report_to": dict.fromkeys(("trackio", "swanlab"), "use wandb or mlflow, or read metrics.jsonl of the run"),
}


def successor_of_value(flag: str, text: str) -> str:
    """Sentence that names the successor of a value that a flag took in an earlier version; "" if it never took it."""
    return REMOVED_VALUES.get(flag, {}).get(text, "")
