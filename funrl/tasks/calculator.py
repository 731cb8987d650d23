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
from typing import TYPE_CHECKING, Any

import numpy as np

from funrl.data.prompts import Prompt
from funrl.data.tokenizer import character_vocabulary, chat_character_tokenizer
from funrl.tasks.arithmetic import Split, is_held_out, model_config
from funrl.tasks.task import EmbeddedTask

if TYPE_CHECKING:
    from funrl.environments.environment import Environment
    from funrl.models.decoder.config import Config

ROLE_MARKS = ("<user>", "<assistant>", "<tool>")  # one token each
UNKNOWN = "?"  # any character outside of an alphabet is read as this one
CHAT_TEMPLATE = (
    "{% for m in messages %}{{ '<' + m['role'] + '>' + m['content'] }}"
    "{% for call in m['tool_calls'] or [] %}{{ '<tool_call>{\"name\": \"' + call['function']['name']"
    " + '\", \"arguments\": ' + call['function']['arguments'] | tojson + '}</tool_call>' }}{% endfor %}"
    "{% if m['role'] == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"
)
SMALLEST_HEAD = 16
CALL = '<tool_call>{"name": "calculator", "arguments": {"expression": "'  # one token, as is the end of a call
END_OF_CALL = '"}}</tool_call>'
DIGITS_AND_SIGNS = "0123456789*?"  # any other character is read as "?"
FACTORS = (11, 99)  # the smallest and the largest
CALLS_SHARE = 0.2  # share of the conversations that call the tool
TRAINING_PRODUCTS = 4096


def chat_tokenizer(alphabet: str, words: Sequence[str] = ()) -> Any:
    """One token a character of the alphabet, which contains `UNKNOWN`, and one for each role and each word."""
    return chat_character_tokenizer(alphabet, (*ROLE_MARKS, *words), CHAT_TEMPLATE, unknown=UNKNOWN)


def chat_model(head: int, vocab: int, positions: int = 64) -> Config:
    """A small decoder of conversations.

    Args:
      head: size of a head, at least; keys and values have fewer of a larger size, and as many parameters.
      vocab: token ids; a tensor axis up to 16 needs a multiple of its size.
      positions: of the longest episode.
    """
    from funrl.models.flat import with_fields  # here, for flags are read without torch

    return with_fields(model_config(max(head, SMALLEST_HEAD)), vocab=vocab, max_positions=positions)


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
    pairs = rng.integers(FACTORS[0], FACTORS[1] + 1, size=(30 * count, 2))
    return pairs[is_held_out(pairs) == (split == "heldout")][:count]


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


def heldout_products(count: int) -> list[Prompt]:
    """At most `count` different questions that no training split contains; the same ones for every seed."""
    pairs = factors(0, 4 * count, "heldout")
    _, first = np.unique(pairs, axis=0, return_index=True)
    return _prompts(pairs[np.sort(first)][:count])


def calculator_task() -> EmbeddedTask:
    """Products by calls of a tool."""
    return EmbeddedTask(
        name="calculator",
        training_prompts=lambda seed: _prompts(factors(seed, TRAINING_PRODUCTS)),
        heldout_prompts=heldout_products,
        reward=None,
        demonstrations=conversations,
        texts={"demonstrations": right_calls},
        tokenizer=lambda: chat_tokenizer(DIGITS_AND_SIGNS, (CALL, END_OF_CALL)),
        tokens=frozenset({*character_vocabulary(DIGITS_AND_SIGNS), *ROLE_MARKS, CALL, END_OF_CALL}),
        model_config=lambda head: chat_model(head, vocab=32),  # 19 are used
        max_new_tokens=12,
        warmstart_steps=400,
        warmstart_demonstrations=25_600,
        warmstart_flags={"batch_prompts": 64, "lr": 4e-3},
        readable=None,
        environment=calculator_environment,
        turns=(2, 6),  # <tool>, four digits, <assistant>
    )


def _prompts(pairs: np.ndarray) -> list[Prompt]:
    return [
        Prompt([{"role": "user", "content": f"{left}*{right}"}], {"answer": str(left * right)})
        for left, right in pairs.tolist()
    ]
