"""Workers of a rank that run reward functions in parallel with each other and with the rank's own work.

They are processes, because rewards are Python and mostly bound by the CPU, so threads would take turns; one that hangs
can be ended, and one that crashes takes nothing with it. They are forked, because a user's function may be a closure
that cannot be pickled. A rank later has threads of torch, gloo and CUDA, from which forking is not safe: so `open_pool`
forks one server while there are none, and the server, which stays single-threaded, forks the workers and replaces them.

A worker is a process group, and what its functions start ends with it. A terminal's interrupt reaches the rank, which
ends the server, which ends the workers; it does so too when the rank is gone without a word.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import pickle
import signal
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from multiprocessing.connection import Connection, Pipe, wait
from typing import Any, NamedTuple

import cloudpickle
import torch

from funrl.rewards.load import Reward, RewardError, row_text, score_row

_PR_SET_PDEATHSIG = 1
_LOOK_EVERY_S = 1.0
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


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
    """The workers of a rank; made by `open_pool`, or without any by `Pool(rewards)`.

    Attributes:
      rewards: the functions.
      workers: how many processes run them; 0: this one does.
    """

    def __init__(
        self, rewards: Sequence[Reward], workers: int = 0, connection: Connection | None = None, server: int = 0
    ):
        self.rewards, self.workers = tuple(rewards), workers
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
            futures.append(Future())
            futures[-1].set_running_or_notify_cancel()
            try:
                task = self._count, _dumps(row)
            except Exception as error:
                message = f"a row cannot be sent to a reward worker ({error}); use --reward_workers=0{row_text(*row)}"
                _settle(futures[-1], _Failure(message, row.prompt, row.completion, None))
                continue
            tasks.append(task)
            self._count += 1
            with self._lock:
                self._waiting[task[0]] = futures[-1]
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
        network. 0: no process is made, rows are rewarded as they are submitted, and nothing times out.
      timeout_s: how long all functions together may take for one row.
    """
    if not workers:
        pool = Pool(rewards)
    else:
        here, there = Pipe()
        _flush()
        server = _fork(functools.partial(_serve, there, here, os.getpid(), tuple(rewards), workers, timeout_s))
        there.close()
        pool = Pool(rewards, workers, here, server)
    try:
        yield pool
    finally:
        pool.close()


def score_rows(pool: Pool, rows: Sequence[Completed]) -> list[Future[list[float]]]:
    """Begin to reward rows; the first submitted is the first begun.

    Returns: one future a row, in order. Its result is one number for each function of the pool; it raises RewardError,
      which shows the row, where a function raised (with its traceback), gave no finite number, took longer than the
      pool's timeout or ended its process; or where its row cannot be pickled.

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


def _dumps(row: Completed) -> bytes:
    try:
        return pickle.dumps(row)
    except Exception:  # such as a field that is a lambda
        return cloudpickle.dumps(row)


def _failure(row: bytes, message: str) -> _Failure:
    prompt, completion, fields = pickle.loads(row)
    return _Failure(message + row_text(prompt, completion, fields), prompt, completion, None)


def _fork(live: Callable[[], None]) -> int:
    """Fork a process that lives and ends, and nothing else; return its number."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _ENDING)  # not in between, in the rank's handlers
    pid = os.fork()
    if not pid:
        status = 1
        try:
            live()
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            _flush()
            os._exit(status)
    signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return pid


def _take_signals(handler: Any) -> None:
    """Let a forked process take the signals that end programs in its own way, instead of in the rank's."""
    for sign in _ENDING:
        signal.signal(sign, handler)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _ENDING)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # there is none, or its reader has gone
            stream.flush()


def _work(connection: Connection, others: Sequence[Connection], rewards: tuple[Reward, ...]) -> None:
    """The life of a worker: a row, its rewards, the next row.

    Args:
      others: ends of pipes that it has by being a fork. While it had them open, nobody would see them end.
    """
    for other in others:
        other.close()
    _own_group(0)
    _take_signals(signal.SIG_DFL)  # and so do programs that a function starts
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    torch.set_num_threads(1)  # the threads of a pool of OpenMP do not survive a fork
    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):  # the server is gone
        while True:
            connection.send(_outcome(rewards, pickle.loads(connection.recv_bytes())))


def _serve(
    parent: Connection, theirs: Connection, rank: int, rewards: tuple[Reward, ...], count: int, timeout_s: float
) -> None:
    """The life of the server: rows to idle workers, results to the rank; workers that die or hang are replaced."""
    theirs.close()
    _take_signals(signal.SIG_IGN)  # a terminal's or a scheduler's go to all: the rank decides what they mean
    queue: deque[tuple[int, bytes]] = deque()
    idle: list[_Worker] = []
    running: dict[Connection, _Running] = {}

    def start() -> _Worker:
        return _start(rewards, [parent, *running, *(worker.connection for worker in idle)])

    def answer(task: _Running, found: list[float] | _Failure, worker: _Worker) -> None:
        del running[task.worker.connection]
        idle.append(worker)
        parent.send((task.number, found))

    try:
        for _ in range(count):
            idle.append(start())
        while os.getppid() == rank:
            while queue and idle:
                worker, (number, row) = idle.pop(), queue.popleft()
                running[worker.connection] = _Running(worker, number, row, time.monotonic() + timeout_s)
                with contextlib.suppress(OSError):  # it has died: that is seen when it is waited for
                    worker.connection.send_bytes(row)
            rest = min((task.deadline for task in running.values()), default=float("inf")) - time.monotonic()
            # Some process that the rank has started may keep the pipe open that would tell of the rank's end.
            for ready in wait([parent, *running], min(max(rest, 0), _LOOK_EVERY_S)):
                if ready is parent:
                    tasks = parent.recv()
                    if tasks is None:
                        return
                    queue.extend(tasks)
                    continue
                task = running[ready]  # type: ignore[index]
                worker = task.worker
                try:
                    found = worker.connection.recv()
                except (EOFError, ConnectionResetError):
                    found = _failure(task.row, f"a reward function ended its process ({_end(worker)})")
                    worker = start()
                answer(task, found, worker)
            for task in [task for task in running.values() if task.deadline <= time.monotonic()]:
                _end(task.worker)
                message = f"the reward functions took longer than {timeout_s:g} s"
                answer(task, _failure(task.row, message), start())
    except (EOFError, BrokenPipeError, ConnectionResetError):
        pass  # the rank is gone
    finally:
        for worker in [*idle, *(task.worker for task in running.values())]:
            _end(worker)


def _start(rewards: tuple[Reward, ...], others: Sequence[Connection]) -> _Worker:
    here, there = Pipe()
    pid = _fork(functools.partial(_work, there, [here, *others], rewards))
    _own_group(pid)
    there.close()
    return _Worker(pid, here)


def _own_group(pid: int) -> None:
    """Make a worker a group of its own; it and the server both do, as neither knows which comes first."""
    with contextlib.suppress(OSError):
        os.setpgid(pid, pid)


def _end(worker: _Worker) -> str:
    """End a worker and what it has started, and say how it ended if it had done so itself."""
    with contextlib.suppress(OSError):
        os.killpg(worker.pid, signal.SIGKILL)
    worker.connection.close()
    _, status = os.waitpid(worker.pid, 0)
    if os.WIFSIGNALED(status):
        return f"by signal {signal.Signals(os.WTERMSIG(status)).name}"
    return f"with exit code {os.WEXITSTATUS(status)}"
