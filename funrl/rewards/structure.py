"""Rewards for the form of a completion: tags in their order, and JSON of a schema."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from funrl.rewards.answers import last_fenced
from funrl.rewards.views import ANSWER, MARKS, read_as

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
