"""The HTTP application: keys, limits, and the endpoints of all dialects."""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import json
import secrets
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from funrl.environments.forms.response_templates import OPEN
from funrl.serve import chat_completions, connections, messages, responses
from funrl.serve.asks import Ask, BadRequest, Body
from funrl.serve.session import DecodeIds, Exchange, RequestThread, Session, decode_json, replies_again, request_digest

LARGEST_BODY = 64 << 20  # bytes
CHUNK_S = 0.05  # between two chunks of a stream: those of single tokens would cost as much as a small model's tokens


class Events(Protocol):
    """The events of one stream, as texts."""

    def begin(self) -> list[str]: ...
    def text(self, index: int, text: str) -> list[str]: ...
    def end(self, exchanges: Sequence[Exchange], rests: Sequence[str]) -> list[str]: ...


class Dialect(NamedTuple):
    """An endpoint that gives replies.

    Attributes:
      read: a body -> the request. Raises BadRequest.
      answer: (request, replies, head, decode) -> the whole answer.
      events: (request, head, decode) -> the events of a stream; None: it has none.
      prefix: of an answer's id.
    """

    read: Callable[[Body], Ask]
    answer: Callable[[Ask, Sequence[Exchange], dict[str, Any], DecodeIds], dict[str, Any]]
    events: Callable[[Ask, dict[str, Any], DecodeIds], Events] | None
    prefix: str


DIALECTS = {
    "/v1/chat/completions": Dialect(
        chat_completions.read_chat, chat_completions.chat_answer, chat_completions.ChatEvents, "chatcmpl-"
    ),
    "/v1/completions": Dialect(
        chat_completions.read_text, chat_completions.text_answer, chat_completions.TextEvents, "cmpl-"
    ),
    "/v1/responses": Dialect(responses.read_responses, responses.response_answer, responses.ResponseEvents, ""),
    "/v1/messages": Dialect(messages.read_messages, messages.message_answer, messages.MessageEvents, "msg_"),
    "/inference/v1/generate": Dialect(chat_completions.read_generate, chat_completions.generate_answer, None, "gen-"),
}


class Sessions:
    """The sessions of a server by their keys; only digests of keys are kept."""

    def __init__(self) -> None:
        self._by_key: dict[bytes, Session] = {}

    def open(self, session: Session, key: str = "") -> str:
        """Serve a session under a key; returns the key, a new one if none is given."""
        key = key or "funrl-" + secrets.token_urlsafe(24)
        self._by_key[_digest(key)] = session
        return key

    def close(self, key: str) -> None:
        """End a key."""
        self._by_key.pop(_digest(key), None)

    def of(self, headers: Mapping[str, str]) -> Session:
        """The session of a request. Raises BadRequest with status 401."""
        given = headers.get("x-api-key") or headers.get("authorization", "")
        scheme, _, rest = given.partition(" ")
        key = rest.strip() if scheme.lower() == "bearer" else given
        session = self._by_key.get(_digest(key)) if key else None
        if session is None:
            problem = "a key is needed: Authorization: Bearer KEY" if not key else "the key is not valid, or has ended"
            raise BadRequest(problem, status=401, code="invalid_api_key")
        return session


class _Answer(JSONResponse):
    """JSON in ASCII, which has also a text that is no Unicode, such as half of a surrogate pair."""

    def render(self, content: object) -> bytes:
        return json.dumps(content, allow_nan=False, separators=(",", ":")).encode()


def make_app(sessions: Sessions, model: str, decode: DecodeIds) -> Starlette:
    """An application that serves sessions.

    Args:
      sessions: by their keys.
      model: name of the model, which answers carry whatever a client calls it.
      decode: token ids -> text.
    """
    server = _Server(sessions, model, decode)
    routes = [Route(path, server.replies(path, dialect), methods=["POST"]) for path, dialect in DIALECTS.items()]
    routes += [
        Route("/v1/messages/count_tokens", server.guarded(server.count), methods=["POST"]),
        Route("/v1/models", server.guarded(server.models), methods=["GET"]),
        Route("/v1/models/{name:path}", server.guarded(server.models), methods=["GET"]),
        Route("/health", _health, methods=["GET"]),
    ]
    return Starlette(routes=routes, exception_handlers={HTTPException: _not_found})


