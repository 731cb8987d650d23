"""Environments of TRL's GRPOTrainer.

funrl grpo --model=DIR --prompts=FILE --env=examples/env_trl.py:trl_environment \
  --env_args=name:FILE.py:NAME,rewards:FILE.py:REWARD

| name | argument of `GRPOTrainer` |
|---|---|
| a list of functions | `tools` |
| a class, a function without arguments, or a dict of such | `environment_factory` |
| a function of `(prompts, trainer)` | `rollout_func` |

TRL need not be installed. Written for TRL 1.16; reference: https://huggingface.co/docs/trl/grpo_trainer
"""

from __future__ import annotations

import asyncio
import copy
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

from recorded_replies import RecordedReplies

from funrl.data.prompts import Example
from funrl.environments.adapters import (
    ToolOutput,
    example_messages,
    tool_conversation,
    tool_schema,
)
from funrl.environments.agents import POLICY
from funrl.environments.builtin.load import ARGUMENTS, FLAG
from funrl.environments.calls import call
from funrl.environments.chat import TemplateChat
from funrl.environments.environment import Environment
from funrl.foreign.shapes import AdaptedEnvironment, checked_call, taken_values, with_observation
from funrl.loading import load_object
from funrl.rewards.call import function_name
from funrl.rollout.episodes import Episode, Message, Node, Trajectory
from funrl.rollout.policy import LimitReached, Policy

ROLLOUT_ARGUMENTS = 2  # of a `rollout_func`
ROLLOUT_OUTPUTS = ("prompt_ids", "completion_ids", "logprobs")  # of what a `rollout_func` returns
NOT_TOOLS = ("reset", "get_reward")  # public methods of an environment that the policy cannot call
NOT_COLUMNS = ("prompt", "completion", "completion_ids")

RewardFunctions = str | Callable[..., Any] | Sequence[str | Callable[..., Any]]


def trl_environment(
    name: Any,
    rewards: RewardFunctions = (),
    weights: Sequence[float] | None = None,
    tools: str | Sequence[Callable[..., Any]] = (),
) -> Environment:
    """An environment of what TRL's GRPOTrainer takes.

    The reward of an episode is the weighted sum of the reward functions' numbers, and of `get_reward` with weight 1; it
    is unscored if all of them are None.

    Each argument is an object or "FILE.py:NAME".

    Args:
      name: `tools`, an `environment_factory` or a `rollout_func`.
      rewards: as `reward_funcs`: (prompts, completions, completion_ids, **columns) -> a list of numbers or None.
      weights: as `reward_weights`; None: 1 each.
      tools: as `tools`, beside an `environment_factory`.

    Raises:
      LoadError: an argument cannot be loaded.
      TypeError: it is not one of these.
      ValueError: there is no reward, a tool has no docstring or types, or there are not as many weights as rewards.
    """
    given = load_object(FLAG, name) if isinstance(name, str) else name
    tools = load_object(ARGUMENTS, tools) if isinstance(tools, str) else tools
    scorer = Rewards(rewards, weights)
    if isinstance(given, (list, tuple)):
        scorer.check("tools")
        return _tool_episodes({None: None}, [*given, *tools], scorer)
    if isinstance(given, Mapping):
        return _tool_episodes(dict(given), tools, scorer)
    if not callable(given):
        raise TypeError(f"{given!r:.100} is neither a list of tools, a factory of environments nor a rollout function")
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    parameters = inspect.signature(given).parameters.values()
    names = [p.name for p in parameters if p.default is p.empty and p.kind not in kinds]
    if not isinstance(given, type) and len(names) == ROLLOUT_ARGUMENTS:
        scorer.check("a rollout function")
        return _function_episodes(given, scorer)
    if names:
        needs = f"{function_name(given)} needs {', '.join(names)}"
        raise TypeError(f"{needs}; a factory needs nothing, a rollout function two")
    return _tool_episodes({None: given}, tools, scorer)


