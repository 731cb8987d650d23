"""Watch over the process that writes a rank's checkpoints, while the rank waits for it.

A disk may be slow, so a writer that is at work is only named, and has as long as a rank waits for another. One that is
stopped does nothing, however long it is given.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import NamedTuple

from funrl.processes.stall_monitor import GAP_S, duration

WATCH_S = 0.5  # between two polls of the process


class WriterLimits(NamedTuple):
    """Limits of a rank's wait for its writer, in seconds.

    Attributes:
      heartbeat_s: until the writer is named.
      stalled_s: for a writer that is stopped.
      timeout_s: for any writer.
    """

    heartbeat_s: float
    stalled_s: float
    timeout_s: float


class WriterWatch:
    """Watch over one wait. Time in which this process was stopped itself does not count."""

    def __init__(self, rank: int, file: str, limits: WriterLimits) -> None:
        """Begin a wait of a rank.

        Args:
          rank: that waits.
          file: what the process writes.
          limits: of the wait.
        """
        self.rank = rank
        self.file = file
        self.limits = limits
        self.waited_s = 0.0
        self.stopped_s = 0.0
        self.polled: float | None = None
        self.next_line_s = limits.heartbeat_s

    def poll(self, pid: int) -> tuple[str | None, str | None]:
        """A line for the user, if one is due, and the problem that ends the run, if there is one.

        Args:
          pid: of the writer.
        """
        now = time.monotonic()  # which stands still while the machine is suspended
        if self.polled is not None and now - self.polled < WATCH_S:
            return None, None
        passed_s = 0.0 if self.polled is None else min(now - self.polled, GAP_S)
        stopped = is_stopped(pid)
        self.polled = now
        self.waited_s += passed_s
        self.stopped_s = self.stopped_s + passed_s if stopped else 0.0
        limits = self.limits
        if stopped and self.stopped_s >= limits.stalled_s:
            time_text = duration(limits.stalled_s)
            return None, f"process {pid}, which writes {self.file}, has been stopped for {time_text} (--stalled_after)"
        if self.waited_s >= limits.timeout_s:
            return None, f"process {pid} has not written {self.file} within {duration(limits.timeout_s)} (--timeout)"
        if self.waited_s < self.next_line_s:
            return None, None
        self.next_line_s = 2 * self.waited_s
        if stopped:
            rest = f" and is stopped; the run ends after {duration(limits.stalled_s)} of that (--stalled_after)"
        else:
            rest = (
                f", on a slow disk or a dead one; the run ends after {duration(limits.timeout_s)} of that (--timeout)"
            )
        waits = f"rank {self.rank} waits for process {pid}, which writes {self.file}"
        return f"no progress for {self.waited_s:.0f} s: {waits}{rest}", None


def is_stopped(pid: int) -> bool:
    """True if a process is stopped, as by SIGSTOP or a debugger; False where the system does not say so."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in ("T", "t")
    except OSError:
        return False
