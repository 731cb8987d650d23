"""Logs of what models said, of any tool, as episodes: which tokens were sampled, by which weights, after what.

| record of the file | what it is |
|---|---|
| `{"traces": [{"nodes": ...}]}` | an episode of verifiers (traces.jsonl) |
| `[number, seed, [...]]` | an episode of funrl (rollouts/step-N/episodes-R.jsonl) |
| `{"request": {...}, "response": {...}}` | a call of a chat API of OpenAI or Anthropic, as their clients dump them |
| `{"input": text, "output": text, "step": ...}` | a rollout of verl (`trainer.rollout_data_dir`) |
| `{"prompt": ..., "completion": ...}` | a sample of funrl, or a demonstration |
| `{"messages": [...]}` | a conversation |

Token ids of the file are kept; where it has none, `conversations` renders and tokenizes the words.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from funrl.data.conversations import ChatTemplate, Text, conversation_texts
from funrl.data.json_lines import DataError
from funrl.data.messages import TRAIN_FIELD, are_messages, normal_message, normal_messages, normal_tools, shown
from funrl.data.records import read_records
from funrl.data.supervised import completed_texts
from funrl.environments.agents import POLICY
from funrl.rollout.episode_records import record_from_json
from funrl.rollout.episodes import Episode, Message, Node, Trajectory, from_record
from funrl.serve.asks import Body
from funrl.serve.messages import read_messages

UNKNOWN_WEIGHTS = "unknown weights"
RECORD_FORMS = (
    ("conversation", "messages", ""),
    ("verl", "input", "output"),
    ("samples", "prompt", "completion"),
)  # of words
REMARKS = {
    "conversation": ("the file does not say whether a model wrote the assistant's words",),
    "verl": ("verl leaves special tokens out of this file: where turns begin and end is not known",),
    "samples": ("the file does not say how a completion ended: an end-of-text token is added",),
}
_ASKED = {"role": "user", "content": "?"}
_MISSING = (KeyError, TypeError, IndexError, AttributeError)  # raised where a record has another form
_IDS = range(1 << 31)  # of tokens
_THOUGHTS = ("reasoning_content", "reasoning", "thinking")  # the normal form has the first


class LoggedConversation(NamedTuple):
    """Messages as a record has them, of which trainers make rows.

    Attributes:
      messages: in the normal form.
      tools: JSON schemas.
      prompt: number of messages of the prompt; 0: the record is one conversation.
    """

    messages: Sequence[Message]
    tools: Sequence[Any]
    prompt: int = 0


class LogEntry(NamedTuple):
    """Entry of a log: one episode or conversation.

    Attributes:
      source: file and line.
      form: name of the format.
      episode: its trajectories; rewards are left out.
      weights: of sampled nodes without versions, in the words of the file.
      logged: whether the token ids are those of the file; otherwise its words were tokenized.
      texts: prompt and completion where the file has no messages.
      remarks: on what the file leaves out.
      conversation: of a record that is one; None: each path of the episode is one.
      frozen: agents that are not trained.
    """

    source: str
    form: str
    episode: Episode
    weights: Mapping[Node, str]
    logged: bool
    texts: tuple[str, str] | None = None
    remarks: tuple[str, ...] = ()
    conversation: LoggedConversation | None = None
    frozen: frozenset[str] = frozenset()


class LoggedCall(NamedTuple):
    """A call of a chat API.

    Attributes:
      source: file and line.
      form: name of the dialect.
      messages: of the request, in the normal form.
      reply: the assistant's message.
      tools: of the request.
      weights: name of the model in the response.
      prompt, tokens: token ids; empty: the response has none.
    """

    source: str
    form: str
    messages: Sequence[Message]
    reply: Message
    tools: Sequence[Any]
    weights: str
    prompt: Sequence[int] = ()
    tokens: Sequence[int] = ()


def read_logs(path: str | Path, template: ChatTemplate) -> Iterator[LogEntry]:
    """Yield each episode or conversation of a file. Calls of one conversation become one entry.

    Raises:
      DataError: a record is of no known form or lacks a part, named with its line.
    """
    calls: list[LoggedCall] = []
    for source, record in read_records(path):
        try:
            entries = _entries(source, record, template, calls)
        except _MISSING as error:
            raise DataError(f"{source}: the record lacks a part: {type(error).__name__}: {error}") from error
        except ValueError as error:
            raise DataError(f"{source}: {error}") from error
        yield from entries
    yield from grouped_calls(calls, template)


def _entries(source: str, record: Any, template: ChatTemplate, calls: list[LoggedCall]) -> list[LogEntry]:
    """Entries of a record; calls are appended to `calls` instead."""
    if isinstance(record, list) and len(record) == 3:
        episode = from_record(record_from_json(record[2]))
        return [LogEntry(source, "funrl", episode, {}, logged=True)]
    if not isinstance(record, Mapping):
        raise DataError(f"{shown(record)} is not a record of a log")
    if "traces" in record:
        return [verifiers_entry(source, trace, template) for trace in record["traces"] if trace["nodes"]]
    if "request" in record and "response" in record:
        calls += api_calls(source, record["request"], record["response"])
        return []
    for form, prompt, completion in RECORD_FORMS:
        replied = record.get(completion)
        if prompt in record and (not completion or isinstance(replied, str) or are_messages(replied)):
            return [_text_entry(source, form, record, (record[prompt], replied), template)]
    raise DataError(f"a record with {', '.join(map(str, record))} is of no known log; docs/data.md lists the forms")


def verifiers_entry(source: str, trace: Mapping[str, Any], template: ChatTemplate) -> LogEntry:
    """A trace of verifiers, whose graph has each message once, with its tokens if a trainer's client has asked."""
    form = f"verifiers {trace['verifiers']['version']}"
    named = (call for call in trace["calls"] if call.get("node") is not None)
    models = {call["node"]: str(call.get("model") or UNKNOWN_WEIGHTS) for call in named}
    entries, weights = trace["nodes"], {}
    name = str(trace["agent"]["name"])
    is_trained = trace["agent"].get("trainable", True)
    remarks = () if is_trained else (f"the agent {name} is not trained",)
    last: list[Node | None] = []
    parents = [entry.get("parent") for entry in entries]
    for number, entry in enumerate(entries):
        node = None if parents[number] is None else last[parents[number]]
        tokens, mask = entry.get("token_ids") or [], entry.get("mask") or []
        begin = mask.index(True) if True in mask else len(tokens)
        message = [normal_message(_plain(entry["message"]))]
        if entry["sampled"] and begin == len(tokens):  # an evaluation: texts alone
            relayed = _relayed(source, form, trace, models, template)
            frozen = frozenset(() if is_trained else (POLICY,))
            return relayed._replace(remarks=(*remarks, *relayed.remarks), frozen=frozen)
        for span, sampled in ((tokens[:begin], False), (tokens[begin:], True)):
            if span:
                node = Node(node, span, sampled, messages=message if sampled == entry["sampled"] else ())
        if node is not None and entry["sampled"]:
            weights[node] = models.get(number, UNKNOWN_WEIGHTS)
        last.append(node)
    tips = [node for number, node in enumerate(last) if number not in parents]
    ends = [Trajectory(name, node, trace.get("tools") or ()) for node in tips if node is not None]
    frozen = frozenset(() if is_trained else (name,))
    return LogEntry(source, form, Episode(ends, {}), weights, logged=True, remarks=remarks, frozen=frozen)


