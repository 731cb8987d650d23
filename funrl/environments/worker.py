"""A process with environments: it answers calls of their methods until the server is gone."""

from __future__ import annotations

import asyncio
import contextlib
import pickle
import resource
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any

import torch

from funrl.environments.attempt import LONGEST_PROBLEM
from funrl.environments.calls import call
from funrl.processes.forks import leave_signals_to_the_rank, own_group
from funrl.processes.parent import end_with_parent


def host_environments(
    connection: Connection,
    others: Sequence[Connection],
    make: Callable[[], Any],
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


async def _answer_calls(connection: Connection, make: Callable[[], Any]) -> None:
    loop = asyncio.get_running_loop()
    gone = loop.create_future()
    environments: dict[int, Any] = {}
    tasks = set[asyncio.Task[None]]()

    async def answer(session: int, number: int, payload: bytes) -> None:
        try:
            if session not in environments:
                environments[session] = make()
            method, args = pickle.loads(payload)
            value = pickle.dumps(await call(getattr(environments[session], method), *args))
            connection.send((number, value, ""))
        except (Exception, SystemExit) as error:
            trace = "".join(traceback.format_exception(error))[-LONGEST_PROBLEM:]
            connection.send((number, b"", f"it raised {error!r}\n{trace}"))

    def take() -> None:
        try:
            session, number, payload = connection.recv()
        except (EOFError, OSError) as error:
            gone.set_exception(error)
            loop.remove_reader(connection.fileno())
            return
        if not payload:
            environments.pop(session, None)
            return
        task = loop.create_task(answer(session, number, payload))
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    loop.add_reader(connection.fileno(), take)
    await gone


def _limit_memory(more: int) -> None:
    """Bound the address space of this process."""
    with contextlib.suppress(OSError, ValueError):  # not Linux, or there is a lower limit
        with open("/proc/self/statm") as file:
            pages = int(file.read().split()[0])
        bound = pages * resource.getpagesize() + more
        resource.setrlimit(resource.RLIMIT_AS, (bound, bound))
