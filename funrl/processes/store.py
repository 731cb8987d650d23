"""The store of a run, which carries everything that its ranks tell each other. No rank keeps it.

The program that starts ranks listens on the loopback, starts them, and only then runs the store: the store has threads,
which no fork survives, and ranks that connect before wait in the queue of the listening socket. Under torchrun its
agent keeps the store; under srun a process that the first rank forks for it does (`keeper`).
"""

from __future__ import annotations

import json
import os
import socket
import traceback
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from funrl.processes import environment, stall_monitor

LOOPBACK = "127.0.0.1"
CONNECT = timedelta(minutes=5)
QUEUE = 4096  # ranks that may connect before the store runs

MESH = "funrl/mesh"  # of rank 0
MOST = 1_000_000  # characters of a report; the store takes 8 MB at once

SIGNS = "funrl/signs"  # records by rank
FAILURE = "funrl/failure"  # the first: "rank text"
UNWRITABLE = "funrl/unwritable"  # it is the usual folder that has failed
RESCUE = "funrl/order"  # what is saved, and the explanation of the end: "replica elsewhere explanation"
NOTICES = "funrl/notices"  # lines for the user
REPORTS = "funrl/reports"  # of failures, a line of JSON each: [rank, text]


def listen(port: int | None = None) -> socket.socket:
    """Listen where the ranks of a run will connect.

    Args:
      port: of all addresses of this machine; None: a free one of the loopback.

    Raises:
      OSError: the port is taken.
    """
    if port is None:
        return socket.create_server((LOOPBACK, 0), backlog=QUEUE)
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, backlog=QUEUE, dualstack_ipv6=True)
    return socket.create_server(("", port), backlog=QUEUE)


def keep_store(listener: socket.socket) -> Any:
    """Run the store in this process, on a listening socket, until nothing refers to it any more."""
    port = listener.getsockname()[1]
    descriptor = listener.detach()
    return dist.TCPStore(LOOPBACK, port, is_master=True, wait_for_workers=False, master_listen_fd=descriptor)


def connect(port: int, host: str = LOOPBACK, timeout: timedelta = CONNECT) -> Any:
    """Connect to the store of the run. Raises: RuntimeError: nothing has answered there in time."""
    return dist.TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timeout)


def own_attempt() -> str | None:
    """Name of the attempt of this rank's run, where its environment or this rank decides it; None: the first one does.

    The first rank calls it once, as it decides anew each time where there are several agents.
    """
    if not environment.has_agents():
        return os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return environment.new_attempt() if int(os.environ["RANK"]) == 0 else None


def join_store(attempt: str | None, timeout: timedelta = CONNECT) -> Any:
    """Connect to the store of ranks that torchrun or srun has started; each of torchrun's restarts has its own keys.

    Args:
      attempt: of `own_attempt`.
      timeout: bound on the wait for the store, and for the first rank.

    Raises:
      RuntimeError: nothing has answered there in time.
      TimeoutError: the first rank has not.
    """
    client = connect(int(os.environ["MASTER_PORT"]), os.environ["MASTER_ADDR"], timeout)
    if attempt is None:
        attempt = environment.join_attempt(client, int(os.environ["RANK"]), timeout)
    return dist.PrefixStore(f"attempt-{attempt}", client)


def gather_ranks(attempt: str, world: int, timeout: timedelta = CONNECT) -> None:
    """Wait on the first rank until all others have joined its attempt, where they have to find out which it is.

    Raises:
      TimeoutError: ranks have not come.
    """
    if environment.has_agents():
        client = connect(int(os.environ["MASTER_PORT"]), os.environ["MASTER_ADDR"], timeout)
        environment.lead_attempt(client, attempt, world, timeout)


def kept_by_agent() -> bool:
    """True if torchrun's agent keeps the store."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def report_first(client: Any, rank: int, text: str) -> None:
    """Leave the notice of a failure, if it is the first one."""
    client.compare_set(FAILURE, "", f"{rank} {text}")


def report_failure(client: object, rank: int, error: BaseException, plain: tuple[type[Exception], ...]) -> None:
    """Leave the explanation of a failure for the launcher."""
    try:
        trace = "".join(traceback.format_exception(error))
        cause = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        text = str(error) if isinstance(error, plain) else f"rank {rank} failed: {cause}\n{trace}"
    except Exception as other:  # the error's own text raises
        trace = "".join(traceback.format_tb(error.__traceback__))
        text = f"rank {rank} failed:\n{trace}{type(error).__name__}, whose text raises {type(other).__name__}"
    try:
        add_line(client, REPORTS, [rank, text[:MOST]])
    except (RuntimeError, OSError, AttributeError):  # the store is gone, or has not been reached
        stall_monitor.say(text)


def add_line(client: Any, key: str, content: Any) -> None:
    """Append a line of JSON to a text in the store. Raises: RuntimeError: it is gone."""
    client.append(key, json.dumps(content) + "\n")
