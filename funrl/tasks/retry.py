"""An embedded task of several attempts: products, which are too hard without the verdict on each digit.

    user       37*48
    assistant  2555            (the first digit is an estimate)
    user       -+++            (each digit is too large, too small, or right)
    assistant  1888
    user       =--=

The small decoder that learns it cannot multiply. Its demonstrator mostly repeats its answer; seldom it uses the
verdicts and halves the range of each digit. Reinforcement learning finds out that the verdict pays.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from funrl.data.prompts import Example, Prompt
from funrl.environments.builtin.retry import Retry, ScoredAnswer
from funrl.tasks.arithmetic import Split
from funrl.tasks.calculator import TRAINING_PRODUCTS, factors, heldout_factors
from funrl.tasks.conversations import (
    CONVERSATIONS,
    IMITATION_FLAGS,
    IMITATION_STEPS,
    chat_model,
    chat_tokenizer,
    demonstrated,
    has_chat_tokenizer,
    user_prompt,
)
from funrl.tasks.task import EmbeddedTask

if TYPE_CHECKING:
    from funrl.environments.environment import Environment
    from funrl.rollout.episodes import Message

RETRY_ALPHABET = "0123456789*=+-?"
PRODUCT_DIGITS = 4  # of a product
PRODUCT_ATTEMPTS = 5
USING_VERDICTS = 0.15  # share of the conversations that use the verdicts


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


def retry_conversations(seed: int, count: int) -> list[dict[str, Any]]:
    """Conversations of a demonstrator that uses the verdicts in a share of them, and else repeats its answer."""
    pairs = factors(seed, count)
    uses_verdicts = np.random.default_rng((seed, 5)).random(count) < USING_VERDICTS
    records = []
    for (left, right), prompt, uses in zip(pairs.tolist(), _prompts(pairs), uses_verdicts, strict=True):
        first = first_answer(left, right)

        def reply(messages: Sequence[Message], first: str = first, uses: bool = uses) -> str:
            return narrowed_answer(messages) if uses and len(messages) > 1 else first

        records.append({"messages": demonstrated(Retry(scored_product, PRODUCT_ATTEMPTS), prompt, reply)})
    return records


def _right_texts(seed: int, count: int, split: Split = "train") -> list[tuple[Any, str]]:
    """Questions with their answers, as (messages, completion)."""
    return [(prompt.prompt, prompt.fields["answer"]) for prompt in _prompts(factors(seed, count, split))]


def _training_prompts(seed: int, count: int = TRAINING_PRODUCTS) -> list[Prompt]:
    """Questions to train on, with the field "answer"."""
    return _prompts(factors(seed, count))


def _heldout_prompts(count: int) -> list[Prompt]:
    """At most `count` different questions that no training split contains; the same ones for every seed."""
    return _prompts(heldout_factors(count))


def retry_environment() -> Environment:
    """Products in at most `PRODUCT_ATTEMPTS` attempts."""
    from funrl.environments.adapters import message_environment

    return message_environment(lambda: Retry(scored_product, PRODUCT_ATTEMPTS))


def _has_tokenizer(folder: str | Path) -> bool:
    """True if a model's directory has the task's tokenizer."""
    return has_chat_tokenizer(folder, RETRY_ALPHABET)


def retry_task() -> EmbeddedTask:
    """Products in several attempts."""
    return EmbeddedTask(
        name="retry",
        training_prompts=_training_prompts,
        heldout_prompts=_heldout_prompts,
        reward=None,
        demonstrations=retry_conversations,
        texts={"demonstrations": _right_texts},
        tokenizer=lambda: chat_tokenizer(RETRY_ALPHABET),
        is_its_tokenizer=_has_tokenizer,
        model_config=lambda head: chat_model(head, vocab=32, positions=128),  # 20 are used
        max_new_tokens=6,
        warmstart_steps=IMITATION_STEPS,
        warmstart_demonstrations=CONVERSATIONS,
        warmstart_flags=IMITATION_FLAGS,
        demonstration_field="answer",
        readable=None,
        environment=retry_environment,
    )


def _prompts(pairs: np.ndarray) -> list[Prompt]:
    return [
        user_prompt(f"{left}*{right}", answer=f"{left * right:0{PRODUCT_DIGITS}}") for left, right in pairs.tolist()
    ]
