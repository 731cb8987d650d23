"""Calls of tools: read from what a policy wrote, and checked against the tools' schemas."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from funrl.data.json_lines import JsonObject
from funrl.data.tokenizer import END_THINK
from funrl.environments.forms.response_templates import (
    REPLY_FORMS,
    Call,
    call_of,
    json_problem,
    parameters_of,
    split_reply,
    types_of,
)
from funrl.rollout.policy import ReadReply, Tools


def read_reply(name: str, text: str, tools: Tools = (), thinking: bool = False) -> ReadReply:
    """Read a reply by the form of its family.

    >>> read_reply("hermes", 'Let me see. <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>').tool_calls
    [('add', {'a': 1})]
    >>> read_reply("hermes", "<tool_call>add 1</tool_call>").problems
    ["a call is not JSON: expecting value at 'add 1'"]

    Args:
      name: of the form, see `response_templates`.
      text: what the policy wrote, with the special tokens that belong to the form.
      tools: descriptions of the tools, whose schemas give values in tags their types.
      thinking: the chat template has opened the policy's thoughts.

    Returns: the reply. A call that cannot be read is a problem; the others are calls all the same. What is around calls
      is the content; thoughts are a field of their own.
    """
    form = REPLY_FORMS[name]
    calls: list[Call] = []
    problems: list[str] = []
    try:
        fields = split_reply(name, text, thinking)
    except Exception as error:  # of a parser of a library, on a text that may be anything
        return ReadReply(_message(text), (), [f"the reply cannot be read: {_reason(error)}"])
    written = fields.get("tool_calls", [])
    contents = [fields.get("content", "")]
    unclosed = bool(form.close) and bool(written) and text.rfind(form.marks[0]) > text.rfind(form.close)
    for body in written[: len(written) - unclosed]:
        try:
            several, rest = form.read(body, tools)
        except json.JSONDecodeError as error:
            problems.append(f"a call is not JSON: {json_problem(error)}")
        except (ValueError, RecursionError) as error:
            problems.append(str(error))
        else:
            calls += several
            contents.append(rest)
    if unclosed:
        problems.append(f"a call has no {form.close}: {written[-1][:100]!r}")
    content = "\n".join(filter(None, contents)).strip()
    if name == "harmony":
        content = content if "<|message|>" in text else text
    elif set(fields) <= {"content"} and not (thinking and END_THINK in text):  # empty thoughts may have been closed
        content = text  # nothing else is in it, so it stays as it is
    return ReadReply(_message(content, calls, **_thoughts(fields, form.thoughts)), _pairs(calls), problems)


def read_message(tokenizer: Any, before: Sequence[int], tokens: Sequence[int], tools: Tools) -> ReadReply:
    """Read a reply by the tokenizer's `response_template`; what transformers cannot read is the content."""
    try:
        message = dict(tokenizer.parse_response(list(tokens), prefix=list(before), tools=list(tools) or None))
        calls = [call_of(call.get("function", call)) for call in message.get("tool_calls") or ()]
    except Exception as error:  # of a parser of a library, on a text that may be anything
        text = tokenizer.decode(list(tokens), skip_special_tokens=True)
        return ReadReply({"role": "assistant", "content": text}, (), [f"the reply cannot be read: {_reason(error)}"])
    message.setdefault("role", "assistant")
    message.setdefault("content", "")
    return ReadReply(message, _pairs(calls))


def argument_problem(name: str, arguments: Mapping[str, object], tools: Tools) -> str:
    """Problem of a call, in the words of the tool's schema; "" if it has none.

    >>> schema = {"properties": {"a": {"type": "integer"}}, "required": ["a"]}
    >>> argument_problem("f", {"a": "1"}, [{"function": {"name": "f", "parameters": schema}}])
    'f: a is of type integer, not "1" (string)'
    """
    functions = [tool.get("function", tool) for tool in tools]
    functions = [function for function in functions if isinstance(function, Mapping)]
    names = [str(function.get("name")) for function in functions]
    if name not in names:
        return f"there is no tool {name!r}, only {', '.join(names) or 'none'}"
    schema = functions[names.index(name)].get("parameters")
    known = parameters_of(name, tools)
    required = schema.get("required") if isinstance(schema, Mapping) else None
    missing = [key for key in required if key not in arguments] if isinstance(required, list) else []
    if missing:
        return f"{name} needs {', '.join(map(str, missing))}; it has {', '.join(known)}"
    if unknown := [key for key in arguments if known and key not in known]:
        return f"{name} has no argument {', '.join(unknown)}, only {', '.join(known)}"
    for key, value in arguments.items():
        types = types_of(known.get(key))
        if types and not any(_is_of(value, kind) for kind in types):
            return f"{name}: {key} is of type {' or '.join(types)}, not {_short(value)} ({_kind(value)})"
        choices = known[key].get("enum") if isinstance(known.get(key), Mapping) else None
        if isinstance(choices, list) and value not in choices:
            return f"{name}: {key} is one of {json.dumps(choices)}, not {_short(value)}"
    return ""


_TYPES: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "array": (list, tuple),
    "object": (Mapping,),
    "null": (type(None),),
}


def _is_of(value: object, kind: str) -> bool:
    if isinstance(value, bool) or kind not in _TYPES:
        return kind == "boolean" or kind not in _TYPES
    return isinstance(value, _TYPES[kind]) or (kind == "integer" and isinstance(value, float) and value.is_integer())


def _kind(value: object) -> str:
    return next((kind for kind in ("boolean", *_TYPES) if isinstance(value, _TYPES[kind])), type(value).__name__)


def _short(value: object) -> str:
    return json.dumps(value, default=str, ensure_ascii=False)[:100]


def _reason(error: Exception) -> str:
    """Reason of an error of transformers' parser, which puts lines around that of JSON."""
    cause = error if error.__cause__ is None else error.__cause__
    return f"a part of it is not JSON: {json_problem(cause)}" if isinstance(cause, json.JSONDecodeError) else str(error)


def _thoughts(fields: Mapping[str, Any], name: str) -> dict[str, str]:
    return {name: fields[name]} if fields.get(name) else {}


def _pairs(calls: Sequence[Call]) -> list[tuple[str, Mapping[str, Any]]]:
    return [(call.name, call.arguments) for call in calls]


def _message(content: str, calls: Sequence[Call] = (), **more: str) -> JsonObject:
    message: JsonObject = {"role": "assistant", "content": content, **more}
    if calls:
        message["tool_calls"] = [
            {
                "type": "function",
                **({"id": call.id} if call.id else {}),
                "function": {"name": call.name, "arguments": dict(call.arguments)},
            }
            for call in calls
        ]
    return message
