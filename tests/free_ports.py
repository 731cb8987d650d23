"""Ports of this machine for tests that have to name one before a process listens at it."""

import fcntl
import os
import socket
import tempfile
from pathlib import Path

_HELD = []  # locks, until this process ends


def free_port(low: int, high: int) -> int:
    """A port from `low` to `high` that nothing listens at and that no other process of the tests has been given.

    Best below the range that the system gives away by itself.
    """
    folder = Path(tempfile.gettempdir()) / f"funrl-test-ports-{os.getuid()}"
    folder.mkdir(exist_ok=True)
    for port in range(low, high):
        lock = open(folder / str(port), "w")  # noqa: SIM115
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            with socket.socket() as first:
                first.bind(("127.0.0.1", port))
        except OSError:
            lock.close()
            continue
        _HELD.append(lock)
        return port
    raise AssertionError(f"no free port from {low} to {high}")
