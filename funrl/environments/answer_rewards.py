"""Rewards of one answer in an episode, by a reward function of any form."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from funrl.rewards.call import Completed, Failure, Reward, RewardError, awaited_outcomes, outcomes, reward_functions
from funrl.rewards.load import load_rewards

# (prompt, answer, fields, messages of the prompt or None) -> reward
AnswerReward = Callable[[str, str, Mapping[str, Any], Sequence[Mapping[str, Any]] | None], float]


def answer_reward(reward: str | Reward) -> AnswerReward:
    """A plain function that rewards an answer; it must not be called on an event loop.

    Args:
      reward: a reward function of any form, or what --reward names: "exact", "math", "FILE.py:function".

    Raises:
      ValueError: the text names several rewards.
      LoadError: a function cannot be loaded.
    """
    functions = load_rewards(reward) if isinstance(reward, str) else reward_functions([reward])
    if len(functions) != 1:
        raise ValueError(f"reward={reward}: an answer has one reward here, not {len(functions)}")
    (function,) = functions

    def of_answer(
        prompt: str, answer: str, fields: Mapping[str, Any], messages: Sequence[Mapping[str, Any]] | None = None
    ) -> float:
        row = Completed(prompt, answer, fields, messages=messages)
        if function.awaited:
            (outcome,) = asyncio.run(awaited_outcomes(function, [row]))
        else:
            (outcome,) = outcomes(function, [row])
        if isinstance(outcome, Failure):
            raise RewardError(*outcome)
        return float(outcome)

    return of_answer
