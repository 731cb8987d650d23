"""Calls of tools: read from what a policy wrote, and made.

| form | read by |
|---|---|
| `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, as Hermes and Qwen write | `read_hermes` |
| any that the tokenizer's `response_template` declares | `read_message`, by transformers |
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from funrl.rollout.policy import ReadReply, Tools

OPEN, CLOSE = "<tool_call>", "</tool_call>"
_CALL = re.compile(re.escape(OPEN) + r"(.*?)" + re.escape(CLOSE), re.DOTALL)


def read_hermes(text: str) -> ReadReply:
    """Read the calls in a text; what is outside of them is the content.

    >>> read_hermes('Let me see. <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>').tool_calls
    [('add', {'a': 1})]
    >>> read_hermes("<tool_call>add 1</tool_call>").problems
    ['a call is not JSON: Expecting value: line 1 column 1 (char 0)']
    """
    calls: list[tuple[str, Mapping[str, Any]]] = []
    problems: list[str] = []
    for inner in _CALL.findall(text):
        try:
            calls.append(_call(json.loads(inner)))
        except json.JSONDecodeError as error:
            problems.append(f"a call is not JSON: {error}")
        except (ValueError, RecursionError) as error:
            problems.append(str(error))
    content = _CALL.sub("", text)
    if OPEN in content:
        content, _, rest = content.partition(OPEN)
        problems.append(f"a call has no {CLOSE}: {rest[:100]!r}")
    return ReadReply(_message(content.strip() if calls or problems else content, calls), calls, problems)


def read_message(tokenizer: Any, before: Sequence[int], tokens: Sequence[int], tools: Tools) -> ReadReply:
    """Read a reply by the tokenizer's `response_template`; what transformers cannot read is the content."""
    try:
        message = dict(tokenizer.parse_response(list(tokens), prefix=list(before), tools=list(tools) or None))
        calls = [_call(call.get("function", call)) for call in message.get("tool_calls") or ()]
    except Exception as error:  # of a parser of a library, on a text that may be anything
        text = tokenizer.decode(list(tokens), skip_special_tokens=True)
        return ReadReply({"role": "assistant", "content": text}, (), [f"the reply cannot be read: {error}"])
    message.setdefault("role", "assistant")
    message.setdefault("content", "")
    return ReadReply(message, calls)


def _call(value: Any) -> tuple[str, Mapping[str, Any]]:
    """Name and arguments of a call. Raises ValueError."""
    if not isinstance(value, Mapping) or not isinstance(value.get("name"), str):
        raise ValueError(f"a call is an object with a name and arguments, not {json.dumps(value)[:100]}")
    arguments = value.get("arguments") or {}
    if isinstance(arguments, str):
        arguments = json.loads(arguments)
    if not isinstance(arguments, Mapping):
        raise ValueError(f"arguments of {value['name']} are an object, not {json.dumps(arguments)[:100]}")
    return value["name"], arguments


def _message(content: str, calls: Sequence[tuple[str, Mapping[str, Any]]]) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": content}
    if calls:
        message["tool_calls"] = [
            {"type": "function", "function": {"name": name, "arguments": dict(arguments)}} for name, arguments in calls
        ]
    return message
