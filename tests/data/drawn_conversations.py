"""Conversations drawn by seed: in the normal form of messages, and as records that users have.

A normal form has `content` as text ("" beside calls without one), arguments as objects, thoughts as `reasoning_content`
where there are some, and no nulls. A record says the same in one of the `FLAVOURS`.
"""

import copy
import json
import random
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

from random_chats import OWN_WORDS, WORDS, text_of

FLAVOURS = {
    "plain": "as the normal form",
    "openai": "as OpenAI's API returns it: arguments and tools as JSON text, null contents, null fields",
    "parts": "contents as lists of text parts, answers of tools as objects",
    "arrow": "as a column of parquet has it: every struct has all keys of the column, null where a record lacks them",
}
REFUSALS = {
    "tools": "tools, calls and answers",
    "parallel": "several calls in a message",
    "all_beside_calls": "content and thoughts both beside calls",
    "in_a_row": "two messages of the assistant in a row",
}
PLACES = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}
PARAMETERS = {
    "find": {
        "s": {"type": "string", "description": "what to find"},
        "l": {"type": "array", "items": {"type": "string"}},
    },
    "add_1": {"n": {"type": "integer"}},
    "now": {},
    "weather": {"where": PLACES, "unit": {"type": "string", "enum": ["C", "F"]}},
}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"Tool {name}.",
            "parameters": {"type": "object", "properties": properties, "required": [*properties][:1]},
        },
    }
    for name, properties in PARAMETERS.items()
]
STRINGS = ["a b", 'q"uote', "line\nbreak", "", "{", *OWN_WORDS[:6]]


class Drawn(NamedTuple):
    """A conversation.

    Attributes:
      number: of the draw.
      flavour: of the record, in `FLAVOURS`.
      messages: in normal form.
      tools: schemas in normal form; empty: none.
      record: {"messages": ..., "tools": ...} as a user has it.
    """

    number: int
    flavour: str
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]]
    record: dict[str, Any]


def drawn_conversations(
    count: int = 300, seed: int = 0, marks: Sequence[str] = (), without: Collection[str] = ()
) -> list[Drawn]:
    """Conversations that end with a message of the assistant; needs pyarrow.

    Args:
      count: of conversations.
      seed: of all draws.
      marks: of the template, for texts of users and tools, beside those in `random_chats.WORDS`.
      without: names of `REFUSALS` that no conversation has.
    """
    unknown = set(without) - set(REFUSALS)
    assert not unknown, f"{unknown} are not among {[*REFUSALS]}"
    words = [*WORDS, *marks]
    drawn = []
    for number in range(count):
        chance = random.Random(f"{seed}/{number}")
        tools = [] if "tools" in without or chance.random() < 0.3 else _some(TOOLS, chance)
        messages = _conversation(chance, tools, words, without)
        flavour = chance.choice([*FLAVOURS])
        drawn.append(Drawn(number, flavour, messages, tools, _record(messages, tools, flavour, chance)))
    return _through_arrow(drawn)


def answer_text(answer: Any) -> str:
    """Normal form of a tool's answer."""
    return answer if isinstance(answer, str) else json.dumps(answer, ensure_ascii=False)


def _some(values: Sequence[Any], chance: random.Random) -> list[Any]:
    return [copy.deepcopy(x) for x in values if chance.random() < 0.6] or [copy.deepcopy(chance.choice(values))]


def _conversation(
    chance: random.Random, tools: Sequence[Any], words: Sequence[str], without: Collection[str]
) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    if chance.random() < 0.4:
        messages.append({"role": "system", "content": text_of(chance, OWN_WORDS, 5) or "system"})
    for _ in range(chance.choice([1, 1, 2, 3])):
        messages.append({"role": "user", "content": text_of(chance, words, 8) or "?"})
        while tools and chance.random() < 0.5:
            messages += _calls_and_answers(chance, tools, words, without, len(messages))
        messages.append(_reply(chance))
        if "in_a_row" not in without and chance.random() < 0.1:
            messages.append(_reply(chance))
    if tools and chance.random() < 0.2:  # ends with calls
        messages.append({"role": "user", "content": text_of(chance, words, 8) or "?"})
        messages += _calls_and_answers(chance, tools, words, without, len(messages))[:1]
    return messages


def _reply(chance: random.Random) -> dict[str, Any]:
    content = text_of(chance, OWN_WORDS, 6).strip() or "x"
    if chance.random() < 0.1:
        content = chance.choice([" ", "\n"]) + content + chance.choice([" ", "\n\n"])
    return {"role": "assistant", "content": content, **_thoughts(chance)}


