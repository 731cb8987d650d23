"""One owner of a run directory: who holds the lock of `.lock` writes there, whoever else comes is refused.

The system gives the lock back when the last process of the run has ended, however it ended.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from funrl.track.run_directory import RunDirectory, RunDirectoryError, given_directory, open_run

LOCK = ".lock"
WAIT_S = 10.0  # for the ranks of a run that was killed, where the next one resumes it


@contextlib.contextmanager
def owned_run(
    run_dir: str | Path | None, experiment: str, config: dict[str, Any], resume: bool = False
) -> Iterator[RunDirectory]:
    """Open the directory of a run, as `open_run` does, and own it: this process, and those that it forks.

    Raises:
      RunDirectoryError: another run owns it, or as `open_run`.
    """
    with contextlib.ExitStack() as stack:
        if run_dir:
            stack.enter_context(_locked(given_directory(Path(run_dir)), WAIT_S if resume else 0.0))
        run = open_run(run_dir, experiment, config, resume)
        if not run_dir:  # a new one, whose name nobody else has
            stack.enter_context(_locked(run.path, 0.0))
        yield run


@contextlib.contextmanager
def _locked(folder: Path, wait_s: float) -> Iterator[None]:
    path, deadline = folder / LOCK, time.monotonic() + wait_s
    try:
        number = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise RunDirectoryError(f"--run_dir={folder}: cannot be written: {reason}") from None
    mine = False
    try:
        while not _lock(number, folder):
            if time.monotonic() >= deadline:
                owner = os.pread(number, 200, 0).decode(errors="replace").strip()
                raise RunDirectoryError(f"--run_dir={folder}: another run writes there ({owner}); give another one")
            time.sleep(0.05)
        mine = True
        os.ftruncate(number, 0)
        os.pwrite(number, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)
        yield
    except RunDirectoryError:
        with contextlib.suppress(OSError):  # it may have been deleted
            if mine and os.listdir(folder) == [LOCK]:  # refused before anything was written
                path.unlink()
                folder.rmdir()
        raise
    finally:
        os.close(number)


def _lock(number: int, folder: Path) -> bool:
    """Try to take the lock; false where another run has it."""
    deadline = time.monotonic() + WAIT_S
    while not _flock(number, fcntl.LOCK_EX, folder):
        if not _flock(number, fcntl.LOCK_SH, folder) or time.monotonic() >= deadline:
            return False
        fcntl.flock(number, fcntl.LOCK_UN)  # nobody owns it: `is_owned` looks at it, for an instant
        time.sleep(0.01)
    return True


def _flock(number: int, how: int, folder: Path) -> bool:
    """Try to take the lock alone (LOCK_EX) or with others (LOCK_SH); false where that cannot be now."""
    try:
        fcntl.flock(number, how | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        raise RunDirectoryError(f"--run_dir={folder}: its file system has no locks: {error.strerror}") from None
    return True


def is_owned(folder: Path) -> bool:
    """True while a run owns a directory; false where that cannot be told, as without locks."""
    try:
        number = os.open(folder / LOCK, os.O_RDONLY)
    except OSError:
        return False
    try:
        free = _flock(number, fcntl.LOCK_SH, folder)
        fcntl.flock(number, fcntl.LOCK_UN)  # also for a process that another thread forks now
        return not free
    except RunDirectoryError:
        return False
    finally:
        os.close(number)
