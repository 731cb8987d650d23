"""Tokens of a conversation that TRL and verl train, as their trainers for demonstrations render it.

Written for TRL 1.16 and verl 0.9.1, whose own results the tests compare.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from funrl.data.conversations import ChatTemplate, Conversation, Text
from funrl.data.json_lines import DataError
from funrl.data.tokenizer import TokenizerError, encode_rendered, encode_text

_EMPTY = {"role": "user", "content": ""}


def trl_text(messages: Conversation, template: ChatTemplate) -> Text:
    """A conversation in `SFTTrainer` of TRL: rendered once, and each token but the first is trained.

    With `assistant_only_loss=True` it would train what TRL's own template for the family marks.

    Raises:
      TokenizerError: the template refuses the messages.
    """
    tokens = _rendered(messages, template)
    return Text(tokens, [False] + [True] * (len(tokens) - 1))


def trl_completion(prompt: str, completion: str, template: ChatTemplate) -> Text:
    """A text prompt and its completion in `SFTTrainer` of TRL: what differs from the prompt's tokens is trained."""
    tokenizer = template.tokenizer
    end = str(tokenizer.eos_token or "")
    whole = prompt + completion if completion.endswith(end) else prompt + completion + end
    tokens = encode_text(tokenizer, whole, special=True)
    same = same_tokens(encode_text(tokenizer, prompt, special=True), tokens)
    return Text(tokens, [False] * same + [True] * (len(tokens) - same))


def trl_completed_messages(prompt: Conversation, completion: Conversation, template: ChatTemplate) -> Text:
    """Messages of a prompt and of its completion in `SFTTrainer` of TRL: the prompt's tokens are not trained.

    Raises:
      TokenizerError: the template refuses the messages.
    """
    tokens = _rendered([*prompt, *completion], template)
    same = same_tokens(_rendered(prompt, template, opens=True), tokens)
    return Text(tokens, [False] * same + [True] * (len(tokens) - same))


def verl_text(messages: Conversation, template: ChatTemplate) -> Text:
    """A conversation in `MultiTurnSFTDataset` of verl: each message is rendered alone, and the assistant's are trained.

    Raises:
      TokenizerError: the template refuses a message alone.
      DataError: the messages rendered together have other tokens: verl's check, off by `ignore_input_ids_mismatch`.
    """
    bare = template._replace(tools=())
    first = _rendered([_EMPTY], bare)  # most templates write a system message of their own before it
    system = len(first) - (len(_rendered([_EMPTY, _EMPTY], bare)) - len(first))
    opening = len(_rendered([_EMPTY], bare, opens=True)) - len(first)
    tokens: list[int] = []
    trained: list[bool] = []
    for number, message in enumerate(messages):
        ids = _alone(message, bare if number else template)
        ids = ids[system:] if number and message["role"] != "system" else ids
        is_trained = message["role"] == "assistant"
        tokens += ids
        trained += [is_trained and place >= opening for place in range(len(ids))]
    if tokens != _rendered(messages, template):
        raise DataError("the messages rendered one by one have other tokens than the conversation")
    return Text(tokens, trained)


def same_tokens(left: Sequence[int], right: Sequence[int]) -> int:
    """Number of tokens with which both begin, by bisection: slices are compared fast."""
    low, high = 0, min(len(left), len(right))
    while low < high:
        middle = (low + high + 1) // 2
        if left[low:middle] == right[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _alone(message: Mapping[str, Any], template: ChatTemplate) -> list[int]:
    """Tokens of one message; behind an empty one of a user where the template refuses it alone."""
    try:
        return _rendered([message], template)
    except TokenizerError:
        before = {"role": "user", "content": [{"type": "text", "text": ""}]}
        return _rendered([before, message], template)[len(_rendered([before], template)) :]


def _rendered(messages: Conversation, template: ChatTemplate, opens: bool = False) -> list[int]:
    return encode_rendered(template.tokenizer, template.render(messages, opens=opens))
