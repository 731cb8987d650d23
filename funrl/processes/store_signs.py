"""Signs of life of ranks that torchrun or srun has started on one host or several: they go through the run's store.

Each rank leaves its record there once in a while. The first rank reads all of them and speaks; the second one reads
that of the first and speaks of it. So a rank writes one record and reads one word, whatever the number of ranks.

A rank that fails leaves word in the store before it ends. The first rank decides who saves the state; every rank ends
within seconds, also one that waits on its device for the one that has failed.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from datetime import timedelta
from typing import Any, NamedTuple

import torch.distributed as dist

from funrl.processes import lookout
from funrl.processes.heartbeat import NOBODY, NOT_BEGUN, TICK_S, Heart, Order, Sign, decoded, waited_s

PREFIX = "funrl/signs"
PUBLISH_S, WORD_S = 5.0, 1.0  # at most between two records of a rank, and between two looks for word of a failure
END_S = 5.0  # how long a rank may take to end by itself once another has failed
ANSWER_S = 20.0  # for the store
STORE = "the process that keeps the run's rendezvous"


class Word(NamedTuple):
    """Word of a failure.

    Attributes:
      rank: that fails; NOBODY: the store itself is gone.
      unwritable: whether it is the usual folder that failed.
      stalled: whether it has not left the word itself, as it does not answer.
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
        self.lookout = None if heartbeat_s is None else lookout.Lookout(heartbeat_s)
        self.next_look = 0.0

    def tick(self, heart: Heart) -> Order | None:
        now = time.monotonic()
        if self.lookout is not None and now >= self.next_look:
            self.next_look = now + self.lookout.every_s
            if text := self.lookout.look({0: decoded(heart.record)}, now):
                lookout.say(text)
        return None

    def failed(self, heart: Heart, error: BaseException, unwritable: bool) -> bool:
        return False

    def elsewhere(self) -> str | None:
        return None

    def tell(self, text: str) -> None:
        lookout.say(text)

    def close(self) -> None: ...


