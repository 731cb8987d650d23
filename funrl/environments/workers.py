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
import threading
from collections.abc import Callable, Iterator, Sequence
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

CLOSE_S = 2.0  # for an environment to close
_POLL_EVERY_S = 1.0


class _Call(NamedTuple):
    """A call of an environment.

    Attributes:
      session: number of the environment.
      number: identifies the answer.
      payload: pickled name of the method and arguments; b"": the session has ended, and there is no answer.
    """

    session: int
    number: int
    payload: bytes


class _Answer(NamedTuple):
    """Answer to a call: the pickled value, or the problem."""

    number: int
    payload: bytes
    problem: str = ""


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
def open_workers(make: Callable[[], Any], workers: int, memory_bytes: int = 1 << 30) -> Iterator[WorkerClient]:
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

    async def _call(self, method: str, *args: Any) -> Any:
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
        self._ended = False
        threading.Thread(target=self._receive, daemon=True).start()

    def session(self) -> int:
        """Number of a new session."""
        return next(self._sessions)

    async def call(self, session: int, method: str, args: Sequence[Any]) -> Any:
        """Call a method of the object of a session.

        Raises:
          RuntimeError: the method raised, or its process has ended.
        """
        number = next(self._numbers)
        future = asyncio.get_running_loop().create_future()
        self._waiting[number] = future
        try:
            self._send(_Call(session, number, cloudpickle.dumps((method, args))))
            answer = await future
        finally:
            self._waiting.pop(number, None)
        if answer.problem:
            raise RuntimeError(answer.problem)
        return pickle.loads(answer.payload)

    def end(self, session: int) -> None:
        """End a session. Its process is killed if it has not answered."""
        with contextlib.suppress(RuntimeError):
            self._send(_Call(session, -1, b""))

    def close(self) -> None:
        """End the server, and with it all processes."""
        self._ended = True
        with contextlib.suppress(OSError):
            self._connection.send(None)

    def _send(self, call: _Call) -> None:
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
        if future is not None:
            with contextlib.suppress(RuntimeError):  # its loop has ended
                future.get_loop().call_soon_threadsafe(_settle, future, answer)


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
        if not call.payload:
            self._end(call, self.homes.pop(call.session, None))
            return
        if isinstance(home, str):
            self.parent.send(_Answer(call.number, b"", home))
            return
        if home is None:
            home = self._choose()
            home.sessions.add(call.session)
            self.homes[call.session] = home
        home.calls[call.number] = call.session
        with contextlib.suppress(OSError):  # it has died, which the next wait detects
            home.connection.send(tuple(call))

    def _end(self, call: _Call, home: _Host | str | None) -> None:
        """Forget a session, and kill its process if it has not answered a call."""
        if not isinstance(home, _Host):
            return
        home.sessions.discard(call.session)
        if call.session in home.calls.values():
            home.calls = {n: session for n, session in home.calls.items() if session != call.session}
            self._lose(home, "another environment in its process did not answer")
            return
        with contextlib.suppress(OSError):
            home.connection.send(tuple(call))

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
        if host.calls.pop(answer.number, None) is not None:
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


def _serve(parent: Connection, theirs: Connection, rank: int, options: _Options) -> None:
    """Main function of the server's process."""
    theirs.close()
    take_signals(signal.SIG_IGN)  # a terminal's or a scheduler's go to all: the rank decides what they mean
    _Server(parent, options).serve(rank)
