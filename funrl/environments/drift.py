"""Why a chat template renders a history in another way than it was sampled.

| cause | what differs |
|---|---|
| `whitespace` | spaces and line breaks only |
| `arguments` | the text of arguments that are equal as JSON |
| `tool_ids` | ids of calls |
| `end_of_turn` | the token that ends a reply: some templates have one at the end, and another in a history |
| `thinking` | what the policy thought: templates drop it once the user speaks again |
| `system_prompt` | what is before the conversation, such as tools that move to the last question |
| `unreadable` | a call that could not be read, which no message has |
| `other` | anything else |

The first four mean the same to a reader: what was sampled stays. After the others a trajectory may fork.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence

SAME = ("whitespace", "arguments", "tool_ids", "end_of_turn")
_THOUGHTS = re.compile(
    r"<think>.*?</think>|\[THINK\].*?\[/THINK\]"
    r"|<\|channel\|>analysis<\|message\|>.*?<\|end\|>(?:<\|start\|>assistant)?",
    re.DOTALL,
)
_ID = re.compile(r'"(?:id|call_id|tool_call_id)": ?"[^"]*",? ?|\[CALL_ID\]\w*')
_ENDS = {"<|return|>": "<|end|>", "<|eom_id|>": "<|eot_id|>"}
LONGEST = 100_000  # characters whose objects are compared


def drift_cause(sampled: str, rendered: str) -> str:
    """Name of the first change in the table after which two texts are equal, all before it included; "" if they are.

    >>> drift_cause('<think>hm</think>\\n\\nyes', 'yes'), drift_cause('{"a":1}', '{"a": 1}'), drift_cause("a", "a")
    ('thinking', 'arguments', '')
    """
    if sampled == rendered:
        return ""
    for cause, change in _CHANGES:
        sampled, rendered = change(sampled), change(rendered)
        if sampled == rendered:
            return cause
    return "other"


def _without_space(text: str) -> str:
    return re.sub(r"\s+", "", text)


def _canonical(text: str) -> str:
    """The text with each object of JSON in it in one form."""
    if len(text) > LONGEST:
        return text
    decoder = json.JSONDecoder()
    parts: list[str] = []
    begin = 0
    while (found := text.find("{", begin)) >= 0:
        parts.append(text[begin:found])
        try:
            value, begin = decoder.raw_decode(text, found)
            parts.append(json.dumps(value, sort_keys=True, separators=(",", ":")))
        except (ValueError, RecursionError):
            parts.append(text[found])
            begin = found + 1
    return "".join((*parts, text[begin:]))


def _one_end(text: str) -> str:
    for end, other in _ENDS.items():
        text = text.replace(end, other)
    return text


def _without_thoughts(text: str) -> str:
    return _THOUGHTS.sub("", text)


_CHANGES: Sequence[tuple[str, Callable[[str], str]]] = (
    ("whitespace", _without_space),
    ("arguments", _canonical),
    ("tool_ids", lambda text: _ID.sub("", text)),
    ("end_of_turn", _one_end),
    ("thinking", _without_thoughts),
)