def _relayed(
    source: str, form: str, trace: Mapping[str, Any], models: Mapping[int, str], template: ChatTemplate
) -> LogEntry:
    """A trace of which a reply has no tokens: each reply is a call after the messages before it."""
    tools = normal_tools(trace.get("tools") or ())
    histories: list[list[Message]] = []
    calls = []
    for number, node in enumerate(trace["nodes"]):
        before = [] if node.get("parent") is None else histories[node["parent"]]
        histories.append([*before, normal_message(_plain(node["message"]))])
        if node["sampled"]:
            place, weights = f"message {number + 1}", models.get(number, UNKNOWN_WEIGHTS)
            calls.append(LoggedCall(place, form, before, histories[-1][-1], tools, weights))
    entry = _conversation(calls, template)
    bare = sum(bool(node["sampled"] and True not in (node.get("mask") or ())) for node in trace["nodes"])
    text = f"its token ids are not used, as {bare} of {len(calls)} replies have none: all words are tokenized"
    return entry._replace(source=source, remarks=(text,) if bare < len(calls) else ())


def api_calls(source: str, request: Mapping[str, Any], response: Mapping[str, Any]) -> list[LoggedCall]:
    """The calls of a request and its response, one for each choice. Raises: DataError."""
    weights = str(response.get("model") or UNKNOWN_WEIGHTS)
    if response.get("type") == "message":
        asked = {name: request[name] for name in ("system", "messages", "tools") if request.get(name)}
        ask = read_messages(Body({"max_tokens": 1} | asked))
        replied = [_ASKED, {"role": "assistant", "content": response["content"]}, _ASKED]
        reply = read_messages(Body({"max_tokens": 1, "messages": replied})).messages[1]
        return [LoggedCall(source, "Anthropic", ask.messages, normal_message(reply), ask.tools, weights)]
    if not isinstance(response.get("choices"), list) or "messages" not in request:
        raise DataError("its response is neither of /v1/chat/completions nor of /v1/messages")
    fingerprint = response.get("system_fingerprint")
    messages = normal_messages([_plain(x) if isinstance(x, Mapping) else x for x in request["messages"]])
    return [
        LoggedCall(
            source,
            "OpenAI",
            messages,
            reply=normal_message(_plain(choice["message"])),
            tools=normal_tools(request.get("tools") or ()),
            weights=f"{weights} ({fingerprint})" if fingerprint else weights,
            prompt=_token_ids(response, "prompt_token_ids"),
            tokens=_token_ids(choice, "token_ids"),
        )
        for choice in response["choices"]
    ]


