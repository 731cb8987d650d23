"""Servers of OpenEnv on loopback, in a process whose Python has openenv: PAGE -> their ports on standard output."""

import asyncio
import json
import socket
import sys
from uuid import uuid4

import uvicorn
from fastmcp import FastMCP
from openenv.core.env_server.http_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.mcp_environment import MCPEnvironment
from openenv.core.env_server.mcp_types import CallToolAction, CallToolObservation
from openenv.core.env_server.types import Action, Observation, State


class Echo(MCPEnvironment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        mcp = FastMCP("echo")

        @mcp.tool
        def echo_message(message: str) -> str:
            """Echo a message."""
            return message

        @mcp.tool
        def measure(message: str) -> dict:
            """Length of a message."""
            if not message:
                raise ValueError("it is empty")
            return {"length": len(message)}

        super().__init__(mcp)
        self._state = State(episode_id=str(uuid4()), step_count=0)

    def reset(self, seed=None, episode_id=None, **kwargs):
        return Observation(done=False, reward=0.0, metadata={"status": "ready"})

    def _step_impl(self, action, timeout_s=None, **kwargs):
        raise ValueError(f"unknown action {action}")

    @property
    def state(self):
        return self._state


class Guess(Action):
    """Guess the number."""

    number: int


class Hint(Observation):
    hint: str = ""


class Guessing(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed=None, episode_id=None, **kwargs):
        self.secret, self.left = (seed or 0) % 10, 3
        return Hint(hint=f"from 0 to 9 {'x' * kwargs.get('padding', 0)}".strip())

    def step(self, action, timeout_s=None, **kwargs):
        if action.number < 0:
            raise ValueError("numbers are positive")
        self.left -= 1
        right = action.number == self.secret
        hint = "right" if right else "higher" if action.number < self.secret else "lower"
        return Hint(hint=hint, reward=float(right), done=right or not self.left)

    @property
    def state(self):
        return State()


class Say(Action):
    message: str


class Talking(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed=None, episode_id=None, **kwargs):
        self.turns = 0
        return Hint(hint="say something")

    def step(self, action, timeout_s=None, **kwargs):
        self.turns += 1
        return Hint(hint=action.message.upper(), reward=len(action.message) / 10, done=self.turns == 2)

    @property
    def state(self):
        return State()


def page_app(file):
    """The server of a page, whose file is given."""
    with open(file) as source:
        page = {"__name__": "page"}
        exec(source.read(), page)
    return create_fastapi_app(page["Guessing"], page["Guess"], page["Hint"], max_concurrent_envs=64)


APPS = {
    "page": page_app,
    "echo": lambda: create_fastapi_app(Echo, CallToolAction, CallToolObservation, max_concurrent_envs=64),
    "guess": lambda: create_fastapi_app(Guessing, Guess, Hint, max_concurrent_envs=64),
    "say": lambda: create_fastapi_app(Talking, Say, Hint, max_concurrent_envs=64),
    "crowded": lambda: create_fastapi_app(Talking, Say, Hint, max_concurrent_envs=1),
}


async def serve_all(page):
    """Serve each on a port of its own."""
    ports, servers = {}, []
    for name, make in APPS.items():
        listening = socket.socket()
        listening.bind(("127.0.0.1", 0))
        listening.listen(64)
        ports[name] = listening.getsockname()[1]
        app = make(page) if name == "page" else make()
        servers.append(uvicorn.Server(uvicorn.Config(app, log_level="error")).serve([listening]))
    print(json.dumps(ports), flush=True)
    await asyncio.gather(*servers)


if __name__ == "__main__":
    asyncio.run(serve_all(sys.argv[1]))
