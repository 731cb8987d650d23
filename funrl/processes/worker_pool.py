"""Worker processes of a rank, in which reward functions and whole episodes run.

They are processes because Python that computes would hold up other threads; a process that hangs can be killed, and a
crash affects no other. They are forked because what they run may be a closure that cannot be pickled. A rank later has
threads of torch, gloo and CUDA, after which forking is not safe. So `open_workers` forks one server before there are
threads, and the server, which stays single-threaded, forks and replaces the workers.

Each worker leads a process group, so that whatever it starts ends with it. Server and workers ignore the signals that
ask a run to stop: the rank, which may finish its step first, ends the server, which ends the workers. The server also
ends when the rank disappears.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import inspect
import itertools
import math
import os
import pickle
import resource
import signal
import socket
import struct
import threading
import time
import traceback
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import Future
from multiprocessing.connection import Connection, Pipe, wait
from typing import Any, NamedTuple

import torch

from funrl.processes.forks import end_group, end_with_parent, fork, leave_signals_to_the_rank, own_group, take_signals

SEND_S = 5  # for a worker to read what it is sent
LONGEST_TRACE = 2000  # characters
_POLL_EVERY_S = 1.0
_MEMORY = 0.9  # decay of earlier calls' idleness

AskRank = Callable[[object], Awaitable[Any]]  # a question -> its answer by the rank


class Lane(NamedTuple):
    """Equal workers.

    Attributes:
      answer: payload of a call -> its answer; or `async`, of concurrent calls in a loop: (payload, ask) -> answer.
      least, most: workers, which are started when calls wait; beyond `least` if finished calls were mostly idle.
      room: concurrent calls of a worker.
      timeout_s: of a call; its worker is then killed, and the other calls there start again.
      memory_bytes: address space that a worker may take, beyond what it has when it is forked; 0: no bound.
    """

    answer: Callable[..., Any]
    least: int
    most: int
    room: int = 1
    timeout_s: float = math.inf
    memory_bytes: int = 0


class WorkerCall(NamedTuple):
    """A call, or what belongs to one.

    Attributes:
      number: of the call.
      kind: "call"; "reply", to a question; "cancel"; "end": the rank has no use for it, so kill its worker if it runs.
      payload: pickled.
      lane: index of its workers.
    """

    number: int = -1
    kind: str = "call"
    payload: bytes = b""
    lane: int = 0
    deadline: float = math.inf


class WorkerAnswer(NamedTuple):
    """Answer to a call.

    Attributes:
      kind: "result"; "failed", with a text; "lost", with how the worker ended, "" after the timeout; "ask", with number
        and question.
      payload: pickled.
      cpu_s, wall_s: that the worker took since its last answer.
    """

    number: int
    kind: str
    payload: bytes
    cpu_s: float = 0.0
    wall_s: float = 0.0


class CallLostError(RuntimeError):
    """The worker of a call has ended; the message is how, or "" after the timeout."""


class PendingCall(NamedTuple):
    """A call, and the future of its answer."""

    number: int
    future: Future[Any]


class WorkerClient:
    """The rank's side of the server.

    Example:
      with open_workers([Lane(answer, least=2, most=2)], "reward workers") as client:
          answers = [client.begin(WorkerCall(payload=pickle.dumps(row))).future.result() for row in rows]
    """

    def __init__(self, connection: Connection, server: int, name: str):
        self.server = server
        self._connection = connection
        self._name = name
        self._numbers = itertools.count()
        self._pending: dict[int, tuple[Future[Any], Callable[[WorkerAnswer], None] | None]] = {}
        self._lock = threading.Lock()
        self._sending = threading.Lock()
        self._closed = False
        threading.Thread(target=self._receive, daemon=True).start()

    def begin(self, call: WorkerCall, hear: Callable[[WorkerAnswer], None] | None = None) -> PendingCall:
        """Begin a call, which gets a number.

        Args:
          hear: receives questions of the call, in a thread.

        Returns: its future raises CallLostError, or RuntimeError if the call raised or the server has ended.
        """
        future: Future[Any] = Future()
        future.set_running_or_notify_cancel()
        number = next(self._numbers)
        with self._lock:
            self._pending[number] = (future, hear)
        self.send(call._replace(number=number))
        return PendingCall(number, future)

    def end(self, number: int) -> None:
        """Forget a call. Its worker is killed if it has not answered."""
        with self._lock:
            self._pending.pop(number, None)
        self.send(WorkerCall(number, "end"))

    def send(self, call: WorkerCall | None) -> None:
        """Send to the server; pending calls fail if it has ended."""
        try:
            with self._sending:
                self._connection.send(call)
        except OSError:
            self._fail()

    def close(self) -> None:
        """End the server, and with it all workers. Pending calls fail."""
        self._closed = True
        self.send(None)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self.server, 0)
        self._fail()

    def _receive(self) -> None:
        with contextlib.suppress(EOFError, OSError):
            while True:
                self._deliver(self._connection.recv())
        self._fail()

    def _deliver(self, answer: WorkerAnswer) -> None:
        asks = answer.kind == "ask"
        with self._lock:
            future, hear = (self._pending.get if asks else self._pending.pop)(answer.number, (None, None))
        if asks and hear is not None:
            hear(answer)
        elif future is not None and answer.kind == "result":
            future.set_result(pickle.loads(answer.payload))
        elif future is not None:
            error = CallLostError if answer.kind == "lost" else RuntimeError
            future.set_exception(error(answer.payload.decode()))

    def _fail(self) -> None:
        with self._lock:
            pending = list(self._pending.values())
            self._pending.clear()
        problem = f"the pool of {self._name} was closed" if self._closed else f"the server of the {self._name} has died"
        for future, _ in pending:
            future.set_exception(RuntimeError(problem))


@contextlib.contextmanager
def open_workers(lanes: Sequence[Lane], name: str) -> Iterator[WorkerClient]:
    """Open worker processes for the duration of the context.

    Enter it before the process has threads: before process groups, devices and torch's first parallel operation.

    Args:
      lanes: kinds of workers, which calls name by their index.
      name: of the workers, for errors.
    """
    here, there = Pipe()
    server = fork(functools.partial(_serve, there, here, os.getpid(), lanes))
    there.close()
    client = WorkerClient(here, server, name)
    try:
        yield client
    finally:
        client.close()


@dataclasses.dataclass(eq=False)
class _Worker:
    """A worker, and its unanswered calls by number."""

    pid: int
    connection: Connection
    lane: int
    calls: dict[int, WorkerCall] = dataclasses.field(default_factory=dict)


class _Server:
    """Server that passes calls to workers, and their answers to the rank."""

    def __init__(self, parent: Connection, lanes: Sequence[Lane]):
        self.parent = parent
        self.lanes = lanes
        self.queues: list[deque[WorkerCall]] = [deque() for _ in lanes]
        self.wanted = [lane.least for lane in lanes]
        self.workers: dict[object, _Worker] = {}  # by connection
        self.cpu_s = self.wall_s = 0.0

    def serve(self, rank: int) -> None:
        """Serve until the rank ends or closes the connection."""
        try:
            while os.getppid() == rank:
                self._give_calls()
                deadlines = (call.deadline for worker in self.workers.values() for call in worker.calls.values())
                rest_s = min(deadlines, default=math.inf) - time.monotonic()
                connections = [self.parent, *(worker.connection for worker in self.workers.values())]
                # A process started by the rank may keep the pipe open after the rank's end, so poll for that too.
                for ready in wait(connections, min(max(rest_s, 0), _POLL_EVERY_S)):
                    if ready is not self.parent:
                        self._take_answer(self.workers.get(ready))
                        continue
                    call = self.parent.recv()
                    if call is None:
                        return
                    self._take_call(call)
                self._end_overdue()
        except (EOFError, BrokenPipeError, ConnectionResetError):
            pass  # the rank is gone
        finally:
            for worker in self.workers.values():
                end_group(worker.pid)

    def _take_call(self, call: WorkerCall) -> None:
        queue = self.queues[call.lane]
        if call.kind == "call":
            queue.append(call)
            return
        worker = next((worker for worker in self.workers.values() if call.number in worker.calls), None)
        if call.kind != "end":
            self._send(worker, call)
        elif worker is not None:
            del worker.calls[call.number]
            self._lose(worker, "as another call in it was not answered")
        else:
            self.queues = [deque(other for other in queue if other.number != call.number) for queue in self.queues]

    def _give_calls(self) -> None:
        """Pass waiting calls to workers, in order."""
        for lane, queue in enumerate(self.queues):
            while queue and (worker := self._free_worker(lane)) is not None:
                call = queue.popleft()._replace(deadline=time.monotonic() + self.lanes[lane].timeout_s)
                worker.calls[call.number] = call
                self._send(worker, call)

    def _free_worker(self, lane: int) -> _Worker | None:
        """The worker for a call: one without calls, a new one, or that with the fewest."""
        workers = [worker for worker in self.workers.values() if worker.lane == lane]
        worker = min(workers, key=lambda candidate: len(candidate.calls), default=None)
        if (worker is None or worker.calls) and len(workers) < self.wanted[lane]:
            here, there = Pipe()
            others = [here, self.parent, *(other.connection for other in self.workers.values())]
            pid = fork(functools.partial(_work, there, others, self.lanes[lane]))
            own_group(pid)
            there.close()
            with socket.socket(fileno=os.dup(here.fileno())) as same:  # fail instead of waiting for one that blocks
                same.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", SEND_S, 0))
            worker = self.workers[here] = _Worker(pid, here, lane)
        return worker if worker is not None and len(worker.calls) < self.lanes[lane].room else None

    def _send(self, worker: _Worker | None, call: WorkerCall) -> None:
        if worker is None:
            return
        try:
            worker.connection.send(call)
        except BlockingIOError:
            self._lose(worker, f"as it had not read for {SEND_S} s")
        except OSError:  # it has died, which the next wait detects
            pass

    def _take_answer(self, worker: _Worker | None) -> None:
        if worker is None:  # lost since the wait
            return
        try:
            answer = WorkerAnswer(*worker.connection.recv())
        except (EOFError, OSError):
            self._lose(worker)
            return
        if answer.kind in ("result", "failed"):
            del worker.calls[answer.number]
        self.parent.send(answer)
        lane = self.lanes[worker.lane]
        if lane.least < lane.most:
            self.cpu_s = self.cpu_s * _MEMORY + answer.cpu_s
            self.wall_s = self.wall_s * _MEMORY + answer.wall_s
            busy = max(self.cpu_s / max(self.wall_s, 1e-6), lane.least / lane.most)
            self.wanted[worker.lane] = min(lane.most, math.ceil(lane.least / busy))

    def _end_overdue(self) -> None:
        """End workers with overdue calls. Their other calls start again."""
        now = time.monotonic()
        for worker in list(self.workers.values()):
            overdue = {number: call for number, call in worker.calls.items() if call.deadline <= now}
            if overdue:
                others = [call for number, call in worker.calls.items() if number not in overdue]
                self.queues[worker.lane].extendleft(reversed(others))
                worker.calls = overdue
                self._lose(worker, "")

    def _lose(self, worker: _Worker, how: str | None = None) -> None:
        """End a worker, whose calls are lost."""
        del self.workers[worker.connection]
        worker.connection.close()
        ended = end_group(worker.pid)
        for number in worker.calls:
            self.parent.send(WorkerAnswer(number, "lost", (ended if how is None else how).encode()))


def _serve(parent: Connection, theirs: Connection, rank: int, lanes: Sequence[Lane]) -> None:
    """Main function of the server's process; `theirs` is the rank's end of the pipe, which the fork has too."""
    theirs.close()
    take_signals(signal.SIG_IGN)  # a terminal's or a scheduler's go to all: the rank decides what they mean
    _Server(parent, lanes).serve(rank)


def _work(connection: Connection, others: Sequence[Connection], lane: Lane) -> None:
    """Main function of a worker. It closes others' ends of pipes, so that their other ends see the processes end."""
    for other in others:
        other.close()
    own_group(0)
    leave_signals_to_the_rank()
    end_with_parent()
    torch.set_num_threads(1)  # the threads of a pool of OpenMP do not survive a fork
    if lane.memory_bytes:
        _limit_memory(lane.memory_bytes)
    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):  # the server is gone
        if inspect.iscoroutinefunction(lane.answer):
            asyncio.run(_ConcurrentCalls(connection, lane.answer).serve())
        while True:
            call = connection.recv()
            cpu_s = _cpu_s()
            wall_s = time.monotonic()
            answer = pickle.dumps(lane.answer(call.payload))
            connection.send((call.number, "result", answer, _cpu_s() - cpu_s, time.monotonic() - wall_s))


