"""Retry after a verdict: a wrong answer gets a verdict, and the policy answers again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from funrl.data.prompts import Example
from funrl.environments.adapters import example_messages, message_environment
from funrl.environments.answer_rewards import answer_reward
from funrl.environments.environment import Environment
from funrl.loading import load_function
from funrl.rewards.call import Reward
from funrl.rollout.episodes import Message
from funrl.rollout.policy import Tools

VERDICT = "That is not right. Try again."


class ScoredAnswer(NamedTuple):
    """Reward of an answer, and what is said of it.

    Attributes:
      reward: of the answer; 1 or more ends the episode.
      verdict: what the policy reads if it may try again.
    """

    reward: float
    verdict: str


class Retry:
    """The other side of an episode: it verifies each answer.

    Attributes:
      verify: (example, answer) -> reward and verdict.
      attempts: answers that the policy may give.
    """

    def __init__(self, verify: Callable[[Example, str], ScoredAnswer], attempts: int = 3):
        self.verify = verify
        self.attempts = attempts

    def reset(self, example: Example, seed: int) -> tuple[Sequence[Message], Tools]:
        """Ask the question of the example."""
        self._example = example
        self._left = self.attempts
        return example_messages(example), ()

    def step(self, message: Message) -> tuple[Sequence[Message], float | None, bool]:
        """Verify an answer. The reward of an episode is that of the answer that ends it."""
        scored = self.verify(self._example, message["content"])
        self._left -= 1
        ended = scored.reward >= 1 or self._left == 0
        return [{"role": "user", "content": scored.verdict}], scored.reward if ended else 0.0, ended

    def close(self) -> None:
        """Nothing is held."""


def retry(
    reward: str | Reward = "exact", attempts: int = 3, verdict: str | Callable[..., str] = VERDICT
) -> Environment:
    """An environment of several attempts at each prompt; the reward of an episode is that of its last attempt.

    It is 0 if a limit ends the episode before.

    Args:
      reward: a reward function, or what --reward names: "exact", "math", "FILE.py:function". An answer that it gives 1
        or more ends the episode.
      attempts: answers that the policy may give, at least 1.
      verdict: text after a wrong answer; or a function of (prompt, completion, **fields) that writes one, which
        "FILE.py:function" names too.

    Raises:
      ValueError: there is no attempt, or more than one reward.
      LoadError: a function cannot be loaded.
    """
    if attempts < 1:
        raise ValueError(f"attempts={attempts}: the policy needs at least 1")
    of_answer = answer_reward(reward)
    if isinstance(verdict, str) and ".py:" in verdict:
        verdict = load_function("env_args", verdict)

    def verify(example: Example, answer: str) -> ScoredAnswer:
        messages = example.messages if example.conversational else None
        text = verdict if isinstance(verdict, str) else verdict(example.text, answer, **example.fields)
        return ScoredAnswer(of_answer(example.text, answer, example.fields, messages), text)

    return message_environment(lambda: Retry(verify, attempts))