def _token_ids(record: Mapping[str, Any], name: str) -> Sequence[int]:
    """Token ids of a field; none where it is absent or null. Raises: DataError."""
    ids = record.get(name)
    if ids is not None and not (isinstance(ids, list) and all(type(x) is int and x in _IDS for x in ids)):
        raise DataError(f"its {name} is {shown(ids)}; a list of token ids is needed")
    return ids or ()


def grouped_calls(calls: Sequence[LoggedCall], template: ChatTemplate) -> list[LogEntry]:
    """Calls as conversations: a call goes on from the newest call that it repeats, or rewrites what began as it does.

    Raises:
      DataError: the template refuses a call, named with its source.
    """
    groups: list[list[LoggedCall]] = []
    histories: dict[bytes, int] = {}  # a call with its reply -> newest group that has it
    openings: dict[bytes, int] = {}  # the first messages of a group, up to a turn of the assistant -> newest such group
    for call in calls:
        before = next((n for n, x in enumerate(call.messages) if x["role"] == "assistant"), len(call.messages))
        exact, bare = _prefix_keys(call, thoughts=True), _prefix_keys(call, thoughts=False)
        group = None
        if before < len(call.messages):  # else it begins a conversation
            ways = ((exact[:-1], histories), (bare[:-1], histories), (exact[before : before + 1], openings))
            groups_alike = (max((known[key] for key in keys if key in known), default=None) for keys, known in ways)
            group = next((number for number in groups_alike if number is not None), None)
        if group is None:
            group = len(groups)
            groups.append([])
            openings |= dict.fromkeys(exact[: before + 1], group)
        groups[group].append(call)
        for key in (exact[-1], bare[-1]):
            histories[key] = max(group, histories.get(key, group))
    return [_conversation(group, template) for group in groups]


def _prefix_keys(call: LoggedCall, thoughts: bool) -> list[bytes]:
    """Digests of the first 0, 1, ... messages of a call, and of all of them with the reply.

    Args:
      thoughts: whether they count; clients may leave them out of a history.
    """
    keys = [b"" if thoughts else b"without thoughts"]
    left_out = (TRAIN_FIELD,) if thoughts else (TRAIN_FIELD, _THOUGHTS[0])
    for message in (*call.messages, call.reply):
        counted = {name: value for name, value in message.items() if name not in left_out}
        text = json.dumps(counted, sort_keys=True, default=str)
        keys.append(hashlib.blake2b(keys[-1] + text.encode()).digest())
    return keys


