"""Work on large requests in a thread beside the event loop: reading JSON, rendering, tokenising."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from json.scanner import py_make_scanner  # pyright: ignore[reportAttributeAccessIssue]
from typing import Any, TypeVar

from funrl.environments.calls import call

_T = TypeVar("_T")
ASIDE_BYTES = 1 << 15  # bytes of a request; smaller ones take milliseconds


class RequestThread:
    """Runs functions of large requests in a thread, one after another; those of others at once.

    >>> aside = RequestThread()
    >>> asyncio.run(aside.run(10, len, "abc"))
    3
    """

    def __init__(self) -> None:
        self._turn = asyncio.Lock()

    async def run(self, size: int, function: Callable[..., _T], *args: object) -> _T:
        """Call a function.

        Args:
          size: bytes of the request.
        """
        if size < ASIDE_BYTES:
            return function(*args)
        async with self._turn:
            return await call(function, *args)


class _PythonDecoder(json.JSONDecoder):
    """A decoder that lets other threads run between two values: that of C holds them up for the whole text."""

    def __init__(self) -> None:
        super().__init__()
        self.scan_once = py_make_scanner(self)


def decode_json(body: bytes) -> Any:
    """The value of a body. Raises: ValueError, RecursionError, it is no JSON."""
    if len(body) < ASIDE_BYTES:
        return json.loads(body)
    return _PythonDecoder().decode(body.decode(json.detect_encoding(body), "surrogatepass"))
