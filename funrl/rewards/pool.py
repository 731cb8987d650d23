"""Workers of a rank that run reward functions in parallel with each other and with the rank's own work.

They are processes because rewards are Python and mostly CPU-bound, so that threads would block each other; a hanging
process can be killed, and a crash affects no other process. They are forked because a user's function may be a closure
that cannot be pickled. A rank later has threads of torch, gloo and CUDA, after which forking is not safe. So
`open_pool` forks one server before there are threads, and the server, which stays single-threaded, forks and replaces
the workers.

Each worker leads a process group, so that whatever its functions start ends with it. Server and workers ignore the
signals that ask a run to stop: the rank, which may finish its step first, ends the server, which ends the workers. The
server also ends when the rank disappears.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import math
import os
import pickle
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from multiprocessing.connection import Connection, Pipe
from typing import NamedTuple

import cloudpickle

from funrl.processes.forks import fork
from funrl.rewards.call import (
    CompletedRow,
    Failure,
    Reward,
    RewardError,
    RewardFunction,
    RewardOutcome,
    awaited_outcomes,
    outcomes,
    reward_functions,
    row_text,
)
from funrl.rewards.pool_server import ServerOptions, Submission, serve_rewards
from funrl.rewards.views import TEXT


class Pool:
    """Reward workers of a rank, made by `open_pool`; `Pool(rewards)` has no workers.

    Attributes:
      functions: the reward functions.
      views: names of the views that they read instead of the text.
      workers: bound on the processes that run them; 0: this process does.
    """

    def __init__(
        self, rewards: Sequence[Reward], workers: int = 0, connection: Connection | None = None, server: int = 0
    ):
        self.functions = reward_functions(rewards)
        self.views = {function.view.name for function in self.functions} - {TEXT}
        self.workers = workers
        self._connection = connection
        self._server = server
        self._waiting: dict[int, Future[list[RewardOutcome]]] = {}
        self._lock = threading.Lock()
        self._sending = threading.Lock()  # rows of a batch and of an evaluation may come from two threads
        self._count = 0
        self._closed = False
        if connection is not None:
            threading.Thread(target=self._receive, args=(connection,), daemon=True).start()

    def begin(self, function: int, rows: Sequence[CompletedRow]) -> Future[list[RewardOutcome]]:
        """Begin to reward rows with the function of an index. A batched function gets all of them in one call.

        Returns: a future of one outcome per row, which raises RewardError only if the pool itself has ended.
        """
        if self._closed:
            raise RewardError("the pool of reward workers is closed")
        future: Future[list[RewardOutcome]] = Future()
        if self._connection is None:
            future.set_result(_now(self.functions[function], rows))
            return future
        future.set_running_or_notify_cancel()
        try:
            packed = tuple(map(_dumps, rows))
        except Exception as error:
            what = f"a row cannot be sent to a reward worker ({error}); use --reward_workers=0"
            future.set_result([Failure(what + row_text(row), row.prompt, row.completion) for row in rows])
            return future
        with self._lock:
            number, self._count = self._count, self._count + 1
            self._waiting[number] = future
        try:
            with self._sending:
                self._connection.send(Submission(number, function, packed))
        except OSError:
            self._fail("the server of the reward workers has died")
        return future

    def close(self) -> None:
        """End all workers. Pending rewards fail."""
        if self._closed:
            return
        self._closed = True
        if self._connection is not None:
            with contextlib.suppress(OSError):
                self._connection.send(None)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(self._server, 0)
            self._fail("the pool of reward workers was closed")

    def _receive(self, connection: Connection) -> None:
        with contextlib.suppress(EOFError, OSError):
            while True:
                number, results = connection.recv()
                with self._lock:
                    future = self._waiting.pop(number, None)
                if future is not None:
                    future.set_result(results)
        if not self._closed:
            self._fail("the server of the reward workers has died")

    def _fail(self, message: str) -> None:
        with self._lock:
            waiting = list(self._waiting.values())
            self._waiting = {}
        for future in waiting:
            future.set_exception(RewardError(message))


@contextlib.contextmanager
def open_pool(
    rewards: Sequence[Reward], workers: int, timeout_s: float = 60.0, most: int | None = None
) -> Iterator[Pool]:
    """Open a pool of workers for the duration of the context.

    Enter it before the process has threads: before process groups, devices and torch's first parallel operation.

    Args:
      rewards: functions of any form. Each worker has a forked copy, so that a function's state, such as a cache, is
        separate in each worker.
      workers: number of workers; 0: rows are rewarded in this process when they are submitted, without a timeout.
        Awaited functions are not counted: they share one worker with an event loop.
      timeout_s: timeout of a call.
      most: bound on the workers, which are added while rows wait and workers are mostly idle; None: `workers`.
    """
    if not workers:
        pool = Pool(rewards)
    else:
        here, there = Pipe()
        most = max(workers, most or workers)
        options = ServerOptions(reward_functions(rewards), workers, most, timeout_s=timeout_s)
        program = functools.partial(serve_rewards, there, here, os.getpid(), options=options)
        server = fork(program)
        there.close()
        pool = Pool(rewards, most, here, server=server)
    try:
        yield pool
    finally:
        pool.close()


class RowRewards(NamedTuple):
    """Pending rewards of one row.

    Attributes:
      row: the row.
      parts: for each function, the future of its outcomes and the row's index among them.
    """

    row: CompletedRow
    parts: tuple[tuple[Future[list[RewardOutcome]], int], ...]

    def done(self) -> bool:
        """True if all outcomes are available."""
        return all(future.done() for future, _ in self.parts)

    def outcomes(self, timeout: float | None = None) -> list[RewardOutcome]:
        """Wait for the outcome of each function. If no function applies to the row, all have failed.

        Raises:
          RewardError: the pool has ended.
        """
        results = [future.result(timeout)[place] for future, place in self.parts]
        if results and all(not isinstance(outcome, Failure) and math.isnan(outcome) for outcome in results):
            message = f"none of the {len(results)} reward functions applies, one of them must{row_text(self.row)}"
            return [Failure(message, self.row.prompt, self.row.completion)] * len(results)
        return results

    def result(self, timeout: float | None = None) -> list[float]:
        """Wait for the score of each function; NaN where one of several does not apply.

        Raises:
          RewardError: a function failed, no function applies, or the pool has ended.
        """
        results = self.outcomes(timeout)
        for outcome in results:
            if isinstance(outcome, Failure):
                raise RewardError(*outcome)
        return [outcome for outcome in results if not isinstance(outcome, Failure)]


def score_rows(pool: Pool, rows: Sequence[CompletedRow]) -> list[RowRewards]:
    """Begin to reward rows, in order. A batched function gets all of them in one call.

    Returns: pending rewards of each row. `result()` waits for the scores; it raises RewardError, which shows the row,
      if a function raised (with its traceback), did not return a finite number, exceeded the pool's timeout or ended
      its process, or if the row cannot be pickled.

    Example: [pending.result() for pending in score_rows(pool, rows)] is [[1.0]] for a pool of `verifiers.exact_match`
      and rows = [Completed("1+1=", "2", {"answer": "2"})].
    """
    futures: list[list[tuple[Future[list[RewardOutcome]], int]]] = [[] for _ in rows]
    for number, reward in enumerate(pool.functions):
        together = reward.batched or (reward.awaited and not pool.workers)
        future = pool.begin(number, rows) if together and rows else None
        for place, row in enumerate(rows):
            futures[place].append((future, place) if future is not None else (pool.begin(number, [row]), 0))
    return [RowRewards(row, tuple(parts)) for row, parts in zip(rows, futures, strict=True)]


def _now(reward: RewardFunction, rows: Sequence[CompletedRow]) -> list[RewardOutcome]:
    """Compute outcomes in this process."""
    if not reward.awaited:
        return outcomes(reward, rows)
    results: list[RewardOutcome] = []
    thread = threading.Thread(target=lambda: results.extend(asyncio.run(awaited_outcomes(reward, rows))))
    thread.start()  # this thread may already run an event loop, as in a notebook
    thread.join()
    return results


def _dumps(row: CompletedRow) -> bytes:
    try:
        return pickle.dumps(row)
    except Exception:  # such as a field that is a lambda
        return cloudpickle.dumps(row)
