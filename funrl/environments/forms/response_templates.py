"""Forms of the replies of families of models: calls of tools, thoughts, and text around them.

| name | a call | chosen where the chat template has |
|---|---|---|
| `hermes` | `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`: Hermes, Qwen2.5, Qwen3 | `<tool_call>` |
| `qwen_xml` | `<tool_call><function=...><parameter=...>`: Qwen3-Coder, Qwen3.5 | `<function=` |
| `llama_json` | `{"name": ..., "parameters": {...}}`: Llama 3.1 and later | `<|python_tag|>`, `<|start_header_id|>` |
| `mistral` | `[TOOL_CALLS][{...}]`, and `[TOOL_CALLS]name[ARGS]{...}` | `[TOOL_CALLS]` |
| `harmony` | `<|channel|>commentary to=functions.... <|message|>{...}`: gpt-oss | `<|channel|>` |
| `glm` | `<tool_call>name<arg_key>...</arg_key><arg_value>...</arg_value></tool_call>`: GLM-4.5 | `<arg_key>` |

transformers' `ResponseParser` takes a reply apart by a response template. The text of each call is read here, so that
one that is wrong leaves the others as they are.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from funrl.data.json_lines import JsonObject
from funrl.data.tokenizer import END_THINK, THINK, TokenizerError
from funrl.rollout.policy import Tools

OPEN = "<tool_call>"
CLOSE = "</tool_call>"
LONGEST_EXCERPT = 40  # characters of a text in a message about it


class Call(NamedTuple):
    """A call of a tool, as the policy wrote it; `id` is "" where it wrote none."""

    name: str
    arguments: Mapping[str, Any]
    id: str = ""


# (text of one or several calls, tools) -> the calls, and text behind them. Raises ValueError, RecursionError.
ReadCalls = Callable[[str, Tools], tuple[list[Call], str]]


class ReplyForm(NamedTuple):
    """Form of a family's replies.

    Attributes:
      shown: texts; a chat template of the family contains one of them.
      fields: of transformers' response template; "tool_calls" are texts.
      read: reads these.
      marks: special tokens that are part of the form.
      close: text that ends a call; "": the end of the reply does.
      thoughts: name of the message's field of what the policy thinks.
    """

    shown: tuple[str, ...]
    fields: Mapping[str, Any]
    read: ReadCalls
    marks: tuple[str, ...]
    close: str = ""
    thoughts: str = "reasoning_content"


def form_of(chat_template: str | None) -> str:
    """Name of the form that a chat template shows; "": it shows none."""
    return next(
        (name for name in FORM_ORDER if any(text in str(chat_template) for text in REPLY_FORMS[name].shown)), ""
    )


def checked_form(name: str) -> str:
    """The name of a form. Raises TokenizerError, which lists the names, if it is another text."""
    if name not in REPLY_FORMS:
        raise TokenizerError(f"--tool_parser={name}: it is one of {', '.join(REPLY_FORMS)}")
    return name


def split_reply(name: str, text: str, thinking: bool) -> JsonObject:
    """Take a reply apart by transformers' parser.

    Args:
      name: of the form.
      thinking: the chat template has opened the policy's thoughts.

    Returns: fields of a message, as far as the reply has them; "tool_calls" is a list of texts.
    """
    from transformers.utils.chat_parsing import parse_response

    return parse_response(text, _response_template(name), prefix=THINK if thinking else "")


@functools.cache
def _response_template(name: str) -> Any:
    from transformers.utils.chat_parsing.response_templates import load_response_template

    return load_response_template({"start_anchor": "\0", "fields": REPLY_FORMS[name].fields})


def read_json_call(text: str, tools: Tools = ()) -> tuple[list[Call], str]:
    """Read one call, an object of JSON."""
    del tools
    return [call_of(json.loads(text))], ""


def call_of(value: object) -> Call:
    """A call of an object with a name, and arguments or parameters. Raises ValueError."""
    if not isinstance(value, Mapping) or not isinstance(value.get("name"), str):
        raise ValueError(f"a call is an object with a name and arguments, not {json.dumps(value)[:100]}")
    arguments = value.get("arguments", value.get("parameters")) or {}
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except json.JSONDecodeError as error:
            raise ValueError(f"arguments of {value['name']} are not JSON: {json_problem(error)}") from error
    if not isinstance(arguments, Mapping):
        raise ValueError(f"arguments of {value['name']} are an object, not {json.dumps(arguments)[:100]}")
    number = value.get("id")
    return Call(value["name"], arguments, number if isinstance(number, str) else "")


def json_problem(error: json.JSONDecodeError) -> str:
    """Problem of a text that is not JSON, and its place, for the author of the text.

    >>> try:
    ...     json.loads('{"name": "f" "arguments": {}}')
    ... except json.JSONDecodeError as error:
    ...     print(json_problem(error))
    expecting ',' delimiter at '"arguments": {}}'
    """
    what = error.msg[:1].lower() + error.msg[1:].removesuffix(" at")
    rest = error.doc[error.pos : error.pos + LONGEST_EXCERPT]
    return f"{what} at {rest!r}" if rest.strip() else f"{what} at its end"


def _read_json_calls(text: str, tools: Tools = ()) -> tuple[list[Call], str]:
    """Read objects of JSON, one after another, as Llama writes them; ";" may be between them."""
    del tools
    calls: list[Call] = []
    decoder = json.JSONDecoder()
    rest = text.strip()
    while rest.startswith("{") or not calls:
        value, end = decoder.raw_decode(rest)
        calls.append(call_of(value))
        rest = rest[end:].lstrip("; \n,")
    return calls, rest


def _read_mistral(text: str, tools: Tools = ()) -> tuple[list[Call], str]:
    """Read a list of calls, or a name with its arguments."""
    del tools
    text = text.strip()
    decoder = json.JSONDecoder()
    if text.startswith("["):
        values, end = decoder.raw_decode(text)
        return [call_of(value) for value in values], text[end:].strip()
    name, brace, _ = text.partition("{")
    name, _, number = name.partition("[ARGS]")[0].partition("[CALL_ID]")
    if not brace or not name.strip():
        raise ValueError(f"a call is a name and an object of arguments, not {text[:100]!r}")
    arguments, end = decoder.raw_decode(text, text.index("{"))
    return [Call(name.strip(), arguments, number.strip())], text[end:].strip()


def _read_harmony(text: str, tools: Tools = ()) -> tuple[list[Call], str]:
    """Read a name, the rest of a header, and arguments."""
    del tools
    header, _, arguments = text.partition("<|message|>")
    name = re.split(r"[\s<]", header.strip(), maxsplit=1)[0]
    return [call_of({"name": name, "arguments": json.loads(arguments)})], ""


_FUNCTION = re.compile(r"\s*<function=([^>\n]+)>(.*?)(?:</function>\s*)?\Z", re.DOTALL)
_PARAMETER = re.compile(r"\s*<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>\s*", re.DOTALL)


def _read_qwen_xml(text: str, tools: Tools = ()) -> tuple[list[Call], str]:
    """Read a function with its parameters, each as the schema of the tool has it."""
    match = _FUNCTION.match(text)
    if match is None:
        raise ValueError(f"a call is <function=NAME>...</function>, not {text.strip()[:100]!r}")
    return [_call_of_pairs(match[1].strip(), match[2], _PARAMETER, tools)], ""


_PAIR = re.compile(r"\s*<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>\s*", re.DOTALL)


def _read_glm(text: str, tools: Tools = ()) -> tuple[list[Call], str]:
    """Read a name, and keys with values."""
    name, key, _ = text.partition("<arg_key>")
    if not name.strip():
        raise ValueError(f"a call begins with the name of a tool, not {text.strip()[:100]!r}")
    return [_call_of_pairs(name.strip(), text[len(name) :] if key else "", _PAIR, tools)], ""


def _call_of_pairs(name: str, text: str, pattern: re.Pattern[str], tools: Tools) -> Call:
    schemas = parameters_of(name, tools)
    pairs = [(key.strip(), value) for key, value in pattern.findall(text)]
    arguments = {key: _value(value, schemas.get(key)) for key, value in pairs}
    if left := pattern.sub("", text).strip():
        raise ValueError(f"a part of the call of {name} cannot be read: {left[:100]!r}")
    return Call(name, arguments)


def parameters_of(name: str, tools: Tools) -> Mapping[str, Any]:
    """Schemas of the parameters of a tool by name; none where its description has another form."""
    for tool in tools:
        function = tool.get("function", tool)
        if isinstance(function, Mapping) and function.get("name") == name:
            schema = function.get("parameters")
            properties = schema.get("properties") if isinstance(schema, Mapping) else None
            return properties if isinstance(properties, Mapping) else {}
    return {}


def types_of(schema: object) -> tuple[str, ...]:
    """Types that a JSON schema allows; none: any."""
    if not isinstance(schema, Mapping):
        return ()
    given = schema.get("type")
    types = [given] if isinstance(given, str) else [x for x in given or () if isinstance(x, str)]
    for union in ("anyOf", "oneOf"):
        choices = schema.get(union)
        types += [x for choice in (choices if isinstance(choices, list) else ()) for x in types_of(choice)]
    return (*types, "null") if types and schema.get("nullable") else tuple(types)


def _value(text: str, schema: object) -> Any:
    """The value that a text stands for: itself where the schema allows a string."""
    types = types_of(schema)
    if not types or "string" in types:
        return text
    try:
        return json.loads({"True": "true", "False": "false", "None": "null"}.get(text.strip(), text))
    except ValueError:
        return text  # its type is wrong, and is said to be


_CONTENT = {"content": {"content_args": {"strip": False}, "repeats": True, "join": ""}}  # all around calls, as it is
_THOUGHTS = {"reasoning_content": {"open": THINK, "close": END_THINK, "repeats": True, "join": "\n"}}
_IN_TAGS = _CONTENT | _THOUGHTS | {"tool_calls": {"open": OPEN, "close": CLOSE, "repeats": True}}
_TAGS = (OPEN, CLOSE, THINK, END_THINK)
_LLAMA_CALL = r'<\|python_tag\|>|(?=\{\s*"(?:type|name)"\s*:[^{}]*"(?:parameters|arguments)"\s*:)'
_HEAD = r"(?:<\|start\|>assistant)?"
_HARMONY = {
    "thinking": {
        "open_pattern": _HEAD + r"\s*<\|channel\|>analysis\s*<\|message\|>",
        "close_pattern": r"<\|end\|>|(?=<\|start\|>)",
        "repeats": True,
        "join": "\n",
    },
    "content": {
        "open_pattern": _HEAD + r"\s*<\|channel\|>(?:final|commentary)\s*<\|message\|>",
        "close_pattern": r"<\|end\|>|<\|return\|>|(?=<\|start\|>)",
        "repeats": True,
        "join": "\n",
    },
    "tool_calls": {
        "open_pattern": _HEAD + r"\s*(?:<\|channel\|>\w+)?\s*to=(?:functions\.)?(?=[^\s<]+)",
        "close_pattern": r"<\|call\|>|<\|end\|>",
        "repeats": True,
    },
}
REPLY_FORMS: dict[str, ReplyForm] = {
    "hermes": ReplyForm((OPEN,), _IN_TAGS, read_json_call, _TAGS, CLOSE),
    "qwen_xml": ReplyForm(("<function=",), _IN_TAGS, _read_qwen_xml, _TAGS, CLOSE),
    "llama_json": ReplyForm(
        ("<|python_tag|>", "<|start_header_id|>"),
        _CONTENT | {"tool_calls": {"open_pattern": _LLAMA_CALL, "repeats": True}},
        _read_json_calls,
        ("<|python_tag|>",),
    ),
    "mistral": ReplyForm(
        ("[TOOL_CALLS]",),
        _CONTENT
        | {"reasoning_content": {"open": "[THINK]", "close": "[/THINK]", "repeats": True, "join": "\n"}}
        | {"tool_calls": {"open": "[TOOL_CALLS]", "close_pattern": r"(?=\[TOOL_CALLS\])", "repeats": True}},
        _read_mistral,
        ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "[THINK]", "[/THINK]"),
    ),
    "harmony": ReplyForm(
        ("<|channel|>",),
        _HARMONY,
        _read_harmony,
        ("<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|end|>", "<|call|>", "<|return|>"),
        thoughts="thinking",
    ),
    "glm": ReplyForm(
        ("<arg_key>",),
        _IN_TAGS,
        _read_glm,
        (*_TAGS, "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
        CLOSE,
    ),
}
FORM_ORDER = ("glm", "qwen_xml", "harmony", "mistral", "hermes", "llama_json")  # a template may show several
