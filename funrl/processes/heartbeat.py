"""Signs of life of a rank: where it is, written at every phase and collective for whoever waits for it.

A rank writes its step, its phase and its last collective in a record, at a cost that does not depend on the number of
ranks. A thread beside the program counts up, so that a stopped rank differs from one that computes. The
records go through the store of the run (`store_link`) to the process that watches all of them (`watch`).

When a rank has failed, others may still hold the state of the run: what `set_rescue` was given is called in this thread
on the ranks that are chosen for it, while their programs wait in a collective for the one that has failed.
"""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from funrl.processes import spans

TICK_S = 0.25
ORDER_S = 4.0  # how long a failed rank waits for a decision about what is saved
SAVE_S = 120.0  # how long it then waits for the save
RUNNING, FAILED, SAVING, ENDED = range(4)  # states of a rank
NOBODY = -1  # instead of the number of a replica


class Sign(NamedTuple):
    """The record of a rank.

    Attributes:
      beats: things that it has begun or ended.
      ticks: of the thread beside it.
      since: when it entered the collective, by the monotonic clock of its machine; of a rank that has failed, seconds
        that it had waited there.
      step, phase: where it is; step 0 is before the first.
      phases: phases that it has entered, the same on every rank that is as far.
      collectives: over all ranks that it has begun, the same on every rank that is as far.
      recoverable: the step whose recoverable state it holds, or its part of it; -1: none.
      replica: the ranks of one number hold every part of the state together; NOBODY: no ranks do without the others.
      status: RUNNING, FAILED, SAVING or ENDED.
      waiting: whether it is in a collective.
      heard: whether it has heard of a failure.
      collective: the last one, such as "all_reduce over data".
    """

    beats: int
    ticks: int
    since: float
    step: int
    phases: int
    collectives: int
    recoverable: int
    replica: int
    status: int
    waiting: int
    heard: int
    phase: str
    collective: str
    host: str


NOT_BEGUN = Sign(0, 0, 0.0, 0, 0, 0, -1, NOBODY, RUNNING, 0, 0, "not begun", "", "an unknown host")


def decode(record: bytes) -> Sign:
    """The record of these bytes; see `Heartbeat.record`."""
    return Sign(**json.loads(record))


class Order(NamedTuple):
    """Decision of what is saved when a rank has failed.

    Attributes:
      replica: whose ranks save what they hold; NOBODY: nothing is saved.
      elsewhere: whether the usual folder cannot be written.
    """

    replica: int
    elsewhere: bool


class Link:
    """The way from a rank to whoever reads its record; this one leads nowhere."""

    def tick(self, heart: Heartbeat) -> Order | None:
        """Called a few times a second; the decision, once there is one."""

    def publish(self, heart: Heartbeat, wait_s: float = 0.0) -> None:
        """Show the record to whoever reads it, as soon as the way is free; at most `wait_s` seconds are lost here."""

    def failed(self, heart: Heartbeat, error: BaseException, unwritable: bool) -> bool:
        """Report a failure; False where nobody decides about it."""
        return False

    def elsewhere(self) -> str | None:
        """A folder that all ranks see and that can be written, for what the usual one does not take."""

    def notify(self, text: str) -> None:
        """Print a line for the user, after the error."""

    def close(self, heart: Heartbeat) -> None:
        """Leave the last record, after which nobody is asked for anything."""

    def timed_out(self) -> str | None:
        """The explanation of a collective that has failed by `--timeout`; None where it has not."""


Save = Callable[[bool, str | None], str]


class Heartbeat:
    """The record of this rank, and the thread that keeps it ticking."""

    def __init__(self, link: Link) -> None:
        """Prepare the record; the thread starts later."""
        host = socket.gethostname()
        self.facts: dict[str, Any] = NOT_BEGUN._asdict() | {"since": time.monotonic(), "phase": "start", "host": host}
        self.link = link
        self.save: Save | None = None
        self.settled = threading.Event()
        self.stop = threading.Event()
        self.thread = threading.Thread(target=self._live, name="heartbeat", daemon=True)

    def record(self) -> bytes:
        """The record as it is now."""
        return json.dumps(self.facts).encode()

    def _live(self) -> None:
        while not self.stop.wait(TICK_S):
            self.facts["ticks"] += 1
            order = self.link.tick(self)
            if order is not None and not self.settled.is_set():
                self._obey(order)

    def _obey(self, order: Order) -> None:
        """Save this rank's part of the state if its replica was chosen."""
        if order.replica != NOBODY and order.replica == self.facts["replica"] and self.save is not None:
            self.facts["status"] = SAVING
            try:
                message = self.save(order.elsewhere, self.link.elsewhere())
            except Exception as error:  # whatever it is, the first failure is the one that counts
                first = (str(error).strip() or type(error).__name__).splitlines()[0]
                message = f"the state could not be saved: {first}"
            if message:
                self.link.notify(message)
        self.facts["status"] = ENDED
        self.settled.set()

    def beat(self) -> None:
        self.facts["beats"] += 1


