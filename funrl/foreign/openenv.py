"""Environments of OpenEnv, on a server: --env=openenv:URL.

| the server's actions | the policy |
|---|---|
| tools of MCP | calls them |
| a typed action | calls one tool, whose arguments are the action's fields |
| a typed action, with `reply:FIELD` | writes replies, each of which is that field of an action |

OpenEnv need not be installed here. Written for OpenEnv 0.10; reference: https://github.com/huggingface/OpenEnv
"""

from __future__ import annotations

import contextlib
import http.client
import json
import math
import re
import urllib.request
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

from funrl.data.prompts import Example
from funrl.environments.adapters import ToolOutput, example_messages, output_text, tool_conversation
from funrl.environments.agents import POLICY
from funrl.environments.answer_rewards import answer_reward
from funrl.environments.environment import Environment
from funrl.foreign.shapes import (
    LARGEST_SEED,
    AdaptedEnvironment,
    answer_score,
    checked_call,
    failed_output,
    seeded_prompts,
    text_turns,
    with_observation,
)
from funrl.loading import LoadError
from funrl.rewards.call import Reward
from funrl.rollout.episodes import Episode, Message
from funrl.rollout.policy import Policy

MCP_ACTIONS = ("Action", "ListToolsAction", "CallToolAction")  # titles of the schemas of servers with tools of MCP
TOLD_ERRORS = ("VALIDATION_ERROR", "EXECUTION_ERROR")  # of an action, which the policy hears
NOT_SHOWN = ("metadata", "done", "reward")  # of an observation
STEP = "step"  # name of the tool of a typed action
INSTRUCTION = "Act in the environment."
DEFAULT_EPISODES = 256
SCHEMA_S = 10.0
# Of a connection. Servers that are busy answer no ping, so none is sent.
CONNECTION = {"open_timeout": 10.0, "close_timeout": 2.0, "ping_interval": None, "max_size": 100 << 20, "proxy": None}


class StepError(Exception):
    """An action that the server refuses or that fails."""


def load_openenv(
    url: str,
    reply: str | None = None,
    instruction: str = INSTRUCTION,
    episodes: int = DEFAULT_EPISODES,
    reward: str | Reward | None = None,
) -> Environment:
    """An environment of an OpenEnv server. Each episode has a session of its own.

    Args:
      url: of the server, http:// or ws://.
      reply: field of an action that is the text of a reply, instead of calls.
      instruction: prompt of a run without --prompts; what a reset observes follows it.
      episodes: prompts of such a run, which differ by their seed.
      reward: of the last reply, instead of those of the steps: a function, or what --reward names.

    Raises:
      LoadError: the server does not answer, or its action has no such field; websockets is not installed.
    """
    try:
        from websockets.asyncio.client import connect  # type: ignore[import-not-found]
    except ImportError as error:
        raise LoadError(f"it needs websockets ({error}): pip install 'funrl[environments]'") from error
    root = re.sub("^ws", "http", url if "://" in url else f"http://{url}")
    action = _schema(root)
    fields = {name: value for name, value in (action.get("properties") or {}).items() if name != "metadata"}
    if reply is not None and reply not in fields:
        raise LoadError(f"an action has no field {reply!r}, only {', '.join(fields) or 'tools of MCP'}")
    tools = None if action.get("title") in MCP_ACTIONS else [_action_tool(action, fields)]
    score = None if reward is None else answer_reward(reward)
    place = _below(re.sub("^http", "ws", root), "ws")

    async def run(policy: Policy, example: Example, seed: int) -> Episode:
        async with connect(place, **CONNECTION) as connection:
            opened = await _ask(connection, "reset", {"seed": seed % LARGEST_SEED, **example.fields})
            observed = _observation_text(opened.get("observation") or {})
            messages = with_observation(example_messages(example), f"\n\n{observed}" if observed else "")
            policy.answered(messages)
            if reply is None:
                episode = await _calls(policy, connection, messages, tools)
            else:
                episode = await _replies(policy, connection, messages, reply)
            await _send(connection, {"type": "close"})
        if score is None:
            return episode
        (end,) = episode.ends
        last = str(end.leaf.messages[0]["content"]) if end.leaf.messages else ""
        value = await answer_score(score, example, last)
        return Episode([end], {POLICY: value}, parts=episode.parts, status=episode.status)

    return AdaptedEnvironment(run, seeded_prompts(instruction, episodes))


async def _calls(
    policy: Policy, connection: Any, messages: Sequence[Message], tools: Sequence[dict[str, object]] | None
) -> Episode:
    """Run tool calls of the policy until it replies without a call. `tools` are those of a typed action, or None."""

    async def act(name: str, arguments: Mapping[str, object]) -> ToolOutput:
        call = {"type": "call_tool", "tool_name": name, "arguments": dict(arguments)}
        return _output_of(await _ask(connection, "step", arguments if tools is not None else call))

    shown = await _mcp_tools(connection) if tools is None else tools
    talk = await tool_conversation(policy, policy.start(messages, shown), checked_call(act, shown, errors=(StepError,)))
    total = math.fsum(talk.rewards.values()) if talk.rewards else None
    return Episode([talk.end], {POLICY: total}, talk.rewards, parts=talk.parts(), status=talk.status)


