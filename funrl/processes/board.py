"""The board: signs of life of all ranks of a machine, in memory that they share with the process that started them.

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

from funrl.processes import lookout
from funrl.processes.heartbeat import (
    FAILED,
    NOBODY,
    NOT_BEGUN,
    RECORD_BYTES,
    RUNNING,
    SAVING,
    STATUS,
    Heart,
    Order,
    Sign,
    decoded,
)

HEAD_BYTES = 64
NAME = "board"
_HEAD = struct.Struct("<Bi?")  # whether it was decided, the replica, whether elsewhere


class Board:
    """The shared memory, as each side sees it."""

    def __init__(
        self, folder: str, ranks: int, create: bool = False, report: Callable[[BaseException], None] | None = None
    ) -> None:
        """
        Args:
          folder: that all ranks of the run share.
          ranks: how many there are.
          create: make the memory, which the ranks open.
          report: leaves this rank's failure where it is looked for.

        Raises:
          OSError: there is no room for it.
        """
        self.folder, size = folder, HEAD_BYTES + ranks * RECORD_BYTES
        with open(os.path.join(folder, NAME), "x+b" if create else "r+b") as file:
            if create:
                file.write(bytes(size))  # not sparse: a full disk shows here
                file.flush()
            self.memory = mmap.mmap(file.fileno(), size)
        self.ranks, self.report = ranks, report

    def record(self, rank: int) -> memoryview:
        """The memory of one rank's record."""
        begin = HEAD_BYTES + rank * RECORD_BYTES
        return memoryview(self.memory)[begin : begin + RECORD_BYTES]

    def sign(self, rank: int) -> Sign:
        sign = decoded(self.record(rank))
        return sign._replace(host=socket.gethostname()) if sign == NOT_BEGUN else sign

    def signs(self) -> dict[int, Sign]:
        """The signs of all ranks."""
        return {rank: self.sign(rank) for rank in range(self.ranks)}

    def decide(self, order: Order) -> None:
        """Tell the ranks what is saved."""
        _HEAD.pack_into(self.memory, 0, 1, order.replica, order.elsewhere)

    def decision(self) -> Order | None:
        decided, replica, elsewhere = _HEAD.unpack_from(self.memory, 0)
        return Order(replica, elsewhere) if decided else None

    # ---- as a rank sees it: `heartbeat.Link`

    def tick(self, heart: Heart) -> Order | None:
        return self.decision()

    def failed(self, heart: Heart, error: BaseException, unwritable: bool) -> bool:
        if unwritable:
            with contextlib.suppress(OSError):
                Path(self.folder, "unwritable").touch()
        if self.report is not None:
            self.report(error)
        return True

    def elsewhere(self) -> str | None:
        return f"{self.folder}-saved"

    def tell(self, text: str) -> None:
        with contextlib.suppress(OSError):
            Path(self.folder, f"said-{os.getpid()}").write_text(text)

    def close(self) -> None: ...


class Supervision:
    """Use of the board by the process that has started the ranks, while it waits for them."""

    def __init__(
        self, board: Board, heartbeat_s: float | None, timeout_s: float | None, stalled_s: float | None = None
    ) -> None:
        """
        Args:
          heartbeat_s: seconds without progress after which it says for whom the run waits; None: it says nothing.
          timeout_s: how long ranks wait in a collective; None: that is not known here.
          stalled_s: see `Lookout`.
        """
        self.board, self.timeout_s = board, timeout_s
        self.speaks = heartbeat_s is not None
        ending = "" if timeout_s is None else f"; the run ends when a rank has waited {lookout.duration(timeout_s)}"
        self.lookout = lookout.Lookout(heartbeat_s or 60.0, f"{ending} (--timeout)" if ending else "", stalled_s)
        self.stalled: list[int] = []  # ranks that end the run, as they do not answer
        self.next_look, self.ordered, self.replica = 0.0, False, NOBODY
        self.waited_s: dict[int, float] = {}  # by ranks that have ended

    def look(self) -> bool:
        """Say what is to be said; True if a rank has left word that it fails, or does not answer."""
        now = time.monotonic()  # which stands still while the machine is suspended
        if now >= self.next_look:
            self.next_look = now + self.lookout.every_s
            signs = self.board.signs()
            text = self.lookout.look(signs, now)
            if text is not None and self.speaks:
                lookout.say(text)
            if not self.ordered:
                self.stalled = self.lookout.stalled(signs)
        return bool(self.stalled) or any(self.board.record(rank)[STATUS] == FAILED for rank in range(self.board.ranks))

    def in_steps(self) -> bool:
        """True once a rank has begun its first step."""
        return any(sign.step > 0 for sign in self.board.signs().values())

    def ended(self, rank: int) -> None:
        """Take note of the end of a rank."""
        sign = self.board.sign(rank)
        self.waited_s[rank] = time.monotonic() - sign.since if sign.status == RUNNING else sign.since

    def order(self, dead: Collection[int]) -> bool:
        """Decide once what is saved; True if some ranks are to save.

        Args:
          dead: ranks that have ended.
        """
        self.ordered = True
        elsewhere, signs = os.path.exists(os.path.join(self.board.folder, "unwritable")), self.board.signs()
        lost = {*dead, *self.stalled, *self.lookout.silent(signs, time.monotonic())}
        order = lookout.rescuers(signs, lost, elsewhere)
        self.board.decide(order)
        self.replica = order.replica
        return order.replica != NOBODY

    def saving(self, dead: Collection[int]) -> bool:
        """True while a rank that was chosen has not ended its save."""
        if self.replica == NOBODY:
            return False
        signs = {rank: sign for rank, sign in self.board.signs().items() if rank not in dead}
        return any(sign.replica == self.replica and sign.status <= SAVING for sign in signs.values())

    def explained(self, failed: Collection[int]) -> str | None:
        """The explanation of an end by `--stalled_after` or `--timeout`, see `lookout.timed_out`; None: by neither."""
        signs = self.board.signs()
        if self.stalled:
            return self.lookout.stall(self.stalled, signs)
        if self.timeout_s is None:
            return None
        silent = self.lookout.silent(signs, time.monotonic())
        return lookout.timed_out(signs, failed, self.waited_s, silent, self.timeout_s)

    def said(self) -> str:
        """Lines that the ranks want the user to be told."""
        texts = sorted(path.read_text() for path in Path(self.board.folder).glob("said-*"))
        return "".join(f"\n{text}" for text in dict.fromkeys(texts))