class StoreLink:
    """The link of a rank that another launcher has started.

    A thread of its own talks to the store, which is on one of the hosts and answers only as long as that one does.
    """

    def __init__(
        self, rank: int, world: int, heartbeat_s: float | None, timeout_s: float, stalled_s: float | None = None
    ) -> None:
        self.rank, self.world, self.timeout_s, self.speaks = rank, world, timeout_s, heartbeat_s is not None
        ending = f"; the run ends when a rank has waited {lookout.duration(timeout_s)} (--timeout)"
        self.lookout, self.stalled_s = lookout.Lookout(heartbeat_s or 60.0, ending, stalled_s), stalled_s
        self.store: Any = None
        self.thread: threading.Thread | None = None
        self.closed, self.lock = threading.Event(), threading.Lock()
        self.asked = self.ticked = time.monotonic()  # when the store was last asked for something; the last tick
        self.speaks_at = 0.0
        self.unanswered_s = 0.0  # by the store, without the time in which this process was stopped
        self.signs: dict[int, Sign] = {}  # as they were last read
        self.publish_at = 0.0
        self.word: Word | None = None
        self.order: Order | None = None
        self.waited_s = 0.0  # of this rank in the collective that has failed

    # ---- in the thread of the heart

    def tick(self, heart: Heart) -> Order | None:
        now = time.monotonic()
        if self.thread is None and dist.is_initialized():
            self.asked = now
            self.thread = threading.Thread(target=self._visit, args=(heart,), name="signs", daemon=True)
            self.thread.start()
        silent_s = now - self.asked if self.thread is not None and not self.closed.is_set() else 0.0
        if silent_s > self.lookout.heartbeat_s and now >= self.speaks_at and self.speaks and self.rank == 1:
            self.speaks_at = now + silent_s  # ever less often
            lookout.say(f"no progress: {STORE} does not answer; it may be the first rank")
        passed_s, self.ticked = min(now - self.ticked, lookout.GAP_S), now
        self.unanswered_s = self.unanswered_s + passed_s if silent_s > 3 * WORD_S else 0.0
        if self.stalled_s is not None and self.word is None and self.unanswered_s >= self.stalled_s:
            self.word, self.order = Word(NOBODY, False, True, now), _order_without_store()
        overdue = self.word is not None and now - self.word.seen > END_S and self.word.rank != self.rank
        if self.word is not None and overdue and (self.order is None or heart.settled.is_set()):
            lookout.say(f"rank {self.rank} ends, as {self.word.text}")
            os._exit(1)
        return self.order

    # ---- in the thread that talks to the store

    def _visit(self, heart: Heart) -> None:
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
                self.closed.wait(TICK_S if self.word else WORD_S)
        except (RuntimeError, OSError):
            if not self.closed.is_set():  # whoever keeps the store is gone, and nobody hears of anybody any more
                self.word, self.order = Word(NOBODY, False, False, time.monotonic()), _order_without_store()

    def _exchange(self, heart: Heart, now: float) -> None:
        """Leave this rank's record; read those that are this rank's to read; hear of a failure."""
        heard = self.word is None and self.store.check([f"{PREFIX}/failed"])
        if heard:
            rank, unwritable, stalled = self.store.get(f"{PREFIX}/failed").decode().split()
            self.word = Word(int(rank), unwritable == "True", stalled == "True", now)
        if heard or now >= self.publish_at:
            self.publish_at = now + min(PUBLISH_S, self.lookout.heartbeat_s / 4)
            self.store.set(f"{PREFIX}/{self.rank}", bytes(heart.record))
            self._read()
            if self.speaks and self.word is None and (text := self.lookout.look(self.signs, now)):
                lookout.say(text)
            if self.word is None and (stalled := self.lookout.stalled(self.signs)):
                lookout.say(self.lookout.stall(stalled, self.signs))
                self.store.compare_set(f"{PREFIX}/failed", "", f"{stalled[0]} False True")
        if self.word is None or self.order is not None:
            return
        decider = 1 if self.word.rank == 0 and self.word.stalled else 0
        if self.rank == decider and now - self.word.seen > 2 * WORD_S:
            self._read(everyone=True)
            self.lookout.look(self.signs, now)
            lost = {*self.lookout.silent(self.signs, now), *({self.word.rank} if self.word.stalled else ())}
            decided = lookout.rescuers(self.signs, lost, self.word.unwritable)
            self.store.set(f"{PREFIX}/order", f"{decided.replica} {decided.elsewhere}")
        if self.store.check([f"{PREFIX}/order"]):
            replica, elsewhere = self.store.get(f"{PREFIX}/order").decode().split()
            self.order = Order(int(replica), elsewhere == "True")

    def _read(self, everyone: bool = False) -> None:
        """The first rank reads the records of all, the second one that of the first and its own, or of everyone."""
        read = self.world if self.rank == 0 or everyone else min(2, self.world) if self.rank == 1 else 0
        ranks = range(read)
        begun = [
            rank for rank in ranks
            if self.signs.get(rank, NOT_BEGUN) != NOT_BEGUN or self.store.check([f"{PREFIX}/{rank}"])
        ]  # fmt: skip
        found = self.store.multi_get([f"{PREFIX}/{rank}" for rank in begun]) if begun else []
        self.signs = dict.fromkeys(ranks, NOT_BEGUN) | {
            rank: decoded(bytes(record)) for rank, record in zip(begun, found, strict=True)
        }

    # ---- in the program's own thread

    def failed(self, heart: Heart, error: BaseException, unwritable: bool) -> bool:
        if self.store is None:
            return False
        self.waited_s = self.waited_s or waited_s()
        leave = threading.Thread(target=self._leave_word, args=(heart, unwritable), daemon=True)
        leave.start()
        leave.join(WORD_S)  # where the store does not answer, so be it
        return not leave.is_alive()

    def _leave_word(self, heart: Heart, unwritable: bool) -> None:
        with self.lock, contextlib.suppress(RuntimeError, OSError):
            self.store.set(f"{PREFIX}/{self.rank}", bytes(heart.record))
            self.store.compare_set(f"{PREFIX}/failed", "", f"{self.rank} {unwritable} False")

    def elsewhere(self) -> str | None:
        return None  # no folder but the usual one is that of all hosts

    def tell(self, text: str) -> None:
        lookout.say(f"rank {self.rank}: {text}")

    def close(self) -> None:
        self.closed.set()
        if self.lock.acquire(timeout=WORD_S):
            self.lock.release()

    def timed_out(self) -> str | None:
        """The explanation of a collective that has failed by `--timeout`; None where it has not."""
        if self.waited_s < lookout.TIMED_OUT * self.timeout_s:
            return None
        silent = self.lookout.silent(self.signs, time.monotonic())
        waited_s = dict.fromkeys(self.signs, self.timeout_s)
        here = [self.rank] if self.rank in self.signs else []
        text = lookout.timed_out(self.signs, here, waited_s, silent, self.timeout_s)
        return text or (
            f"a collective has waited {lookout.duration(self.timeout_s)} in vain (--timeout); the first rank, or the "
            "second, says for whom"
        )


def _order_without_store() -> Order:
    """Decision that every rank takes by itself where the store does not answer, as none can ask another.

    Where no agent of torchrun keeps the store, the first rank does, so that its replica, of number 0, is not whole.
    """
    by_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return Order(0 if by_agent else 1, False)
