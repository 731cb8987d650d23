"""The server of a rank's reward workers, and the workers.

The server is single-threaded, so it can fork workers at any time. A worker runs one call at a time; awaited functions
share one worker, whose event loop runs many calls concurrently. A call of a batched function takes a worker's share of
the waiting batches. A worker that hangs or dies is replaced.

If the number of workers may vary, the server starts with one per core, and adds more while calls wait and finished
calls were mostly idle, for example waiting for a model behind a network.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import math
import os
import pickle
import resource
import signal
import time
from collections import deque
from collections.abc import Sequence
from multiprocessing.connection import Connection, Pipe, wait
from typing import NamedTuple

import torch

from funrl.processes.forks import end_group, fork, leave_signals_to_the_rank, own_group, take_signals
from funrl.processes.parent import end_with_parent
from funrl.rewards.call import (
    RewardFunction,
    RewardOutcome,
    awaited_outcomes,
    failure_of,
    outcomes,
    picklable,
    too_slow,
)

IN_FLIGHT = 256  # bound on the concurrent calls of an event loop
BATCH_ROWS = 1024  # bound on the rows of a batched call, unless a single group has more
AWAITED_GRACE_S = 5.0  # for an event loop to cancel a call itself
_POLL_EVERY_S = 1.0
_MEMORY = 0.9  # decay of earlier calls' idleness


class Submission(NamedTuple):
    """Rows for one function.

    Attributes:
      number: identifies the answer; tasks begin in the order of their numbers.
      function: index of the function.
      rows: pickled `Completed`s.
    """

    number: int
    function: int
    rows: tuple[bytes, ...]


class _Call(NamedTuple):
    """Tasks of one function in a call of a worker, and the deadline of the call."""

    tasks: tuple[Submission, ...]
    deadline: float


class _Worker(NamedTuple):
    """A worker, and its calls by the number of their first task."""

    pid: int
    connection: Connection
    awaits: bool
    calls: dict[int, _Call]

    @property
    def free(self) -> bool:
        return len(self.calls) < (IN_FLIGHT if self.awaits else 1)


class ServerOptions(NamedTuple):
    """Functions and workers of a server.

    Attributes:
      functions: of the pool.
      least, most: bounds on the workers of functions that are not awaited.
      timeout_s: of a call.
    """

    functions: tuple[RewardFunction, ...]
    least: int
    most: int
    timeout_s: float


class Server:
    """Server that passes calls to free workers, and their results to the rank.

    Args:
      parent: to the rank.
      options: its functions and workers.
    """

    def __init__(self, parent: Connection, options: ServerOptions):
        self.parent = parent
        self.functions = options.functions
        self.least = options.least
        self.most = options.most
        self.timeout_s = options.timeout_s
        self.queues: list[deque[Submission]] = [deque() for _ in options.functions]
        self.workers: list[_Worker] = []
        self.cpu_s = self.wall_s = 0.0

    def serve(self, rank: int) -> None:
        """Serve until the rank ends or closes the pool."""
        try:
            self._start(self.least if any(not reward.awaited for reward in self.functions) else 0, awaits=False)
            self._start(int(any(reward.awaited for reward in self.functions)), awaits=True)
            while os.getppid() == rank:
                self._give_calls()
                deadlines = [call.deadline for worker in self.workers for call in worker.calls.values()]
                rest = min(deadlines, default=math.inf) - time.monotonic()
                busy = {worker.connection: worker for worker in self.workers if worker.calls}
                # A process started by the rank may keep the pipe open after the rank's end, so poll for that too.
                for ready in wait([self.parent, *busy], min(max(rest, 0), _POLL_EVERY_S)):
                    if ready is not self.parent:
                        self._take_answer(busy[ready])  # type: ignore[index]
                        continue
                    task = self.parent.recv()
                    if task is None:
                        return
                    self.queues[task.function].append(task)
                self._end_overdue()
        except (EOFError, BrokenPipeError, ConnectionResetError):
            pass  # the rank is gone
        finally:
            for worker in self.workers:
                _end(worker)

    def _give_calls(self) -> None:
        """Pass waiting tasks to free workers, in order."""
        for worker in self.workers:
            while worker.free and (task := self._first(worker.awaits)) is not None:
                queue = self.queues[task.function]
                reward = self.functions[task.function]
                tasks = [queue.popleft()]
                share = -(-(len(queue) + 1) // sum(other.awaits == worker.awaits for other in self.workers))
                room = BATCH_ROWS - len(task.rows)
                while reward.batched and queue and len(tasks) < share and len(queue[0].rows) <= room:
                    room -= len(queue[0].rows)
                    tasks.append(queue.popleft())
                grace = AWAITED_GRACE_S if worker.awaits else 0.0
                worker.calls[task.number] = _Call(tuple(tasks), time.monotonic() + self.timeout_s + grace)
                rows = tuple(row for task in tasks for row in task.rows)
                with contextlib.suppress(OSError):  # it has died, which the next wait detects
                    worker.connection.send_bytes(pickle.dumps((task.number, task.function, rows)))

    def _first(self, awaited: bool) -> Submission | None:
        """The first task that waits for a worker of this kind; None without one."""
        heads = [q[0] for q, reward in zip(self.queues, self.functions, strict=True) if q and reward.awaited == awaited]
        return min(heads, default=None)

    def _take_answer(self, worker: _Worker) -> None:
        try:
            number, results, cpu_s, wall_s = worker.connection.recv()
        except (EOFError, ConnectionResetError):
            ended = _end(worker)
            for call in worker.calls.values():
                self._fail(call, f"ended its process ({ended})")
            self._replace(worker)
            return
        self._answer(worker.calls.pop(number), results)
        if not worker.awaits:
            self.cpu_s = self.cpu_s * _MEMORY + cpu_s
            self.wall_s = self.wall_s * _MEMORY + wall_s
            self._grow()

    def _grow(self) -> None:
        """Add workers if calls wait and finished calls were mostly idle."""
        waiting = sum(len(q) for q, reward in zip(self.queues, self.functions, strict=True) if not reward.awaited)
        here = [worker for worker in self.workers if not worker.awaits]
        busy = max(self.cpu_s / max(self.wall_s, 1e-6), self.least / self.most)
        wanted = min(self.most, math.ceil(self.least / busy), len(here) + waiting - sum(w.free for w in here))
        self._start(wanted - len(here), awaits=False)

    def _end_overdue(self) -> None:
        """End workers with overdue calls. Other calls in the same event loop start again."""
        now = time.monotonic()
        for worker in [
            candidate for candidate in self.workers if any(call.deadline <= now for call in candidate.calls.values())
        ]:
            _end(worker)
            for call in reversed(worker.calls.values()):
                if call.deadline <= now:
                    self._fail(call, too_slow(self.timeout_s))
                else:
                    self.queues[call.tasks[0].function].extendleft(reversed(call.tasks))
            self._replace(worker)

    def _answer(self, call: _Call, results: Sequence[RewardOutcome]) -> None:
        """Send the outcomes of each task to the rank."""
        begin = 0
        for task in call.tasks:
            self.parent.send((task.number, list(results[begin : begin + len(task.rows)])))
            begin += len(task.rows)

    def _fail(self, call: _Call, what: str) -> None:
        reward = self.functions[call.tasks[0].function]
        rows = [row for task in call.tasks for row in task.rows]
        among = f" for {len(rows)} completions, the first of which is" if len(rows) > 1 else ""
        self._answer(call, [failure_of(reward, pickle.loads(rows[0]), what + among)] * len(rows))

    def _replace(self, worker: _Worker) -> None:
        self.workers.remove(worker)
        self._start(1, worker.awaits)

    def _start(self, count: int, awaits: bool) -> None:
        for _ in range(count):
            here, there = Pipe()
            others = [here, self.parent, *(worker.connection for worker in self.workers)]
            pid = fork(functools.partial(_work, there, others, self.functions, awaits, self.timeout_s))
            own_group(pid)
            there.close()
            self.workers.append(_Worker(pid, here, awaits, calls={}))


def serve_rewards(parent: Connection, theirs: Connection, rank: int, options: ServerOptions) -> None:
    """Main function of the server's process.

    Args:
      parent: to the rank.
      theirs: the rank's end of the pipe, which the fork has too.
      rank: process id of the rank.
      options: as in `Server`.
    """
    theirs.close()
    take_signals(signal.SIG_IGN)  # a terminal's or a scheduler's go to all: the rank decides what they mean
    Server(parent, options).serve(rank)


def _work(
    connection: Connection,
    others: Sequence[Connection],
    functions: Sequence[RewardFunction],
    awaits: bool,
    timeout_s: float,
) -> None:
    """Main function of a worker.

    Args:
      connection: to the server.
      others: ends of pipes that it inherits. It closes them, so that their other ends see the processes end.
      functions: of the pool.
      awaits: whether it runs the awaited functions, in one event loop.
      timeout_s: of an awaited call.
    """
    for other in others:
        other.close()
    own_group(0)
    leave_signals_to_the_rank()
    end_with_parent()
    torch.set_num_threads(1)  # the threads of a pool of OpenMP do not survive a fork
    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):  # the server is gone
        if awaits:
            asyncio.run(_answer_awaited(connection, functions, timeout_s))
        while True:
            number, function, rows = pickle.loads(connection.recv_bytes())
            cpu_s = _cpu_s()
            wall_s = time.monotonic()
            results = outcomes(functions[function], [pickle.loads(row) for row in rows])
            connection.send((number, [*map(picklable, results)], _cpu_s() - cpu_s, time.monotonic() - wall_s))


async def _answer_awaited(connection: Connection, functions: Sequence[RewardFunction], timeout_s: float) -> None:
    """Answer calls concurrently until the server is gone."""
    loop = asyncio.get_running_loop()
    gone = loop.create_future()
    tasks = set[asyncio.Task[None]]()

    async def answer(number: int, function: int, rows: Sequence[bytes]) -> None:
        results = await awaited_outcomes(functions[function], [pickle.loads(row) for row in rows], timeout_s)
        connection.send((number, [*map(picklable, results)], 0.0, 0.0))

    def take() -> None:
        try:
            message = pickle.loads(connection.recv_bytes())
        except (EOFError, OSError) as error:
            gone.set_exception(error)
            loop.remove_reader(connection.fileno())
            return
        tasks.add(task := loop.create_task(answer(*message)))
        task.add_done_callback(tasks.discard)

    loop.add_reader(connection.fileno(), take)
    await gone


def _cpu_s() -> float:
    """CPU-seconds of this process and of its finished child programs, and seconds that it was queued for a core."""
    programs = resource.getrusage(resource.RUSAGE_CHILDREN)
    queued = 0.0
    with contextlib.suppress(OSError), open("/proc/self/schedstat") as file:
        queued = int(file.read().split()[1]) / 1e9
    return time.process_time() + programs.ru_utime + programs.ru_stime + queued


def _end(worker: _Worker) -> str:
    """Kill a worker and what it has started; returns how it ended if it had ended by itself."""
    worker.connection.close()
    return end_group(worker.pid)
