"""Requests from one pool of ranks to another, and their answers, through the store of the run.

The first rank of the asking mesh writes a request; every rank of the answering mesh sees that it is there, and its
first rank reads it for all. Answers go the other way. What travels here is metadata: tokens and weights go from rank to
rank (`handover`, `reshard`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import pickle
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any, NamedTuple, TypeVar

import torch.distributed as dist

from funrl.mesh.collectives import from_first_rank
from funrl.mesh.mesh import Mesh, MeshError
from funrl.processes.heartbeat import beat, beats, entered, left

VALUE_BYTES = 4 << 20  # bytes of a value of the store, which takes 8 MB at once
IN_PIECES = b"pieces "  # prefix of a value that is written in n further ones; no pickle begins with it
KEPT_REQUESTS = 64  # that stay in the store, with their answers, for ranks that have not seen them yet
SHORTEST_S = 0.0005  # between two looks at the store
LONGEST_S = 0.02
STORE_S = 0.0002  # for each waiting rank, so that all of them ask the store a few thousand times a second
KEY = "funrl/pools"
END_KEY = f"{KEY}/end"
GENERATING = "generate"  # the pool that answers, where no other one is named
PROGRESS_S = 5.0  # between two signs of progress

_T = TypeVar("_T")


class MethodCall(NamedTuple):
    """A request to call a method of the answering side.

    Attributes:
      method: its name.
      arguments: of it.
    """

    method: str
    arguments: tuple[Any, ...] = ()


class PoolAnswer(NamedTuple):
    """Answer to a request.

    Attributes:
      value: as the request says; None where there is a problem.
      notes: remarks since the answer before.
      problem: error that ends the run; None without one.
    """

    value: Any = None
    notes: Sequence[str] = ()
    problem: Exception | None = None


class End(NamedTuple):
    """The last request.

    Attributes:
      result: how the asking side has ended.
    """

    result: Any


@dataclasses.dataclass(eq=False)
class Requests:
    """The asking side, on every rank of a mesh.

    Attributes:
      mesh: of the asking ranks; this process is one of them.
      pool: name of the answering ranks.
      posted: number of requests.
      note: receives remarks of answers.
    """

    mesh: Mesh
    pool: str = GENERATING
    posted: int = 0
    note: Callable[[str], None] = lambda text: None
    _kept: int = 0  # number of the oldest request in the store

    def post(self, request: object) -> int:
        """Send a request; returns its number. Every rank calls it, with the same request."""
        number = self.posted
        self.posted += 1
        if self.mesh.rank == 0:
            write_value(request_key(self.pool, number), request)
        beat()
        return number

    def answer(self, number: int, waits_for: str) -> Any:
        """Wait for the value of the answer to a request, on every rank, and show its remarks. Collective.

        Args:
          number: of `post`.
          waits_for: name of the answer, for whoever looks at a rank that waits.

        Requests and answers leave the store once those of a few later ones are read.

        Raises:
          MeshError: the answering side makes no progress for `Mesh.timeout`.
          Exception: `PoolAnswer.problem`.
        """
        key = answer_key(self.pool, number)
        entered(waits_for)
        limit = ProgressLimit(self.mesh.timeout, waits_for, progress_key(self.pool))
        wait_for_keys([key], self.mesh.world, limit)
        value, notes, problem = from_first_rank(read_value(key) if self.mesh.rank == 0 else None, self.mesh)
        left()
        for oldest in range(self._kept, number - KEPT_REQUESTS + 1) if self.mesh.rank == 0 else ():
            remove_value(request_key(self.pool, oldest))
            remove_value(answer_key(self.pool, oldest))
        self._kept = max(self._kept, number - KEPT_REQUESTS + 1)
        for text in notes:
            self.note(text)
        if problem is not None:
            raise problem
        return value

    def ask(self, request: object, waits_for: str) -> Any:
        """Send a request and wait for its answer. Collective."""
        return self.answer(self.post(request), waits_for)


@dataclasses.dataclass(eq=False)
class Answers:
    """The answering side, on every rank of a mesh.

    Attributes:
      mesh: of the answering ranks; this process is one of them.
      pool: as of `Requests`.
      taken: number of requests so far.
    """

    mesh: Mesh
    pool: str = GENERATING
    taken: int = 0

    def take(self, waits_for: str) -> Any:
        """The next request, on every rank; an `End` where the asking side has ended. Collective.

        Args:
          waits_for: name of the request, for whoever looks at a rank that waits.
        """
        entered(waits_for)
        there = wait_for_keys([self.next_key, END_KEY], self.mesh.world)
        request = from_first_rank(read_value(there[0]) if self.mesh.rank == 0 else None, self.mesh)
        left()
        self.taken += 1
        return request

    @property
    def next_key(self) -> str:
        """Key of the next request in the store."""
        return request_key(self.pool, self.taken)

    def waiting(self) -> bool:
        """True if a request waits to be taken. Not collective."""
        store = run_store()
        return bool(store.check([self.next_key]) or store.check([END_KEY]))

    @contextlib.contextmanager
    def showing_progress(self) -> Iterator[None]:
        """Report progress to the asking side through the store, inside the context."""
        ended = threading.Event()

        def show() -> None:
            while not ended.wait(PROGRESS_S):
                with contextlib.suppress(RuntimeError):  # the store is gone, and this process will be
                    run_store().set(progress_key(self.pool), str(beats()))

        thread = threading.Thread(target=show, name="progress", daemon=True)
        if self.mesh.rank == 0:
            thread.start()
        try:
            yield
        finally:
            ended.set()
            if self.mesh.rank == 0:
                thread.join()

    def answer(self, *answer: Any) -> None:
        """Answer the newest request. Only the first rank's answer counts. Args: fields of a `PoolAnswer`."""
        if self.mesh.rank == 0:
            write_value(answer_key(self.pool, self.taken - 1), PoolAnswer(*answer))
        beat()