class Rewards:
    """Reward functions of TRL, with their weights."""

    def __init__(self, rewards: RewardFunctions, weights: Sequence[float] | None):
        several = [rewards] if callable(rewards) or isinstance(rewards, str) else rewards
        self.functions = [load_object(ARGUMENTS, each) if isinstance(each, str) else each for each in several]
        self._weights = [1.0] * len(self.functions) if weights is None else [float(weight) for weight in weights]
        if len(self._weights) != len(self.functions):
            raise ValueError(f"there are {len(self._weights)} weights of {len(self.functions)} reward functions")

    def check(self, kind: str) -> None:
        """Refuse episodes of a kind that only reward functions score. Raises: ValueError if there is none."""
        if not self.functions:
            raise ValueError(f"{kind} of TRL needs reward functions; give --{ARGUMENTS}=rewards:FILE.py:function")

    async def score(
        self, example: Example, prompt: Any, end: Trajectory, begin: Trajectory, extra: Mapping[str, Any]
    ) -> tuple[float | None, dict[str, float]]:
        """Reward of an episode, and numbers that the functions log or return.

        Args:
          prompt: as the functions get it.
          end, begin: trajectory, and its begin.
          extra: further arguments; each is a list with one entry.
        """
        parts: dict[str, float] = {}
        ids = end.token_ids()[len(begin.token_ids()) :]
        replies = end.messages()[len(begin.messages()) :]
        completion = "".join(str(message["content"]) for message in replies) if isinstance(prompt, str) else replies
        columns = {name: [value] for name, value in example.fields.items() if name not in NOT_COLUMNS}
        row = {"prompts": [prompt], "completions": [completion], "completion_ids": [ids], **columns, **extra}
        row |= {"log_metric": parts.__setitem__, "log_extra": lambda column, values: None}
        earned: list[float] = []
        for function, weight in zip(self.functions, self._weights, strict=True):
            values = await call(function, **taken_values(function, row))
            if not isinstance(values, Sequence) or len(values) != 1:
                raise TypeError(
                    f"{function_name(function)} returned {values!r:.200}; a list with one number or None is needed"
                )
            if values[0] is not None and not math.isnan(values[0]):
                parts[function_name(function)] = float(values[0])
                earned.append(weight * float(values[0]))
        return (math.fsum(earned) if earned else None), {name: float(number) for name, number in parts.items()}


class _Pool:
    """Environments of one factory, which `reset` makes new again."""

    def __init__(self, factory: Callable[[], Any]):
        self._factory = factory
        self._idle = [factory()]
        self.has_reward = callable(getattr(self._idle[0], "get_reward", None))
        if not callable(getattr(self._idle[0], "reset", None)):
            raise TypeError(f"{type(self._idle[0]).__name__}, of {function_name(factory)}, has no reset")
        for method in tool_methods(self._idle[0]).values():
            tool_schema(method)  # is checked before the run

    async def take(self) -> Any:
        """An environment that no other episode has."""
        return self._idle.pop() if self._idle else await call(self._factory)

    def give_back(self, environment: Any) -> None:
        """Take back an environment whose episode has ended well."""
        self._idle.append(environment)


def _tool_episodes(
    factories: Mapping[str | None, Callable[[], Any] | None], tools: Sequence[Any], scorer: Rewards
) -> Environment:
    """Episodes in which the policy calls tools and the methods of an environment until it replies without a call.

    Args:
      factories: by the value of a record's field "environment"; None: one for all.
    """
    common = {tool.__name__: tool for tool in tools}
    common_schemas = [tool_schema(tool) for tool in tools]
    pools = {name: factory and _Pool(factory) for name, factory in factories.items()}
    if any(pool is not None and not pool.has_reward for pool in pools.values()):
        scorer.check("an environment without get_reward")

    async def run(policy: Policy, example: Example, seed: int) -> Episode:
        name = None if None in pools else example.fields.get("environment")
        if name not in pools:
            raise ValueError(f"the record has environment={name!r}; there are {', '.join(map(str, pools))}")
        pool = pools[name]
        prompt = example_messages(example)
        if pool is None:
            return await talk_with(policy, example, prompt, None)
        environment = await pool.take()
        fields = {key: value for key, value in example.fields.items() if key != "environment" or name is None}
        observation = await call(environment.reset, **{"prompt": copy.deepcopy(prompt), **fields})
        policy.answered(observation)
        if not isinstance(observation, str | None):
            raise TypeError(f"reset returned {observation!r:.200}; a text or None is needed")
        episode = await talk_with(policy, example, with_observation(prompt, observation or ""), environment)
        pool.give_back(environment)
        return episode

    async def talk_with(policy: Policy, example: Example, prompt: Sequence[Message], environment: Any) -> Episode:
        methods = {} if environment is None else tool_methods(environment)
        schemas = [*common_schemas, *map(tool_schema, methods.values())]

        async def act(tool: str, arguments: Mapping[str, Any]) -> ToolOutput:
            return ToolOutput(_text(await call({**common, **methods}[tool], **arguments)))

        begin = policy.start(prompt, schemas)
        talk = await tool_conversation(policy, begin, checked_call(act, schemas, _failed), _failed)
        get_reward = getattr(environment, "get_reward", None)
        own = None if get_reward is None else await call(get_reward)
        extra = {} if environment is None else {"environments": [environment]}
        given = prompt if example.conversational or environment is not None else example.text
        reward, parts = await scorer.score(example, given, talk.end, begin, extra)
        if own is not None and not math.isnan(own):
            parts[type(environment).__name__] = float(own)
            reward = float(own) + (reward or 0.0)
        return Episode([talk.end], {POLICY: reward}, parts=talk.parts() | parts, status=talk.status)

    return AdaptedEnvironment(run)


