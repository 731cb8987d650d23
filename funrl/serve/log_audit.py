"""Audit of a log entry: who wrote each token, where histories were rewritten, and what trainers would train of it."""

from __future__ import annotations

import collections
import itertools
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from funrl.data.conversations import ChatTemplate, Text
from funrl.data.json_lines import DataError
from funrl.data.peers import same_tokens, trl_completed_messages, trl_completion, trl_text, verl_text
from funrl.data.tokenizer import TokenizerError
from funrl.environments.row_paths import RowPath, paths_of
from funrl.rollout.episodes import Episode, Message, Node, Trajectory
from funrl.serve.log_files import UNKNOWN_WEIGHTS, LogEntry, LoggedConversation

_PARTIAL = "\ufffd"  # decoded from a part of a character
_MOST_BYTES = 4  # bytes, of which each may be a token


class Trained(NamedTuple):
    """Tokens of an entry that a trainer would train.

    Attributes:
      rows: number of its rows.
      tokens: of the rows.
      trained: trained tokens.
      as_sampled: sampled tokens that are trained at least once after exactly the tokens after which they were sampled.
      again: trainings of such tokens beyond the first.
      other: trained tokens that are none of these.
      lost: sampled tokens that are not in `as_sampled`.
      refused: why rows are missing; "": none is.
    """

    rows: int
    tokens: int
    trained: int
    as_sampled: int
    again: int
    other: int
    lost: int
    refused: str = ""


class Audit(NamedTuple):
    """Contents of an entry.

    Attributes:
      entry: itself.
      paths: number of histories with a reply.
      tokens: of the nodes, each counted once.
      sampled: tokens by the weights that sampled them, in the words of the file.
      template: tokens that the chat template wrote.
      given: tokens of messages that others wrote.
      rewrites: where a history was rewritten or compacted, in words.
      trained: by the name of a library.
    """

    entry: LogEntry
    paths: int
    tokens: int
    sampled: Mapping[str, int]
    template: int
    given: int
    rewrites: Sequence[str]
    trained: Mapping[str, Trained]

    def without_tokens(self) -> Audit:
        """The numbers alone, so that a long log does not stay in memory."""
        entry = self.entry._replace(episode=Episode([], {}), weights={}, texts=None, conversation=None)
        return self._replace(entry=entry)

    def as_json(self) -> dict[str, Any]:
        """Values for a file; see `Audit` and `Trained` for their meaning."""
        entry = self.entry
        own = self._asdict() | {"trained": {name: trained._asdict() for name, trained in self.trained.items()}}
        named = {"source": entry.source, "form": entry.form, "token_ids": "logged" if entry.logged else "rendered"}
        return named | {"remarks": [*entry.remarks]} | {name: x for name, x in own.items() if name != "entry"}


def audit_entry(entry: LogEntry, template: ChatTemplate) -> Audit:
    """Count the tokens of an entry by their authors, and those that funrl, TRL and verl would train."""
    nodes = list(dict.fromkeys(node for end in entry.episode.ends for node in end.nodes()))
    sampled: collections.Counter[str] = collections.Counter()
    for node in nodes:
        if node.sampled and node.versions is not None:
            sampled.update(f"version {version}" for version in node.versions.tolist())
        elif node.sampled:
            sampled[entry.weights.get(node, UNKNOWN_WEIGHTS)] += len(node.tokens)
    tokens = sum(len(node.tokens) for node in nodes)
    by_template = sum(_template_tokens(node, template) for node in nodes if not node.sampled)
    paths = paths_of(entry.episode)
    return Audit(
        entry,
        paths=len(paths),
        tokens=tokens,
        sampled=dict(sampled),
        template=by_template,
        given=tokens - by_template - sampled.total(),
        rewrites=rewrites_of([path.trajectory for path in paths]),
        trained=_trained(entry, template),
    )


def rewrites_of(ends: Sequence[Trajectory]) -> list[str]:
    """Places where a later history is not an earlier one continued, in words."""
    lines = []
    for number, end in enumerate(ends):
        mine = _said(end)
        shared, other = max(
            ((_common(_said(earlier), mine), earlier) for earlier in ends[:number]),
            key=lambda pair: pair[0],
            default=(0, end),
        )
        theirs = _said(other)
        if not shared or (shared < len(mine) and mine[shared][1]) or other.leaf in end.leaf.path():
            continue  # nothing in common, another reply to the same history, or a continuation
        place = f"path {number + 1}, message {shared + 1}"
        left = [node for node in other.nodes() if node.sampled and node not in end.leaf.path()]
        lost = f"{sum(len(node.tokens) for node in left)} sampled tokens of the path before it are not in it"
        history = max((index for index, (_, sampled) in enumerate(mine) if sampled), default=len(mine))
        if shared == len(theirs):
            lines.append(f"path {number + 1}: the same messages have other tokens, rendered anew; {lost}")
        elif history < len(theirs):
            lines.append(f"{place}: compacted, {len(theirs) - shared} messages became {history - shared}; {lost}")
        else:
            lines.append(f"{place}: rewritten; {lost}")
    return lines


