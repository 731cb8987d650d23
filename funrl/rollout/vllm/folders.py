"""Temporary folders of weights, which are large: one that a killed process has left is removed by the next."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
import time
import weakref
from pathlib import Path

PREFIX = "funrl-weights-"
NEW_S = 60  # age below which a folder may belong to a process that is about to lock it


def weights_folder() -> tempfile.TemporaryDirectory[str]:
    """A folder of this process, removed with the object that is returned; those of killed processes are removed now.

    A process holds a lock on its folder, which ends with the process.
    """
    _remove_abandoned()
    folder = tempfile.TemporaryDirectory(prefix=PREFIX)
    lock = os.open(folder.name, os.O_RDONLY)
    weakref.finalize(folder, os.close, lock)
    with contextlib.suppress(OSError):  # a file system without locks, on which nothing is removed either
        fcntl.flock(lock, fcntl.LOCK_EX)
    return folder


def _remove_abandoned() -> None:
    for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):  # another user's, in use, or removed by another process
            if time.time() - folder.stat().st_mtime < NEW_S:
                continue
            lock = os.open(folder, os.O_RDONLY)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder)
            finally:
                os.close(lock)