def tool_methods(environment: Any) -> dict[str, Callable[..., Any]]:
    """Methods of an environment of TRL that the policy can call: all public ones but `reset` and `get_reward`."""
    methods = dict(inspect.getmembers(environment, predicate=inspect.ismethod))
    return {name: method for name, method in methods.items() if name not in NOT_TOOLS and not name.startswith("_")}


def _text(value: Any) -> str:
    """Text of what a tool returned, as TRL has it."""
    if isinstance(value, list) and value and all(isinstance(part, Mapping) and "type" in part for part in value):
        if any(part["type"] != "text" for part in value):
            raise TypeError("a tool returned a picture; only text is served")
        return "".join(str(part["text"]) for part in value)
    return str(value)


def _failed(problem: str) -> ToolOutput:
    """Output of a call that failed, in TRL's words."""
    return ToolOutput(str({"error": problem}), succeeded=False)


def _function_episodes(function: Callable[..., Any], scorer: Rewards) -> Environment:
    """Episodes of a rollout function, which makes a completion of a prompt."""

    async def run(policy: Policy, example: Example, seed: int) -> Episode:
        replies = RecordedReplies(policy)
        trainer = _TrainerShape(policy, replies)
        prompt = list(map(dict, example.messages)) if example.conversational and example.messages else example.text
        try:
            output = await call(function, [prompt], trainer)
        except LimitReached as limit:
            return Episode(policy.ends(), {POLICY: None}, status=limit.status)
        finally:
            trainer.close()
        if missing := [name for name in ROLLOUT_OUTPUTS if name not in output]:
            raise TypeError(f"{function_name(function)} returned no {', '.join(missing)}")
        prompt_ids = output["prompt_ids"][0]
        completion_ids = output["completion_ids"][0]
        mask = output["env_mask"][0] if "env_mask" in output else [1] * len(completion_ids)
        end = replies.end_of([*prompt_ids, *completion_ids], [*[0] * len(prompt_ids), *mask])
        extra = {name: value for name, value in output.items() if name not in (*ROLLOUT_OUTPUTS, "env_mask")}
        reward, parts = await scorer.score(example, prompt, end, Trajectory(end.agent, next(end.nodes())), extra)
        return Episode([end], {POLICY: reward}, parts=parts)

    return AdaptedEnvironment(run)


class _TrainerShape:
    """The part of a GRPOTrainer that a rollout function of one prompt uses.

    Attributes:
      processing_class: the tokenizer.
      args: `num_generations`, 1, and `max_completion_length`.
      vllm_generation: has `generate`, as TRL's.
    """

    def __init__(self, policy: Policy, replies: RecordedReplies):
        chat = policy.chat
        most = policy.sampling.max_new_tokens
        self.processing_class = chat.tokenizer if isinstance(chat, TemplateChat) else None
        self.args = SimpleNamespace(num_generations=1, max_completion_length=most)
        self.vllm_generation = self
        self._loop = asyncio.get_running_loop()
        self._replies = replies
        self._asked: list[Future[Node]] = []

    def close(self) -> None:
        """Cancel what is being sampled."""
        for asked in self._asked:
            asked.cancel()

    def generate(
        self, prompts: Sequence[Sequence[int]], images: Any = None, num_generations: int = 1, profiler: Any = None
    ) -> tuple[list[list[int]], list[list[int]], list[list[list[float]]], list[list[list[int]]]]:
        """Prompts, completions, and of each token of these its log-probability and its id, in lists of one.

        It must not be called on the event loop; a plain rollout function is in a thread.
        """
        if images and any(images):
            raise ValueError("images are not served; only text is")
        sampled = [self._sampled(list(prompt)) for prompt in prompts for _ in range(num_generations)]
        rows = [[] if node.sampling_logp is None else node.sampling_logp.tolist() for node in sampled]
        logp = [[[value] for value in row] for row in rows]
        ids = [list(node.tokens) for node in sampled]
        return [list(prompt) for prompt in prompts], ids, logp, [[[token] for token in tokens] for tokens in ids]

    def _sampled(self, prompt: list[int]) -> Node:
        asked = asyncio.run_coroutine_threadsafe(self._replies.reply(prompt), self._loop)
        self._asked.append(asked)
        return asked.result()
