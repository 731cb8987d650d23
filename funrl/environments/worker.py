"""A process with environments: it answers calls of their methods until the server is gone."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import pickle
import resource
import threading
from collections.abc import Awaitable, Callable, Sequence
from contextvars import ContextVar
from multiprocessing.connection import Connection
from typing import Any

import torch

from funrl.environments.attempt import LONGEST_PROBLEM
from funrl.environments.calls import call
from funrl.loading import user_trace
from funrl.processes.forks import leave_signals_to_the_rank, own_group
from funrl.processes.parent import end_with_parent

_ASK: ContextVar[Callable[[Any], Awaitable[Any]]] = ContextVar("ask")


def host_environments(
    connection: Connection,
    others: Sequence[Connection],
    make: Callable[[], object],
    memory_bytes: int,
) -> None:
    """Main function of the process.

    Args:
      connection: to the server.
      others: ends of pipes that it inherits and closes, so that their other ends see the processes end.
      make: makes an environment, or another object.
      memory_bytes: address space that it may take, beyond what it has.
    """
    for other in others:
        other.close()
    own_group(0)
    leave_signals_to_the_rank()
    end_with_parent()
    torch.set_num_threads(1)  # the threads of a pool of OpenMP do not survive a fork
    _limit_memory(memory_bytes)
    with contextlib.suppress(EOFError, OSError):  # the server is gone
        asyncio.run(_answer_calls(connection, make))


def asker() -> Callable[[Any], Awaitable[Any]]:
    """A function that asks whoever has made the call that is being answered, and waits for the answer.

    Take it when the call begins: tasks that a server starts for its connections have the context of whichever call
    started that server. It raises ValueError or RuntimeError as whoever answers, or as the call has ended.
    """
    return _ASK.get()


class _Answers:
    """The calls that a process answers."""

    def __init__(self, connection: Connection, make: Callable[[], Any]):
        self._connection = connection
        self._make = make
        self._sessions: dict[int, Any] = {}
        self._tasks: dict[asyncio.Task[None], int] = {}  # and their sessions
        self._questions: dict[int, asyncio.Future[Any]] = {}
        self._numbers = itertools.count()

    def take(self, session: int, number: int, payload: bytes, kind: str) -> None:
        """Take what the server sends; see `workers.Call`."""
        if kind == "call":
            task = asyncio.get_running_loop().create_task(self._answer(session, number, payload))
            self._tasks[task] = session
            task.add_done_callback(self._tasks.pop)
        elif kind == "end":
            self._sessions.pop(session, None)
        elif kind == "cancel":
            for task, of in self._tasks.items():
                if of == session:
                    task.cancel()
        elif number in self._questions and not self._questions[number].done():
            value, error = pickle.loads(payload)
            if error is None:
                self._questions[number].set_result(value)
            else:
                self._questions[number].set_exception(error)

    async def _answer(self, session: int, number: int, payload: bytes) -> None:
        """Answer a call."""
        _ASK.set(lambda question: self._ask(number, question))
        try:
            if session not in self._sessions:
                self._sessions[session] = self._make()
            method, args = pickle.loads(payload)
            value = pickle.dumps(await call(getattr(self._sessions[session], method), *args))
            self._connection.send((number, value, "", None))
        except (Exception, SystemExit, asyncio.CancelledError) as error:
            trace = user_trace(error)[-LONGEST_PROBLEM:]
            self._connection.send((number, b"", f"it raised {error!r}\n{trace}", None))

    async def _ask(self, call_number: int, question: object) -> Any:
        """Ask the caller of a call."""
        number = next(self._numbers)
        future = self._questions[number] = asyncio.get_running_loop().create_future()
        self._connection.send((call_number, pickle.dumps(question), "", number))
        try:
            return await future
        except asyncio.CancelledError:
            self._connection.send((call_number, b"", "", number))
            raise
        finally:
            del self._questions[number]


async def _answer_calls(connection: Connection, make: Callable[[], object]) -> None:
    """Answer calls until the connection ends."""
    loop = asyncio.get_running_loop()
    gone = loop.create_future()
    answers = _Answers(connection, make)

    def receive() -> None:
        # A thread reads, as the server would wait for an environment that blocks the event loop.
        try:
            while True:
                loop.call_soon_threadsafe(answers.take, *connection.recv())
        except (EOFError, OSError) as error:
            loop.call_soon_threadsafe(gone.set_exception, error)

    threading.Thread(target=receive, daemon=True).start()
    await gone


def _limit_memory(more: int) -> None:
    """Bound the address space of this process."""
    with contextlib.suppress(OSError, ValueError):  # not Linux, or there is a lower limit
        with open("/proc/self/statm") as file:
            pages = int(file.read().split()[0])
        bound = pages * resource.getpagesize() + more
        resource.setrlimit(resource.RLIMIT_AS, (bound, bound))
