"""Rewards for the style and the form of a completion: repetition, length, tags in their order, JSON of a schema."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from numbers import Real
from typing import Any

from funrl.rewards.answers import last_fenced
from funrl.rewards.views import ANSWER, MARKS, read_as, view_of


def words(text: str) -> int:
    """Number of words in a text, separated by blanks."""
    return len(text.split())


def repetition_penalty(n: int = 3, penalty: float = 1.0) -> Callable[..., float]:
    """A reward of -penalty times the share of a completion's n-grams of words that are repetitions.

    Args:
      n: words of an n-gram, at least 1.
      penalty: in units of reward, at least 0; subtracted in full if all n-grams were repetitions.

    Raises:
      ValueError: n is below 1 or the penalty below 0.

    Example:
      >>> repetition_penalty(n=2)("", "so it is so it is")  # so it, it is, is so, so it, it is: 3 of 5 are new
      -0.4

    References: Yeo et al., 2025, https://arxiv.org/abs/2502.03373. Case is ignored.
    """
    if n < 1 or penalty < 0:
        raise ValueError(f"repetition_penalty(n={n}, penalty={penalty}): n is at least 1 and the penalty at least 0")

    def reward(prompt: str, completion: str, **fields: object) -> float:
        tokens = completion.lower().split()
        grams = len(tokens) - n + 1
        different = len(set(zip(*(tokens[i:] for i in range(n)), strict=False)))
        return -penalty * (1 - different / grams) if grams > 0 else 0.0

    return reward


repetition = repetition_penalty()


def within_length(
    prompt: str, completion: str, *, min_words: int | None = None, max_words: int | None = None, **fields: object
) -> float:
    """1 if the completion has at least and at most as many words as the record's fields say.

    Args:
      min_words, max_words: None: no bound.

    Example: within_length("In three words?", "I love it.", max_words=3) is 1.0.
    """
    count = words(completion)
    return float((min_words is None or count >= min_words) and (max_words is None or count <= max_words))


def check_length(fields: Mapping[str, object]) -> None:
    """Check the bounds of a record before anything is computed. Raises: ValueError, one is not a number."""
    for name in ("min_words", "max_words"):
        bound = fields.get(name)
        if bound is not None and (isinstance(bound, bool) or not isinstance(bound, Real) or math.isnan(bound)):
            raise ValueError(f"the field {name!r} is a number of words, not {bound!r}")


def cosine_length(
    right: Callable[..., float],
    longest: int,
    right_range: tuple[float, float] = (1.0, 0.5),
    wrong_range: tuple[float, float] = (-1.0, -0.5),
    length: Callable[[str], int] = words,
) -> Callable[..., float]:
    """A reward that varies with length along half a cosine wave: right answers should be short, wrong ones longer.

    With t = length / longest, at most 1: to + (from - to) (1 + cos(pi t)) / 2.

    Args:
      right: (prompt, completion, **fields) -> number; above one half means that the completion is right.
      longest: length at the end of the wave, above 0.
      right_range: reward of a right completion of length 0, and of the longest one.
      wrong_range: the same for a wrong completion.
      length: text -> its length, for example a tokenizer's count of tokens.

    Raises:
      ValueError: longest is not above 0.

    Example:
      >>> reward = cosine_length(lambda prompt, completion: completion.endswith("4"), longest=4)
      >>> [reward("2+2=", text) for text in ("4", "it is 4", "5", "it must be 5")]
      [0.9267766952966369, 0.5732233047033631, -0.9267766952966369, -0.5]

    References: Yeo et al., 2025, https://arxiv.org/abs/2502.03373, which also takes a penalty off at the limit itself.
    """
    if longest <= 0:
        raise ValueError(f"cosine_length(longest={longest}): it must be above 0")

    @read_as(*view_of(right))
    def reward(prompt: str, completion: str, **fields: object) -> float:
        is_right = right(prompt, completion, **fields) > 0.5
        begin, end = right_range if is_right else wrong_range
        progress = min(length(completion) / longest, 1.0)
        return end + (begin - end) * (1 + math.cos(math.pi * progress)) / 2

    return reward


_TAGGED = re.compile(r"\s*<think>(.*?)</think>\s*<answer>(.*?)</answer>\s*", re.DOTALL)
_TAGS = ("<think>", "</think>", "<answer>", "</answer>")


@read_as(MARKS, example="<think>a</think><answer>4</answer>")
def think_then_answer(prompt: str, completion: str, **fields: object) -> float:
    """1 if the completion is <think>...</think> and then <answer>...</answer>, each tag once and nothing around.

    A prompt that ends with "<think>", as some chat templates make it, has opened the first tag.

    Example: think_then_answer("2+2=", "<think>Two and two.</think> <answer>4</answer>") is 1.0.
    """
    text = "<think>" + completion if prompt.rstrip().endswith("<think>") else completion
    once = all(text.count(tag) == 1 for tag in _TAGS)  # then the pattern takes time linear in the text
    return float(once and _TAGGED.fullmatch(text) is not None)


@read_as(ANSWER, example='{"a": [1]}')
def json_schema(prompt: str, completion: str, *, schema: object = None, **fields: object) -> float:
    """1 if the completion is JSON that the schema of the field "schema" allows.

    The JSON is the completion's last fenced block of `json`, else the last one without a word, else all of it.

    Args:
      schema: a JSON schema, as an object or as text; None: any JSON will do. References to other documents are not
        followed, and "format" is not checked.

    Raises:
      ValueError: the schema is not one.

    Example: json_schema("Who?", '{"age": 7}', schema={"properties": {"age": {"type": "integer"}}}) is 1.0.
    """
    block = last_fenced(completion, "json")
    try:
        value = json.loads(completion if block is None else block, parse_constant=_refuse)
    except (ValueError, RecursionError):  # ValueError also for integers that Python does not convert
        return 0.0
    try:
        return float(schema is None or _validator(schema).is_valid(value))
    except RecursionError:
        return 0.0


def check_schema(fields: Mapping[str, Any]) -> None:
    """Check the field "schema" of a record before anything is computed. Raises: ValueError, it is not a schema."""
    if fields.get("schema") is not None:
        _validator(fields["schema"])


def _validator(schema: Any) -> Any:
    """Validator of values by a schema. Raises: ValueError, it is none."""
    from jsonschema.exceptions import SchemaError
    from jsonschema.validators import Draft202012Validator, validator_for
    from referencing import Registry

    try:
        schema = json.loads(schema) if isinstance(schema, str) else schema
        kind = validator_for(schema, default=Draft202012Validator)
        kind.check_schema(schema)
    except (json.JSONDecodeError, SchemaError) as error:
        message = getattr(error, "message", str(error))
        raise ValueError(f"the field 'schema' is not a JSON schema: {message}") from error
    return kind(schema, registry=Registry())


def _refuse(word: str) -> None:
    """Refuse NaN and Infinity, which Python's parser takes and JSON does not have."""
    raise ValueError(word)
