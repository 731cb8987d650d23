"""The time that torchrun gives its ranks to end after SIGTERM. It imports no torch."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

SHUTDOWN_S = 30  # torchrun's default
SHUTDOWN_VARIABLE = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"


def shutdown_s(environment: Mapping[str, str] = os.environ, arguments: Sequence[str] | None = None) -> int | None:
    """Seconds from the SIGTERM that torchrun's agent sends its ranks to their SIGKILL; None: it has not started this.

    Args:
      environment: of this process.
      arguments: command line of the agent; None: that of this process's parent, where the system shows it.

    Example:
      >>> shutdown_s({"TORCHELASTIC_RUN_ID": "none"}, ["torchrun", "--shutdown-timeout=600", "train.py"])
      600
    """
    if "TORCHELASTIC_RUN_ID" not in environment:
        return None
    words = _parent_arguments() if arguments is None else arguments
    for word, following in zip(words, [*words[1:], ""], strict=True):
        match = re.fullmatch(r"--shutdown[-_]timeout(?:=(\d+))?", word)
        value = match and (match[1] or following)
        if value and value.isdigit():
            return int(value)
    given = environment.get(SHUTDOWN_VARIABLE, "")
    return int(given) if given.isdigit() else SHUTDOWN_S


def shutdown_remark(seconds: int | None) -> str | None:
    """A remark on this time for the log of a run; None where torchrun has not started it."""
    if seconds is None:
        return None
    return (
        f"torchrun kills ranks {seconds} s after SIGTERM: a run that is terminated saves its step if step and "
        "save take less; --shutdown-timeout=SECONDS of torchrun gives it more"
    )


def _parent_arguments() -> list[str]:
    try:
        return Path(f"/proc/{os.getppid()}/cmdline").read_text().split("\0")
    except (OSError, UnicodeDecodeError):
        return []
