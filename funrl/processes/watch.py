"""The watch over the ranks of a run, from a process beside them: the launcher, or the keeper of the first rank.

It reads the records of all ranks in the store, warns when the run makes no progress, and hears of the first failure.
Every rank that lives then writes a last record; from those the watch decides which ranks save the state.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any, NamedTuple

from funrl.processes import stall_monitor, store
from funrl.processes.heartbeat import ENDED, FAILED, NOBODY, NOT_BEGUN, RUNNING, SAVE_S, SAVING, Order, Sign, decode
from funrl.processes.output import discard, flush_output

HEARTBEAT_S = 60.0
LOOK_S = 0.1  # between two looks at the store
SETTLE_S = 0.3  # how long to wait for the failures that one failure causes
HEAR_S = 3.0  # how long ranks may take to hear of a failure
LEAVE_S = 10.0  # how long the other ranks may take to end, once the first one has ended


class WaitLimits(NamedTuple):
    """Limits of the waiting of ranks for each other.

    Attributes:
      timeout: how long a rank waits for another in a collective, of any group, before that is an error.
      heartbeat_s: seconds without progress after which a line on the standard error names the rank that the run waits
        for, and its phase; None: no line.
      stalled_s: seconds without a sign of life from a rank's process after which the run ends; None: it does not.
      reward: what ends a wait for a reward function, as a line continues; "": as for any other.
    """

    timeout: timedelta = timedelta(minutes=10)
    heartbeat_s: float | None = HEARTBEAT_S
    stalled_s: float | None = None
    reward: str = ""


class Watch:
    """The ranks of a run as their records show them."""

    def __init__(self, client: Any, world: int, waiting: WaitLimits) -> None:
        """Begin to watch.

        Args:
          client: of the store; nothing else may wait in it.
          world: number of ranks.
        """
        self.client: Any = client
        self.timeout_s = waiting.timeout.total_seconds()
        self.speaks = waiting.heartbeat_s is not None
        ending = f"; the run ends when a rank has waited {stall_monitor.duration(self.timeout_s)} (--timeout)"
        self.monitor = stall_monitor.StallMonitor(
            waiting.heartbeat_s or HEARTBEAT_S, ending, waiting.stalled_s, waiting.reward
        )
        self.signs: dict[int, Sign] = dict.fromkeys(range(world), NOT_BEGUN)
        self.next_poll = 0.0
        self.next_read = 0.0
        self.ended: dict[int, float] = {}  # ranks that have ended, and how long they had waited in a collective
        self.stalled: list[int] = []
        self.failed_at: float | None = None
        self.lost: set[int] = set()  # ranks that have not heard of the failure
        self.order: Order | None = None
        self.ordered_at = 0.0
        self.explanation = ""  # of an end by `--stalled_after` or `--timeout`

    def poll(self) -> None:
        """Read what is due, print any due warning, and decide what is saved once a rank has failed."""
        now = time.monotonic()  # which stands still while the machine is suspended
        if now < self.next_poll:
            return
        self.next_poll = now + LOOK_S
        if self.failed_at is None and self.client.check([store.FAILURE]):
            self.failed_at = now
        if now < self.next_read and self.failed_at is None:
            return
        self.next_read = now + self.monitor.every_s
        self._read()
        text = self.monitor.poll(self.signs, now)
        if self.failed_at is None:
            if text is not None and self.speaks:
                stall_monitor.say(text)
            self.stalled = self.monitor.stalled(self.signs)
            if self.stalled:
                self.explanation = self.monitor.stall(self.stalled, self.signs)
                store.report_first(self.client, self.stalled[0], self.explanation)
        elif self.order is None:
            self._decide(now, now - self.failed_at)

    def note_end(self, rank: int, failed: bool) -> None:
        """Take note of the end of a rank's process."""
        sign = self.signs[rank]
        if sign == NOT_BEGUN:  # its record has not been read yet
            self.ended[rank] = 0.0
        else:
            self.ended[rank] = time.monotonic() - sign.since if sign.status == RUNNING else sign.since
        if failed:
            store.report_first(self.client, rank, f"rank {rank} has failed")

    def in_steps(self) -> bool:
        """True once a rank has begun its first step."""
        self._read()
        return any(sign.step > 0 for sign in self.signs.values())

    def saving(self) -> bool:
        """True while a rank that was chosen has not ended its save."""
        if self.order is None or self.order.replica == NOBODY or time.monotonic() - self.ordered_at > SAVE_S:
            return False
        chosen = [rank for rank, sign in self.signs.items() if sign.replica == self.order.replica]
        return any(self.signs[rank].status <= SAVING for rank in chosen if rank not in self.ended)

    def over(self) -> bool:
        """True once every rank has ended that still answers."""
        return all(self.signs[rank].status == ENDED for rank in self.signs.keys() - self.lost - self.ended.keys())

    def reports(self) -> dict[int, str]:
        """The first failure that each rank has reported, by rank, in the order of their arrival."""
        reports: dict[int, str] = {}
        for rank, text in map(json.loads, self._lines(store.REPORTS)):
            reports.setdefault(rank, text)
        return reports

    def notices(self) -> str:
        """Lines of the ranks for the user."""
        return "".join(f"\n{text}" for text in dict.fromkeys(map(json.loads, self._lines(store.NOTICES))))

    def close(self) -> None:
        """Release the store, which ends if it is in this process."""
        self.client = None

    def _lines(self, key: str) -> list[str]:
        return self.client.get(key).decode().splitlines() if self.client.check([key]) else []

    def _read(self) -> None:
        keys = {rank: f"{store.SIGNS}/{rank}" for rank in self.signs}
        begun = [rank for rank, sign in self.signs.items() if sign != NOT_BEGUN or self.client.check([keys[rank]])]
        records = self.client.multi_get([keys[rank] for rank in begun]) if begun else []
        self.signs |= {rank: decode(bytes(record)) for rank, record in zip(begun, records, strict=True)}

    def _decide(self, now: float, passed_s: float) -> None:
        """Decide what is saved, as soon as every rank that lives has heard of the failure."""
        silent = self.monitor.silent(self.signs, now)
        gone = {*self.ended, *self.stalled, *silent}
        running = {rank for rank, sign in self.signs.items() if sign != NOT_BEGUN and sign.status != ENDED}
        deaf = {rank for rank in running - gone if not self.signs[rank].heard}
        if passed_s < SETTLE_S or (deaf and passed_s < HEAR_S):
            return
        self.lost = gone | deaf
        self.order = stall_monitor.rescuers(self.signs, self.lost, self.client.check([store.UNWRITABLE]))
        self.ordered_at = now
        if not self.stalled:
            waited_s = {rank: sign.since for rank, sign in self.signs.items() if sign.status == FAILED} | self.ended
            self.explanation = stall_monitor.timed_out(self.signs, waited_s, waited_s, silent, self.timeout_s) or ""
        self.client.set(store.RESCUE, f"{self.order.replica} {self.order.elsewhere} {self.explanation}")