class _ConcurrentCalls:
    """The calls that a worker answers in an event loop."""

    def __init__(self, connection: Connection, answer: Callable[[bytes, AskRank], Awaitable[object]]):
        self._connection = connection
        self._answer = answer
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._questions: dict[int, asyncio.Future[Any]] = {}
        self._numbers = itertools.count()

    async def serve(self) -> None:
        """Answer calls until the server is gone."""
        loop = asyncio.get_running_loop()
        gone = loop.create_future()

        def receive() -> None:
            # A thread reads, as the server would wait for a call that blocks the event loop.
            try:
                while True:
                    loop.call_soon_threadsafe(self._take, self._connection.recv())
            except (EOFError, OSError) as error:
                loop.call_soon_threadsafe(gone.set_exception, error)

        threading.Thread(target=receive, daemon=True).start()
        await gone

    def _take(self, call: WorkerCall) -> None:
        if call.kind == "call":
            task = self._tasks[call.number] = asyncio.get_running_loop().create_task(self._run(call))
            task.add_done_callback(lambda _: self._tasks.pop(call.number))
        elif call.kind == "cancel" and call.number in self._tasks:
            self._tasks[call.number].cancel()
        elif call.kind == "reply":
            number, value, error = pickle.loads(call.payload)
            question = self._questions.get(number)
            if question is not None and not question.done() and error is None:
                question.set_result(value)
            elif question is not None and not question.done():
                question.set_exception(error)

    async def _run(self, call: WorkerCall) -> None:
        try:
            value = await self._answer(call.payload, functools.partial(self._ask, call.number))
            self._connection.send((call.number, "result", pickle.dumps(value)))
        except (Exception, SystemExit, asyncio.CancelledError) as error:
            problem = f"it raised {error!r}\n{traceback.format_exc()[-LONGEST_TRACE:]}"
            self._connection.send((call.number, "failed", problem.encode()))

    async def _ask(self, call: int, question: object) -> Any:
        """Ask the rank for something that a call needs. Raises: ValueError, RuntimeError, as whoever answers does."""
        number = next(self._numbers)
        future = self._questions[number] = asyncio.get_running_loop().create_future()
        self._connection.send((call, "ask", pickle.dumps((number, question))))
        try:
            return await future
        finally:
            del self._questions[number]


def _cpu_s() -> float:
    """CPU-seconds of this process and of its finished child programs, and seconds that it was queued for a core."""
    programs = resource.getrusage(resource.RUSAGE_CHILDREN)
    queued = 0.0
    with contextlib.suppress(OSError), open("/proc/self/schedstat") as file:
        queued = int(file.read().split()[1]) / 1e9
    return time.process_time() + programs.ru_utime + programs.ru_stime + queued


def _limit_memory(more: int) -> None:
    """Bound the address space of this process."""
    with contextlib.suppress(OSError, ValueError):  # not Linux, or there is a lower limit
        with open("/proc/self/statm") as file:
            pages = int(file.read().split()[0])
        bound = pages * resource.getpagesize() + more
        resource.setrlimit(resource.RLIMIT_AS, (bound, bound))