def _conversation(calls: Sequence[LoggedCall], template: ChatTemplate) -> LogEntry:
    """The tree of some calls: each prompt continues the longest path that it begins with, token for token."""
    paths: dict[Node, tuple[list[int], int]] = {}  # leaf -> tokens and number of messages
    weights = {}
    for call in calls:
        messages = list(call.messages)
        try:
            prompt, tokens = _tokens_of(call, template)
        except (*_MISSING, ValueError) as error:
            raise DataError(f"{call.source}: {error}") from error
        begun = [(ids, count, node) for node, (ids, count) in paths.items() if prompt[: len(ids)] == ids]
        ids, count, node = max(begun, key=lambda path: len(path[0]), default=([], 0, None))
        if len(prompt) > len(ids):
            node = Node(node, prompt[len(ids) :], sampled=False, messages=messages[count:])
        leaf = Node(node, tokens, sampled=True, messages=[call.reply])
        paths[leaf] = ([*prompt, *tokens], len(messages) + 1)
        weights[leaf] = call.weights
    ends = [Trajectory(POLICY, leaf, calls[0].tools) for leaf in paths]
    logged = all(call.prompt and call.tokens for call in calls)
    return LogEntry(calls[0].source, calls[0].form, Episode(ends, {}), weights, logged)


def _tokens_of(call: LoggedCall, template: ChatTemplate) -> tuple[list[int], list[int]]:
    """Tokens of a call's prompt and reply, of the file where it has both."""
    if call.prompt and call.tokens:
        return list(call.prompt), list(call.tokens)
    own = template._replace(tools=call.tools)
    text = conversation_texts([*call.messages, call.reply], own, first=len(call.messages))[-1]
    begin = text.trained.index(True)
    return text.tokens[:begin], text.tokens[begin:]


def _text_entry(
    source: str, form: str, record: Mapping[str, Any], given: tuple[Any, Any], template: ChatTemplate
) -> LogEntry:
    """A record of words whose origin it does not say: what is trained of it counts as sampled.

    Args:
      given: prompt or conversation, as text or messages, and what completes it; None: it is a conversation.
    """
    prompt, completion = given
    messages: list[Message] = []
    first, texts = 0, None
    tools = normal_tools(record.get("tools") or ())
    own = template._replace(tools=tools)
    if completion is None:
        if not are_messages(prompt):
            raise DataError(f"its messages are {shown(prompt)}, which is no list of messages")
        messages = [*normal_messages(prompt)]
        rows = conversation_texts(messages, own)
    elif are_messages(prompt):
        messages = [*normal_messages(prompt)]
        rows = completed_texts(messages, "completion", completion, own)
        first = len(messages)
        replies = [{"role": "assistant", "content": completion}] if isinstance(completion, str) else completion
        messages += normal_messages(replies)
    elif isinstance(prompt, str):
        rows = completed_texts(prompt, "completion", completion, template)
        texts = (prompt, completion if isinstance(completion, str) else normal_messages(completion)[0]["content"])
    else:
        raise DataError(f"its prompt is {shown(prompt)}, neither a text nor messages")
    leaves = _leaves_of(rows, messages, first)
    weights = f"step {record['step']}" if "step" in record else UNKNOWN_WEIGHTS
    sampled = {node: weights for leaf in leaves for node in leaf.path() if node.sampled}
    ends = [Trajectory(POLICY, leaf, tools) for leaf in leaves]
    entry = LogEntry(source, form, Episode(ends, {}), sampled, logged=False, texts=texts, remarks=REMARKS.get(form, ()))
    return entry._replace(conversation=LoggedConversation(messages, tools, first) if messages else None)


def _leaves_of(rows: Sequence[Text], messages: Sequence[Message], first: int) -> list[Node]:
    """The last node of each row of some messages, whose turns from `first` on are trained in order."""
    leaves = []
    trained = (x["role"] == "assistant" and x.get(TRAIN_FIELD) is not False for x in messages)
    turns = (n for n, is_trained in enumerate(trained) if is_trained and n >= first)
    for row in rows:
        node: Node | None = None
        seen = turn = 0  # messages
        for sampled, group in itertools.groupby(zip(row.trained, row.tokens, strict=True), key=lambda pair: pair[0]):
            turn = turn if sampled else next(turns, 0)
            turn_messages = messages[turn : turn + 1] if sampled else messages[seen:turn]
            node = Node(node, [token for _, token in group], sampled, messages=turn_messages)
            seen = turn + 1
        leaves += [node] if node is not None else []
    return leaves


def _plain(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message of a client with the fields of the normal form; others, such as annotations, say nothing of tokens."""
    fields = ("role", "content", "tool_calls", "function_call", "tool_call_id", "name", *_THOUGHTS)
    plain = {name: message[name] for name in fields if message.get(name)}
    marks = {name: message[name] for name in (TRAIN_FIELD, "weight") if message.get(name) is not None}
    return {"content": "", **plain, **marks}