def _thoughts(chance: random.Random) -> dict[str, str]:
    thoughts = text_of(chance, OWN_WORDS, 5).strip() if chance.random() < 0.4 else ""
    return {"reasoning_content": thoughts} if thoughts else {}


def _calls_and_answers(
    chance: random.Random, tools: Sequence[Any], words: Sequence[str], without: Collection[str], place: int
) -> list[dict[str, Any]]:
    number = 1 if "parallel" in without else chance.choice([1, 1, 1, 2, 3])
    thoughts = _thoughts(chance)
    content = text_of(chance, OWN_WORDS, 4).strip() if chance.random() < 0.4 else ""
    if thoughts and "all_beside_calls" in without:
        content = ""
    calls = []
    for n in range(number):
        name = chance.choice(tools)["function"]["name"]
        function = {"name": name, "arguments": _arguments(chance, name)}
        calls.append({"type": "function", "id": f"c{place:03}x{n:04}", "function": function})
    answers = [
        {
            "role": "tool",
            "name": call["function"]["name"],
            "tool_call_id": call["id"],
            "content": text_of(chance, words, 6)
            if chance.random() < 0.7
            else answer_text(_arguments(chance, "weather")),
        }
        for call in calls
    ]
    return [{"role": "assistant", "content": content, **thoughts, "tool_calls": calls}, *answers]


def _arguments(chance: random.Random, name: str) -> dict[str, Any]:
    values = {
        "s": chance.choice(STRINGS),
        "l": [chance.choice(STRINGS) for _ in range(chance.randrange(3))],
        "n": chance.choice([3, -1, 0, 10**12]),
        "where": {"city": chance.choice(STRINGS), "days": chance.randrange(9)},
        "unit": chance.choice(["C", "F"]),
    }
    values["where"] = {key: value for key, value in values["where"].items() if chance.random() < 0.8} or {"days": 1}
    return {key: values[key] for key in PARAMETERS[name] if chance.random() < 0.8}


def _record(messages: list[Any], tools: list[Any], flavour: str, chance: random.Random) -> dict[str, Any]:
    record = {"messages": [_message(message, flavour, chance) for message in messages], "tools": copy.deepcopy(tools)}
    if flavour == "openai" and tools and chance.random() < 0.5:
        record["tools"] = json.dumps(tools)
    elif flavour != "arrow" and not tools:
        record["tools"] = chance.choice([[], None])
        if chance.random() < 0.5:
            del record["tools"]
    return record


def _message(message: dict[str, Any], flavour: str, chance: random.Random) -> dict[str, Any]:
    given = copy.deepcopy(message)
    if flavour == "openai":
        given |= {"refusal": None, "function_call": None} if given["role"] == "assistant" else {}
        given |= {"tool_calls": None} if given["role"] == "assistant" and "tool_calls" not in given else {}
        if "reasoning_content" in given and chance.random() < 0.5:
            given["reasoning"] = given.pop("reasoning_content")
    if flavour in ("openai", "arrow"):
        _empty_content(given, chance)
    if flavour == "openai":
        for call in given.get("tool_calls") or ():
            ascii_only, spaces = chance.random() < 0.5, chance.choice([(", ", ": "), (",", ":")])
            arguments = call["function"]["arguments"]
            call["function"]["arguments"] = json.dumps(arguments, ensure_ascii=ascii_only, separators=spaces)
    if flavour == "parts":
        _split(given, chance)
    return given


def _empty_content(given: dict[str, Any], chance: random.Random) -> None:
    """Leave out the content beside calls where it is empty, or make it null."""
    if given.get("tool_calls") and not given["content"]:
        given["content"] = None
        if chance.random() < 0.3:
            del given["content"]


def _split(given: dict[str, Any], chance: random.Random) -> None:
    """Make parts of a content, or an object of a tool's answer."""
    content = given["content"]
    if given["role"] == "tool" and content.startswith('{"') and chance.random() < 0.7:
        given["content"] = json.loads(content)
    elif content and chance.random() < 0.8:
        place = chance.randrange(len(content) + 1)
        texts = [text for text in (content[:place], content[place:]) if text]
        given["content"] = [{"type": "text", "text": text} for text in texts]


def _through_arrow(drawn: list[Drawn]) -> list[Drawn]:
    """Conversations whose records of the flavour "arrow" have been rows of one table."""
    import pyarrow

    rows = [x.record for x in drawn if x.flavour == "arrow"]
    read = iter(pyarrow.Table.from_pylist(rows).to_pylist())
    return [x._replace(record=next(read)) if x.flavour == "arrow" else x for x in drawn]
