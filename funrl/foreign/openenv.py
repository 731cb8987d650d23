"""Environments of OpenEnv, on a server: --env=openenv:URL.

| the server's actions | the policy |
|---|---|
| tools of MCP | calls them |
| a typed action | calls one tool, whose arguments are the action's fields |
| a typed action, with `reply:FIELD` | writes replies, each of which is that field of an action |

OpenEnv need not be installed here. Written for OpenEnv 0.10; reference: https://github.com/huggingface/OpenEnv
"""

from __future__ import annotations

import http.client
import json
import math
import urllib.request
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

from funrl.data.prompts import Example
from funrl.environments.adapters import ToolOutput, example_messages, output_text, to_last_turn, tool_conversation
from funrl.environments.agents import POLICY
from funrl.environments.answer_rewards import AnswerReward, answer_reward
from funrl.environments.calls import call
from funrl.environments.environment import Environment
from funrl.environments.forms.tool_calls import argument_problem
from funrl.foreign.websocket import WebSocket, connect_websocket
from funrl.loading import LoadError
from funrl.rewards.call import Reward
from funrl.rollout.episodes import Episode, Message, Node, Status, Trajectory
from funrl.rollout.policy import LimitReached, Policy

MCP_ACTIONS = ("Action", "ListToolsAction", "CallToolAction")  # titles of the schemas of servers with tools of MCP
TOLD_ERRORS = ("VALIDATION_ERROR", "EXECUTION_ERROR")  # of an action, which the policy hears
NOT_SHOWN = ("metadata", "done", "reward")  # of an observation
STEP = "step"  # name of the tool of a typed action
INSTRUCTION = "Act in the environment."
DEFAULT_EPISODES = 256
LARGEST_SEED = 1 << 31
SCHEMA_S = 10.0


class StepError(Exception):
    """An action that the server refuses or that fails."""


def load_openenv(
    url: str,
    reply: str | None = None,
    instruction: str = INSTRUCTION,
    episodes: int = DEFAULT_EPISODES,
    reward: str | Reward | None = None,
) -> Environment:
    """An environment of an OpenEnv server.

    Args:
      url: of the server, http:// or ws://.
      reply: field of an action that is the text of a reply, instead of calls.
      instruction: prompt of a run without --prompts; what a reset observes follows it.
      episodes: prompts of such a run, which differ by their seed.
      reward: of the last reply, instead of those of the steps: a function, or what --reward names.

    Raises:
      LoadError: the server does not answer, or its action has no such field.
    """
    root = url if "://" in url else f"http://{url}"
    action = _schema(root.replace("ws", "http", 1) if root.startswith("ws") else root)
    fields = {name: value for name, value in (action.get("properties") or {}).items() if name != "metadata"}
    if reply is not None and reply not in fields:
        raise LoadError(f"an action has no field {reply!r}, only {', '.join(fields) or 'tools of MCP'}")
    tools = None if action.get("title") in MCP_ACTIONS else [_action_tool(action, fields)]
    score = None if reward is None else answer_reward(reward)
    prompts = [{"prompt": [{"role": "user", "content": instruction}], "seed": n} for n in range(episodes)]
    return _OpenEnv(_below(root, "ws"), tools, reply, prompts=prompts, score=score)


class _OpenEnv:
    """See `load_openenv`. `tools` are those of a typed action; None: tools of MCP."""

    agents = (POLICY,)

    def __init__(
        self,
        url: str,
        tools: Sequence[dict[str, Any]] | None,
        reply: str | None,
        *,
        prompts: Sequence[Mapping[str, Any]],
        score: AnswerReward | None,
    ):
        self._url = url
        self._tools = tools
        self._reply = reply
        self._prompts = prompts
        self._score = score

    def prompts(self, seed: int) -> Sequence[Mapping[str, Any]]:
        """Episodes with different seeds."""
        count = len(self._prompts)
        return [{**record, "seed": (seed * count + n) % LARGEST_SEED} for n, record in enumerate(self._prompts)]

    async def run(self, policy: Policy, example: Example, seed: int) -> Episode:
        """Run an episode in a session of its own."""
        async with connect_websocket(self._url) as connection:
            session = _Session(connection)
            given = {"seed": seed % LARGEST_SEED, **example.fields}
            opened = await session.ask("reset", given)
            messages = _with_observation(example_messages(example), opened)
            policy.answered(messages)
            if self._reply is not None:
                episode = await self._replies(policy, session, policy.start(messages))
            else:
                episode = await self._calls(policy, session, messages)
            await session.leave()
        if self._score is None:
            return episode
        (end,) = episode.ends
        last = str(end.leaf.messages[0]["content"]) if end.leaf.messages else ""
        given = example.messages if example.conversational else None
        value = await call(self._score, example.text, last, example.fields, given)
        reward = None if math.isnan(value) else value
        return Episode([end], {POLICY: reward}, parts=episode.parts, status=episode.status)

    async def _calls(self, policy: Policy, session: _Session, messages: Sequence[Message]) -> Episode:
        """Run tool calls of the policy until it replies without a call."""
        tools = await session.mcp_tools() if self._tools is None else self._tools

        async def run_call(name: str, arguments: Mapping[str, Any]) -> ToolOutput:
            if problem := argument_problem(name, arguments, tools):
                return ToolOutput(f"error: {problem}", succeeded=False)
            action = dict(arguments)
            if self._tools is None:
                action = {"type": "call_tool", "tool_name": name, "arguments": action}
            try:
                return _output_of(await session.ask("step", action))
            except StepError as error:
                return ToolOutput(f"error: {error}", succeeded=False)

        talk = await tool_conversation(policy, policy.start(messages, tools), run_call)
        total = math.fsum(talk.rewards.values()) if talk.rewards else None
        return Episode([talk.end], {POLICY: total}, talk.rewards, parts=talk.parts(), status=talk.status)

    async def _replies(self, policy: Policy, session: _Session, trajectory: Trajectory) -> Episode:
        """Let each reply be an action until the episode is done."""
        assert self._reply is not None
        status: Status = "done"
        rewards: dict[Node, float] = {}
        while True:
            try:
                reply, trajectory = await policy.sample(trajectory)
            except LimitReached as limit:
                status = limit.status
                break
            try:
                output = _output_of(await session.ask("step", {self._reply: str(reply.message["content"])}))
            except StepError as error:
                output = ToolOutput(f"error: {error}", succeeded=False)
            policy.answered(tuple(output))
            if output.reward is not None:
                rewards[trajectory.leaf] = output.reward
            if output.ends:
                break
            trajectory = policy.extend(trajectory, [{"role": "user", "content": output.text}])
        total = math.fsum(rewards.values()) if rewards else None
        return Episode([to_last_turn(trajectory)], {POLICY: total}, rewards, status=status)


