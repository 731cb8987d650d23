"""Requests from one pool of ranks to another, and their answers, through the store of the run.

The first rank of the asking mesh writes a request; every rank of the answering mesh sees that it is there, and its
first rank reads it for all. Answers go the other way. What travels here is metadata: tokens and weights go from rank to
rank (`handover`, `reshard`).
"""

from __future__ import annotations

import collections
import contextlib
import pickle
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch.distributed as dist

from funrl.mesh.collectives import from_first_rank
from funrl.mesh.mesh import Mesh, MeshError
from funrl.processes.heartbeat import beat, beats, entered, left

VALUE_BYTES = 4 << 20  # bytes of a value of the store, which takes 8 MB at once
KEPT_REQUESTS = 8  # whose answers were read, that stay in the store for ranks that have not seen them yet
SHORTEST_S = 0.0005  # between two looks at the store
LONGEST_S = 0.02
STORE_S = 0.0002  # for each waiting rank, so that all of them ask the store a few thousand times a second
KEY = "funrl/pools"
END_KEY = f"{KEY}/end"
PROGRESS = f"{KEY}/progress"
PROGRESS_S = 5.0  # between two signs of progress


class End(NamedTuple):
    """The last request.

    Attributes:
      result: how the asking side has ended.
    """

    result: Any


class Requests:
    """The asking side, on every rank of a mesh."""

    def __init__(self, mesh: Mesh, first: int = 0) -> None:
        """Begin without a request.

        Args:
          mesh: of the asking ranks; this process is one of them.
          first: number of the first request; those to each pool are numbered apart.
        """
        self.mesh = mesh
        self.posted = first
        self.read: collections.deque[int] = collections.deque()  # requests in the store whose answers were read

    def post(self, request: Any) -> int:
        """Send a request; returns its number. Every rank calls it, with the same request."""
        number = self.posted
        self.posted += 1
        if self.mesh.rank == 0:
            _write(f"{KEY}/request/{number}", request)
        beat()
        return number

    def answer(self, number: int, waits_for: str) -> Any:
        """Wait for the answer to a request, on every rank. Collective.

        Args:
          number: of `post`.
          waits_for: name of the answer, for whoever looks at a rank that waits.

        Raises:
          MeshError: the answering side makes no progress for `Mesh.timeout`.
        """
        key = f"{KEY}/answer/{number}"
        entered(waits_for)
        limit_s = None if self.mesh.timeout is None else self.mesh.timeout.total_seconds()
        _wait([key], self.mesh.world, waits_for, limit_s)
        value = from_first_rank(_read(key) if self.mesh.rank == 0 else None, self.mesh)
        left()
        self.forget(number)
        return value

    def forget(self, number: int) -> None:
        """Remove a request, whose answer was read or that nobody reads, from the store after the next few."""
        self.read.append(number)
        while len(self.read) > KEPT_REQUESTS:
            oldest = self.read.popleft()
            if self.mesh.rank == 0:
                _remove(f"{KEY}/request/{oldest}")
                _remove(f"{KEY}/answer/{oldest}")

    def ask(self, request: Any, waits_for: str) -> Any:
        """Send a request and wait for its answer. Collective."""
        return self.answer(self.post(request), waits_for)


class Answers:
    """The answering side, on every rank of a mesh."""

    def __init__(self, mesh: Mesh, first: int = 0) -> None:
        """Begin before the first request.

        Args:
          mesh: of the answering ranks; this process is one of them.
          first: as of `Requests`.
        """
        self.mesh = mesh
        self.taken = first

    def take(self, waits_for: str) -> Any:
        """The next request, on every rank; an `End` where the asking side has ended. Collective.

        Args:
          waits_for: name of the request, for whoever looks at a rank that waits.
        """
        key = f"{KEY}/request/{self.taken}"
        entered(waits_for)
        there = _wait([key, END_KEY], self.mesh.world, waits_for)
        request = from_first_rank(_read(there[0]) if self.mesh.rank == 0 else None, self.mesh)
        left()
        self.taken += 1
        return request

    @contextlib.contextmanager
    def showing_progress(self) -> Iterator[None]:
        """Let the asking side see in the store, while the context lasts, that this one makes progress."""
        ended = threading.Event()

        def show() -> None:
            while not ended.wait(PROGRESS_S):
                with contextlib.suppress(RuntimeError):  # the store is gone, and this process will be
                    _store().set(PROGRESS, str(beats()))

        thread = threading.Thread(target=show, name="progress", daemon=True)
        if self.mesh.rank == 0:
            thread.start()
        try:
            yield
        finally:
            ended.set()
            if self.mesh.rank == 0:
                thread.join()

    def answer(self, value: Any) -> None:
        """Answer the newest request. Only the first rank's value counts."""
        if self.mesh.rank == 0:
            _write(f"{KEY}/answer/{self.taken - 1}", value)
        beat()


def end_requests(mesh: Mesh, result: Any) -> None:
    """Tell the answering side that no request follows. Every rank of the asking mesh calls it.

    Args:
      mesh: of the asking ranks.
      result: `End.result`.
    """
    if mesh.rank == 0:
        _write(END_KEY, End(result))


def _store() -> Any:
    return dist.distributed_c10d._get_default_store()


def _wait(keys: Sequence[str], ranks: int, waits_for: str, limit_s: float | None = None) -> list[str]:
    """Wait until one of the keys is there; return those that are.

    The run's watch ends this process where another one has failed or is stalled, so that it waits for no dead rank.

    Args:
      keys: of the store.
      ranks: that wait with this one.
      waits_for: name of what comes, for the error.
      limit_s: seconds that the answering side may make no progress; None: without a limit.

    Raises:
      MeshError: it has made none for so long.
    """
    store = _store()
    pause_s = SHORTEST_S
    progress = b""
    since = looked = time.monotonic()
    while True:
        there = [key for key in keys if store.check([key])]
        if there:
            return there
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, max(LONGEST_S, ranks * STORE_S))
        now = time.monotonic()
        if limit_s is None or now - looked < min(PROGRESS_S, limit_s / 4):
            continue
        looked = now
        if store.check([PROGRESS]) and (newest := store.get(PROGRESS)) != progress:
            progress = newest
            since = now
        if now - since > limit_s:
            raise MeshError(
                f"waited for {waits_for}: the ranks that were asked have made no progress for {limit_s:.0f} s; a "
                "longer --timeout, in minutes, waits longer"
            )


def _write(key: str, value: Any) -> None:
    """Write a value under a key, in pieces that the store takes; the key is there once all of them are."""
    data = pickle.dumps(value)
    pieces = [data[begin : begin + VALUE_BYTES] for begin in range(0, len(data), VALUE_BYTES)]
    store = _store()
    for number, piece in enumerate(pieces):
        store.set(f"{key}/{number}", piece)
    store.set(key, str(len(pieces)))


def _read(key: str) -> Any:
    store = _store()
    count = int(store.get(key))
    return pickle.loads(b"".join(store.get(f"{key}/{number}") for number in range(count)))


def _remove(key: str) -> None:
    store = _store()
    if not store.check([key]):
        return
    for number in range(int(store.get(key))):
        store.delete_key(f"{key}/{number}")
    store.delete_key(key)
