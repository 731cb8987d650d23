"""Clients that are slow, silent or too large, over raw sockets: each is cut, and costs the others nothing."""

import asyncio
import contextlib
import json
import random
import socket

import pytest
from small_chats import engine_of, text
from small_servers import LIMITS, LONG, needs_clients, scripted, serve
from test_server import GOOD, ask

from funrl.rollout.policy import Policy
from funrl.serve.endpoint import _SERVERS, serve_policy

pytestmark = needs_clients
FILE = {"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}
MANY = 20  # slow clients at once


@pytest.fixture
def short(monkeypatch):
    """Limits of time that a test can wait for."""
    connections = pytest.importorskip("funrl.serve.connections")
    for name in ("HEAD_S", "BODY_S", "UNREAD_S", "KEEP_ALIVE_S"):
        monkeypatch.setattr(connections, name, 0.4)


def request_of(endpoint, body=GOOD, **headers):
    """A request, as bytes."""
    data = json.dumps(body).encode()
    given = {"host": "x", "authorization": f"Bearer {endpoint.api_key}", "content-length": len(data), **headers}
    head = "".join(f"{name}: {value}\r\n" for name, value in given.items())
    return f"POST /v1/chat/completions HTTP/1.1\r\n{head}\r\n".encode() + data


def address_of(endpoint):
    host, port = endpoint.base_url.removeprefix("http://").removesuffix("/v1").split(":")
    return host, int(port)


async def answer_to(endpoint, at_once, slowly=b"", every_s=0.03):
    """What the server has answered when it cuts the connection.

    Args:
      at_once: sent first.
      slowly: sent after it, a byte at a time, over and over.
    """
    reader, writer = await asyncio.open_connection(*address_of(endpoint))
    received = bytearray()

    async def receive():
        with contextlib.suppress(ConnectionError):
            while part := await reader.read(1 << 16):
                received.extend(part)

    receiving = asyncio.create_task(receive())
    writer.write(at_once)
    place = 0
    while not receiving.done():
        if slowly:
            writer.write(slowly[place % len(slowly) :][:1])
            place += 1
        await asyncio.wait({receiving}, timeout=every_s)
    writer.close()
    return bytes(received)


def head_end(data):
    return data.index(b"\r\n\r\n") + 4


SLOW = {  # what is sent at once, what is sent slowly, and the status of the answer; 0: none
    "silence": lambda endpoint: (b"", b"", 0),
    "a head": lambda endpoint: (b"GET /health HTTP/1.1\r\n", b"a: b\r\n", 0),
    "a body": lambda endpoint: (request_of(endpoint, **{"content-length": 9999}), b" ", 408),
    "a body without a key": lambda endpoint: (
        request_of(endpoint, authorization="x", **{"content-length": 9999}),
        b" ",
        401,
    ),
    "a body that nothing reads": lambda endpoint: (
        b"GET /health HTTP/1.1\r\nhost: x\r\ncontent-length: 9999\r\n\r\n",
        b" ",
        200,
    ),
    "a head after an answer": lambda endpoint: (b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n", b"GET ", 200),
    "nothing after an answer": lambda endpoint: (b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n", b"", 200),
}


@pytest.mark.parametrize("what", SLOW)
def test_slow_clients_are_cut_and_others_are_served_meanwhile(what, short):
    async def program(endpoint):
        at_once, slowly, status = SLOW[what](endpoint)
        slow = [asyncio.create_task(answer_to(endpoint, at_once, slowly)) for _ in range(MANY)]
        good = [await ask(endpoint) for _ in range(3)]
        return good, await asyncio.gather(*slow), status

    good, answers, status = serve(engine_of(), program)
    assert [status for status, _ in good] == [200] * 3
    for answer in answers:
        assert answer[9:12].decode() == (str(status) if status else ""), answer


def test_a_client_that_does_not_read_its_answers_is_cut(short):
    async def program(endpoint):
        loop = asyncio.get_running_loop()
        connections = _SERVERS[loop].server._server.server_state.connections
        body = GOOD | {"n": 64, "logprobs": True}
        length = len(await answer_to(endpoint, request_of(endpoint, body, connection="close")))
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 12)
            client.setblocking(False)
            await loop.sock_connect(client, address_of(endpoint))
            await loop.sock_sendall(client, request_of(endpoint, body) * 12)
            async with asyncio.timeout(60):
                while not connections:
                    await asyncio.sleep(0.01)
                while connections:
                    await asyncio.sleep(0.01)
            received = 0
            with contextlib.suppress(ConnectionError):
                while part := await loop.sock_recv(client, 1 << 16):
                    received += len(part)
        return received, 12 * length, await ask(endpoint)

    received, whole, good = serve(scripted(*["x" * 200] * 5000), program)
    assert received < whole and good[0] == 200


def test_a_body_whose_length_is_not_announced_is_limited_too(monkeypatch):
    monkeypatch.setattr("funrl.serve.app.LARGEST_BODY", 1 << 12)

    async def program(endpoint):
        request = request_of(endpoint, GOOD, **{"transfer-encoding": "chunked"})
        head = request[: request.index(b"\r\n\r\n")].replace(b"content-length", b"x-length")
        return await answer_to(endpoint, head + b"\r\n\r\n", b"400\r\n" + b" " * 1024 + b"\r\n", every_s=0)

    assert serve(engine_of(), program).startswith(b"HTTP/1.1 413")


WRONG = {
    "a long line": b"GET /" + b"a" * 300_000,
    "a long header": b"GET /health HTTP/1.1\r\nhost: x\r\nlong: " + b"a" * 300_000,
    "many headers": b"GET /health HTTP/1.1\r\nhost: x\r\n" + b"".join(b"h%d: v\r\n" % n for n in range(40_000)),
    "two lengths": b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 3\r\ncontent-length: 4\r\n\r\nabcd",
    "a negative length": b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: -3\r\n\r\nabcd",
    "no HTTP": random.Random(0).randbytes(1 << 17),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_wrong_head_is_refused(what):
    async def program(endpoint):
        return await answer_to(endpoint, WRONG[what]), await ask(endpoint)

    answer, good = serve(engine_of(), program)
    assert answer.startswith(b"HTTP/1.1 400") or (len(WRONG[what]) > 1 << 16 and not answer)
    assert good[0] == 200


@pytest.mark.parametrize("stream", [False, True])
def test_a_key_ends_with_its_episode_also_for_a_request_that_is_being_answered(stream):
    async def main():
        asked = asyncio.Event()

        async def complete(*request):
            asked.set()
            await asyncio.Event().wait()

        async with serve_policy(Policy(complete, LONG, 3, LIMITS)) as (place, _):
            begun = asyncio.create_task(ask(place, body=GOOD | {"stream": stream}))
            await asked.wait()
        return await begun, await ask(place)

    for status, answer in asyncio.run(main()):
        assert status == 401 and "ended" in json.loads(answer)["error"]["message"]


def test_a_server_that_does_not_start_fails_one_episode_and_the_next_one_starts_it(monkeypatch):
    import uvicorn

    startup = uvicorn.Server.startup
    errors = [OSError("no descriptor")]

    async def fragile(server, sockets=None):
        await asyncio.sleep(0.05)  # the other episode waits meanwhile
        if errors:
            raise errors.pop()
        await startup(server, sockets)

    monkeypatch.setattr(uvicorn.Server, "startup", fragile)

    async def status_of_health():
        async with serve_policy(Policy(None, LONG, 3, LIMITS)) as (place, _):
            return (await ask(place, "/health", method="GET"))[0]

    async def main():
        async with asyncio.timeout(30):
            return await asyncio.gather(status_of_health(), status_of_health(), return_exceptions=True)

    first, second = asyncio.run(main())
    assert isinstance(first, OSError) and "no descriptor" in str(first) and second == 200


FOREIGN = {  # nothing that a client names is opened, loaded or executed
    "a template": (400, {"body": GOOD | {"chat_template": "{{ ''.__class__ }}"}}),
    "arguments of the template": (400, {"body": GOOD | {"chat_template_kwargs": {"a": "{{ 1 }}"}}}),
    "a picture of a file": (400, {"body": GOOD | {"messages": [{"role": "user", "content": [FILE]}]}}),
    "a grammar": (400, {"body": GOOD | {"structured_outputs": {"regex": "(a+)+$"}}}),
    "an adapter": (400, {"body": GOOD | {"lora_path": "/etc/passwd"}}),
    "a processor": (400, {"body": GOOD | {"logits_processors": ["os.system"]}}),
    "another model": (200, {"body": GOOD | {"model": "/etc/passwd"}}),
    "a path of a model": (404, {"path": "/v1/models/../../etc/passwd", "method": "GET"}),
    "a path": (404, {"path": "/../../etc/passwd", "method": "GET"}),
    "a coded path": (404, {"path": "/%2e%2e/%2e%2e/etc/passwd", "method": "GET"}),
    "a text with marks of a template": (
        200,
        {"body": GOOD | {"messages": [{"role": "user", "content": "{{ 7 * 7 }}"}]}},
    ),
}


def test_no_file_and_no_code_reaches_the_server():
    async def program(endpoint):
        answers = [await ask(endpoint, **asked) for _, asked in FOREIGN.values()]
        return answers, endpoint.session.trajectories()

    answers, ends = serve(engine_of(), program)
    for (what, (status, _)), (answered, text_of) in zip(FOREIGN.items(), answers, strict=True):
        assert answered == status and b"root:" not in text_of, what
    assert "{{ 7 * 7 }}" in text(ends[-1].token_ids())
