"""Processes that end with their parent. It imports no torch."""

from __future__ import annotations

import ctypes
import signal
import sys

PR_SET_PDEATHSIG = 1


def end_with_parent() -> None:
    """On Linux have this process killed when its parent ends, however that ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
