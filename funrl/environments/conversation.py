"""Episodes as conversations for people: who said what, what of it the policy sampled, and what it earned."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from funrl.data.json_lines import JsonObject
from funrl.data.processors.form import PictureForm
from funrl.data.processors.thumbnails import thumbnails
from funrl.rollout.episodes import Episode, Message, Node

LONGEST_TEXT = 4000  # of one text; a tool's answer may be megabytes
MOST_SEEN = 12  # pictures of an episode


def conversation_of(
    episode: Episode, decode: Callable[[list[int]], str], form: PictureForm | None = None
) -> JsonObject:
    """An episode as a JSON value.

    Its "branches" are trajectories, each with an "agent", its "reward" and "says": entries with a "role", a "text"
    and, where they apply, "sampled" (by the policy; the text is then that of its tokens), "calls" (names and arguments
    of tools), "content" (what a message with calls says beside them), "reward" (of the turn), "finish" (where a limit
    ended the turn), "pictures" (fields of `ShownPicture`, up to `MOST_SEEN` in an episode) and "before" (an earlier
    branch has it too, and its pictures). From the first "forked" branches others forked.

    Args:
      decode: token ids -> text.
      form: in which the model takes pictures; None: none are shown.
    """
    seen: set[Node] = set()
    left = MOST_SEEN
    branches = []
    for end in episode.ends:
        says: list[JsonObject] = []
        for node in end.leaf.path():
            shared = {"before": True} if node in seen else {}
            entries = [entry | shared for entry in _entries(node, episode, decode)]
            if form is not None and node.owned is not None and node not in seen:
                pictures = thumbnails(node.owned.values, form, left)
                left -= len(pictures)
                entries = _with_pictures(entries, node, [picture._asdict() for picture in pictures])
            says += entries
            seen.add(node)
        branches.append({"agent": end.agent, "reward": episode.rewards.get(end.agent), "says": says})
    facts = {"status": episode.status, "problem": episode.problem[:LONGEST_TEXT], "parts": dict(episode.parts)}
    facts["forked"] = episode.forked
    return {"branches": branches} | {name: x for name, x in facts.items() if x}


def short_text(conversation: Mapping[str, Any]) -> list[tuple[bool, str]]:
    """The first branch that no other forked from in pieces: whether the policy sampled it, and the text."""
    branches = (conversation.get("branches") or [])[conversation.get("forked", 0) :] or [{}]
    says = branches[0].get("says") or ()
    return [(bool(entry.get("sampled")), str(entry.get("text", ""))) for entry in says]


def _entries(node: Node, episode: Episode, decode: Callable[[list[int]], str]) -> Iterator[JsonObject]:
    """Entries of a node: one for each of its messages, or one for all of its tokens."""
    if node.sampled:
        yield _sampled(node, episode, decode)
    elif node.messages:
        for message in node.messages:
            role = str(message.get("role", "context"))
            name = f" {message['name']}" if message.get("name") else ""
            yield {"role": role + name, "text": _cut(_content(message))}
    else:
        yield {"role": "context", "text": _cut(decode(list(node.tokens)))}


def _with_pictures(entries: list[JsonObject], node: Node, pictures: list[dict[str, str]]) -> list[JsonObject]:
    """Entries of a node with its pictures, each in that of the message which has it."""
    contents = [message.get("content") for message in node.messages] or [[{"type": "image"}] * len(pictures)]
    counts = [sum(part.get("type") == "image" for part in x) if isinstance(x, list) else 0 for x in contents]
    rest = iter(pictures)
    own = [list(itertools.islice(rest, count)) for count in counts]
    return [entry | ({"pictures": x} if x else {}) for entry, x in zip(entries, own, strict=True)]


def _sampled(node: Node, episode: Episode, decode: Callable[[list[int]], str]) -> JsonObject:
    message: Message = node.messages[0] if node.messages else {}
    entry: JsonObject = {"role": str(message.get("role", "assistant")), "text": _cut(decode(list(node.tokens)))}
    entry["sampled"] = True
    functions = [call.get("function", call) for call in message.get("tool_calls") or ()]
    if functions:
        entry["calls"] = [[str(f.get("name", "")), _cut(json.dumps(f.get("arguments")))] for f in functions]
        entry["content"] = _cut(_content(message))
    if node in episode.turn_rewards:
        entry["reward"] = float(episode.turn_rewards[node])
    if node.finish not in ("stop", "string"):
        entry["finish"] = str(node.finish)
    return entry


def _content(message: Message) -> str:
    content = message.get("content") or ""
    if isinstance(content, list) and all(isinstance(part, Mapping) and "type" in part for part in content):
        return "".join(str(part.get("text", "")) if part["type"] == "text" else f"[{part['type']}]" for part in content)
    return content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)


def _cut(text: str) -> str:
    rest = len(text) - LONGEST_TEXT
    return text if rest <= 0 else f"{text[:LONGEST_TEXT]} ({rest} more characters)"
