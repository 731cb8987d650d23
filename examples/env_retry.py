"""Retry after a verdict: a wrong answer gets a verdict, and the policy answers again.

`retry` is for any model and reward. `products` is a task for a small decoder: products, which are too hard without the
verdict on each digit.

    user       37*48
    assistant  2555            (the first digit is an estimate)
    user       -+++            (each digit is too large, too small, or right)
    assistant  1888
    user       =--=

    python examples/env_retry.py RETRY   # writes its files; docs/example_environments.md has the commands that follow

The decoder cannot multiply. Its demonstrator mostly repeats its answer; seldom it uses the verdicts and halves the
range of each digit. Reinforcement learning finds out that the verdict pays.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from task_files import CONVERSATIONS, Task, demonstrated, write_files

from funrl.data.prompts import Example, Prompt
from funrl.environments.adapters import example_messages, message_environment
from funrl.environments.answer_rewards import answer_reward
from funrl.environments.environment import Environment
from funrl.loading import load_function
from funrl.rewards.call import Reward
from funrl.rollout.episodes import Message
from funrl.rollout.policy import Tools
from funrl.tasks.arithmetic import Split
from funrl.tasks.calculator import TRAINING_PRODUCTS, factors

VERDICT = "That is not right. Try again."
ALPHABET = "0123456789*=+-?"
PRODUCT_DIGITS = 4  # of a product
PRODUCT_ATTEMPTS = 5
USING_VERDICTS = 0.15  # share of the conversations that use the verdicts


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


def products() -> Environment:
    """Products in at most `PRODUCT_ATTEMPTS` attempts."""
    return message_environment(lambda: Retry(scored_product, PRODUCT_ATTEMPTS))


def digit_marks(answer: str, right: str) -> str:
    """A mark for each digit: "=" right, "+" too small or missing, "-" too large or one too many.

    >>> digit_marks("301", "312"), digit_marks("5", "312"), digit_marks("3129", "312")
    ('=++', '-++', '===-')
    """
    pairs = itertools.zip_longest(answer, right, fillvalue="")
    return "".join("=" if given == wanted else "+" if given < wanted else "-" for given, wanted in pairs)


def scored_product(example: Example, answer: str) -> ScoredAnswer:
    """The verdict on an answer to a product."""
    right = example.fields["answer"]
    return ScoredAnswer(float(answer == right), digit_marks(answer, right))


def first_answer(left: int, right: int) -> str:
    """A first answer: the first digit of the product of rounded factors, and the middle of the range of the others."""
    product = 100 * round(left / 10) * round(right / 10)
    return f"{min(product, 9999):0{PRODUCT_DIGITS}}"[0] + "5" * (PRODUCT_DIGITS - 1)


def narrowed_answer(messages: Sequence[Message]) -> str:
    """The next answer of a player who uses the verdicts: of each digit the middle of what they leave."""
    answers = [message["content"] for message in messages[1::2]]
    verdicts = [message["content"] for message in messages[2::2]]
    digits = []
    for place in range(PRODUCT_DIGITS):
        low = 0
        high = 9
        for answer, verdict in zip(answers, verdicts, strict=True):
            digit = int(answer[place])
            low = digit + 1 if verdict[place] == "+" else digit if verdict[place] == "=" else low
            high = digit - 1 if verdict[place] == "-" else digit if verdict[place] == "=" else high
        digits.append(str((low + high + 1) // 2))
    return "".join(digits)


def question(left: int, right: int) -> Prompt:
    """A question for a product, with the field "answer"."""
    return Prompt([{"role": "user", "content": f"{left}*{right}"}], {"answer": f"{left * right:0{PRODUCT_DIGITS}}"})


def questions(seed: int, count: int, split: Split = "train") -> list[Prompt]:
    """At most `count` different questions; the two splits share none."""
    return [question(*pair) for pair in dict.fromkeys(map(tuple, factors(seed, count, split).tolist()))]


def retry_conversations(seed: int, count: int) -> list[dict[str, Any]]:
    """Conversations of a demonstrator that uses the verdicts in a share of them, and else repeats its answer."""
    uses_verdicts = np.random.default_rng((seed, 5)).random(count) < USING_VERDICTS
    records = []
    for (left, right), uses in zip(factors(seed, count).tolist(), uses_verdicts, strict=True):
        first = first_answer(left, right)

        def reply(messages: Sequence[Message], first: str = first, uses: bool = uses) -> str:
            return narrowed_answer(messages) if uses and len(messages) > 1 else first

        side = Retry(scored_product, PRODUCT_ATTEMPTS)
        records.append({"messages": demonstrated(side, question(left, right), reply)})
    return records


def task(conversations: int = CONVERSATIONS) -> Task:
    """The task of products."""
    return Task(
        ALPHABET,
        (),
        vocab=32,  # 20 are used
        positions=128,
        prompts=questions(0, TRAINING_PRODUCTS),
        heldout=questions(0, 400, "heldout"),
        demonstrations=retry_conversations(0, conversations),
    )


if __name__ == "__main__":
    write_files(task(), sys.argv[1])