class _Server:
    def __init__(self, sessions: Sessions, model: str, decode: DecodeIds):
        self._sessions = sessions
        self._model = model
        self._decode = decode
        self._aside = RequestThread()
        self._began = int(time.time())

    def guarded(self, endpoint: Callable[[Request], Any]) -> Callable[[Request], Any]:
        """An endpoint whose errors are answers."""

        async def serve(request: Request) -> Response:
            try:
                return await endpoint(request)
            except BadRequest as error:
                return _problem(request, error)
            except ClientDisconnect:
                return Response(status_code=400)

        return serve

    def replies(self, path: str, dialect: Dialect) -> Callable[[Request], Any]:
        """The endpoint of a dialect."""

        async def serve(request: Request) -> Response:
            session = self._sessions.of(request.headers)
            ask, digest = await self._read(request, session, dialect.read)
            pieces = _pieces(session, ask, digest, again=replies_again(request.headers), decode=self._decode)
            head = {"id": dialect.prefix + secrets.token_hex(12), "created": int(time.time()), "model": self._model}
            first = await anext(pieces)  # errors of the request, before the answer begins
            if ask.stream and dialect.events is not None:
                events = dialect.events(ask, head, self._decode)
                stream = _stream(events, first, pieces, path)
                return StreamingResponse(stream, media_type="text/event-stream")
            while not isinstance(first, list):
                first = await anext(pieces)
            return _Answer(dialect.answer(ask, [end.exchange for end in first], head, self._decode))

        return self.guarded(serve)

    async def count(self, request: Request) -> Response:
        session = self._sessions.of(request.headers)
        ask, _ = await self._read(request, session, messages.read_counted)
        return _Answer({"input_tokens": await session.count(ask)})

    async def _read(self, request: Request, session: Session, read: Callable[[Body], Ask]) -> tuple[Ask, bytes]:
        """The request of a body, and its digest. Raises BadRequest."""
        parts, size = await _read_body(request, session.check_body)

        def read_whole() -> tuple[Ask, bytes]:
            body = b"".join(parts)
            ask = read(Body(_json(body)))
            return dataclasses.replace(ask, size=size), request_digest(request.url.path, body)

        return await self._aside.run(size, read_whole)

    async def models(self, request: Request) -> Response:
        self._sessions.of(request.headers)
        own = {"id": self._model, "object": "model", "created": self._began, "owned_by": "funrl"}
        name = request.path_params.get("name")
        if name is None:
            return _Answer({"object": "list", "data": [own]})
        if name != self._model:
            raise BadRequest(f"there is no model {name!r}, only {self._model!r}", status=404, code="model_not_found")
        return _Answer(own)


class _Piece(NamedTuple):
    """Further text of a reply."""

    index: int
    text: str


class _End(NamedTuple):
    """A whole reply, and what of its content no piece had."""

    exchange: Exchange
    rest: str


async def _pieces(
    session: Session, ask: Ask, digest: bytes, *, again: bool, decode: DecodeIds
) -> AsyncIterator[_Piece | list[_End]]:
    """Pieces of the replies while they are sampled, if the client wants a stream; then all replies."""
    streams: dict[int, TextStream] = {}
    heard: dict[int, list[int]] = {}
    wake = asyncio.Event()

    def hear(index: int, tokens: list[int]) -> None:
        heard.setdefault(index, []).extend(tokens)
        wake.set()

    answer = asyncio.ensure_future(session.answer(ask, digest, again=again, hear=hear if ask.stream else None))
    answer.add_done_callback(lambda _: wake.set())
    calls = bool(ask.tools) and ask.tool_choice != "none"
    while not answer.done():
        await wake.wait()
        wake.clear()
        new = dict(heard)
        heard.clear()
        for index, tokens in new.items():
            if session.waits(ask):
                continue
            stream = streams.setdefault(index, TextStream(decode, (), ask.stop, calls=calls))
            text = stream.feed(tokens)
            if text:
                yield _Piece(index, text)
        if new and not answer.done():
            await asyncio.wait({answer}, timeout=CHUNK_S)
    ends = []
    if answer.cancelled():
        raise BadRequest("the key has ended with its episode", status=401, code="invalid_api_key")
    for index, exchange in enumerate(await answer):
        stream = streams.get(index)
        ends.append(_End(exchange, exchange.content if stream is None else stream.finish(exchange.content)))
    yield ends


async def _stream(
    events: Events, first: _Piece | list[_End], pieces: AsyncIterator[_Piece | list[_End]], path: str
) -> AsyncIterator[str]:
    yield "".join(events.begin())
    piece = first
    while isinstance(piece, _Piece):
        yield "".join(events.text(piece.index, piece.text))
        try:
            piece = await anext(pieces)
        except BadRequest as error:  # too late for a status
            yield _error_event(path, error)
            return
    yield "".join(events.end([end.exchange for end in piece], [end.rest for end in piece]))