def end_requests(mesh: Mesh, result: object) -> None:
    """Tell the answering side that no request follows. Every rank of the asking mesh calls it.

    Args:
      mesh: of the asking ranks.
      result: `End.result`.
    """
    if mesh.rank == 0:
        write_value(END_KEY, End(result))


def run_store() -> Any:
    """The store of the run."""
    return dist.distributed_c10d._get_default_store()


def request_key(pool: str, number: int) -> str:
    """Key of a request in the store."""
    return f"{KEY}/{pool}/request/{number}"


def answer_key(pool: str, number: int) -> str:
    """Key of the answer to a request in the store."""
    return f"{KEY}/{pool}/answer/{number}"


def progress_key(pool: str) -> str:
    """Key whose value changes while a pool makes progress."""
    return f"{KEY}/{pool}/progress"


def wait_for_keys(keys: Sequence[str], ranks: int, limit: ProgressLimit | None = None) -> list[str]:
    """Wait until the store has at least one of the keys; return the keys that it has.

    Args:
      keys: of the store.
      ranks, limit: as of `wait_until`.
    """
    store = run_store()
    return wait_until(lambda: [key for key in keys if store.check([key])], ranks, limit)


def wait_until(look: Callable[[], _T], ranks: int, limit: ProgressLimit | None = None) -> _T:
    """The first result of `look` that is true; calls it again and again, less often the longer it takes.

    The run's watch ends this process where another one has failed or is stalled, so that it waits for no dead rank.

    Args:
      look: at the store.
      ranks: that look at it.
      limit: checked between two calls.

    Raises:
      MeshError: as of the limit.
    """
    pause_s = SHORTEST_S
    while not (result := look()):
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, max(LONGEST_S, ranks * STORE_S))
        if limit is not None:
            limit.check()
    return result


class ProgressLimit:
    """Limit of the seconds for which other ranks may make no progress while this one waits for them."""

    def __init__(self, timeout: timedelta | None, waits_for: str, key: str = "") -> None:
        """Begin to wait.

        Args:
          timeout: without progress, as `Mesh.timeout`; None: no limit.
          waits_for: name of what comes, for the error.
          key: whose value in the store changes with progress; "": that of `GENERATING`.
        """
        self.key = key or progress_key(GENERATING)
        self.limit_s = None if timeout is None else timeout.total_seconds()
        self.waits_for = waits_for
        self.progress = b""
        self.since = self.looked = time.monotonic()

    def check(self) -> None:
        """Look for progress, every few seconds. Raises: MeshError: there was none for too long."""
        now = time.monotonic()
        if self.limit_s is None or now - self.looked < min(PROGRESS_S, self.limit_s / 4):
            return
        self.looked = now
        store = run_store()
        if store.check([self.key]) and (newest := store.get(self.key)) != self.progress:
            self.progress = newest
            self.since = now
        if now - self.since > self.limit_s:
            raise MeshError(
                f"waited for {self.waits_for}: the ranks that were asked have made no progress for {self.limit_s:.0f} "
                "s; a longer --timeout, in minutes, waits longer"
            )


def write_value(key: str, value: object) -> None:
    """Write a value under a key, in pieces that the store takes; the key is there once all of them are."""
    write_values([key], [value])


def write_values(keys: Sequence[str], values: Sequence[object]) -> None:
    """Write values under keys, as `write_value` does, many small ones in one message."""
    together: dict[str, bytes] = {}
    size = 0
    for key, value in zip(keys, values, strict=True):
        data = pickle.dumps(value)
        if len(data) > VALUE_BYTES:
            pieces = [data[begin : begin + VALUE_BYTES] for begin in range(0, len(data), VALUE_BYTES)]
            for number, piece in enumerate(pieces):
                run_store().set(f"{key}/{number}", piece)
            data = IN_PIECES + str(len(pieces)).encode()
        if together and size + len(data) > VALUE_BYTES:
            run_store().multi_set(list(together), list(together.values()))
            together = {}
            size = 0
        together[key] = data
        size += len(data)
    if together:
        run_store().multi_set(list(together), list(together.values()))


def read_value(key: str) -> Any:
    """The value that `write_value` wrote."""
    return _value_of(key, run_store().get(key))


def take_values(keys: Sequence[str]) -> list[Any]:
    """The values that `write_value` wrote, which then leave the store."""
    store = run_store()
    values = []
    for key, data in zip(keys, store.multi_get(list(keys)), strict=True):
        values.append(_value_of(key, data))
        for piece in (*_pieces(key, data), key):
            store.delete_key(piece)
    return values


def remove_value(key: str) -> None:
    """Remove a value, if it is there."""
    if run_store().check([key]):
        take_values([key])


def _value_of(key: str, data: bytes) -> Any:
    """The value under a key with these bytes."""
    pieces = _pieces(key, data)
    return pickle.loads(b"".join(run_store().get(piece) for piece in pieces) if pieces else data)


def _pieces(key: str, data: bytes) -> list[str]:
    """Keys of the pieces of the value under a key with these bytes; none of one that is whole."""
    if not data.startswith(IN_PIECES):
        return []
    return [f"{key}/{number}" for number in range(int(data[len(IN_PIECES) :]))]
