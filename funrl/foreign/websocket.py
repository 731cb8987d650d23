"""A small WebSocket client of text messages on an asyncio event loop.

It is written here because a client of text frames is a page, and the packages that have one bring servers along.
Reference: RFC 6455, https://www.rfc-editor.org/rfc/rfc6455
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import os
import struct
from collections.abc import AsyncIterator
from urllib.parse import urlsplit

GUID = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
TEXT, CLOSE, PING, PONG = 1, 8, 9, 10  # opcodes
FINAL, MASKED = 0x80, 0x80
LARGEST_TEXT_BYTES = 100 << 20  # bytes
LARGEST_ANSWER_HEAD = 1 << 16
CONNECT_S = 10.0
GOODBYE_S = 2.0
ACCEPT = "sec-websocket-accept"
SECURE = ("wss", "https")


class WebSocketError(ConnectionError):
    """A connection that cannot be made, or that the other side has broken or ended."""


class WebSocket:
    """A connection; see `connect_websocket`."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter):
        self._reader = reader
        self._writer = writer

    async def send(self, text: str) -> None:
        """Send a message."""
        await self._send_frame(TEXT, text.encode())

    async def receive(self) -> str:
        """The next message. Raises WebSocketError at the end of the connection."""
        parts: list[bytes] = []
        while True:
            try:
                final, opcode, payload = await self._frame()
            except (asyncio.IncompleteReadError, OSError) as error:
                raise WebSocketError(f"the connection has ended: {error!r}") from error
            if opcode == PING:
                await self._send_frame(PONG, payload)
            elif opcode == CLOSE:
                raise WebSocketError(
                    f"the other side has ended the connection: {payload[2:].decode('utf-8', 'replace')}"
                )
            elif opcode != PONG:
                parts.append(payload)
                if sum(map(len, parts)) > LARGEST_TEXT_BYTES:
                    raise WebSocketError(f"a message has more than {LARGEST_TEXT_BYTES} bytes")
                if final:
                    return b"".join(parts).decode("utf-8", "replace")

    async def close(self) -> None:
        """End the connection, within `GOODBYE_S` also where the other side does not read."""
        try:
            with contextlib.suppress(OSError):
                async with asyncio.timeout(GOODBYE_S):
                    await self._send_frame(CLOSE, struct.pack("!H", 1000))
                    self._writer.close()
                    await self._writer.wait_closed()
        finally:
            self._writer.transport.abort()

    async def _frame(self) -> tuple[bool, int, bytes]:
        """Whether the next frame ends its message, its opcode and its payload."""
        first, second = await self._reader.readexactly(2)
        size = second & 0x7F
        if size == 126:
            (size,) = struct.unpack("!H", await self._reader.readexactly(2))
        elif size == 127:
            (size,) = struct.unpack("!Q", await self._reader.readexactly(8))
        if second & MASKED or size > LARGEST_TEXT_BYTES:
            raise WebSocketError(f"the server sends a frame that is masked or too large: {size} bytes")
        return bool(first & FINAL), first & 0x0F, await self._reader.readexactly(size)

    async def _send_frame(self, opcode: int, payload: bytes) -> None:
        mask = os.urandom(4)
        size = len(payload)
        if size < 126:
            head = struct.pack("!BB", FINAL | opcode, MASKED | size)
        elif size < 1 << 16:
            head = struct.pack("!BBH", FINAL | opcode, MASKED | 126, size)
        else:
            head = struct.pack("!BBQ", FINAL | opcode, MASKED | 127, size)
        key = int.from_bytes((mask * (size // 4 + 1))[:size], "little")
        masked = (int.from_bytes(payload, "little") ^ key).to_bytes(size, "little")
        self._writer.write(head + mask + masked)
        await self._writer.drain()


@contextlib.asynccontextmanager
async def connect_websocket(url: str) -> AsyncIterator[WebSocket]:
    """Connect to a server, and end the connection at the end of the context.

    Args:
      url: ws://, wss://, http:// or https://.

    Raises:
      WebSocketError: nothing listens there, or it speaks no WebSocket.
    """
    place = urlsplit(url)
    secure = place.scheme in SECURE
    port = place.port or (443 if secure else 80)
    target = (place.path or "/") + (f"?{place.query}" if place.query else "")
    try:
        async with asyncio.timeout(CONNECT_S):
            reader, writer = await asyncio.open_connection(place.hostname, port, ssl=secure or None)
            try:
                await _shake_hands(reader, writer, f"{place.hostname}:{port}", target)
            except BaseException:
                writer.transport.abort()
                raise
    except (OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError) as error:
        # asyncio's TimeoutError has no text.
        raise WebSocketError(f"{url}: {str(error) or f'no answer within {CONNECT_S:g} s'}") from error
    connection = WebSocket(reader, writer)
    try:
        yield connection
    finally:
        await connection.close()


async def _shake_hands(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, host: str, target: str) -> None:
    key = base64.b64encode(os.urandom(16))
    lines = [
        f"GET {target} HTTP/1.1",
        f"Host: {host}",
        "Upgrade: websocket",
        "Connection: Upgrade",
        f"Sec-WebSocket-Key: {key.decode()}",
        "Sec-WebSocket-Version: 13",
    ]
    writer.write("\r\n".join([*lines, "", ""]).encode())
    await writer.drain()
    head = (await reader.readuntil(b"\r\n\r\n"))[:LARGEST_ANSWER_HEAD].decode("latin-1")
    status, *fields = head.split("\r\n")
    expected = base64.b64encode(hashlib.sha1(key + GUID).digest()).decode()
    accepted = [value.strip() for name, _, value in (f.partition(":") for f in fields) if name.lower() == ACCEPT]
    if status.split(" ")[1:2] != ["101"] or accepted != [expected]:
        raise WebSocketError(f"the server answers {status!r}, not as a WebSocket")
