"""Message environments in processes of their own, which may hang, crash or take all the memory that they are given.

A server, forked before the rank has threads, forks the processes and passes calls on. An environment stays in the
process where it was made, and has it to itself while there are enough of them. A process whose environment does not
answer is killed; the episodes that had environments in it fail, and are tried again.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import itertools
import os
import pickle
import signal
import socket
import struct
import threading
from collections.abc import Awaitable, Callable, Iterator, Sequence
from multiprocessing.connection import Connection, Pipe, wait
from typing import Any, NamedTuple

import cloudpickle

from funrl.data.prompts import Example
from funrl.environments.adapters import message_environment
from funrl.environments.environment import Environment, MessageEnvironment
from funrl.environments.worker import host_environments
from funrl.processes.forks import end_group, fork, own_group, take_signals
from funrl.rollout.episodes import Message
from funrl.rollout.policy import Tools

AnswerQuestion = Callable[[Any], Awaitable[Any]]  # a question -> its answer
SEND_S = 5  # for a process to read what it is sent
CLOSE_S = 2.0  # for an environment to close
_POLL_EVERY_S = 1.0


class _Call(NamedTuple):
    """A call of an environment, or what belongs to one.

    Attributes:
      session: number of the environment.
      number: identifies the answer; of a reply, the question.
      payload: pickled name of the method and arguments; of a reply, its value and error.
      kind: "call"; "reply", to a question; "cancel", of all calls of the session; "end", of the session.
    """

    session: int
    number: int
    payload: bytes = b""
    kind: str = "call"


class _Answer(NamedTuple):
    """Answer to a call: the pickled value, or the problem.

    Attributes:
      question: None, or number of a question that the call asks first, the payload; b"": it is withdrawn.
    """

    number: int
    payload: bytes
    problem: str = ""
    question: int | None = None


@dataclasses.dataclass(eq=False)
class _Host:
    """A process with environments; `calls` are sessions by the numbers of their unanswered calls."""

    pid: int
    connection: Connection
    sessions: set[int] = dataclasses.field(default_factory=set)
    calls: dict[int, int] = dataclasses.field(default_factory=dict)


@contextlib.contextmanager
def open_environment(
    make: Callable[[], MessageEnvironment], workers: int, memory_bytes: int = 1 << 30
) -> Iterator[Environment]:
    """Open an environment of conversations whose other sides are in processes of their own.

    Enter it before the process has threads: before process groups, devices and torch's first parallel operation.

    Args:
      make: as in `message_environment`.
      workers: bound on the processes; 0: everything is in this process.
      memory_bytes: that a process may take, beyond what it has when it is forked.
    """
    if not workers:
        yield message_environment(make)
        return
    with open_workers(make, workers, memory_bytes) as client:
        yield message_environment(lambda: _RemoteEnvironment(client))


@contextlib.contextmanager
def open_workers(make: Callable[[], object], workers: int, memory_bytes: int = 1 << 30) -> Iterator[WorkerClient]:
    """Open processes that hold objects whose methods are called from here; see `open_environment`.

    Args:
      make: makes the object of a session, in its process.
      workers: bound on the processes, at least 1.
      memory_bytes: that a process may take, beyond what it has when it is forked.
    """
    here, there = Pipe()
    options = _Options(make, workers, memory_bytes)
    server = fork(functools.partial(_serve, there, here, os.getpid(), options))
    there.close()
    client = WorkerClient(here)
    try:
        yield client
    finally:
        client.close()
        with contextlib.suppress(ChildProcessError):
            os.waitpid(server, 0)


class _RemoteEnvironment:
    """A message environment in another process."""

    def __init__(self, client: WorkerClient):
        self._client = client
        self._session = client.session()
        self._waiting = False

    async def reset(self, example: Example, seed: int) -> tuple[Sequence[Message], Tools]:
        """As the environment there."""
        return await self._call("reset", example, seed)

    async def step(self, message: Message) -> tuple[Sequence[Message], float | None, bool]:
        """As the environment there."""
        return await self._call("step", message)

    async def close(self) -> None:
        """Close the environment there; kill its process if it does not answer.

        Raises:
          RuntimeError: it does not answer in time.
        """
        try:
            if not self._waiting:
                await asyncio.wait_for(self._call("close"), CLOSE_S)
        except TimeoutError as error:
            raise RuntimeError(f"close took longer than {CLOSE_S:g} s") from error
        finally:
            self._client.end(self._session)

    async def _call(self, method: str, *args: object) -> Any:
        self._waiting = True
        value = await self._client.call(self._session, method, args)
        self._waiting = False
        return value


class WorkerClient:
    """The rank's side of the server. A session is an object in a process."""

    def __init__(self, connection: Connection):
        self._connection = connection
        self._numbers = itertools.count()
        self._sessions = itertools.count()
        self._waiting: dict[int, asyncio.Future[_Answer]] = {}
        self._asked: dict[int, _Questions] = {}
        self._ended = False
        threading.Thread(target=self._receive, daemon=True).start()

    def session(self) -> int:
        """Number of a new session."""
        return next(self._sessions)

    async def call(self, session: int, method: str, args: Sequence[object], reply: AnswerQuestion | None = None) -> Any:
        """Call a method of the object of a session.

        Args:
          reply: answers what the method asks by `worker.asker`.

        Raises:
          RuntimeError: the method raised, or its process has ended.
        """
        number = next(self._numbers)
        future = asyncio.get_running_loop().create_future()
        self._waiting[number] = future
        questions = _Questions(self, session, reply)
        self._asked[number] = questions
        try:
            self.send(_Call(session, number, cloudpickle.dumps((method, args))))
            answer = await future
        finally:
            del self._waiting[number], self._asked[number]
            questions.close()
        if answer.problem:
            raise RuntimeError(answer.problem)
        return pickle.loads(answer.payload)

    def cancel(self, session: int) -> None:
        """Cancel the calls of a session, whose problem is then that."""
        with contextlib.suppress(RuntimeError):
            self.send(_Call(session, -1, kind="cancel"))

    def end(self, session: int) -> None:
        """End a session. Its process is killed if it has not answered."""
        with contextlib.suppress(RuntimeError):
            self.send(_Call(session, -1, kind="end"))

    def close(self) -> None:
        """End the server, and with it all processes."""
        self._ended = True
        with contextlib.suppress(OSError):
            self._connection.send(None)

    def send(self, call: _Call) -> None:
        """Send to the server. Raises RuntimeError if it has ended."""
        try:
            self._connection.send(call)
        except OSError as error:
            raise RuntimeError("the server of the environments has ended") from error

    def _receive(self) -> None:
        with contextlib.suppress(EOFError, OSError):
            while not self._ended:
                self._deliver(self._connection.recv())
        for number in list(self._waiting):
            self._deliver(_Answer(number, b"", "the server of the environments has ended"))

    def _deliver(self, answer: _Answer) -> None:
        future = self._waiting.get(answer.number)
        questions = self._asked.get(answer.number)
        if future is None or questions is None:
            return
        with contextlib.suppress(RuntimeError):  # its loop has ended
            if answer.question is None:
                future.get_loop().call_soon_threadsafe(_settle, future, answer)
            else:
                future.get_loop().call_soon_threadsafe(questions.take, answer.question, answer.payload)


