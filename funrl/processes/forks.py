"""Forked processes of a rank: workers in groups of their own, which end with whoever has forked them.

Fork from a process without threads: before process groups, devices and torch's first parallel operation.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import signal
import sys
import traceback
from collections.abc import Callable
from typing import Any

from funrl.processes.output import flush_output

PR_SET_PDEATHSIG = 1


def end_with_parent() -> None:
    """On Linux have this process killed when its parent ends, however that ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def fork(live: Callable[[], None]) -> int:
    """Fork a process that runs `live` and exits; return its process id."""
    _flush()  # or the fork would write it again
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _ENDING)  # not in between, in the rank's handlers
    pid = os.fork()
    if not pid:
        status = 1
        try:
            live()
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            _flush()
            os._exit(status)
    signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return pid


def take_signals(handler: Any) -> None:
    """Set a forked process's own handler for the signals that end programs, instead of the rank's."""
    for sign in _ENDING:
        signal.signal(sign, handler)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _ENDING)


def leave_signals_to_the_rank() -> None:
    """Ignore the signals that systemd and Slurm send to every process of a run: a worker ends with its server.

    This is done by a handler, because programs started by a function would inherit SIG_IGN.
    """
    take_signals(lambda *_: None)
    os.register_at_fork(after_in_child=functools.partial(take_signals, signal.SIG_DFL))


def own_group(pid: int) -> None:
    """Make a worker a process group. Both worker and server call this, as either may run first."""
    with contextlib.suppress(OSError):
        os.setpgid(pid, pid)


def end_group(pid: int) -> str:
    """Kill a worker and what it has started; returns how it ended if it had ended by itself."""
    with contextlib.suppress(OSError):
        os.killpg(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    if os.WIFSIGNALED(status):
        return f"by signal {signal.Signals(os.WTERMSIG(status)).name}"
    return f"with exit code {os.WEXITSTATUS(status)}"


def _flush() -> None:
    with contextlib.suppress(Exception):  # the reader of an output has gone
        flush_output()
