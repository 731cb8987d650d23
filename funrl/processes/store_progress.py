"""Progress of ranks that torchrun or srun has started, on one host or several, through the run's store.

Each rank writes its record there every few seconds. The first rank reads all of them and prints warnings; the second
one reads that of the first and warns of it. A rank writes one record and reads one key, whatever the number of ranks.

A rank that fails writes a notice to the store before it ends. The first rank decides which ranks save the state; every
rank ends within seconds, also one that waits on its device for the failed one.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from datetime import timedelta
from typing import Any, NamedTuple

import torch.distributed as dist

from funrl.processes import stall_monitor
from funrl.processes.heartbeat import NOBODY, NOT_BEGUN, TICK_S, Heartbeat, Order, Sign, decode, waited_s

PREFIX = "funrl/signs"
PUBLISH_S = 5.0  # at most between two records of a rank
FAILURE_POLL_S = 1.0  # between two polls for a notice of a failure
END_S = 5.0  # how long a rank may take to end by itself once another has failed
ANSWER_S = 20.0  # for the store
STORE = "the process that keeps the run's rendezvous"


class FailureNotice(NamedTuple):
    """Notice of a failure.

    Attributes:
      rank: the one that fails; NOBODY: the store itself is gone.
      unwritable: whether it is the usual folder that failed.
      stalled: whether another rank wrote the notice, as this one does not answer.
      seen: when this rank heard of it.
    """

    rank: int
    unwritable: bool
    stalled: bool
    seen: float

    @property
    def text(self) -> str:
        who = STORE if self.rank == NOBODY else f"rank {self.rank}"
        return f"{who} does not answer (--stalled_after)" if self.stalled else f"{who} has failed"


class Alone:
    """The link of the only rank of a run: its thread speaks itself."""

    def __init__(self, heartbeat_s: float | None) -> None:
        self.monitor = None if heartbeat_s is None else stall_monitor.StallMonitor(heartbeat_s)
        self.next_poll = 0.0

    def tick(self, heart: Heartbeat) -> Order | None:
        now = time.monotonic()
        if self.monitor is not None and now >= self.next_poll:
            self.next_poll = now + self.monitor.every_s
            if text := self.monitor.poll({0: decode(heart.record)}, now):
                stall_monitor.say(text)
        return None

    def failed(self, heart: Heartbeat, error: BaseException, unwritable: bool) -> bool:
        return False

    def elsewhere(self) -> str | None:
        return None

    def notify(self, text: str) -> None:
        stall_monitor.say(text)

    def close(self) -> None: ...


class StoreLink:
    """The link of a rank that another launcher has started.

    A thread of its own talks to the store, which is on one of the hosts and answers only as long as that one does.
    """

    def __init__(
        self, rank: int, world: int, heartbeat_s: float | None, timeout_s: float, stalled_s: float | None = None
    ) -> None:
        self.rank = rank
        self.world = world
        self.timeout_s = timeout_s
        self.speaks = heartbeat_s is not None
        ending = f"; the run ends when a rank has waited {stall_monitor.duration(timeout_s)} (--timeout)"
        self.monitor = stall_monitor.StallMonitor(heartbeat_s or 60.0, ending, stalled_s)
        self.stalled_s = stalled_s
        self.store: Any = None
        self.thread: threading.Thread | None = None
        self.closed = threading.Event()
        self.lock = threading.Lock()
        self.asked = self.ticked = time.monotonic()  # when the store was last asked for something; the last tick
        self.speaks_at = 0.0
        self.unanswered_s = 0.0  # by the store, without the time in which this process was stopped
        self.signs: dict[int, Sign] = {}  # as they were last read
        self.publish_at = 0.0
        self.failure: FailureNotice | None = None
        self.order: Order | None = None
        self.waited_s = 0.0  # of this rank in the collective that has failed

    # ---- in the thread of the heart

    def tick(self, heart: Heartbeat) -> Order | None:
        now = time.monotonic()
        if self.thread is None and dist.is_initialized():
            self.asked = now
            self.thread = threading.Thread(target=self._visit, args=(heart,), name="signs", daemon=True)
            self.thread.start()
        silent_s = now - self.asked if self.thread is not None and not self.closed.is_set() else 0.0
        if silent_s > self.monitor.heartbeat_s and now >= self.speaks_at and self.speaks and self.rank == 1:
            self.speaks_at = now + silent_s  # ever less often
            stall_monitor.say(f"no progress: {STORE} does not answer; it may be the first rank")
        passed_s = min(now - self.ticked, stall_monitor.GAP_S)
        self.ticked = now
        self.unanswered_s = self.unanswered_s + passed_s if silent_s > 3 * FAILURE_POLL_S else 0.0
        if self.stalled_s is not None and self.failure is None and self.unanswered_s >= self.stalled_s:
            self.failure = FailureNotice(NOBODY, False, True, now)
            self.order = _order_without_store()
        overdue = self.failure is not None and now - self.failure.seen > END_S and self.failure.rank != self.rank
        if self.failure is not None and overdue and (self.order is None or heart.settled.is_set()):
            stall_monitor.say(f"rank {self.rank} ends, as {self.failure.text}")
            os._exit(1)
        return self.order

    # ---- in the thread that talks to the store

    def _visit(self, heart: Heartbeat) -> None:
        try:
            program: Any = dist.distributed_c10d._get_default_store()  # which may be waiting in it
            store = program.clone()
            store.set_timeout(timedelta(seconds=ANSWER_S))
            self.store = store
            while not self.closed.is_set():
                with self.lock:
                    self.asked = time.monotonic()
                    self._exchange(heart, self.asked)
                    self.asked = time.monotonic()
                self.closed.wait(TICK_S if self.failure else FAILURE_POLL_S)
        except (RuntimeError, OSError):
            if not self.closed.is_set():  # whoever keeps the store is gone, and nobody hears of anybody any more
                self.failure = FailureNotice(NOBODY, False, False, time.monotonic())
                self.order = _order_without_store()

    def _exchange(self, heart: Heartbeat, now: float) -> None:
        """Publish this rank's record, read the records that this rank reads, and poll for a failure."""
        heard = self.failure is None and self.store.check([f"{PREFIX}/failed"])
        if heard:
            rank, unwritable, stalled = self.store.get(f"{PREFIX}/failed").decode().split()
            self.failure = FailureNotice(int(rank), unwritable == "True", stalled == "True", now)
        if heard or now >= self.publish_at:
            self.publish_at = now + min(PUBLISH_S, self.monitor.heartbeat_s / 4)
            self.store.set(f"{PREFIX}/{self.rank}", bytes(heart.record))
            self._read()
            if self.speaks and self.failure is None and (text := self.monitor.poll(self.signs, now)):
                stall_monitor.say(text)
            if self.failure is None and (stalled := self.monitor.stalled(self.signs)):
                stall_monitor.say(self.monitor.stall(stalled, self.signs))
                self.store.compare_set(f"{PREFIX}/failed", "", f"{stalled[0]} False True")
        if self.failure is None or self.order is not None:
            return
        decider = 1 if self.failure.rank == 0 and self.failure.stalled else 0
        if self.rank == decider and now - self.failure.seen > 2 * FAILURE_POLL_S:
            self._read(everyone=True)
            self.monitor.poll(self.signs, now)
            lost = {*self.monitor.silent(self.signs, now), *({self.failure.rank} if self.failure.stalled else ())}
            decided = stall_monitor.rescuers(self.signs, lost, self.failure.unwritable)
            self.store.set(f"{PREFIX}/order", f"{decided.replica} {decided.elsewhere}")
        if self.store.check([f"{PREFIX}/order"]):
            replica, elsewhere = self.store.get(f"{PREFIX}/order").decode().split()
            self.order = Order(int(replica), elsewhere == "True")

    def _read(self, everyone: bool = False) -> None:
        """The first rank reads the records of all, the second one that of the first and its own, or of everyone."""
        read = self.world if self.rank == 0 or everyone else min(2, self.world) if self.rank == 1 else 0
        ranks = range(read)
        begun = [
            rank
            for rank in ranks
            if self.signs.get(rank, NOT_BEGUN) != NOT_BEGUN or self.store.check([f"{PREFIX}/{rank}"])
        ]
        records = self.store.multi_get([f"{PREFIX}/{rank}" for rank in begun]) if begun else []
        self.signs = dict.fromkeys(ranks, NOT_BEGUN) | {
            rank: decode(bytes(record)) for rank, record in zip(begun, records, strict=True)
        }

    # ---- in the program's own thread

    def failed(self, heart: Heartbeat, error: BaseException, unwritable: bool) -> bool:
        if self.store is None:
            return False
        self.waited_s = self.waited_s or waited_s()
        leave = threading.Thread(target=self._report_failure, args=(heart, unwritable), daemon=True)
        leave.start()
        leave.join(FAILURE_POLL_S)  # where the store does not answer, so be it
        return not leave.is_alive()

    def _report_failure(self, heart: Heartbeat, unwritable: bool) -> None:
        with self.lock, contextlib.suppress(RuntimeError, OSError):
            self.store.set(f"{PREFIX}/{self.rank}", bytes(heart.record))
            self.store.compare_set(f"{PREFIX}/failed", "", f"{self.rank} {unwritable} False")

    def elsewhere(self) -> str | None:
        return None  # no folder but the usual one is that of all hosts

    def notify(self, text: str) -> None:
        stall_monitor.say(f"rank {self.rank}: {text}")

    def close(self) -> None:
        self.closed.set()
        if self.lock.acquire(timeout=FAILURE_POLL_S):
            self.lock.release()

    def timed_out(self) -> str | None:
        """The explanation of a collective that has failed by `--timeout`; None where it has not."""
        if self.waited_s < stall_monitor.TIMED_OUT * self.timeout_s:
            return None
        silent = self.monitor.silent(self.signs, time.monotonic())
        waited_s = dict.fromkeys(self.signs, self.timeout_s)
        here = [self.rank] if self.rank in self.signs else []
        text = stall_monitor.timed_out(self.signs, here, waited_s, silent, self.timeout_s)
        return text or (
            f"a collective has waited {stall_monitor.duration(self.timeout_s)} in vain (--timeout); the first rank, or "
            "the second, says for whom"
        )


def _order_without_store() -> Order:
    """Decision that every rank takes by itself where the store does not answer, as none can ask another.

    Where no agent of torchrun keeps the store, the first rank does, so that its replica, number 0, cannot be recovered.
    """
    by_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return Order(0 if by_agent else 1, False)
