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
    "balance_pictures": RemovedFlag("false", "a rank computes the pictures of its own rows"),
}
REMOVED_COMMANDS: dict[str, str] = {  # of `funrl`
    "bisect": "`funrl replay RUN OTHER_RUN` compares two runs, and the log of a run names the token of a gap",
}
# By flag: values that it no longer takes.
REMOVED_VALUES: dict[str, dict[str, str]] = {}


def successor_of_value(flag: str, text: str) -> str:
    """Sentence that names the successor of a value that a flag took in an earlier version; "" if it never took it."""
    return REMOVED_VALUES.get(flag, {}).get(text, "")
