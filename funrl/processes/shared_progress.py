"""Shared progress: signs of life of all ranks of a machine, in memory shared with the process that started them.

A head of `HEAD_BYTES` has the decision of that process about what is saved after a failure, then come the records by
rank. A rank writes its own record and reads the head; nobody waits for anybody.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import socket
import struct
import time
from collections.abc import Callable, Collection
from pathlib import Path

from funrl.processes import stall_monitor
from funrl.processes.heartbeat import (
    FAILED,
    NOBODY,
    NOT_BEGUN,
    RECORD_BYTES,
    RUNNING,
    SAVING,
    STATUS,
    Heartbeat,
    Order,
    Sign,
    decode,
)

HEAD_BYTES = 64
NAME = "progress"
_HEAD = struct.Struct("<Bi?")  # whether it was decided, the replica, whether elsewhere


class SharedProgress:
    """The shared memory, as each side sees it."""

    def __init__(
        self, folder: str, ranks: int, create: bool = False, report: Callable[[BaseException], None] | None = None
    ) -> None:
        """Make or open the shared memory.

        Args:
          folder: that all ranks of the run share.
          ranks: how many there are.
          create: make the memory, which the ranks open.
          report: writes this rank's failure where the starting process reads it.

        Raises:
          OSError: there is no room for it.
        """
        self.folder = folder
        size = HEAD_BYTES + ranks * RECORD_BYTES
        with open(os.path.join(folder, NAME), "x+b" if create else "r+b") as file:
            if create:
                file.write(bytes(size))  # not sparse: a full disk shows here
                file.flush()
            self.memory = mmap.mmap(file.fileno(), size)
        self.ranks = ranks
        self.report = report

    def record(self, rank: int) -> memoryview:
        """The memory of one rank's record."""
        begin = HEAD_BYTES + rank * RECORD_BYTES
        return memoryview(self.memory)[begin : begin + RECORD_BYTES]

    def sign(self, rank: int) -> Sign:
        sign = decode(self.record(rank))
        return sign._replace(host=socket.gethostname()) if sign == NOT_BEGUN else sign

    def signs(self) -> dict[int, Sign]:
        """The signs of all ranks."""
        return {rank: self.sign(rank) for rank in range(self.ranks)}

    def decide(self, order: Order) -> None:
        """Publish to the ranks what is saved."""
        _HEAD.pack_into(self.memory, 0, 1, order.replica, order.elsewhere)

    def decision(self) -> Order | None:
        decided, replica, elsewhere = _HEAD.unpack_from(self.memory, 0)
        return Order(replica, elsewhere) if decided else None

    # ---- as a rank sees it: `heartbeat.Link`

    def tick(self, heart: Heartbeat) -> Order | None:
        return self.decision()

    def failed(self, heart: Heartbeat, error: BaseException, unwritable: bool) -> bool:
        if unwritable:
            with contextlib.suppress(OSError):
                Path(self.folder, "unwritable").touch()
        if self.report is not None:
            self.report(error)
        return True

    def elsewhere(self) -> str | None:
        return f"{self.folder}-saved"

    def notify(self, text: str) -> None:
        with contextlib.suppress(OSError):
            Path(self.folder, f"notice-{os.getpid()}").write_text(text)

    def close(self) -> None: ...


class Supervision:
    """Shared progress as the process that has started the ranks uses it while it waits for them."""

    def __init__(
        self,
        progress: SharedProgress,
        heartbeat_s: float | None,
        timeout_s: float | None,
        stalled_s: float | None = None,
    ) -> None:
        """Begin to supervise the ranks of a run.

        Args:
          heartbeat_s: seconds without progress after which it says for whom the run waits; None: it says nothing.
          timeout_s: how long ranks wait in a collective; None: that is not known here.
          stalled_s: see `StallMonitor`.
        """
        self.progress = progress
        self.timeout_s = timeout_s
        self.speaks = heartbeat_s is not None
        ending = (
            "" if timeout_s is None else f"; the run ends when a rank has waited {stall_monitor.duration(timeout_s)}"
        )
        self.monitor = stall_monitor.StallMonitor(
            heartbeat_s or 60.0, f"{ending} (--timeout)" if ending else "", stalled_s
        )
        self.stalled: list[int] = []  # ranks that end the run, as they do not answer
        self.next_poll = 0.0
        self.ordered = False
        self.replica = NOBODY
        self.waited_s: dict[int, float] = {}  # by ranks that have ended

    def poll(self) -> bool:
        """Print any due warning; True if a rank has reported a failure or does not answer."""
        now = time.monotonic()  # which stands still while the machine is suspended
        if now >= self.next_poll:
            self.next_poll = now + self.monitor.every_s
            signs = self.progress.signs()
            text = self.monitor.poll(signs, now)
            if text is not None and self.speaks:
                stall_monitor.say(text)
            if not self.ordered:
                self.stalled = self.monitor.stalled(signs)
        return bool(self.stalled) or any(
            self.progress.record(rank)[STATUS] == FAILED for rank in range(self.progress.ranks)
        )

    def in_steps(self) -> bool:
        """True once a rank has begun its first step."""
        return any(sign.step > 0 for sign in self.progress.signs().values())

    def ended(self, rank: int) -> None:
        """Take note of the end of a rank."""
        sign = self.progress.sign(rank)
        self.waited_s[rank] = time.monotonic() - sign.since if sign.status == RUNNING else sign.since

    def order(self, dead: Collection[int]) -> bool:
        """Decide once what is saved; True if some ranks are to save.

        Args:
          dead: ranks that have ended.
        """
        self.ordered = True
        elsewhere = os.path.exists(os.path.join(self.progress.folder, "unwritable"))
        signs = self.progress.signs()
        lost = {*dead, *self.stalled, *self.monitor.silent(signs, time.monotonic())}
        order = stall_monitor.rescuers(signs, lost, elsewhere)
        self.progress.decide(order)
        self.replica = order.replica
        return order.replica != NOBODY

    def saving(self, dead: Collection[int]) -> bool:
        """True while a rank that was chosen has not ended its save."""
        if self.replica == NOBODY:
            return False
        signs = {rank: sign for rank, sign in self.progress.signs().items() if rank not in dead}
        return any(sign.replica == self.replica and sign.status <= SAVING for sign in signs.values())

    def explained(self, failed: Collection[int]) -> str | None:
        """Explanation of an end by `--stalled_after` or `--timeout` (`stall_monitor.timed_out`); None: by neither."""
        signs = self.progress.signs()
        if self.stalled:
            return self.monitor.stall(self.stalled, signs)
        if self.timeout_s is None:
            return None
        silent = self.monitor.silent(signs, time.monotonic())
        return stall_monitor.timed_out(signs, failed, self.waited_s, silent, self.timeout_s)

    def notices(self) -> str:
        """Lines of the ranks for the user."""
        texts = sorted(path.read_text() for path in Path(self.progress.folder).glob("notice-*"))
        return "".join(f"\n{text}" for text in dict.fromkeys(texts))