async def _replies(policy: Policy, connection: Any, messages: Sequence[Message], field: str) -> Episode:
    """Send each reply as an action until the episode is done."""

    async def act(text: str) -> tuple[Sequence[Message], float | None, bool]:
        try:
            output = _output_of(await _ask(connection, "step", {field: text}))
        except StepError as error:
            output = failed_output(str(error))
        return [{"role": "user", "content": output.text}], output.reward, output.ends

    return await text_turns(policy, messages, act, written=lambda reply: str(reply.message["content"]))


async def _ask(connection: Any, kind: str, data: Mapping[str, object]) -> dict[str, Any]:
    """Data of the answer to a message of a session.

    Raises:
      StepError: the action is wrong or failed.
      ConnectionError: the server has no room, or its environment is broken.
    """
    await _send(connection, {"type": kind, "data": dict(data)})
    answer = json.loads(await connection.recv())
    content = answer.get("data") or {}
    if answer.get("type") != "error":
        return content
    problem = f"{content.get('message')} {json.dumps(content.get('errors') or '', default=str)}".removesuffix(' ""')
    if kind == "step" and content.get("code") in TOLD_ERRORS:
        raise StepError(problem)
    raise ConnectionError(f"the OpenEnv server answers {kind} with {content.get('code')}: {problem}")


async def _send(connection: Any, message: Mapping[str, object]) -> None:
    """Send a message; of a server that has closed the connection, the last one that it sent says why."""
    from websockets.exceptions import ConnectionClosed  # type: ignore[import-not-found]

    with contextlib.suppress(ConnectionClosed):
        await connection.send(json.dumps(message, default=str))


async def _mcp_tools(connection: Any) -> list[dict[str, object]]:
    """Schemas of the tools of an environment."""
    observation = (await _ask(connection, "step", {"type": "list_tools"})).get("observation") or {}
    return [
        _tool_schema(
            tool["name"],
            tool.get("description") or "",
            tool.get("input_schema") or {"type": "object", "properties": {}},
        )
        for tool in observation.get("tools") or ()
    ]


def _tool_schema(name: str, description: str, parameters: Mapping[str, object]) -> dict[str, object]:
    function = {"name": name, "description": description, "parameters": parameters}
    return {"type": "function", "function": function}


def _schema(root: str) -> dict[str, Any]:
    """JSON schema of the actions of a server."""
    url = _below(root, "schema")
    try:
        with urllib.request.urlopen(url, timeout=SCHEMA_S) as answer:
            return json.load(answer)["action"]
    except (OSError, http.client.HTTPException, ValueError, KeyError) as error:
        raise LoadError(f"no OpenEnv server answers at {url} ({error!r}); start it first") from error


def _below(root: str, name: str) -> str:
    """The URL of an endpoint of a server; a query string stays at the end."""
    place = urlsplit(root)
    return place._replace(path=f"{place.path.rstrip('/')}/{name}").geturl()


def _action_tool(schema: Mapping[str, object], fields: Mapping[str, object]) -> dict[str, object]:
    """The tool of a typed action."""
    parameters = {"type": "object", "properties": dict(fields)}
    parameters |= {key: schema[key] for key in ("required", "$defs") if key in schema}
    description = str(schema.get("description") or f"Take the action {schema.get('title', '')}.").strip()
    return _tool_schema(STEP, description, parameters)


def _output_of(data: Mapping[str, Any]) -> ToolOutput:
    """Output of a step."""
    observation = data.get("observation") or {}
    error = observation.get("error")
    if isinstance(error, Mapping):
        return failed_output(error.get("message") or str(error))
    reward = None if data.get("reward") is None else float(data["reward"])
    return ToolOutput(_observation_text(observation), reward=reward, ends=bool(data.get("done")))


def _observation_text(observation: Mapping[str, object]) -> str:
    """The text of an observation: of its only field, or JSON of its fields; without any, of its metadata."""
    if "tool_name" in observation and "result" in observation:
        result = observation["result"]  # of a tool of MCP, perhaps wrapped
        wrapped = [
            result[name] for name in ("data", "structured_content") if isinstance(result, Mapping) and name in result
        ]
        return output_text(next((value for value in wrapped if value is not None), result))
    shown = {name: value for name, value in observation.items() if name not in NOT_SHOWN and value not in (None, "")}
    if not shown:
        return output_text(observation["metadata"]) if observation.get("metadata") else ""
    values = list(shown.values())
    return values[0] if len(values) == 1 and isinstance(values[0], str) else output_text(shown)
