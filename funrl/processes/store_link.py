"""The links of ranks: through the run's store, or, of a rank that is alone, to its own standard error.

Each rank writes its record to the store a few times a second, and asks whether a rank has failed: two messages,
whatever the number of ranks. Once one has failed it writes a last record, obeys the decision of the process that
watches (`watch`), and ends within seconds, also where it waits on its device for the failed one.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from typing import Any, NamedTuple

from funrl.processes import stall_monitor, store
from funrl.processes.heartbeat import NOBODY, ORDER_S, TICK_S, Heartbeat, Link, Order, decode, waited_s
from funrl.processes.watch import HEARTBEAT_S, WaitLimits

PUBLISH_S = 1.0  # at most between two records of a rank
POLL_SHARE_S = 1e-3  # of each rank, so that the store gets about a thousand records a second
END_S = 5.0  # how long a rank may take to end by itself once another has failed
STORE = "the process that keeps the run's store"


class FailureNotice(NamedTuple):
    """Notice of a failure: the rank (NOBODY: the store is gone), the cause, and when this rank heard of it."""

    rank: int
    text: str
    seen: float


class LaunchAgreement(NamedTuple):
    """Agreement with the launcher of this program, which takes a rank's report and ends it.

    Attributes:
      folder: one that all ranks see and that can be written, for what the usual one does not take.
      plain: exceptions whose message is all that a user needs.
    """

    folder: str
    plain: tuple[type[Exception], ...]


class Alone(Link):
    """The link of the only rank of a run: its thread speaks itself."""

    def __init__(self, heartbeat_s: float | None) -> None:
        self.monitor = None if heartbeat_s is None else stall_monitor.StallMonitor(heartbeat_s)
        self.next_poll = 0.0

    def tick(self, heart: Heartbeat) -> Order | None:
        now = time.monotonic()
        if self.monitor is not None and now >= self.next_poll:
            self.next_poll = now + self.monitor.every_s
            if text := self.monitor.poll({0: decode(heart.record())}, now):
                stall_monitor.say(text)
        return None

    def notify(self, text: str) -> None:
        stall_monitor.say(text)


class StoreLink(Link):
    """The link of one of several ranks. A thread of its own talks to the store, which may not answer."""

    def __init__(
        self, client: Any, rank: int, world: int, waiting: WaitLimits, launched: LaunchAgreement | None = None
    ) -> None:
        """Prepare the link; the thread starts with the first tick.

        Args:
          client: of the store; nothing else may wait in it.
          launched: what a launcher of this program does for the rank; None: another has started it.
        """
        self.client = client
        self.rank = rank
        self.launched = launched
        self.ended_otherwise = range(world) if launched else (rank,)  # by their failures this rank ends without END_S
        self.timeout_s = waiting.timeout.total_seconds()
        self.heartbeat_s = waiting.heartbeat_s or HEARTBEAT_S
        self.speaks = waiting.heartbeat_s is not None and rank == 0
        self.stalled_s = None if launched else waiting.stalled_s
        self.poll_s = min(PUBLISH_S, self.heartbeat_s / 4, max(TICK_S, world * POLL_SHARE_S))
        self.thread: threading.Thread | None = None
        self.closed = threading.Event()
        self.awake = threading.Event()
        self.lock = threading.Lock()
        self.asked = self.ticked = time.monotonic()  # when the store was last asked for something; the last tick
        self.speaks_at = 0.0
        self.unanswered_s = 0.0  # by the store, without the time in which this process was stopped
        self.failure: FailureNotice | None = None
        self.order: Order | None = None
        self.ordered = threading.Event()
        self.explanation = ""
        self.waited_s = 0.0  # of this rank in the collective that has failed

    # ---- in the thread of the heart

    def tick(self, heart: Heartbeat) -> Order | None:
        now = time.monotonic()
        if self.thread is None:
            self.asked = now
            self.thread = threading.Thread(target=self._visit, args=(heart,), name="signs", daemon=True)
            self.thread.start()
        silent_s = 0.0 if self.closed.is_set() else now - self.asked
        if self.speaks and silent_s > self.heartbeat_s and now >= self.speaks_at:
            self.speaks_at = now + silent_s  # ever less often
            stall_monitor.say(f"no progress: {STORE} does not answer")
        passed_s = min(now - self.ticked, stall_monitor.GAP_S)
        self.ticked = now
        self.unanswered_s = self.unanswered_s + passed_s if silent_s > 3 * PUBLISH_S else 0.0
        if self.stalled_s is not None and self.unanswered_s >= self.stalled_s:
            self._lose_store("does not answer (--stalled_after)")
        failure = self.failure
        overdue = failure is not None and now - failure.seen > END_S and failure.rank not in self.ended_otherwise
        if failure is not None and overdue and (self.order is None or heart.settled.is_set()):
            stall_monitor.say(f"rank {self.rank} ends: {failure.text}")
            os._exit(1)
        return self.order

    def _lose_store(self, text: str) -> None:
        """Go on where the store does not answer: no rank can ask another, so that each decides the same by itself.

        Where no agent of torchrun keeps the store, the machine of the first rank does, which may be gone: then its
        replica, number 0, cannot be recovered.
        """
        self.failure = self.failure or FailureNotice(NOBODY, f"{STORE} {text}", time.monotonic())
        self.order = self.order or Order(0 if store.kept_by_agent() else 1, False)

    # ---- in the thread that talks to the store

    def _visit(self, heart: Heartbeat) -> None:
        try:
            while not self.closed.is_set():
                settled = heart.settled.is_set()
                with self.lock:
                    self.asked = time.monotonic()
                    self._exchange(heart)
                    self.asked = time.monotonic()
                if settled:
                    self.closed.set()
                self.awake.wait(TICK_S if self.failure else self.poll_s)
                self.awake.clear()
        except (RuntimeError, OSError):
            if not self.closed.is_set():  # the store is gone, and nobody hears of anybody any more
                self._lose_store("has failed")

    def _exchange(self, heart: Heartbeat) -> None:
        """Ask for a failure, leave this rank's record, and ask for the decision where there is a failure."""
        if self.failure is None and self.client.check([store.FAILURE]):
            rank, text = self.client.get(store.FAILURE).decode().split(" ", 1)
            heart.facts["heard"] = 1
            self.failure = FailureNotice(int(rank), text, time.monotonic())
        self._leave_record(heart)
        if self.failure is not None and self.order is None and self.client.check([store.RESCUE]):
            replica, elsewhere, self.explanation = self.client.get(store.RESCUE).decode().split(" ", 2)
            self.order = Order(int(replica), elsewhere == "True")
            self.ordered.set()

    def _leave_record(self, heart: Heartbeat) -> None:
        self.client.set(f"{store.SIGNS}/{self.rank}", heart.record())

    # ---- in the program's own thread

    def failed(self, heart: Heartbeat, error: BaseException, unwritable: bool) -> bool:
        self.waited_s = self.waited_s or waited_s()
        leave = threading.Thread(target=self._report_failure, args=(heart, error, unwritable), daemon=True)
        leave.start()
        leave.join(ORDER_S)  # where the store does not answer, so be it
        return not leave.is_alive()

    def _report_failure(self, heart: Heartbeat, error: BaseException, unwritable: bool) -> None:
        if self.launched is not None:
            store.report_failure(self.client, self.rank, error, self.launched.plain)
        with self.lock, contextlib.suppress(RuntimeError, OSError):
            if unwritable:
                self.client.set(store.UNWRITABLE, "")
            self._leave_record(heart)
            store.report_first(self.client, self.rank, f"rank {self.rank} has failed")
        self.awake.set()

    def elsewhere(self) -> str | None:
        return None if self.launched is None else self.launched.folder

    def notify(self, text: str) -> None:
        if self.launched is None:
            stall_monitor.say(f"rank {self.rank}: {text}")
            return
        with contextlib.suppress(RuntimeError, OSError):
            store.add_line(self.client, store.NOTICES, text)

    def publish(self, heart: Heartbeat, wait_s: float = 0.0) -> None:
        if self.lock.acquire(timeout=wait_s):
            with contextlib.suppress(RuntimeError, OSError):
                self._leave_record(heart)
            self.lock.release()
        else:  # the thread is at it, or the store does not answer
            self.awake.set()

    def close(self, heart: Heartbeat) -> None:
        self.closed.set()
        self.awake.set()
        self.publish(heart, PUBLISH_S)
        if (
            self.thread is not None
        ):  # one that is in the store's code while the interpreter ends would abort the process
            self.thread.join(PUBLISH_S)

    def timed_out(self) -> str | None:
        if self.waited_s < stall_monitor.TIMED_OUT * self.timeout_s:
            return None
        self.ordered.wait(ORDER_S)
        timeout = stall_monitor.duration(self.timeout_s)
        return self.explanation or f"a collective has waited {timeout} in vain (--timeout)"
