"""Connections with limits of time: a client that is slow or silent holds one connection, and not for long."""

from __future__ import annotations

import asyncio
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

HEAD_S = 10.0  # for the head of a request, from the connection or from its first byte on
BODY_S = 60.0  # for a body to arrive
UNREAD_S = 60.0  # for a client to take what it was sent
KEEP_ALIVE_S = 75  # between two requests
LARGEST_HEAD = 1 << 16  # bytes that are kept of a head that is not complete


class LimitedConnection(H11Protocol):
    """A connection that is cut when its client takes too long.

    uvicorn itself limits only the time between two requests.
    """

    def __init__(self, *args: Any, **named: Any):
        super().__init__(*args, **named)
        self._in_head = False
        self._arriving: asyncio.TimerHandle | None = None
        self._leaving: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        """Begin the time of the first head."""
        super().connection_made(transport)
        self._time_head()

    def data_received(self, data: bytes) -> None:
        """Begin the time of a head, or end it."""
        self._time_head()
        super().data_received(data)
        self._time_head()

    def pause_writing(self) -> None:
        """Begin the time of a client that does not read its answer."""
        super().pause_writing()
        self._leaving = self._leaving or self.loop.call_later(UNREAD_S, self._cut)

    def resume_writing(self) -> None:
        """End that time."""
        super().resume_writing()
        self._leaving = _ended(self._leaving)

    def connection_lost(self, exc: Exception | None) -> None:
        """End all times."""
        self._arriving = _ended(self._arriving)
        self._leaving = _ended(self._leaving)
        super().connection_lost(exc)

    def on_response_complete(self) -> None:
        """Begin the time of a body that nothing has read. Before that, the application limits it."""
        super().on_response_complete()
        if self.conn.their_state is h11.SEND_BODY:
            self._arriving = self._arriving or self.loop.call_later(HEAD_S, self._cut)

    def _time_head(self) -> None:
        """Bound the time of a whole head, not of each byte."""
        in_head = self.conn.their_state is h11.IDLE
        if in_head == self._in_head:
            return
        self._in_head = in_head
        self._arriving = _ended(self._arriving)
        if in_head:
            self._arriving = self.loop.call_later(HEAD_S, self._cut)

    def _cut(self) -> None:
        self.transport.abort()


def _ended(timer: asyncio.TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()
