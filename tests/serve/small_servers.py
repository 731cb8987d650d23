"""A server of one episode in front of a small engine, and the clients of the registry."""

import dataclasses
import functools
import importlib.util
import json
from types import SimpleNamespace

import pytest
from small_chats import SETUP, ScriptedEngine

from funrl.mesh.mesh import SINGLE
from funrl.rollout.policy import EpisodeLimits, Policy
from funrl.rollout.resident import run_beside
from funrl.serve.endpoint import serve_policy

PACKAGES = ("starlette", "uvicorn", "openai", "anthropic")
MISSING = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
needs_clients = pytest.mark.skipif(bool(MISSING), reason=f"needs {', '.join(MISSING)}: pip install -e '.[test]'")
LONG = SETUP._replace(sampling=dataclasses.replace(SETUP.sampling, max_new_tokens=200))  # for scripted engines
LIMITS = EpisodeLimits(turns=512, length=1024)
TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
    },
}


def serve(engine, program, setup=LONG, limits=LIMITS, seed=3, lasting=False, **how):
    """What a program returns that is given an endpoint beside the engine's steps."""

    async def main(resident):
        policy = Policy(resident.ask, setup, seed, limits)
        async with serve_policy(policy, **how) as (endpoint, session):
            return await program(SimpleNamespace(**endpoint._asdict(), session=session))

    return run_beside(engine, SINGLE, main, lasting=lasting)


def call(name="add", **arguments):
    """A call as the policy writes it."""
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def scripted(*answers):
    """An engine that gives these answers one after another."""
    left = list(answers)
    return ScriptedEngine(lambda prompt: left.pop(0))


@functools.cache
def openai_module():
    import openai

    return openai


def openai_client(endpoint, **how):
    return openai_module().AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key, max_retries=0, **how)


def anthropic_client(endpoint, **how):
    import anthropic

    root = endpoint.base_url.removesuffix("/v1")
    return anthropic.AsyncAnthropic(base_url=root, api_key=endpoint.api_key, max_retries=0, **how)
