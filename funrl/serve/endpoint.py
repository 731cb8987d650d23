"""Endpoints of episodes: a server beside the engine's steps, with a key for each episode.

async with serve_policy(policy) as (endpoint, session):
reward = await agent(endpoint.base_url, endpoint.api_key)
episode = Episode(session.trajectories(), {"policy": reward})

An environment that calls `policy.endpoint` has the same without this file; see `funrl.rollout.policy.Policy`.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import logging
import signal
import socket
from collections.abc import AsyncIterator, Callable
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from funrl.data.pictures import picture_form_of
from funrl.environments.chat import TemplateChat
from funrl.environments.forms.response_templates import END_THINK, OPEN
from funrl.rollout.episodes import Endpoint
from funrl.rollout.policy import LimitReached, Policy
from funrl.serve.asks import Ask
from funrl.serve.session import DecodeIds, Sampler, Session, Speech

_log = logging.getLogger(__name__)

_LOOPBACK = "127.0.0.1"
START_S = 30.0
STOP_S = 5.0
EPISODE_MODEL = "policy"  # name of the model of an episode
KEPT_EXCHANGES = 4096  # exchanges that a server of a model remembers


class ServedAgent(NamedTuple):
    """An agent of an episode that is served, and what was said."""

    endpoint: Endpoint
    session: Session


class HTTPServer:
    """A running server of sessions on the current event loop."""

    def __init__(self, app: Any, host: str = _LOOPBACK, port: int = 0):
        import uvicorn

        from funrl.serve.connections import KEEP_ALIVE_S, LARGEST_HEAD, LimitedConnection

        self.listening = listening_socket(host, port)
        config = uvicorn.Config(
            app,
            log_level="error",
            access_log=False,
            lifespan="off",
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=int(STOP_S),
            h11_max_incomplete_event_size=LARGEST_HEAD,
            http=LimitedConnection,
            ws="none",
        )
        self._server = uvicorn.Server(config)
        self._task: asyncio.Task[None] | None = None

    @property
    def url(self) -> str:
        """Address at which it listens."""
        host, port = self.listening.getsockname()[:2]
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    async def start(self) -> None:
        """Listen until `end`. Signals stay with the program.

        Raises:
          RuntimeError: it has not started within `START_S`, or has ended before it listened.
        """
        self._task = asyncio.create_task(self._serve())
        try:
            async with asyncio.timeout(START_S):
                while not self._server.started and not self._task.done():
                    await asyncio.sleep(0.005)
            if self._task.done():
                await self._task
            if not self._server.started:
                raise RuntimeError("the server has ended before it listened")
        except TimeoutError:
            raise RuntimeError(f"the server has not started within {START_S:g} s") from None
        finally:
            if not self._server.started:
                self._task.cancel()

    def end(self) -> None:
        """Shut down: `wait` returns when connections close, or after a few seconds."""
        self._server.should_exit = True

    async def wait(self) -> None:
        """Wait until it has stopped."""
        assert self._task is not None
        await asyncio.shield(self._task)

    async def _serve(self) -> None:
        try:
            await self._server._serve([self.listening])  # `serve` would take the signals of the process
        finally:
            self.listening.close()


class _Shared(NamedTuple):
    server: HTTPServer
    sessions: Any


_LONGEST: WeakKeyDictionary[object, int] = WeakKeyDictionary()
_SERVERS: WeakKeyDictionary[asyncio.AbstractEventLoop, _Shared] = WeakKeyDictionary()


def listening_socket(host: str, port: int) -> socket.socket:
    """A listening socket. Raises OSError that names the address."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((host, port))
    except OSError as error:
        listening.close()
        raise OSError(f"cannot listen at {host}:{port}: {error.strerror}; --port=N names another port") from None
    listening.listen(1024)
    return listening


def check_installed() -> None:
    """Raise ImportError where the packages of the server are missing."""
    missing = [name for name in ("starlette", "uvicorn") if importlib.util.find_spec(name) is None]
    if missing:
        raise ImportError(f"an endpoint needs {' and '.join(missing)}: pip install 'funrl[serve]'")


