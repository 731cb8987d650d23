"""One owner of a run directory: the process that holds the lock on `.lock` writes there, every other one is refused.

The system releases the lock when the last process of the run has ended, however it ended.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from funrl.track.records.run_directory import (
    RunDirectory,
    RunDirectoryError,
    given_directory,
    has_no_step,
    open_run,
    remove_start,
)
from funrl.track.records.segments import segments_of

LOCK = ".lock"
WAIT_S = 10.0  # for the ranks of a run that was killed, where the next one resumes it


@contextlib.contextmanager
def owned_run(
    run_dir: str | Path | None,
    experiment: str,
    config: dict[str, Any],
    resume: bool = False,
) -> Iterator[RunDirectory]:
    """Open the directory of a run, as `open_run` does; this process and its forks own it.

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


def leave_nothing(run: RunDirectory) -> bool:
    """Remove what the only start of a run has written if it made no step, and the directory if it is then empty.

    The owner of the directory calls it, at the end.

    Returns: whether nothing of the run is left.
    """
    try:
        count = len(segments_of(json.loads(run.config.read_bytes()))) if run.config.exists() else 0
        if count + run.start.exists() != 1 or not has_no_step(run):
            return False
        remove_start(run)
        (run.path / LOCK).unlink(missing_ok=True)
        if not any(run.path.iterdir()):
            run.path.rmdir()
    except (OSError, ValueError):
        return False
    return True


@contextlib.contextmanager
def _locked(folder: Path, wait_s: float) -> Iterator[None]:
    path = folder / LOCK
    deadline = time.monotonic() + wait_s
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
    """Try to take the lock; False if another run has it."""
    try:
        fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        raise RunDirectoryError(f"--run_dir={folder}: its file system has no locks: {error.strerror}") from None
    return True
