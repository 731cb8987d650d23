"""Rewards for the form of a completion: tags in their order, and JSON of a schema."""

from __future__ import annotations

import json
import re
from typing import Any

_TAGGED = re.compile(r"\s*<think>(.*?)</think>\s*<answer>(.*?)</answer>\s*", re.DOTALL)
_FENCED = re.compile(r"```(?:json)?[ \t]*\n(.*?)```", re.DOTALL)
_TAGS = ("<think>", "</think>", "<answer>", "</answer>")


def think_then_answer(prompt: str, completion: str, **fields: Any) -> float:
    """1 if the completion is <think>...</think> and then <answer>...</answer>, each tag once and nothing around.

    A prompt that ends with "<think>", as some chat templates make it, has opened the first tag.

    Example: think_then_answer("2+2=", "<think>Two and two.</think> <answer>4</answer>") is 1.0.
    """
    text = "<think>" + completion if prompt.rstrip().endswith("<think>") else completion
    return float(_TAGGED.fullmatch(text) is not None and all(text.count(tag) == 1 for tag in _TAGS))


def json_schema(prompt: str, completion: str, *, schema: Any = None, **fields: Any) -> float:
    """1 if the completion is JSON that the schema of the field "schema" allows.

    The JSON is the completion's last fenced block, where it has one, else all of it.

    Args:
      schema: a JSON schema, as an object or as text; None: any JSON will do. References to other documents are not
        followed, and "format" is not checked.

    Raises:
      ValueError: the schema is not one.

    Example: json_schema("Who?", '{"age": 7}', schema={"properties": {"age": {"type": "integer"}}}) is 1.0.
    """
    blocks = _FENCED.findall(completion)
    try:
        value = json.loads(blocks[-1] if blocks else completion, parse_constant=_refuse)
        return float(schema is None or _validator(schema).is_valid(value))
    except (json.JSONDecodeError, RecursionError, _NotJSONError):
        return 0.0


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


class _NotJSONError(ValueError):
    """A word that Python's parser takes and JSON has not."""


def _refuse(word: str) -> None:
    raise _NotJSONError(word)
