"""Environments of verl.

funrl grpo --model=DIR --prompts=FILE --env=examples/env_verl.py:verl_environment --env_args=name:tools.yaml
funrl grpo --model=DIR --prompts=FILE --env=examples/env_verl.py:verl_environment --env_args=name:loop.py:TwoTurns

| name | environment |
|---|---|
| a YAML file of tools (`class_name`, `config`, `tool_schema`) | the policy calls them until it replies without a call |
| a subclass of `BaseTool`, an object of one, a function of `@function_tool`, a list of these | the same |
| a subclass of `AgentLoopBase` | its `run`, whose `server_manager.generate` is the policy |

Where verl is not installed, examples/verl_modules.py has what tools import. Written for verl 0.9.1; reference:
https://verl.readthedocs.io/en/latest/sglang_multiturn/multiturn.html
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import json
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import verl_modules  # noqa: F401 (what tools import, where verl is not installed)
import yaml
from recorded_replies import RecordedReplies

from funrl.data.prompts import Example
from funrl.environments.adapters import ToolOutput, error_text, example_messages, output_text, tool_conversation
from funrl.environments.adapters import tool_schema as schema_of
from funrl.environments.agents import POLICY
from funrl.environments.answer_rewards import AnswerReward, answer_reward
from funrl.environments.builtin.load import ARGUMENTS, FLAG
from funrl.environments.calls import call
from funrl.environments.chat import TemplateChat
from funrl.environments.environment import Environment
from funrl.foreign.shapes import AdaptedEnvironment, answer_score, checked_call
from funrl.loading import LoadError, load_object
from funrl.rewards.call import Reward
from funrl.rollout.episodes import Episode, Trajectory
from funrl.rollout.policy import LimitReached, Policy

YAML = (".yaml", ".yml")
MOST_RESPONSE_TOKENS = 1 << 20  # of a response, for loops that cut theirs off; the run's own limits hold


def verl_environment(
    name: Any, reward: str | Reward | None = None, config: Mapping[str, Any] | None = None
) -> Environment:
    """An environment of tools or of an agent loop of verl.

    The reward of an episode of tools is the sum of what `execute` and, at the end, `calc_reward` return; that of an
    agent loop is its `reward_score`. A reward function replaces them. An episode without any number is unscored.

    Args:
      name: "TOOLS.yaml" or "FILE.py:NAME", or tools, classes of tools, or an agent loop's class.
      reward: a function such as verl's `compute_score`, or what --reward names.
      config: for an agent loop, merged into its `rollout_config`.

    Raises:
      LoadError: it cannot be loaded.
      TypeError: it is not one of these.
    """
    given = _load(name) if isinstance(name, str) else name
    score = None if reward is None else answer_reward(reward)
    if isinstance(given, type) and not hasattr(given, "execute"):
        if not callable(getattr(given, "run", None)):
            raise TypeError(f"class {given.__name__} has neither execute, as a BaseTool, nor run, as an AgentLoopBase")
        return _loop_episodes(given, score, config or {})
    tools = given if isinstance(given, (list, tuple)) else [given]
    return _tool_episodes([_tool(tool) for tool in tools], score)


def _load(name: str) -> Any:
    """The tools or the class that a name stands for. Raises: LoadError."""
    try:
        return read_tools_file(name) if name.endswith(YAML) else load_object(FLAG, name)
    except LoadError as error:
        if "No module named 'verl" not in str(error):
            raise
        raise LoadError(
            f"{error}; this needs verl itself: pip install --no-deps verl, and what it imports, or for tools and agent "
            "loops examples/verl_modules.py"
        ) from error


def read_tools_file(path: str) -> list[Any]:
    """The tools of a YAML file, made of its `tools`, each with `class_name`, `config` and perhaps `tool_schema`.

    Raises:
      LoadError: the file is missing or has another form, or a class cannot be loaded.
    """
    try:
        entries = yaml.safe_load(Path(path).read_text(encoding="utf-8"))["tools"]
        named = [(entry["class_name"], entry.get("config") or {}, entry.get("tool_schema")) for entry in entries]
    except OSError as error:
        raise LoadError(f"{path}: it cannot be read: {error.strerror}") from error
    except (yaml.YAMLError, KeyError, TypeError, AttributeError) as error:
        raise LoadError(f"{path}: a list `tools` is needed, each with class_name and config ({error!r})") from error
    tools = []
    for class_name, config, schema in named:
        if config.get("type", "native") != "native":
            raise LoadError(f"{path}: {class_name} is of type {config['type']!r}; only native tools are served")
        kind = load_object(FLAG, ":".join(class_name.rpartition(".")[::2]))
        tools.append(kind(config=config, tool_schema=_schema_record(schema)))
    return tools


class _FunctionTool(NamedTuple):
    """A function as a tool."""

    name: str
    function: Callable[..., Any]
    schema: Mapping[str, Any]


def _tool_episodes(tools: Sequence[Any], score: AnswerReward | None) -> Environment:
    """Episodes in which the policy calls tools until it replies without a call."""
    all_tools = {tool.name: tool for tool in tools}
    all_schemas = {tool.name: _schema_of(tool) for tool in tools}

    async def run(policy: Policy, example: Example, seed: int) -> Episode:
        extra = example.fields.get("extra_info") or {}
        per_tool = example.fields.get("tools_kwargs") or extra.get("tools_kwargs") or {}
        names = [name for name in extra.get("tool_selection") or all_tools if name in all_tools]
        schemas = [all_schemas[name] for name in names]
        stateful = {name: all_tools[name] for name in names if not isinstance(all_tools[name], _FunctionTool)}
        instances: dict[str, str] = {}
        agent_data = SimpleNamespace(tools_kwargs=per_tool, extra_fields={}, metrics={})

        async def act(name: str, arguments: Mapping[str, Any]) -> ToolOutput:
            try:
                if name not in instances:
                    return _output_of(await call(all_tools[name].function, **arguments))
                further = {"agent_data": agent_data, **((per_tool.get(name) or {}).get("execute_kwargs") or {})}
                return _output_of(await call(stateful[name].execute, instances[name], dict(arguments), **further))
            except (Exception, SystemExit) as error:
                return ToolOutput(f"Error executing tool {name!r}: {error_text(error)}", succeeded=False)

        async with contextlib.AsyncExitStack() as held:  # releases all, also when one release fails
            for name, tool in stateful.items():
                given = (per_tool.get(name) or {}).get("create_kwargs") or {}
                instances[name], _ = await call(tool.create, create_kwargs=given)
                held.push_async_callback(call, tool.release, instances[name])
            begin = policy.start(example_messages(example), schemas)
            talk = await tool_conversation(policy, begin, checked_call(act, schemas))
            if score is not None:
                reward = await _scored(score, policy, example, talk.end)
                return Episode([talk.end], {POLICY: reward}, parts=talk.parts(), status=talk.status)
            earned = list(talk.rewards.values())
            earned += [float(await call(tool.calc_reward, instances[name])) for name, tool in stateful.items()]
        total = math.fsum(earned) if earned else None
        return Episode([talk.end], {POLICY: total}, talk.rewards, parts=talk.parts(), status=talk.status)

    return AdaptedEnvironment(run)


def _loop_episodes(kind: type, score: AnswerReward | None, config: Mapping[str, Any]) -> Environment:
    """Episodes of an agent loop, which talks with the policy in token ids."""

    async def run(policy: Policy, example: Example, seed: int) -> Episode:
        replies = RecordedReplies(policy)
        chat = policy.chat
        settings = _loop_config(config)
        loop: Any = kind(
            trainer_config=_Settings(config=settings),
            server_manager=_ServerManager(replies),
            tokenizer=chat.tokenizer if isinstance(chat, TemplateChat) else None,
            processor=None,
            dataset_cls=None,
            data_config=_Settings(config=settings.data),
        )
        row = {"raw_prompt": list(map(dict, example_messages(example))), **example.fields}
        asked = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "repetition_penalty": 1.0, "logprobs": True}
        try:
            output = await loop.run(asked, **row)
        except LimitReached as limit:
            return Episode(policy.ends(), {POLICY: None}, status=limit.status)
        prompt_ids = list(output.prompt_ids)
        end = replies.end_of([*prompt_ids, *output.response_ids], [*[0] * len(prompt_ids), *output.response_mask])
        reward = output.reward_score if score is None else await _scored(score, policy, example, end)
        return Episode([end], {POLICY: None if reward is None else float(reward)})

    return AdaptedEnvironment(run)


class _ServerManager:
    """The policy as verl's server of token ids.

    Attributes:
      replies: of the episode.
    """

    def __init__(self, replies: RecordedReplies):
        self.replies = replies

    async def generate(
        self, request_id: Any, *, prompt_ids: Sequence[int], sampling_params: Mapping[str, Any], **more: Any
    ) -> Any:
        """Sample a reply. Of the parameters `max_tokens` and `stop` hold; the others are the run's."""
        if any(more.get(name) for name in ("image_data", "video_data", "audio_data")):
            raise ValueError("pictures, videos and sound are not served; only text is")
        most = sampling_params.get("max_tokens") or sampling_params.get("max_new_tokens")
        stop = sampling_params.get("stop") or ()
        node = await self.replies.reply(prompt_ids, most, [stop] if isinstance(stop, str) else list(stop))
        logp = [] if node.sampling_logp is None else node.sampling_logp.tolist()
        reason = "length" if node.finish == "length" else "completed"
        output = getattr(sys.modules.get("verl.workers.rollout.replica"), "TokenOutput", SimpleNamespace)
        return output(token_ids=list(node.tokens), log_probs=logp, stop_reason=reason, extra_fields={})