class _Questions:
    """The questions of a call, while they are answered."""

    def __init__(self, client: WorkerClient, session: int, reply: AnswerQuestion | None):
        self._client = client
        self._session = session
        self._reply = reply
        self._tasks: dict[int, asyncio.Task[None]] = {}

    def take(self, number: int, payload: bytes) -> None:
        """Begin to answer a question, or stop if it is withdrawn."""
        if payload:
            self._tasks[number] = asyncio.get_running_loop().create_task(self._answer(number, payload))
        elif number in self._tasks:
            self._tasks.pop(number).cancel()

    def close(self) -> None:
        """Stop answering."""
        for task in self._tasks.values():
            task.cancel()

    async def _answer(self, number: int, payload: bytes) -> None:
        value = error = None
        try:
            if self._reply is None:
                raise RuntimeError("nobody answers questions of this call")
            value = await self._reply(pickle.loads(payload))
        except ValueError as raised:
            error = ValueError(str(raised))
        except Exception as raised:
            error = RuntimeError(repr(raised))
        self._tasks.pop(number, None)
        with contextlib.suppress(RuntimeError):  # the server has ended, and so has the call
            self._client.send(_Call(self._session, number, pickle.dumps((value, error)), "reply"))


def _settle(future: asyncio.Future[_Answer], answer: _Answer) -> None:
    if not future.done():
        future.set_result(answer)


