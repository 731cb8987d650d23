"""Causes why a chat template renders a history in another way than it was sampled.

| cause | what differs |
|---|---|
| `whitespace` | spaces and line breaks only |
| `arguments` | the text of calls whose arguments are equal as JSON |
| `tool_ids` | ids of calls |
| `end_of_turn` | the token that ends a reply: some templates have one at the end, and another in a history |
| `thinking` | what the policy thought: templates drop it once the user speaks again |
| `system_prompt` | what is before the conversation, such as tools that move to the last question |
| `unreadable` | a call that could not be read, which no message has |
| `truncated` | a reply that was cut off inside of a mark |
| `other` | anything else |

The first four mean the same to a reader: what was sampled stays. After the others a trajectory may fork.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

SAME = ("whitespace", "arguments", "tool_ids", "end_of_turn")
LONGEST_COMPARED = 100_000  # characters whose objects are compared
MOST_ENDS = 6  # replies whose ends are left out in each combination
_THOUGHTS = (
    r"(?:<think>.*?</think>|\[THINK\].*?\[/THINK\]"
    r"|<\|channel\|>analysis<\|message\|>.*?<\|end\|>(?:<\|start\|>assistant)?)"
)
_UNCLOSED = re.compile(r"<think>(?!.*</think>).*|<\|channel\|>analysis<\|message\|>(?!.*<\|end\|>).*", re.DOTALL)
_HEADER = re.compile(r"<\|channel\|>commentaryto=(functions\.[^\s<]+)(?:<\|constrain\|>)?(json)?<\|message\|>")
_ID = re.compile(r'"(?:id|call_id|tool_call_id)":"[^"]*",?|,(?="(?:id|call_id|tool_call_id)":)|\[CALL_ID\]\w*')
_ENDS = {"<|return|>": "<|end|>", "<|eom_id|>": "<|eot_id|>"}


class NodeText(NamedTuple):
    """Text of a node.

    Attributes:
      text: what its tokens say, marks included.
      sampled: whether the policy wrote it.
      end: what of it is the token that ended the reply; "": it was cut off.
    """

    text: str
    sampled: bool = False
    end: str = ""


def drift_cause(parts: Sequence[NodeText], rendered: str, turn: str) -> str:
    """Name of the first cause in the table that explains a difference, those before it included; "" if there is none.

    >>> said = [NodeText("<user>?<bot>"), NodeText('<think>hm</think>yes', True)]
    >>> drift_cause(said, "<user>?<bot>yes", "<bot>"), drift_cause(said, "<user>?<bot>no", "<bot>")
    ('thinking', 'other')

    Args:
      parts: what was sampled, and what was between.
      rendered: the same conversation by the template.
      turn: text with which the template begins the policy's turn.
    """
    sampled = "".join(part.text for part in parts)
    for cause, change in _CHANGES:
        if change(sampled) == change(rendered):
            return cause
    for ends in _without_ends(parts):
        texts = "".join(part.text for part in ends)
        if _same(texts) == _same(rendered):
            return "end_of_turn"
        thoughtless = "".join(_without_thoughts(part.text) if part.sampled else part.text for part in ends)
        header = re.escape(_without_space(turn))
        pattern = re.compile(f"({header}){_THOUGHTS}", re.DOTALL)
        if pattern.sub(r"\1", _same(thoughtless)) == pattern.sub(r"\1", _same(rendered)):
            return "thinking"
    return "other"


def _without_ends(parts: Sequence[NodeText]) -> Iterator[list[NodeText]]:
    """Parts, and parts without the token that ended some of the replies: the template has another there."""
    replies = [n for n, part in enumerate(parts) if part.sampled and part.end]
    late = replies[-MOST_ENDS:]
    several = [dropped for count in range(2, len(late) + 1) for dropped in itertools.combinations(late, count)]
    single = [(reply,) for reply in reversed(replies)]
    for dropped in dict.fromkeys(((), *single, tuple(replies), *several)):
        yield [
            part._replace(text=part.text.removesuffix(part.end)) if n in dropped else part
            for n, part in enumerate(parts)
        ]


def _without_space(text: str) -> str:
    return re.sub(r"\s+", "", text)


def _canonical(text: str) -> str:
    """The text without space, with each object of JSON and each header of a call in it in one form."""
    text = _HEADER.sub(r"to=\1<|channel|>commentaryjson<|message|>", _without_space(text))
    if len(text) > LONGEST_COMPARED:
        return text
    decoder = json.JSONDecoder()
    parts: list[str] = []
    begin = 0
    while (object_begin := text.find("{", begin)) >= 0:
        parts.append(text[begin:object_begin])
        try:
            value, begin = decoder.raw_decode(text, object_begin)
            parts.append(json.dumps(value, sort_keys=True, separators=(",", ":")))
        except (ValueError, RecursionError):
            parts.append(text[object_begin])
            begin = object_begin + 1
    return "".join((*parts, text[begin:]))


def _without_ids(text: str) -> str:
    return _ID.sub("", _canonical(text))


def _same(text: str) -> str:
    """The text in a form in which all that means the same is equal."""
    text = _without_ids(text)
    for end, other in _ENDS.items():
        text = text.replace(end, other)
    return text


def _without_thoughts(text: str) -> str:
    """A reply without what the policy thought, closed or not."""
    text = re.sub(_THOUGHTS, "", text, flags=re.DOTALL)
    return _UNCLOSED.sub("", text)


_CHANGES: Sequence[tuple[str, Callable[[str], str]]] = (
    ("", str),
    ("whitespace", _without_space),
    ("arguments", _canonical),
    ("tool_ids", _without_ids),
)