class _Settings(dict):
    """Settings by attribute and by key, as omegaconf's."""

    def __getattr__(self, name: str) -> Any:
        if name not in self:
            raise AttributeError(f"the configuration of an agent loop has no {name!r} here; give --{ARGUMENTS}=config")
        return self[name]


def _loop_config(given: Mapping[str, Any]) -> Any:
    """The configuration that an agent loop reads. Lengths are those of `MOST_RESPONSE_TOKENS`."""
    lengths = dict.fromkeys(("prompt_length", "response_length"), MOST_RESPONSE_TOKENS)
    turns = {"max_user_turns": None, "max_assistant_turns": None, "max_parallel_calls": 1 << 10, "format": "hermes"}
    turns |= {"max_tool_response_length": MOST_RESPONSE_TOKENS, "tool_response_truncate_side": "right"}
    rollout = {"name": "vllm", "full_determinism": False, "calculate_log_probs": True, **lengths, **given}
    rollout["multi_turn"] = _Settings({**turns, **given.get("multi_turn", {})})
    return _Settings(actor_rollout_ref=_Settings(rollout=_Settings(rollout)), data=_Settings())


async def _scored(score: AnswerReward, policy: Policy, example: Example, end: Trajectory) -> float | None:
    """Reward of what follows the prompt, as a text without special tokens."""
    chat = policy.chat
    ids = [token for node in list(end.nodes())[1:] for token in node.tokens]
    text = chat.tokenizer.decode(ids, skip_special_tokens=True) if isinstance(chat, TemplateChat) else ""
    return await answer_score(score, example, text)