class _Options(NamedTuple):
    """Arguments of `open_workers`."""

    make: Callable[[], Any]
    workers: int
    memory_bytes: int


class _Server:
    """Server that passes calls to the processes of their environments."""

    def __init__(self, parent: Connection, options: _Options):
        self.parent = parent
        self.options = options
        self.hosts: dict[Connection, _Host] = {}
        self.homes: dict[int, _Host | str] = {}  # of each session its process, or how that ended

    def serve(self, rank: int) -> None:
        """Serve until the rank ends or closes the connection."""
        try:
            while os.getppid() == rank:
                for ready in wait([self.parent, *self.hosts], _POLL_EVERY_S):
                    if ready is not self.parent:
                        self._take_answer(self.hosts.get(ready))  # type: ignore[arg-type]
                        continue
                    call = self.parent.recv()
                    if call is None:
                        return
                    self._pass_on(call)
        except (EOFError, BrokenPipeError, ConnectionResetError):
            pass  # the rank is gone
        finally:
            for host in self.hosts.values():
                end_group(host.pid)

    def _pass_on(self, call: _Call) -> None:
        home = self.homes.get(call.session)
        if call.kind == "end":
            self._end(call, self.homes.pop(call.session, None))
            return
        if call.kind != "call":
            self._send(home, call)
            return
        if isinstance(home, str):
            self.parent.send(_Answer(call.number, b"", home))
            return
        if home is None:
            home = self._choose()
            home.sessions.add(call.session)
            self.homes[call.session] = home
        home.calls[call.number] = call.session
        self._send(home, call)

    def _send(self, home: _Host | str | None, call: _Call) -> None:
        if not isinstance(home, _Host):
            return
        try:
            home.connection.send(tuple(call))
        except BlockingIOError:
            self._lose(home, f"the process of the environment has not read for {SEND_S} s")
        except OSError:  # it has died, which the next wait detects
            pass

    def _end(self, call: _Call, home: _Host | str | None) -> None:
        """Forget a session, and kill its process if it has not answered a call."""
        if not isinstance(home, _Host):
            return
        home.sessions.discard(call.session)
        if call.session in home.calls.values():
            home.calls = {n: session for n, session in home.calls.items() if session != call.session}
            self._lose(home, "another environment in its process did not answer")
            return
        self._send(home, call)

    def _choose(self) -> _Host:
        """The process for a new session: one without sessions, a new one, or that with the fewest."""
        host = min(self.hosts.values(), key=lambda x: len(x.sessions), default=None)
        if host is None or (host.sessions and len(self.hosts) < self.options.workers):
            here, there = Pipe()
            others = [here, self.parent, *self.hosts]
            program = functools.partial(
                host_environments, there, others, self.options.make, memory_bytes=self.options.memory_bytes
            )
            pid = fork(program)
            own_group(pid)
            there.close()
            _limit_sending(here)
            host = _Host(pid, here)
            self.hosts[here] = host
        return host

    def _take_answer(self, host: _Host | None) -> None:
        if host is None:  # lost since the wait
            return
        try:
            answer = _Answer(*host.connection.recv())
        except (EOFError, OSError):
            self._lose(host)
            return
        if answer.number not in host.calls:
            if answer.question is not None and answer.payload:
                ended = pickle.dumps((None, RuntimeError("the call that asks has ended")))
                self._send(host, _Call(-1, answer.question, ended, "reply"))
            return
        if answer.question is None:
            del host.calls[answer.number]
        self.parent.send(answer)

    def _lose(self, host: _Host, problem: str = "") -> None:
        """End a process; its calls fail, and further ones of its sessions."""
        del self.hosts[host.connection]
        host.connection.close()
        ended = end_group(host.pid)
        problem = problem or f"the process of the environment ended {ended}"
        self.homes |= dict.fromkeys(host.sessions, problem)
        for number in host.calls:
            self.parent.send(_Answer(number, b"", problem))


def _limit_sending(connection: Connection) -> None:
    """Make sending fail instead of waiting for a process that does not read: others are served meanwhile."""
    with socket.socket(fileno=os.dup(connection.fileno())) as same:
        same.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", SEND_S, 0))


def _serve(parent: Connection, theirs: Connection, rank: int, options: _Options) -> None:
    """Main function of the server's process."""
    theirs.close()
    take_signals(signal.SIG_IGN)  # a terminal's or a scheduler's go to all: the rank decides what they mean
    _Server(parent, options).serve(rank)