class _Session:
    """A session of a server, which has an environment of its own."""

    def __init__(self, connection: WebSocket):
        self._connection = connection

    async def ask(self, kind: str, data: Mapping[str, Any]) -> dict[str, Any]:
        """Data of the answer to a message.

        Raises:
          StepError: the action is wrong or failed.
          RuntimeError: the server has no room, or its environment is broken.
        """
        await self._connection.send(json.dumps({"type": kind, "data": dict(data)}, default=str))
        answer = json.loads(await self._connection.receive())
        content = answer.get("data") or {}
        if answer.get("type") != "error":
            return content
        problem = f"{content.get('message')} {json.dumps(content.get('errors') or '', default=str)}".removesuffix(' ""')
        if kind == "step" and content.get("code") in TOLD_ERRORS:
            raise StepError(problem)
        raise RuntimeError(f"the OpenEnv server answers {kind} with {content.get('code')}: {problem}")

    async def mcp_tools(self) -> list[dict[str, Any]]:
        """Schemas of the tools of the environment."""
        observation = (await self.ask("step", {"type": "list_tools"})).get("observation") or {}
        return [
            {
                "type": "function",
                "function": {
                    "name": tool["name"],
                    "description": tool.get("description") or "",
                    "parameters": tool.get("input_schema") or {"type": "object", "properties": {}},
                },
            }
            for tool in observation.get("tools") or ()
        ]

    async def leave(self) -> None:
        """End the session."""
        await self._connection.send(json.dumps({"type": "close"}))


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


def _action_tool(schema: Mapping[str, Any], fields: Mapping[str, Any]) -> dict[str, Any]:
    """The tool of a typed action."""
    parameters = {"type": "object", "properties": dict(fields)}
    parameters |= {key: schema[key] for key in ("required", "$defs") if key in schema}
    description = str(schema.get("description") or f"Take the action {schema.get('title', '')}.").strip()
    return {"type": "function", "function": {"name": STEP, "description": description, "parameters": parameters}}


def _with_observation(messages: Sequence[Message], data: Mapping[str, Any]) -> list[Message]:
    """Messages of a prompt, the last of which ends with what a reset observes."""
    observed = _observation_text(data.get("observation") or {})
    *before, last = messages
    return [*before, {**last, "content": f"{last['content']}\n\n{observed}"}] if observed else [*before, last]


def _output_of(data: Mapping[str, Any]) -> ToolOutput:
    """Output of a step."""
    observation = data.get("observation") or {}
    error = observation.get("error")
    if isinstance(error, Mapping):
        return ToolOutput(f"error: {error.get('message') or error}", succeeded=False)
    reward = data.get("reward")
    return ToolOutput(
        _observation_text(observation),
        reward=None if reward is None else float(reward),
        ends=bool(data.get("done")),
    )


def _observation_text(observation: Mapping[str, Any]) -> str:
    """The text of an observation: of its only field, or JSON of its fields; without any, of its metadata."""
    if "tool_name" in observation and "result" in observation:
        return output_text(_result_of(observation["result"]))
    shown = {name: value for name, value in observation.items() if name not in NOT_SHOWN and value not in (None, "")}
    if not shown:
        metadata = observation.get("metadata")
        return output_text(metadata) if metadata else ""
    values = list(shown.values())
    return values[0] if len(values) == 1 and isinstance(values[0], str) else output_text(shown)


def _result_of(result: Any) -> Any:
    """The value that a tool of MCP returned, without its wrapping."""
    if isinstance(result, Mapping):
        for name in ("data", "structured_content"):
            if result.get(name) is not None:
                return result[name]
    return result
