"""Standard streams that never end a run: a reader may leave, a device may be full, a stream may be closed.

It imports no torch.
"""

from __future__ import annotations

import contextlib
import errno
import os
import sys
from collections.abc import Iterable, Iterator
from typing import Any, TextIO

GONE = (errno.EPIPE, errno.EBADF)  # nobody will read it again


class LastingStream:
    """A text stream that drops what cannot be written. Everything else is the stream's own."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except (OSError, ValueError) as error:
            self._drop(error)
            return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except (OSError, ValueError) as error:
            self._drop(error)

    def _drop(self, error: Exception) -> None:
        """Drop what the stream has not written yet, and all later output where nobody is left to read it."""
        with contextlib.suppress(OSError, ValueError):
            number = self._stream.fileno()
            before = os.dup(number)
            discard(number)
            with contextlib.suppress(OSError, ValueError):
                self._stream.flush()
            if getattr(error, "errno", None) not in GONE:
                os.dup2(before, number)
            os.close(before)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def discard(number: int) -> None:
    """Have what is written to a file descriptor go nowhere from here on."""
    nowhere = os.open(os.devnull, os.O_RDWR)
    if nowhere != number:
        os.dup2(nowhere, number)
        os.close(nowhere)


@contextlib.contextmanager
def lasting_output() -> Iterator[None]:
    """Have the standard streams drop what cannot be written, for as long as the context lasts."""
    for number in range(3):  # else the next file that is opened gets the number of one that was closed
        try:
            os.fstat(number)
        except OSError:
            discard(number)
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = (stream if stream is None else LastingStream(stream) for stream in before)
    try:
        yield
    finally:
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, LastingStream):
                stream.flush()  # so that nothing is left for the end of the program, where it would be an error
        sys.stdout, sys.stderr = before


def flush_output() -> None:
    """Write out what has been printed, where there is somewhere to print to."""
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()