async def _read_body(request: Request, check: Callable[[int], None]) -> tuple[list[bytes], int]:
    """The parts of a body and their bytes, within the limits of the server, and of `check`. Raises BadRequest.

    One that `check` refuses is still read to its end, as clients read no answer before, and is not kept.
    """
    announced = request.headers.get("content-length", "0")
    if not announced.isdecimal() or int(announced) > LARGEST_BODY:
        raise BadRequest(f"the body has {announced} bytes; {LARGEST_BODY} are allowed", status=413, code="too_large")
    parts: list[bytes] = []
    size = 0
    refused: BadRequest | None = None
    try:
        async with asyncio.timeout(connections.BODY_S):
            async for part in request.stream():
                parts.append(part)
                size += len(part)
                if size > LARGEST_BODY:
                    raise BadRequest(f"the body has more than {LARGEST_BODY} bytes", status=413, code="too_large")
                try:
                    check(max(size, int(announced)))
                except BadRequest as error:
                    refused = error
                    parts.clear()
    except TimeoutError:
        raise BadRequest(f"the body took longer than {connections.BODY_S:g} s", status=408, code="timeout") from None
    if refused is not None:
        raise refused
    return parts, size


def _json(body: bytes) -> Any:
    try:
        return decode_json(body)
    except (ValueError, RecursionError) as error:
        raise BadRequest(f"the body is not JSON: {error}") from None


def _problem(request: Request, error: BadRequest) -> Response:
    value = _error_value(request.url.path, error)
    # A connection whose body was not read to its end cannot have a further request.
    headers = {"connection": "close"} if error.status in (401, 408, 413) else None
    return _Answer(value, status_code=error.status, headers=headers)


def _error_value(path: str, error: BadRequest) -> dict[str, Any]:
    """An error as the clients of an endpoint read it."""
    if not path.startswith("/v1/messages"):
        return _error(error)
    kinds = {401: "authentication_error", 413: "request_too_large", 404: "not_found_error", 500: "api_error"}
    kind = kinds.get(error.status, "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": str(error)}}


def _error_event(path: str, error: BadRequest) -> str:
    """An error as an event of a stream, which clients of two dialects know by its name."""
    value = _error_value(path, error)
    if path == "/v1/responses":
        value = {"type": "error", "sequence_number": 0} | {x: value["error"][x] for x in ("message", "param", "code")}
    name = "event: error\n" if "type" in value else ""
    return f"{name}data: {json.dumps(value)}\n\n"


def _error(error: BadRequest) -> dict[str, Any]:
    kinds = {401: "authentication_error", 500: "server_error"}
    kind = kinds.get(error.status, "invalid_request_error")
    return {"error": {"message": str(error), "type": kind, "param": error.field or None, "code": error.code}}


async def _health(request: Request) -> Response:
    return _Answer({"status": "ok"})


async def _not_found(request: Request, error: Any) -> Response:
    served = ", ".join(DIALECTS)
    known = BadRequest(
        f"{request.method} {request.url.path} is not served; POST {served} are",
        status=error.status_code,
        code="unknown_url",
    )
    return _Answer(_error(known), status_code=error.status_code)


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()


_UNFINISHED = "\N{REPLACEMENT CHARACTER}"  # what tokenizers show of a character whose bytes have not all arrived


class TextStream:
    """The text of one reply, as much of it as cannot change any more.

    Attributes:
      text: given out so far.
    """

    def __init__(self, decode: DecodeIds, before: Sequence[int], hidden: Sequence[str], *, calls: bool):
        """Make it.

        Args:
          decode: token ids -> text.
          before: the last tokens of the prompt, which some tokenizers need for a text's first space.
          hidden: stop texts; no part of them is sent.
          calls: hold back what may be a call of a function.
        """
        self.text = ""
        self._decode = decode
        self._ids = list(before[-1:])
        self._begin = 0
        self._end = len(self._ids)
        self._whole = ""
        self._hidden = [*hidden, *([OPEN] if calls else [])]
        self._calls = calls

    def feed(self, tokens: Sequence[int]) -> str:
        """Take further tokens, and give out what they add."""
        self._ids += tokens
        known = self._decode(self._ids[self._begin : self._end])
        text = self._decode(self._ids[self._begin :])
        if len(text) > len(known) and not text.endswith(_UNFINISHED):
            self._whole += text[len(known) :]
            self._begin = self._end
            self._end = len(self._ids)
        return self._give(self._safe())

    def finish(self, content: str) -> str:
        """The rest of a reply's content, once it is known."""
        rest = content[len(self.text) :] if content.startswith(self.text) else ""
        self.text += rest
        return rest

    def _give(self, upto: int) -> str:
        new = self._whole[len(self.text) : upto]
        self.text += new
        return new

    def _safe(self) -> int:
        """Characters that are content whatever follows."""
        text = self._whole
        safe = len(text)
        for hidden in self._hidden:
            place = text.find(hidden)
            if place >= 0:
                safe = min(safe, place)
            tails = range(min(len(hidden) - 1, len(text)), 0, -1)
            safe = min(safe, next((len(text) - n for n in tails if text.endswith(hidden[:n])), safe))
        if self._calls:  # a content with calls has no white space around it
            safe = len(text[:safe].rstrip())
            if not text[:safe].strip():
                return 0
        return max(safe, len(self.text))
