"""Stall monitor: which rank the others wait for, the warning about it, and which ranks save the state.

Functions of records (`heartbeat.Sign`) by rank. Only one process reads all of them, a few times in each heartbeat.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Collection, Mapping, Sequence

from funrl.processes.heartbeat import NOBODY, NOT_BEGUN, RUNNING, Order, Sign

REWARD_PHASE = "reward"  # phase in which a rank waits for a user's function
NAMED = 4  # ranks that a line names; the others it counts
GAP_S = 10.0  # more between two polls is time in which the monitor itself was stopped
TIMED_OUT = 0.9  # part of the timeout after which a collective that fails has waited in vain


class StallMonitor:
    """Monitor of some ranks: it warns when one has made no progress for a heartbeat, then less and less often."""

    def __init__(self, heartbeat_s: float, ending: str = "", stalled_s: float | None = None, reward: str = "") -> None:
        """Make a monitor.

        Args:
          heartbeat_s: seconds without progress.
          ending: continues a line, such as "; --timeout=60 ends the run".
          reward: continues it instead where no rank waits for another, but all that are late for a reward.
          stalled_s: seconds without an answer after which a rank counts as stalled; None: it never does.
        """
        self.heartbeat_s = heartbeat_s
        self.ending = ending
        self.reward = reward
        self.stalled_s = stalled_s
        self.unanswered_s: dict[int, float] = {}  # of each rank, without the time in which this process was stopped
        self.polled: float | None = None
        self.silent_s = max(1.0, heartbeat_s / 2)
        self.beats: dict[int, tuple[int, float]] = {}  # of each rank, and when they were seen first
        self.ticks: dict[int, tuple[int, float]] = {}
        self.pause_s = heartbeat_s
        self.speaks_at = 0.0

    @property
    def every_s(self) -> float:
        """Seconds between two polls."""
        return min(1.0, self.heartbeat_s / 4)

    def poll(self, signs: Mapping[int, Sign], now: float) -> str | None:
        """The line that is due, if there is one.

        Args:
          now: seconds, of a clock that never goes back.
        """
        passed_s = 0.0 if self.polled is None else min(now - self.polled, GAP_S)
        self.polled = now
        for rank, sign in signs.items():
            answered = rank not in self.ticks or self.ticks[rank][0] != sign.ticks
            self.unanswered_s[rank] = 0.0 if answered else self.unanswered_s[rank] + passed_s
            for count, seen in ((sign.beats, self.beats), (sign.ticks, self.ticks)):
                if rank not in seen or seen[rank][0] != count:
                    seen[rank] = count, now
        running = {rank: sign for rank, sign in signs.items() if sign.status == RUNNING}
        still_s = max((now - self.beats[rank][1] for rank in running), default=0.0)
        if still_s < self.heartbeat_s:
            self.pause_s = self.heartbeat_s
            self.speaks_at = 0.0
            return None
        if now < self.speaks_at:
            return None
        self.speaks_at = now + self.pause_s
        self.pause_s *= 2
        silent = self.silent(signs, now)
        ranks = late(signs, silent)
        why = ", which does not answer: it is stopped, swapped out or in a call that holds it" if silent else ""
        if silent and self.stalled_s is not None:
            why += f"; after {duration(self.stalled_s)} without an answer the run ends (--stalled_after)"
        rewarding = all(running[rank].phase == REWARD_PHASE for rank in ranks if rank in running)
        alone = rewarding and not any(sign.waiting for sign in running.values())
        ending = self.reward if alone and self.reward else self.ending
        return f"no progress for {still_s:.0f} s: the run waits for {named_ranks(ranks, signs)}{why}{ending}"

    def silent(self, signs: Mapping[int, Sign], now: float) -> set[int]:
        """Ranks whose threads do not count on, as far as was seen."""
        return {
            rank
            for rank, sign in signs.items()
            if sign.status == RUNNING and rank in self.ticks and now - self.ticks[rank][1] >= self.silent_s
        }

    def stalled(self, signs: Mapping[int, Sign]) -> list[int]:
        """Ranks whose processes have not answered for `stalled_s`, without ranks that have not begun yet."""
        limit_s = self.stalled_s
        if limit_s is None:
            return []
        begun = [rank for rank, sign in signs.items() if sign.status == RUNNING and sign.phase != NOT_BEGUN.phase]
        return [rank for rank in begun if self.unanswered_s.get(rank, 0.0) >= limit_s]

    def stall(self, ranks: Sequence[int], signs: Mapping[int, Sign]) -> str:
        """The explanation of an end by `--stalled_after`."""
        return (
            f"no answer for {duration(self.stalled_s or 0.0)} (--stalled_after) from {named_ranks(ranks, signs)}: the "
            "process is stopped, swapped out or in a call that holds it"
        )


def late(signs: Mapping[int, Sign], silent: Collection[int] = ()) -> list[int]:
    """Ranks that the others wait for.

    They are the ranks that do not answer; else the least advanced ranks outside a collective.
    """
    if silent:
        return sorted(silent)
    running = {rank: sign for rank, sign in signs.items() if sign.status == RUNNING}
    busy = {rank: sign for rank, sign in running.items() if not sign.waiting} or running
    least = min(((sign.phases, sign.collectives) for sign in busy.values()), default=None)
    return sorted(rank for rank, sign in busy.items() if (sign.phases, sign.collectives) == least)


def named_ranks(ranks: Sequence[int], signs: Mapping[int, Sign]) -> str:
    """Some ranks with their hosts and places; of many only the first."""
    texts = [f"rank {rank} on {signs[rank].host} ({whereabouts(signs[rank])})" for rank in ranks[:NAMED]]
    more = len(ranks) - len(texts)
    return ", ".join(texts) + (f" and {more} more" if more > 0 else "")


def whereabouts(sign: Sign) -> str:
    """Step, phase and last collective."""
    parts = [f"step {sign.step}" if sign.step else "before the first step", sign.phase]
    if sign.collective:
        parts.append(f"{'in' if sign.waiting else 'last'} {sign.collective}")
    return ", ".join(parts)


def timed_out(
    signs: Mapping[int, Sign],
    failed: Collection[int],
    waited_s: Mapping[int, float],
    silent: Collection[int],
    timeout_s: float,
) -> str | None:
    """The explanation of an end by `--timeout`; None where the run has ended for another reason.

    Args:
      failed: ranks that have failed; every one must have waited in vain.
      waited_s: seconds since each of them entered its last collective.
      silent: ranks that do not answer.
    """
    if not failed or not all(signs[rank].waiting and waited_s[rank] >= TIMED_OUT * timeout_s for rank in failed):
        return None
    first = min(failed)
    rest = {rank: sign._replace(status=RUNNING) for rank, sign in signs.items() if rank not in failed}
    ranks = late(rest, [rank for rank in silent if rank in rest])
    if not ranks:
        return None
    return (
        f"rank {first} on {signs[first].host} ({whereabouts(signs[first])}) has waited {duration(timeout_s)} for "
        f"{named_ranks(ranks, signs)}, which did not arrive; --timeout says how many minutes a rank waits"
    )


def duration(seconds: float) -> str:
    """Seconds or minutes in words."""
    return f"{seconds / 60:.0f} minutes" if seconds >= 120 else f"{seconds:g} s"


def rescuers(signs: Mapping[int, Sign], dead: Collection[int], elsewhere: bool) -> Order:
    """Choose the replica that saves the state: all of its ranks live and hold the recoverable state of one step.

    Of several, it is the first among those of the latest step.
    """
    members: dict[int, list[int]] = {}
    for rank, sign in signs.items():
        members.setdefault(sign.replica, []).append(rank)
    steps = {}
    for replica, ranks in members.items():
        recoverable = {signs[rank].recoverable for rank in ranks}
        if replica != NOBODY and len(recoverable) == 1 and min(recoverable) >= 0 and not set(ranks) & set(dead):
            steps[replica] = min(recoverable)
    return Order(min(steps, key=lambda replica: (-steps[replica], replica), default=NOBODY), elsewhere)


def say(text: str) -> None:
    """Print a line on the standard error, if there is still somebody to read it."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        print(text, file=sys.stderr, flush=True)
