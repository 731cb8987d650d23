"""A relay at a fixed address to the endpoints of all episodes of a machine, for NeMo-Gym, which knows one address.

    python examples/nemo_gym_relay.py 8017

starts it for NeMo-Gym's `policy_base_url=http://127.0.0.1:8017/v1` and examples/env_nemo_gym.py. The key of an episode
is in the body of a request, as its `user`. It is written by hand because it passes bytes on and reads one field.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import sys
from collections.abc import Mapping

_LOOPBACK = "127.0.0.1"
RELAYED_HEAD_S = 10.0  # for the head of a request
RELAYED_BODY_S = 60.0  # for its body
RELAYED_HEAD = 1 << 16  # bytes
LARGEST_RELAYED = 64 << 20  # bytes of a body
EPISODE_USER = re.compile(r"(\d{1,5})\.([\w-]{1,200})")
REQUEST = re.compile(r"POST (/[!-~]*) HTTP/1\.[01]")
RELAYED_PATHS = "/v1/"  # beginning of the paths that are passed on
PASSED_HEADERS = ("x-stainless-retry-count",)


class _Refused(Exception):
    """A request that is not passed on.

    Attributes:
      status: of the answer.
    """

    def __init__(self, status: str, problem: str):
        super().__init__(problem)
        self.status = status


async def relay(port: int) -> None:
    """Relay what arrives at a port of this machine. Raises OSError if something else listens there."""
    server = await asyncio.start_server(_serve, _LOOPBACK, port, limit=RELAYED_HEAD, backlog=1024)
    print(f"relaying at http://{_LOOPBACK}:{port}{RELAYED_PATHS}", flush=True)
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
        raise _Refused("400 Bad Request", "the request is no POST of HTTP/1.1")
    fields = dict(line.lower().split(":", 1) for line in lines if ":" in line)
    _check_sender(request[1], fields)
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
        asks.write(_head(f"POST {request[1]} HTTP/1.1", len(body), f"authorization: Bearer {key}", *passed) + body)
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


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(relay(int(sys.argv[1])))
