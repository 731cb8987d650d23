"""The WebSocket client against servers that are silent, deaf or no WebSocket."""

import asyncio
import base64
import contextlib
import hashlib
import time

import pytest

from funrl.foreign import websocket
from funrl.foreign.load import named_environment
from funrl.foreign.websocket import GUID, WebSocketError, connect_websocket
from funrl.loading import LoadError


@contextlib.asynccontextmanager
async def serving(handle):
    """A server on loopback; gives its port."""
    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()


async def shake_hands(reader, writer):
    """Accept a client; returns the first line of its request."""
    line, *fields = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
    key = next(field.partition(": ")[2] for field in fields if field.startswith("Sec-WebSocket-Key"))
    accept = base64.b64encode(hashlib.sha1(key.encode() + GUID).digest()).decode()
    writer.write(f"HTTP/1.1 101 Switching Protocols\r\nSec-WebSocket-Accept: {accept}\r\n\r\n".encode())
    return line


def test_the_end_does_not_wait_for_a_server_that_does_not_read(monkeypatch):
    monkeypatch.setattr(websocket, "GOODBYE_S", 0.2)

    async def main():
        ended = asyncio.Event()

        async def deaf(reader, writer):
            await shake_hands(reader, writer)
            writer.transport.pause_reading()
            await ended.wait()
            writer.transport.abort()

        async with serving(deaf) as port:
            begun = time.monotonic()
            with pytest.raises(TimeoutError):
                async with connect_websocket(f"ws://127.0.0.1:{port}") as connection:
                    async with asyncio.timeout(0.2):
                        await connection.send("x" * (24 << 20))
            took = time.monotonic() - begun
            ended.set()
        return took

    assert asyncio.run(main()) < 10  # it would never end


def test_a_silent_server_and_one_of_another_protocol_are_named_and_left(monkeypatch):
    monkeypatch.setattr(websocket, "CONNECT_S", 0.2)

    async def main():
        left = asyncio.Semaphore(0)

        async def answer(reader, writer):
            line = (await reader.readuntil(b"\r\n\r\n")).decode()
            if "/other" in line:
                writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
            with contextlib.suppress(ConnectionError):
                await reader.read()
            writer.close()
            left.release()

        async with serving(answer) as port:
            with pytest.raises(WebSocketError, match=rf"ws://127.0.0.1:{port}/: no answer within 0.2 s"):
                async with connect_websocket(f"ws://127.0.0.1:{port}/"):
                    pass
            with pytest.raises(WebSocketError, match=r"the server answers 'HTTP/1.1 200 OK', not as a WebSocket"):
                async with connect_websocket(f"ws://127.0.0.1:{port}/other"):
                    pass
            async with asyncio.timeout(10):  # the server sees both ends
                await left.acquire()
                await left.acquire()

    asyncio.run(main())


def test_the_query_of_a_url_is_sent():
    async def main():
        lines = []

        async def accept(reader, writer):
            lines.append(await shake_hands(reader, writer))
            await reader.read()
            writer.close()

        async with serving(accept) as port:
            for path in ("", "?key=1", "/ws?key=1&b=2"):
                async with connect_websocket(f"ws://127.0.0.1:{port}{path}"):
                    pass
        return lines

    assert asyncio.run(main()) == [f"GET {path} HTTP/1.1" for path in ("/", "/?key=1", "/ws?key=1&b=2")]


def test_a_url_of_openenv_that_is_none_and_a_server_that_speaks_no_http_are_named():
    with pytest.raises(LoadError, match=r"no OpenEnv server answers at http://localhost:port/schema \(InvalidURL"):
        named_environment("openenv:localhost:port")

    async def main():
        async def babble(reader, writer):
            writer.write(b"SSH-2.0\r\n\r\n")
            writer.close()

        async with serving(babble) as port:
            with pytest.raises(LoadError, match=rf"at http://127.0.0.1:{port}/a/schema\?key=1 \(BadStatusLine"):
                await asyncio.to_thread(named_environment, f"openenv:127.0.0.1:{port}/a/?key=1")

    asyncio.run(main())
