"""A list of tools, with a reward function of the last answer."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from funrl.environments.adapters import tool_environment
from funrl.environments.answer_rewards import answer_reward
from funrl.environments.environment import Environment
from funrl.rewards.call import Reward


def rewarded_tools(
    tools: Sequence[Callable[..., object]], reward: str | Reward = "exact", system: str | None = None
) -> Environment:
    """An environment in which the policy calls tools until it replies without a call; that reply is rewarded.

    Args:
      tools: as in `tool_environment`.
      reward: a reward function, or what --reward names: "exact", "math", "FILE.py:function". An episode that a limit
        ends at a call has the reward of an empty reply.
      system: a system message, before the messages of the example.

    Raises:
      ValueError: a tool has no docstring or types, or several rewards are named.
      LoadError: the reward cannot be loaded.
    """
    of_answer = answer_reward(reward)

    def score(messages: Sequence[Mapping[str, Any]], **fields: object) -> float:
        question = list(itertools.takewhile(lambda message: message["role"] != "assistant", messages))
        last = messages[-1]
        answered = last["role"] == "assistant" and not last.get("tool_calls")
        return of_answer(str(question[-1]["content"]), last["content"] if answered else "", fields, question)

    return tool_environment(tools, score, system)