def speech_of(chat: TemplateChat) -> Speech:
    """Reading and writing of text by a tokenizer and its chat template."""
    tokenizer = chat.tokenizer
    hermes = chat.form == "hermes" and getattr(tokenizer, "response_template", None) is None
    return Speech(
        chat,
        decode=lambda ids: tokenizer.decode(ids, skip_special_tokens=True),
        encode=lambda text: tokenizer.encode(text, add_special_tokens=False),
        call_opening=_hermes_opening if hermes else None,
        thinks=END_THINK in str(tokenizer.chat_template),
        form=picture_form_of(tokenizer),
        longest=_longest_token(tokenizer),
    )


def _longest_token(tokenizer: Any) -> int:
    """Bytes that the longest token of a tokenizer may have; found once for each."""
    if tokenizer not in _LONGEST:
        _LONGEST[tokenizer] = max((len(token.encode("utf-8", "replace")) for token in tokenizer.get_vocab()), default=0)
    return _LONGEST[tokenizer]


@contextlib.asynccontextmanager
async def serve_policy(
    policy: Policy, agent: str = "policy", note: Callable[[str], None] = _log.warning
) -> AsyncIterator[ServedAgent]:
    """Serve an agent of one episode on loopback, under a key of its own, as long as the context lasts.

    All episodes of an event loop share a server. Sampling parameters are those of the run, whatever a client asks for.

    Args:
      policy: of the episode, with a chat.
      agent: whose trajectories the replies are.
      note: receives, once a key, that sampling parameters of a client are not those of the run.

    Raises:
      ImportError: the packages of the extra `serve` are missing.
      ValueError: the policy has no chat of a tokenizer.
    """
    check_installed()
    chat = policy.chat
    if not isinstance(chat, TemplateChat):
        raise ValueError("an endpoint needs a policy with a chat template, which renders what clients send")
    noted: list[Ask] = []

    def policy_for(ask: Ask) -> Sampler:
        if ask.sampling and not noted:
            noted.append(ask)
            note(f"the run's sampling parameters replace those of a client, {dict(ask.sampling)}")
        return policy

    session = Session(policy_for, speech_of(chat), agent=agent, length=policy.limits.length)
    shared = await _server_of_loop(chat)
    key = shared.sessions.open(session)
    try:
        yield ServedAgent(Endpoint(f"{shared.server.url}/v1", key, EPISODE_MODEL), session)
    finally:
        shared.sessions.close(key)
        await session.close()


@contextlib.asynccontextmanager
async def serve_agent(policy: Policy, agent: str) -> AsyncIterator[Endpoint]:
    """As `serve_policy`, for `PolicySetup`.

    Raises:
      LimitReached: an error, in place of it, that follows a request which would have passed a limit.
    """
    async with serve_policy(policy, agent) as (endpoint, session):
        try:
            yield endpoint
        except Exception as error:
            if session.limit is None:
                raise
            raise LimitReached(session.limit, f"a request passed a limit, and the program ended: {error}") from error


async def _server_of_loop(chat: TemplateChat) -> _Shared:
    """The server of the event loop, which the first episode starts, or the next one if that fails."""
    from funrl.serve.app import Sessions, make_app

    loop = asyncio.get_running_loop()
    async with asyncio.timeout(2 * START_S):
        while (shared := _SERVERS.get(loop)) is not None:
            if shared.server._server.started:
                return shared
            await asyncio.sleep(0.005)
    sessions = Sessions()
    server = HTTPServer(make_app(sessions, EPISODE_MODEL, speech_of(chat).decode))
    shared = _SERVERS[loop] = _Shared(server, sessions)
    try:
        await server.start()
    except BaseException:
        del _SERVERS[loop]
        raise
    return shared


async def serve_until_stopped(
    session: Session,
    decode: DecodeIds,
    *,
    model: str,
    address: tuple[str, int],
    key: str,
    ready: Callable[[str, str], None],
) -> None:
    """Serve a model under one key until SIGINT or SIGTERM.

    Args:
      session: that answers.
      decode: token ids -> text.
      model: its name.
      address: host and port.
      key: that clients give; "": a new one.
      ready: receives the URL and the key.
    """
    from funrl.serve.app import Sessions, make_app

    sessions = Sessions()
    key = sessions.open(session, key)
    server = HTTPServer(make_app(sessions, model, decode), *address)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, server.end)
    await server.start()
    ready(server.url, key)
    await server.wait()
    await session.close()


def _hermes_opening(name: str | None) -> str:
    """The start of a call as `read_hermes` reads it."""
    return f'{OPEN}\n{{"name": "' + ("" if name is None else f'{name}", "arguments": ')
