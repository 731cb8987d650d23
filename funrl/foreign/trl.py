"""Environments of TRL's GRPOTrainer: --env=trl:FILE.py:NAME.

| NAME | argument of `GRPOTrainer` |
|---|---|
| a list of functions | `tools` |
| a class, a function without arguments, or a dict of such | `environment_factory` |

Its `rollout_func` is trained by examples/env_trl_rollout.py.

TRL need not be installed. Written for TRL 1.16; reference: https://huggingface.co/docs/trl/grpo_trainer
"""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

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
from funrl.environments.environment import Environment
from funrl.foreign.shapes import AdaptedEnvironment, checked_call, taken_values, with_observation
from funrl.loading import load_object
from funrl.rewards.call import function_name
from funrl.rollout.episodes import Episode, Message, Trajectory
from funrl.rollout.policy import Policy

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
      name: `tools` or an `environment_factory`.
      rewards: as `reward_funcs`: (prompts, completions, completion_ids, **columns) -> a list of numbers or None.
      weights: as `reward_weights`; None: 1 each.
      tools: as `tools`, beside an `environment_factory`.

    Raises:
      LoadError: an argument cannot be loaded.
      TypeError: it is none of these.
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
        raise TypeError(f"{given!r:.100} is neither a list of tools nor a factory of environments")
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    parameters = inspect.signature(given).parameters.values()
    if names := [p.name for p in parameters if p.default is p.empty and p.kind not in kinds]:
        hint = "a rollout function is trained by --env=examples/env_trl_rollout.py:rollout_environment"
        raise TypeError(
            f"{function_name(given)} needs {', '.join(names)}, but a factory of environments nothing; {hint}"
        )
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
