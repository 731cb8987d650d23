"""Messages of a conversation in one normal form, made where a record is read.

| given | normal form |
|---|---|
| `content` a text; a list of parts of text | the text; the texts joined |
| `content` null or absent, beside calls or thoughts of the assistant, or by a tool | "" |
| `content` of a tool's message as an object, a list or a number | its JSON text |
| a call `{"name": ..., "arguments": ...}`, alone or as `function` | `{"type": "function", "function": {...}}`, `id` |
| `arguments` as JSON text, null or absent | an object |
| `reasoning_content`, `reasoning`, `thinking` | `reasoning_content` |
| `weight: 0` or `train: false` | `train: false`: the turn is not trained |
| any field that is null | left out |

Parts of pictures stay parts. Other fields stay for the chat template; `unread_fields` names what it does not read.
Nulls inside of arguments and schemas stay, except those of Arrow, whose tables give every row all keys of its column:
`without_arrow_nulls` leaves them out.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import date, time
from decimal import Decimal
from typing import Any

from funrl.data.json_lines import DataError

ChatMessage = dict[str, Any]
CHAT_ROLES = ("system", "developer", "user", "assistant", "tool")
THOUGHT_FIELDS = ("reasoning_content", "reasoning", "thinking")  # of the assistant; the normal form has the first
END_THINK = "</think>"
TRAIN_FIELD = "train"  # field of a message: false where its turn is not trained
MESSAGE_FIELDS = frozenset(
    {"role", "content", "tool_calls", "tool_call_id", "name", TRAIN_FIELD, "weight", *THOUGHT_FIELDS}
)
_ROLES = frozenset(CHAT_ROLES)
_PLAIN = frozenset({"role", "content"})
_LONGEST_SHOWN = 80  # characters of a value in an error


def are_messages(value: object) -> bool:
    """True for what is meant as a conversation instead of a text: a list that is not empty."""
    return isinstance(value, list) and bool(value)


def normal_messages(messages: Sequence[Any]) -> list[ChatMessage]:
    """Messages in the normal form of this module.

    >>> call = {"name": "add", "arguments": '{"a": 2}'}
    >>> normal_messages([{"role": "assistant", "content": None, "tool_calls": [call]}])[0]["tool_calls"]
    [{'type': 'function', 'function': {'name': 'add', 'arguments': {'a': 2}}}]

    Raises:
      DataError: one is not a message; the error gives its number and what is wrong.
    """
    normal = []
    for number, message in enumerate(messages, 1):
        try:
            normal.append(normal_message(message))
        except DataError as error:
            raise DataError(f"message {number}: {error}") from None
    return normal


def normal_message(message: object) -> ChatMessage:
    """One message in the normal form. Raises: DataError."""
    if not isinstance(message, Mapping):
        raise DataError(f"{shown(message)} is not an object with a role and a content")
    role = message.get("role")
    if not isinstance(role, str) or not role:
        hint = ", in fields role and content instead of from and value" if "from" in message else ""
        raise DataError(f"its role is {shown(role)}; one of {', '.join(CHAT_ROLES)} is needed{hint}")
    content = message.get("content")
    if message.keys() == _PLAIN and isinstance(content, str):
        return dict(message)
    if message.get("function_call") is not None:
        raise DataError("it has function_call, an older form; give tool_calls")
    normal = {name: value for name, value in message.items() if value is not None and name not in MESSAGE_FIELDS}
    calls = normal_calls(message.get("tool_calls"))
    thoughts = _thoughts(message)
    may_be_empty = role == "tool" or (role == "assistant" and bool(calls or thoughts))
    normal = {"role": role, "content": _content(content, role, may_be_empty), **normal}
    for name in ("name", "tool_call_id"):
        if message.get(name) is not None:
            normal[name] = message[name]
    if thoughts:
        normal[THOUGHT_FIELDS[0]] = thoughts
    if calls:
        normal["tool_calls"] = calls
    if role == "assistant" and not _is_trained(message):
        normal[TRAIN_FIELD] = False
    return normal


def normal_changes(given: Mapping[str, Any], normal: ChatMessage) -> list[str]:
    """Differences between a message as it was given and its normal form, in words, for a reader of the record."""
    changes = []
    content = given.get("content")
    if isinstance(content, list) and isinstance(normal["content"], str) and content:
        is_text = text_of_parts(content) is not None
        changes.append(f"{len(content)} parts of text are joined" if is_text else "its content is written as JSON")
    elif content is not None and not isinstance(content, str | list):
        changes.append("its content is written as JSON")
    calls = [call.get("function") or call for call in given.get("tool_calls") or []]
    decoded = sum(isinstance(call.get("arguments"), str) for call in calls)
    changes += [f"the arguments of {decoded} call{'s' * (decoded > 1)} are decoded from JSON text"] * bool(decoded)
    changes += [f"{name} is read as {THOUGHT_FIELDS[0]}" for name in THOUGHT_FIELDS[1:] if given.get(name)]
    nulls = [name for name, value in given.items() if value is None and name != "content"]
    changes += [f"fields that are null are left out: {', '.join(nulls)}"] * bool(nulls)
    if normal.get(TRAIN_FIELD) is False:
        changes.append("not trained: weight 0" if given.get("weight") == 0 else "not trained: train false")
    return changes


def are_usual(messages: Sequence[object]) -> bool:
    """True only of messages that `normal_messages` takes, with usual roles and fields; quick, for millions of records.

    Fields may be null.
    """
    for message in messages:
        if type(message) is not dict or type(message.get("content")) is not str or message.get("role") not in _ROLES:
            return False
        if len(message) > 2 and not (MESSAGE_FIELDS.issuperset(message) and _are_usual_fields(message)):
            return False
    return True


def normal_calls(calls: object) -> list[ChatMessage]:
    """The calls of a message in the normal form; none for null. Raises: DataError."""
    if calls is None:
        return []
    if not isinstance(calls, list | tuple):
        raise DataError(f"tool_calls is {shown(calls)}; a list of calls is needed")
    return [_call(call) for call in calls]


def decoded_arguments(given: object) -> dict[str, Any]:
    """Arguments of a call as an object, from an object or its JSON text. Raises: DataError."""
    if isinstance(given, str):
        try:
            given = json.loads(given or "{}")
        except (ValueError, RecursionError) as error:
            raise DataError(f"the arguments {shown(given)} of a call are not JSON: {error}") from None
    given = {} if given is None else given
    if not isinstance(given, Mapping):
        raise DataError(f"the arguments of a call are {shown(given)}; an object is needed")
    return dict(given)


def normal_tools(given: Any) -> list[Any]:
    """Schemas of tools, from a list of them or its JSON text.

    Raises:
      DataError: they are neither, or one is not an object or is a function without a name.
    """
    try:
        tools = (json.loads(given or "[]") if isinstance(given, str) else given) or []
        tools = [json.loads(tool) if isinstance(tool, str) else tool for tool in tools]
    except (TypeError, ValueError, RecursionError) as error:
        raise DataError(f"tools are a list of JSON schemas, not {shown(given)}: {error}") from error
    if isinstance(given, Mapping) or not all(isinstance(tool, Mapping) for tool in tools):
        raise DataError(f"tools are a list of JSON schemas, not {shown(given)}")
    for number, tool in enumerate(tools, 1):
        function = tool.get("function", tool)
        is_function = "function" in tool or tool.get("type", "function") == "function"  # others may be a template's own
        if is_function and not (isinstance(function, Mapping) and isinstance(function.get("name"), str)):
            raise DataError(f'tool {number} is {shown(tool)}; {{"function": {{"name": ...}}}} is needed')
    return tools


def without_arrow_nulls(row: object) -> Any:
    """A row of an Arrow table without the nulls in its messages and tools, also those in entries of a column.

    Other columns stay as they are.
    """
    if not isinstance(row, Mapping):
        return row
    return {
        name: _without_nulls(x) if name == "tools" or _is_filled(x) else without_arrow_nulls(x)
        for name, x in row.items()
    }


def check_chat_roles(messages: Iterable[ChatMessage], template: str | None) -> None:
    """Raise DataError for a role that is neither usual nor named in the chat template."""
    for number, message in enumerate(messages, 1):
        role = message["role"]
        if role not in CHAT_ROLES and not mentions(template, role):
            raise DataError(
                f"message {number} has the role {role!r}, which the chat template does not name; the usual ones are "
                f"{', '.join(CHAT_ROLES)}"
            )


def unread_fields(messages: Iterable[ChatMessage], template: str | None) -> list[str]:
    """Names of fields of messages that neither funrl nor the chat template reads, each once."""
    read = known_fields(template)
    names = dict.fromkeys(name for message in messages for name in message if name not in read)
    return [name for name in names if not mentions(template, name)]


def known_fields(template: str | None) -> frozenset[str]:
    """Names of fields that are read with any template, and those of thoughts with one that knows these."""
    thinks = any(mentions(template, name) for name in THOUGHT_FIELDS) or END_THINK in str(template)
    return MESSAGE_FIELDS if thinks else MESSAGE_FIELDS.difference(THOUGHT_FIELDS)


def mentions(template: str | None, name: str) -> bool:
    """True if a chat template has a word."""
    return _has_word(str(template or ""), name)


@functools.lru_cache(maxsize=256)  # it is asked for every record
def _has_word(template: str, name: str) -> bool:
    return re.search(rf"\b{re.escape(name)}\b", template) is not None


def shown(value: object) -> str:
    """A value as JSON, cut off, for errors."""
    text = json.dumps(value, default=str, ensure_ascii=False)
    return text if len(text) <= _LONGEST_SHOWN else text[: _LONGEST_SHOWN - 3] + "..."


def text_of_parts(parts: Sequence[Any]) -> str | None:
    """The texts of parts joined; None if one is not a part of text."""
    texts = [part["text"] for part in parts if _is_text_part(part)]
    return "".join(texts) if len(texts) == len(parts) else None


def _are_usual_fields(message: ChatMessage) -> bool:
    get = message.get
    calls = get("tool_calls")
    if get("weight") is not None or get(TRAIN_FIELD) is not None or (calls and type(calls) is not list):
        return False
    if any(get(name) is not None for name in THOUGHT_FIELDS):  # which a template may leave out
        return False
    for call in calls or ():
        function = call.get("function") if type(call) is dict else None
        if type(function) is not dict or type(function.get("name")) is not str or not function["name"]:
            return False
        arguments = function.get("arguments")
        if type(arguments) is not dict:
            try:
                decoded_arguments(arguments)
            except DataError:
                return False
    return True


def _content(content: object, role: str, may_be_empty: bool) -> Any:
    if isinstance(content, str):
        return content
    if content is None or (content == [] and role != "tool"):
        if may_be_empty:
            return ""
        beside = ", and neither calls nor thoughts beside it" if role == "assistant" else ""
        raise DataError(f"the content of the {role} is {shown(content)}{beside}; a text is needed")
    if isinstance(content, list) and content and (text := text_of_parts(content)) is not None:
        return text
    if isinstance(content, list) and content and all(_is_text_part(x) or _is_picture_part(x) for x in content):
        return [{name: value for name, value in part.items() if value is not None} for part in content]
    if role == "tool":
        return json.dumps(content, ensure_ascii=False, default=str)
    raise DataError(f"the content of the {role} is {shown(content)}; a text, or a list of parts of text, is needed")


def _is_text_part(part: object) -> bool:
    return isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str)


def _is_picture_part(part: object) -> bool:
    return isinstance(part, Mapping) and part.get("type") == "image"


def _thoughts(message: Mapping[str, Any]) -> str:
    given = {name: message[name] for name in THOUGHT_FIELDS if message.get(name) is not None}
    for name, value in given.items():
        if not isinstance(value, str):
            raise DataError(f"{name} is {shown(value)}; a text is needed")
    texts = list(dict.fromkeys(value for value in given.values() if value))
    if len(texts) > 1:
        raise DataError(f"{' and '.join(given)} are different texts; leave all but one out")
    return texts[0] if texts else ""


def _is_trained(message: Mapping[str, object]) -> bool:
    weight = message.get("weight")
    if weight is not None and weight not in (0, 1):
        raise DataError(f"its weight is {shown(weight)}; 1 trains the turn, and 0 does not")
    train = message.get(TRAIN_FIELD)
    if train is not None and not isinstance(train, bool):
        raise DataError(f"its field train is {shown(train)}; true or false is needed")
    return weight != 0 and train is not False


def _call(call: Any) -> ChatMessage:
    function = call.get("function") if isinstance(call, Mapping) else None
    function = call if function is None else function
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str) or not function["name"]:
        raise DataError(f"the call {shown(call)} has no function with a name")
    named = {} if call.get("id") is None else {"id": call["id"]}
    inner = {"name": function["name"], "arguments": decoded_arguments(function.get("arguments"))}
    return {"type": "function", **named, "function": inner}


def _is_filled(value: object) -> bool:
    """True for a column of Arrow that has messages or tools, whose objects have the keys of all rows."""
    first = value[0] if isinstance(value, list) and value else None
    return isinstance(first, Mapping) and not {"role", "function", "parameters"}.isdisjoint(first)


def _without_nulls(value: object) -> Any:
    if isinstance(value, Mapping):
        return {name: _without_nulls(inner) for name, inner in value.items() if inner is not None}
    if isinstance(value, list):
        return [_without_nulls(inner) for inner in value]
    if isinstance(value, date | time):  # which JSON has not; transformers would render its type
        return value.isoformat()
    return float(value) if isinstance(value, Decimal) else value


TEXT_COLUMNS = ("prompt", "messages", "completion", "chosen", "rejected", "reference")


class RecordRemarks:
    """Oddities of some records, with the number of the first of each kind.

    Example:
      remarks = RecordRemarks(tokenizer)
      for number, record in enumerate(records):
          remarks.see(number, record)
      lines = remarks.lines(lambda number: f"record {number + 1}")
    """

    def __init__(self, tokenizer: Any):
        self.template = getattr(tokenizer, "chat_template", None)
        self.begin = getattr(tokenizer, "bos_token", None)
        self.known = known_fields(self.template)  # and further names that have been looked at
        self.unread: dict[str, int] = {}
        self.begun: list[int] = []
        self.equal: list[int] = []
        self.pairs = 0

    def see(self, number: int, record: Mapping[str, object], usual: bool = False) -> None:
        """Look at a record.

        Args:
          number: of the record.
          record: as of `normal_record`.
          usual: whether all messages are known to be; see `are_usual`.

        Raises:
          DataError: a role that nothing knows.
        """
        for name in () if usual else TEXT_COLUMNS:
            value: Any = record.get(name)
            if type(value) is list and value and not are_usual(value):
                check_chat_roles(value, self.template)
                new = {x for message in value for x in message if x not in self.known and message[x] is not None}
                for field in unread_fields([dict.fromkeys(sorted(new))], self.template):
                    self.unread.setdefault(field, number)
                self.known |= new
        text = record.get("prompt", record.get("text"))
        if self.begin and isinstance(text, str) and text.startswith(self.begin):
            self.begun.append(number)
        if "chosen" in record:
            self.pairs += 1
            if record["chosen"] == record["rejected"]:
                self.equal.append(number)

    def lines(self, where: Callable[[int], str]) -> list[str]:
        """A line for each kind.

        Args:
          where: number of a record -> its file and line.

        Raises:
          DataError: all pairs are equal.
        """
        lines = [f"messages have a field {x!r}, which nothing reads ({where(n)})" for x, n in self.unread.items()]
        if self.begun:
            lines.append(
                f"{len(self.begun)} texts begin with {self.begin!r}, as rendered chats do; they get no "
                f"second one (the first: {where(self.begun[0])})"
            )
        if self.equal and len(self.equal) == self.pairs:
            raise DataError(f"{where(0)}: in all pairs 'chosen' and 'rejected' are equal: there is nothing to learn")
        if self.equal:
            lines.append(
                f"in {len(self.equal)} of {self.pairs} pairs 'chosen' and 'rejected' are equal: they train nothing "
                f"(the first: {where(self.equal[0])})"
            )
        return lines