_own: Heartbeat | None = None  # of this process
_mark: Callable[[str], contextlib.AbstractContextManager[Any]] | None = None
_groups: dict[str, tuple[str, bool]] = {}  # of process groups: over which axes, and whether of all ranks
_beside = threading.local()  # of threads whose exchanges the rank's program does not wait for


@contextlib.contextmanager
def alive(heart: Heartbeat) -> Iterator[Heartbeat]:
    """Write the marks of this process to a record while the context lasts."""
    global _own
    before, _own = _own, heart
    heart.thread.start()
    try:
        yield heart
        heart.facts["status"] = ENDED
    except BaseException as error:
        if not isinstance(error, KeyboardInterrupt):  # which ends a run at once
            failed(error)
        raise
    finally:
        _own = before
        heart.stop.set()
        heart.thread.join(timeout=2 * TICK_S)


def name_group(group: str, axes: str, everyone: bool) -> None:
    """Record the axes of a process group, by its name."""
    _groups[group] = (f" over {axes}", everyone)


def beat() -> None:
    """Mark progress: a token of each completion, a micro-batch."""
    if _own is not None:
        _own.beat()


def beats() -> int:
    """Number of things that this rank has begun or ended; 0 without a heartbeat."""
    return 0 if _own is None else _own.facts["beats"]


def at_step(number: int) -> None:
    """Mark the start of a step; the first is 1."""
    spans.set_span_step(number)
    if _own is not None:
        _own.facts["step"] = number
        _own.beat()
        _own.link.publish(_own)


@contextlib.contextmanager
def beside_the_program() -> Iterator[None]:
    """Leave out of the record, while the context lasts, the exchanges that this thread waits for."""
    _beside.here = True
    try:
        yield
    finally:
        _beside.here = False


def in_steps() -> bool:
    """True once the first step of this rank's program has begun."""
    return _own is not None and _own.facts["step"] > 0


def mark_phases(mark: Callable[[str], contextlib.AbstractContextManager[Any]] | None) -> None:
    """Enter a context of this name around every phase from now on, such as a profiler's range; None: no more."""
    global _mark
    _mark = mark


@contextlib.contextmanager
def phase(name: str) -> Iterator[None]:
    """Mark a phase of the program, which every rank enters; afterwards the record names it as the last one."""
    heart = _own
    if heart is not None:
        heart.facts["phases"] += 1
        heart.facts["phase"] = name
        heart.beat()
        heart.link.publish(heart)
    with spans.span(name), contextlib.nullcontext() if _mark is None else _mark(name):
        yield
    if heart is not None:
        heart.facts["phase"] = f"after {name}"
        heart.beat()


def entered(name: str, group: str = "") -> None:
    """Mark the start of a collective. Where it raises, `left` is not called, and the record keeps it.

    Args:
      group: name of its process group; "": it is not one of a group.
    """
    if torch.compiler.is_compiling() or _own is None or getattr(_beside, "here", False):
        return
    heart = _own
    axes, everyone = _groups.get(group, ("", False))
    heart.facts["collectives"] += everyone
    heart.facts |= {"since": time.monotonic(), "collective": name + axes, "waiting": 1}
    heart.beat()


def left() -> None:
    """Mark that a collective has ended, or has been handed to a device."""
    if torch.compiler.is_compiling() or _own is None or getattr(_beside, "here", False):
        return
    _own.facts["waiting"] = 0
    _own.beat()


def set_rescue(save: Save | None, replica: int) -> None:
    """Set the function that saves this rank's part of the state when another rank has failed.

    Args:
      save: (whether the usual folder cannot be written, another one that all ranks see or None) -> message.
      replica: see `Sign`.
    """
    if _own is not None:
        _own.save = save
        _own.facts["replica"] = replica


def mark_recoverable(step: int) -> None:
    """Record the step whose recoverable state this rank holds its part of; -1: of none."""
    if _own is not None:
        _own.facts["recoverable"] = step


def failed(error: BaseException, unwritable: bool = False) -> bool:
    """Report that this rank fails, and wait until the state is saved: its own part too, in the heartbeat's thread.

    Args:
      unwritable: whether it is the usual folder that failed.

    Returns: False where nobody else decides what is saved, as there is no other rank.
    """
    heart = _own
    if heart is None:
        return False
    if heart.settled.is_set():
        return True
    if heart.facts["status"] == RUNNING:
        heart.facts |= {"since": waited_s(), "status": FAILED}
    if not heart.link.failed(heart, error, unwritable):
        return False
    if heart.save is None:
        return True
    begin = time.monotonic()
    while not heart.settled.wait(0.05):
        saving = heart.facts["status"] == SAVING
        if time.monotonic() - begin > (SAVE_S if saving else ORDER_S):
            break
    return True


def waited_s() -> float:
    """Seconds since this rank entered the collective that it has not left; 0 where there is none."""
    if _own is None or not _own.facts["waiting"]:
        return 0.0
    return time.monotonic() - _own.facts["since"]