def _said(end: Trajectory) -> list[tuple[Message, bool]]:
    """The messages of a trajectory, each with whether it was sampled."""
    return [(message, node.sampled) for node in end.nodes() for message in node.messages]


def _common(before: Sequence[tuple[Message, bool]], after: Sequence[tuple[Message, bool]]) -> int:
    """Number of messages with which both begin."""
    pairs = zip(before, after, strict=False)
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0][0] == pair[1][0], pairs))


def _template_tokens(node: Node, template: ChatTemplate) -> int:
    """Tokens of a context node without a character of its messages' words."""
    if node.parent is None and not node.messages:
        return 0  # a raw prompt
    groups: list[list[int]] = [[]]  # tokens that make whole characters
    pieces = []
    for token in node.tokens:
        groups[-1].append(token)
        text = template.tokenizer.decode(groups[-1])
        if not text.endswith(_PARTIAL) or len(groups[-1]) == _MOST_BYTES:
            pieces.append("".join(text.split()))  # tokenizers decode blanks at a border differently
            groups.append([])
    text = "".join(pieces)
    borders = [0, *itertools.accumulate(map(len, pieces)), len(text)]
    written = bytearray(len(text))
    begin = 0
    for words in (words for message in node.messages for words in _words(message)):
        place = text.find(words, begin)
        if place >= 0:
            begin = place + len(words)
            written[place:begin] = b"\1" * len(words)
    inside = [any(written[x:y]) or written[x - 1 : x + 1] == b"\1\1" for x, y in itertools.pairwise(borders)]
    return sum(len(group) for group, is_inside in zip(groups, inside, strict=True) if not is_inside)


def _words(message: Message) -> list[str]:
    """Text of a message without white space; parts of calls one by one."""
    texts = [message.get("reasoning_content"), message.get("content")]
    for call in message.get("tool_calls") or ():
        arguments = call["function"]["arguments"]
        texts += [call["function"]["name"], *(re.findall(r"[^\s{}\[\]\":,]+", str(arguments)))]
    return ["".join(text.split()) for text in texts if isinstance(text, str) and text.strip()]


def _trained(entry: LogEntry, template: ChatTemplate) -> dict[str, Trained]:
    """Tokens that each library would train of an entry."""
    paths = paths_of(entry.episode)
    rows = [_row(path) for path in paths]
    owners = [[(node, index) for node in path.nodes for index in range(len(node.tokens))] for path in paths]
    results = {"funrl": _compared([_row(path) for path in paths_of(entry.episode, entry.frozen)], rows, owners)}
    conversations = [
        LoggedConversation([message for node in path.nodes for message in node.messages], path.trajectory.tools)
        for path in paths
    ]
    if entry.conversation is not None:
        conversations = [entry.conversation]
    for name in ("TRL", "verl"):
        texts: list[Text] = []
        problem = ""
        for conversation in conversations:
            try:
                texts.append(_peer_text(name, entry, conversation, template))
            except (DataError, TokenizerError) as error:
                problem = problem or str(error)
        results[name] = _compared(texts, rows, owners)._replace(refused=problem)
    return results


def _row(path: RowPath) -> Text:
    """The row that funrl trains of a path."""
    trained = [node in path.trained for node in path.nodes for _ in node.tokens]
    return Text([token for node in path.nodes for token in node.tokens], trained)


def _peer_text(name: str, entry: LogEntry, conversation: LoggedConversation, template: ChatTemplate) -> Text:
    """The row that TRL or verl makes of a conversation. Raises: DataError, TokenizerError."""
    messages = conversation.messages
    if entry.texts is not None and name == "TRL":
        return trl_completion(*entry.texts, template)
    if not any(message["role"] == "assistant" for message in messages):
        raise DataError("the file has no messages, which it takes")
    own = template._replace(tools=conversation.tools)
    if name == "verl":
        return verl_text(messages, own)
    if conversation.prompt:
        return trl_completed_messages(messages[: conversation.prompt], messages[conversation.prompt :], own)
    return trl_text(messages, own)


def _compared(texts: Sequence[Text], paths: Sequence[Text], owners: Sequence[Sequence[tuple[Node, int]]]) -> Trained:
    """Compare rows of a library with the paths of an entry.

    Args:
      paths: tokens of each path.
      owners: of each of these tokens, its node and its place there.
    """
    sampled = {owner for path in owners for owner in path if owner[0].sampled}
    seen: set[tuple[Node, int]] = set()
    exact = 0
    for text in texts:
        lengths = [same_tokens(text.tokens, path.tokens) for path in paths]
        shared = max(lengths, default=0)
        closest = [owner for owner, length in zip(owners, lengths, strict=True) if length == shared]
        places = ([owner[t] for owner in closest if owner[t] in sampled] for t in range(shared) if text.trained[t])
        own = [authors[0] for authors in places if authors]  # a row may begin with another, which is context there
        exact += len(own)
        seen |= {*own}
    trained = sum(sum(text.trained) for text in texts)
    return Trained(
        len(texts),
        tokens=sum(len(text.tokens) for text in texts),
        trained=trained,
        as_sampled=len(seen),
        again=exact - len(seen),
        other=trained - exact,
        lost=len(sampled) - len(seen),
    )
