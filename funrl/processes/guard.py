"""Guard of a program, which gets SIGTERM when its parent ends.

    python -m funrl.processes.guard PROGRAM ARGUMENT ...

Ray kills children of a worker with SIGKILL. That would end torchrun's agent and leave its ranks, so this process is the
child that Ray kills, and the agent ends its ranks. It imports no torch.
"""

from __future__ import annotations

import ctypes
import signal
import subprocess
import sys
from collections.abc import Sequence

from funrl.processes.forks import PR_SET_PDEATHSIG


def guard_program(words: Sequence[str]) -> int:
    """Run a program and forward signals to it; return its exit status, 128 + number if a signal ended it."""
    _terminate_with_parent()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # which Ray blocks in its processes
    program = subprocess.Popen(words, preexec_fn=_terminate_with_parent)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, _: program.send_signal(number))
    status = program.wait()
    return 128 - status if status < 0 else status


def _terminate_with_parent() -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


if __name__ == "__main__":
    sys.exit(guard_program(sys.argv[1:]))
