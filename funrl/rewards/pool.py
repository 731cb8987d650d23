"""Workers of a rank that run reward functions in parallel with each other and with the rank's own work.

They are processes, because rewards are Python and mostly bound by the CPU, so threads would take turns; one that hangs
can be ended, and one that crashes takes nothing with it. They are forked, because a user's function may be a closure
that cannot be pickled. A rank later has threads of torch, gloo and CUDA, from which forking is not safe: so `open_pool`
forks one server while there are none, and the server, which stays single-threaded, forks the workers and replaces them.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import pickle
import signal
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from multiprocessing.connection import Connection, Pipe, wait
from typing import Any, NamedTuple

import torch

from funrl.rewards.load import Reward, RewardError, row_text, score_row

_PR_SET_PDEATHSIG = 1


class Completed(NamedTuple):
    """A row to be rewarded.

    Attributes:
      prompt, completion: what the reward functions are given.
      fields: the other fields of the prompt's line, given by name.
    """

    prompt: str
    completion: str
    fields: Mapping[str, Any] = {}


class Pool:
    """The workers of a rank; made by `open_pool`."""

    def __init__(self, rewards: Sequence[Reward], connection: Connection | None, server: int):
        self.rewards = tuple(rewards)
        self._connection, self._server = connection, server
        self._waiting: dict[int, Future[list[float]]] = {}
        self._lock, self._count, self._closed = threading.Lock(), 0, False
        if connection is not None:
            threading.Thread(target=self._receive, args=(connection,), daemon=True).start()

    def submit(self, rows: Sequence[Completed]) -> list[Future[list[float]]]:
        if self._closed:
            raise RewardError("the pool of reward workers is closed")
        if self._connection is None:
            return [_now(self.rewards, row) for row in rows]
        futures: list[Future[list[float]]] = []
        tasks: list[tuple[int, bytes]] = []
        for row in rows:
            try:
                tasks.append((self._count, pickle.dumps(row)))
            except Exception as error:
                raise RewardError(f"a row cannot be sent to a worker: {error}{row_text(*row)}") from error
            futures.append(Future())
            futures[-1].set_running_or_notify_cancel()
            self._count += 1
        with self._lock:
            self._waiting |= dict(zip((number for number, _ in tasks), futures, strict=True))
        try:
            self._connection.send(tasks)
        except OSError:
            self._fail("the server of the reward workers has died")
        return futures

    def close(self) -> None:
        """End all workers; what has not been rewarded yet fails."""
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
                number, found = connection.recv()
                with self._lock:
                    future = self._waiting.pop(number, None)
                if future is not None:
                    _settle(future, found)
        if not self._closed:
            self._fail("the server of the reward workers has died")

    def _fail(self, message: str) -> None:
        with self._lock:
            waiting, self._waiting = list(self._waiting.values()), {}
        for future in waiting:
            future.set_exception(RewardError(message))


@contextlib.contextmanager
def open_pool(rewards: Sequence[Reward], workers: int, timeout_s: float = 60.0) -> Iterator[Pool]:
    """Workers for as long as the context lasts.

    Open it before the process has threads: before process groups, devices and the first parallel operation of torch.

    Args:
      rewards: functions (prompt, completion, **fields) -> number. Each worker has a copy, made by forking: what a
        function keeps, such as a cache, it keeps for itself.
      workers: how many; more than there are cores for functions that wait for others, such as a model behind a
        network. 0: no process is made, rows are rewarded where they are submitted, and nothing times out.
      timeout_s: how long all functions together may take for one row.
    """
    if not workers:
        pool = Pool(rewards, None, 0)
    else:
        here, there = Pipe()
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        server = os.fork()
        if not server:
            here.close()
            _child(lambda: _serve(there, tuple(rewards), workers, timeout_s))
        there.close()
        pool = Pool(rewards, here, server)
    try:
        yield pool
    finally:
        pool.close()


def score_rows(pool: Pool, rows: Sequence[Completed]) -> list[Future[list[float]]]:
    """Begin to reward rows; the first submitted is the first begun.

    Returns: one future a row, in order. Its result is one number for each function of the pool; it raises RewardError,
      which shows the row, where a function raised (with its traceback), gave no finite number, took longer than the
      pool's timeout or ended its process.

    Example: [future.result() for future in score_rows(pool, [Completed("1+1=", "2", {"answer": "2"})])] is [[1.0]] for
      a pool of `verifiers.exact_match`.
    """
    return pool.submit(rows)


class _Failure(NamedTuple):
    """A RewardError on its way between processes."""

    message: str
    prompt: str | None
    completion: str | None
    value: Any


class _Worker(NamedTuple):
    pid: int
    connection: Connection


class _Running(NamedTuple):
    worker: _Worker
    number: int
    row: bytes
    deadline: float


def _now(rewards: Sequence[Reward], row: Completed) -> Future[list[float]]:
    future: Future[list[float]] = Future()
    _settle(future, _outcome(rewards, row))
    return future


def _settle(future: Future[list[float]], found: list[float] | _Failure) -> None:
    if isinstance(found, _Failure):
        future.set_exception(RewardError(*found))
    else:
        future.set_result(found)


def _outcome(rewards: Sequence[Reward], row: Completed) -> list[float] | _Failure:
    try:
        return score_row(rewards, *row)
    except RewardError as error:
        plain = error.value is None or isinstance(error.value, (bool, int, float, str))
        return _Failure(str(error), error.prompt, error.completion, error.value if plain else repr(error.value))


def _failure(row: bytes, message: str) -> _Failure:
    prompt, completion, fields = pickle.loads(row)
    return _Failure(message + row_text(prompt, completion, fields), prompt, completion, None)


def _child(run: Any) -> None:
    """The life of a forked process. It ends with its parent, and is not interrupted by the keyboard: its parent is."""
    status = 1
    try:
        if sys.platform == "linux":
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        run()
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        os._exit(status)


def _work(connection: Connection, rewards: tuple[Reward, ...]) -> None:
    """The life of a worker: a row, its rewards, the next row."""
    torch.set_num_threads(1)  # the threads of a pool of OpenMP do not survive a fork
    with contextlib.suppress(EOFError):
        while True:
            connection.send(_outcome(rewards, pickle.loads(connection.recv_bytes())))


def _serve(parent: Connection, rewards: tuple[Reward, ...], count: int, timeout_s: float) -> None:
    """The life of the server: rows to idle workers, results to the rank; workers that die or hang are replaced."""
    queue: deque[tuple[int, bytes]] = deque()
    idle = [_start(rewards) for _ in range(count)]
    running: dict[Connection, _Running] = {}

    def answer(task: _Running, found: list[float] | _Failure, worker: _Worker) -> None:
        del running[task.worker.connection]
        idle.append(worker)
        parent.send((task.number, found))

    try:
        while True:
            while queue and idle:
                worker, (number, row) = idle.pop(), queue.popleft()
                running[worker.connection] = _Running(worker, number, row, time.monotonic() + timeout_s)
                with contextlib.suppress(OSError):  # it has died: that is seen when it is waited for
                    worker.connection.send_bytes(row)
            rest = min((task.deadline for task in running.values()), default=float("inf")) - time.monotonic()
            for ready in wait([parent, *running], None if rest == float("inf") else max(rest, 0)):
                if ready is parent:
                    tasks = parent.recv()
                    if tasks is None:
                        return
                    queue.extend(tasks)
                    continue
                task = running[ready]  # type: ignore[index]
                try:
                    answer(task, task.worker.connection.recv(), task.worker)
                except (EOFError, ConnectionResetError):
                    ended = _end(task.worker)
                    answer(task, _failure(task.row, f"a reward function ended its process ({ended})"), _start(rewards))
            for task in [task for task in running.values() if task.deadline <= time.monotonic()]:
                _end(task.worker)
                message = f"the reward functions took longer than {timeout_s:g} s"
                answer(task, _failure(task.row, message), _start(rewards))
    except (EOFError, BrokenPipeError, ConnectionResetError):
        pass  # the rank is gone
    finally:
        for worker in [*idle, *(task.worker for task in running.values())]:
            _end(worker)


def _start(rewards: tuple[Reward, ...]) -> _Worker:
    here, there = Pipe()
    pid = os.fork()
    if not pid:
        here.close()
        _child(lambda: _work(there, rewards))
    there.close()
    return _Worker(pid, here)


def _end(worker: _Worker) -> str:
    """End a worker, and say how it ended if it had done so itself."""
    worker.connection.close()
    os.kill(worker.pid, signal.SIGKILL)
    _, status = os.waitpid(worker.pid, 0)
    if os.WIFSIGNALED(status):
        return f"by signal {signal.Signals(os.WTERMSIG(status)).name}"
    return f"with exit code {os.WEXITSTATUS(status)}"