@contextlib.contextmanager
def keeper(attempt: str, world: int, waiting: WaitLimits) -> Iterator[None]:
    """Watch a run that torchrun or srun has started from a process beside this one, which is its first rank.

    Where no agent of torchrun keeps the store, that process does. It outlives this one for as long as others save.

    Args:
      attempt: of `store.own_attempt`.
      world: number of ranks.
      waiting: as of the run.

    Raises:
      OSError: the port of the store is taken.
    """
    listener = None if store.kept_by_agent() else store.listen(int(os.environ["MASTER_PORT"]))
    first_rank = os.getpid()
    flush_output()
    pid = os.fork()
    if not pid:
        with contextlib.suppress(BaseException):
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):  # which are for the ranks
                signal.signal(number, signal.SIG_IGN)
            discard(1)
            server = None if listener is None else store.keep_store(listener)
            _keep(Watch(store.join_store(attempt), world, waiting), first_rank)
            del server
        os._exit(0)
    if listener is not None:
        listener.close()
    yield
    os.waitpid(pid, 0)


def _keep(watch: Watch, first_rank: int) -> None:
    """Watch until every rank has ended, or the first one and all that save."""
    end = time.monotonic() + LEAVE_S
    while not watch.over() and time.monotonic() < end:
        watch.poll()
        first_ended = watch.signs[0].status == ENDED
        if os.getppid() != first_rank and 0 not in watch.ended:
            watch.note_end(0, failed=not first_ended)
        if watch.saving() or not (first_ended or watch.order is not None):
            end = time.monotonic() + LEAVE_S
        time.sleep(LOOK_S)