def _tool(given: Any) -> Any:
    """A tool of a class, of an object or of a function."""
    if isinstance(given, type):
        if not hasattr(given, "execute"):
            raise TypeError(f"class {given.__name__} has no execute, so that it is no tool of verl")
        return given(config={}, tool_schema=None)
    if hasattr(given, "execute"):
        return given
    if hasattr(given, "fn") and hasattr(given, "tool_schema"):
        return _FunctionTool(given.name, given.fn, given.tool_schema.model_dump(exclude_none=True))
    if not inspect.isroutine(given):
        raise TypeError(f"{given!r:.100} is no tool of verl: a BaseTool or a function is needed")
    registry = getattr(sys.modules.get("verl.tools.function_tool"), "FUNCTION_TOOL_REGISTRY", {})
    registered = next((tool for tool in registry.values() if tool.fn is given), None)
    if registered is not None:
        return _tool(registered)
    return _FunctionTool(given.__name__, given, schema_of(given))


def _schema_of(tool: Any) -> dict[str, Any]:
    if isinstance(tool, _FunctionTool):
        return dict(tool.schema)
    schema = tool.tool_schema
    return dict(schema) if isinstance(schema, Mapping) else schema.model_dump(exclude_none=True)


def _schema_record(schema: Mapping[str, Any] | None) -> Any:
    """The record of a schema."""
    if schema is None:
        return None
    return importlib.import_module("verl.tools.schemas").OpenAIFunctionToolSchema.model_validate(schema)


def _output_of(value: Any) -> ToolOutput:
    """Output of a call: a response, or a tuple of a response, a reward and metrics."""
    parts = value if isinstance(value, tuple) else (value,)
    if not 1 <= len(parts) <= 3:
        raise TypeError(f"a tool returned {value!r:.200}; return a response, its reward and metrics")
    response = parts[0]
    if any(getattr(response, kind, None) for kind in ("image", "video")):
        raise TypeError("a tool returned a picture or a video; only text is served")
    text = response.text or "" if hasattr(response, "text") else response
    if isinstance(text, Mapping):
        text = json.dumps(text, ensure_ascii=False)
    reward = parts[1] if len(parts) > 1 else None
    return ToolOutput(output_text(text), reward=None if reward is None else float(reward))
