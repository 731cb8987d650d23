"""An embedded task of several turns: products, which are too hard without the tool.

    user       37*48
    assistant  <tool_call>{"name": "calculator", "arguments": {"expression": "37*48"}}</tool_call>
    tool       1776
    assistant  1776

The small decoder that learns it can copy digits and cannot multiply. Its demonstrator seldom calls the calculator and
mostly estimates, by factors rounded to tens; reinforcement learning finds out that the tool pays.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from funrl.data.prompts import Prompt
from funrl.tasks.arithmetic import Split, is_held_out
from funrl.tasks.conversations import (
    CONVERSATIONS,
    END_OF_CALL,
    IMITATION_FLAGS,
    IMITATION_STEPS,
    call_begin,
    chat_model,
    chat_tokenizer,
    has_chat_tokenizer,
    user_prompt,
)
from funrl.tasks.task import EmbeddedTask

if TYPE_CHECKING:
    from funrl.environments.environment import Environment

CALL = call_begin("calculator", "expression")
DIGITS_AND_SIGNS = "0123456789*?"  # any other character is read as "?"
SMALLEST, LARGEST = 11, 99  # factors
CALLS_SHARE = 0.2  # share of the conversations that call the tool
TRAINING_PRODUCTS = 4096


def calculator(expression: str) -> str:
    """Multiply two whole numbers.

    Args:
        expression: the product, such as 12*34.
    """
    left, sign, right = expression.partition("*")
    if not (sign and left.strip().isdecimal() and right.strip().isdecimal()):
        raise ValueError(f"{expression!r} is not a product of two whole numbers such as 12*34")
    return str(int(left) * int(right))


def final_product(messages: Sequence[Mapping[str, Any]], answer: str, **fields: Any) -> float:
    """1.0 if the last message is exactly the product, else 0.0."""
    last = messages[-1]
    return float(last["role"] == "assistant" and last["content"] == answer)


def calculator_environment() -> Environment:
    """The calculator as the only tool."""
    from funrl.environments.adapters import tool_environment

    return tool_environment([calculator], final_product)


def factors(seed: int, count: int, split: Split = "train") -> np.ndarray:
    """Random pairs of factors [count, 2]; the two splits share no pair."""
    rng = np.random.default_rng((seed, 2))
    pairs = rng.integers(SMALLEST, LARGEST + 1, size=(30 * count, 2))
    return pairs[is_held_out(pairs) == (split == "heldout")][:count]


def heldout_factors(count: int) -> np.ndarray:
    """At most `count` different pairs of factors that no training split contains; the same ones for every seed."""
    pairs = factors(0, 4 * count, "heldout")
    _, first = np.unique(pairs, axis=0, return_index=True)
    return pairs[np.sort(first)][:count]


def conversations(seed: int, count: int) -> list[dict[str, Any]]:
    """Conversations of a demonstrator that calls the tool in a share `CALLS_SHARE` of them and estimates otherwise."""
    rng = np.random.default_rng((seed, 3))
    records = []
    for left, right in factors(seed, count).tolist():
        product = left * right
        question = {"role": "user", "content": f"{left}*{right}"}
        if rng.random() < CALLS_SHARE:
            messages = [
                question,
                {"role": "assistant", "content": f"{CALL}{left}*{right}{END_OF_CALL}"},
                {"role": "tool", "content": str(product)},
                {"role": "assistant", "content": str(product)},
            ]
        else:
            estimate = 100 * round(left / 10) * round(right / 10)
            messages = [question, {"role": "assistant", "content": str(estimate)}]
        records.append({"messages": messages})
    return records


def right_calls(seed: int, count: int, split: Split = "train") -> list[tuple[list[dict[str, str]], str]]:
    """Questions with the call that answers them, as (messages, completion)."""
    return [
        ([{"role": "user", "content": f"{left}*{right}"}], f"{CALL}{left}*{right}{END_OF_CALL}")
        for left, right in factors(seed, count, split).tolist()
    ]


def products_to_train(seed: int, count: int = TRAINING_PRODUCTS) -> list[Prompt]:
    """Questions to train on, with the field "answer"."""
    return _prompts(factors(seed, count))


def heldout_products(count: int) -> list[Prompt]:
    """At most `count` different questions that no training split contains; the same ones for every seed."""
    return _prompts(heldout_factors(count))


def calculator_tokenizer() -> Any:
    """One token a character, and one for each role and each fixed part of a call."""
    return chat_tokenizer(DIGITS_AND_SIGNS, (CALL, END_OF_CALL))


def has_calculator_tokenizer(folder: str | Path) -> bool:
    """True if a model's directory has the task's tokenizer, as that of a run on the task has."""
    return has_chat_tokenizer(folder, DIGITS_AND_SIGNS, (CALL, END_OF_CALL))


def calculator_task() -> EmbeddedTask:
    """Products by calls of a tool."""
    return EmbeddedTask(
        name="calculator",
        training_prompts=products_to_train,
        heldout_prompts=heldout_products,
        reward=None,
        demonstrations=conversations,
        texts={"demonstrations": right_calls},
        tokenizer=calculator_tokenizer,
        is_its_tokenizer=has_calculator_tokenizer,
        model_config=lambda head: chat_model(head, vocab=32),  # 19 are used
        max_new_tokens=12,
        warmstart_steps=IMITATION_STEPS,
        warmstart_demonstrations=CONVERSATIONS,
        warmstart_flags=IMITATION_FLAGS,
        demonstration_field="answer",
        readable=None,
        environment=calculator_environment,
        turns=(2, 6),  # <tool>, four digits, <assistant>
    )


def _prompts(pairs: np.ndarray) -> list[Prompt]:
    return [user_prompt(f"{left}*{right}", answer=str(left * right)) for left, right in pairs.tolist()]
