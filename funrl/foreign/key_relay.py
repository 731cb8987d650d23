"""A relay at a fixed address to the endpoints of all episodes of a machine, for programs that know one address.

The key of an episode is then in the body of a request, as its `user`. It is written by hand because it passes bytes on
and reads one field.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import threading
from collections.abc import Mapping
from concurrent.futures import Future
from urllib.parse import urlsplit
from urllib.request import urlopen

from funrl.rollout.episodes import Endpoint

_LOOPBACK = "127.0.0.1"
RELAYED_HEAD_S = 10.0  # for the head of a request
RELAYED_BODY_S = 60.0  # for its body
RELAYED_HEAD = 1 << 16  # bytes
LARGEST_RELAYED = 64 << 20  # bytes of a body
RELAY_MARK = b'{"relay": "funrl"}'  # answer to any GET, by which other processes of the machine know a relay
OPEN_S = 10.0  # to begin to listen, and for another relay to answer
EPISODE_USER = re.compile(r"(\d{1,5})\.([\w-]{1,200})")
REQUEST = re.compile(r"(GET|POST) (/[!-~]*) HTTP/1\.[01]")
RELAYED_PATHS = "/v1/"  # beginning of the paths that are passed on
PASSED_HEADERS = ("x-stainless-retry-count",)

_OPENED: dict[int, Future[None]] = {}  # by port, in this process
_LOCK = threading.Lock()


class _Refused(Exception):
    """A request that is not passed on.

    Attributes:
      status: of the answer.
    """

    def __init__(self, status: str, problem: str):
        super().__init__(problem)
        self.status = status


def user_of(endpoint: Endpoint) -> str:
    """The field `user` of the requests of an episode."""
    return f"{urlsplit(endpoint.base_url).port}.{endpoint.api_key}"


def open_relay(port: int) -> None:
    """Relay what arrives at a port of this machine, until the process ends, unless another process does so.

    Raises:
      OSError: something else listens there.
    """
    with _LOCK:
        begins = port not in _OPENED
        listening = _OPENED.setdefault(port, Future())
    if begins:
        threading.Thread(target=_relay_here, args=(port, listening), name="relay", daemon=True).start()
    try:
        listening.result(OPEN_S)
    except OSError as error:
        with _LOCK:
            _OPENED.pop(port, None)
        with contextlib.suppress(OSError), urlopen(f"http://{_LOOPBACK}:{port}/", timeout=OPEN_S) as answer:
            if answer.read(len(RELAY_MARK)) == RELAY_MARK:
                return
        raise OSError(f"cannot listen at {_LOOPBACK}:{port} ({error}); choose another port") from error


def _relay_here(port: int, listening: Future[None]) -> None:
    with contextlib.suppress(OSError):
        asyncio.run(_relay(port, listening))


async def _relay(port: int, listening: Future[None]) -> None:
    try:
        server = await asyncio.start_server(_serve, _LOOPBACK, port, limit=RELAYED_HEAD, backlog=1024)
    except OSError as error:
        listening.set_exception(error)
        raise
    listening.set_result(None)
    await server.serve_forever()


async def _serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Pass one request on, and its answer back."""
    try:
        await _pass_on(reader, writer)
    except _Refused as refused:
        body = json.dumps({"error": {"message": str(refused), "type": "invalid_request_error"}}).encode()
        writer.write(_head(f"HTTP/1.1 {refused.status}", len(body)) + body)
    except (OSError, EOFError, ValueError, TimeoutError):  # a client or an endpoint is gone, or is too slow
        writer.transport.abort()
    finally:
        with contextlib.suppress(OSError):
            await writer.drain()
            writer.close()


async def _pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    async with asyncio.timeout(RELAYED_HEAD_S):
        head = await reader.readuntil(b"\r\n\r\n")
    first, *lines = head.decode("latin-1").split("\r\n")
    request = REQUEST.fullmatch(first)
    if request is None:
        raise _Refused("400 Bad Request", "the request is not one of HTTP/1.1")
    if request[1] == "GET":
        writer.write(_head("HTTP/1.1 200 OK", len(RELAY_MARK)) + RELAY_MARK)
        return
    fields = dict(line.lower().split(":", 1) for line in lines if ":" in line)
    _check_sender(request[2], fields)
    length = fields.get("content-length", "").strip()
    if not length.isdecimal() or int(length) > LARGEST_RELAYED:
        raise _Refused("413 Payload Too Large", f"a body needs a content-length of at most {LARGEST_RELAYED}")
    async with asyncio.timeout(RELAYED_BODY_S):
        body = await reader.readexactly(int(length))
    port, key = _episode_of(body)
    passed = [f"{name}: {fields[name].strip()}" for name in PASSED_HEADERS if name in fields]
    try:
        answers, asks = await asyncio.open_connection(_LOOPBACK, port)
    except OSError as error:
        raise _Refused("401 Unauthorized", f"the episode of `user` has ended ({error})") from error
    try:
        asks.write(_head(f"POST {request[2]} HTTP/1.1", len(body), f"authorization: Bearer {key}", *passed) + body)
        tasks = [asyncio.ensure_future(each) for each in (_copy(answers, writer), _until_gone(reader))]
        done, left = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in left:
            task.cancel()
        await asyncio.gather(*done)
    finally:
        asks.close()  # where the client is gone, the endpoint ends its request


async def _copy(answers: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Pass an answer back."""
    while data := await answers.read(RELAYED_HEAD):
        writer.write(data)
        await writer.drain()


async def _until_gone(reader: asyncio.StreamReader) -> None:
    """Wait until a client has closed its connection."""
    while await reader.read(RELAYED_HEAD):
        pass
    raise EOFError("the client is gone")


def _check_sender(path: str, fields: Mapping[str, str]) -> None:
    """Refuse what a page in a browser of this machine could send, or what is for another server."""
    if "origin" in fields:
        raise _Refused("403 Forbidden", "requests of web pages are not passed on")
    kind = fields.get("content-type", "").split(";")[0].strip()
    if kind != "application/json":
        raise _Refused("415 Unsupported Media Type", f"the content-type is {kind!r}; application/json is needed")
    if not path.startswith(RELAYED_PATHS) or ".." in path:
        raise _Refused("404 Not Found", f"the path {path:.100} does not begin with {RELAYED_PATHS}")


def _episode_of(body: bytes) -> tuple[int, str]:
    """Port and key of the endpoint that a body names."""
    try:
        values = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise _Refused("400 Bad Request", f"the body is not JSON: {error}") from error
    user = EPISODE_USER.fullmatch(str(values.get("user"))) if isinstance(values, dict) else None
    if user is None or not 0 < int(user[1]) < 1 << 16:
        raise _Refused("401 Unauthorized", "the field `user` must be what the episode's request has")
    return int(user[1]), user[2]


def _head(first: str, length: int, *further: str) -> bytes:
    lines = (first, f"host: {_LOOPBACK}", "content-type: application/json", f"content-length: {length}")
    return "\r\n".join((*lines, "connection: close", *further, "", "")).encode()
