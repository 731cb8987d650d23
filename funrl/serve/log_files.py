"""Logs of what models said, of any tool, as episodes: which tokens were sampled, by which weights, after what.

| record of the file | what it is |
|---|---|
| `{"traces": [{"nodes": ...}]}` | an episode of verifiers (traces.jsonl) |
| `[number, seed, [...]]` | an episode of funrl (rollouts/step-N/episodes-R.jsonl) |
| `{"request": {...}, "response": {...}}` | a call of a chat API of OpenAI or Anthropic, as their clients dump them |
| `{"input": text, "output": text, "step": ...}` | a rollout of verl (`trainer.rollout_data_dir`) |
| `{"prompt": ..., "completion": text}` | a sample of funrl, or a demonstration |
| `{"messages": [...]}` | a conversation |

Token ids of the file are kept; where it has none, `conversations` renders and tokenizes the words.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from funrl.data.conversations import ChatTemplate, completed_text, conversation_texts, encode_prompt
from funrl.data.json_lines import DataError
from funrl.data.messages import TRAIN_FIELD, are_messages, normal_message, normal_messages, normal_tools, shown
from funrl.data.records import read_records
from funrl.environments.agents import POLICY
from funrl.rollout.episode_records import from_record, record_from_json
from funrl.rollout.episodes import Episode, Message, Node, Trajectory
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
    """

    source: str
    form: str
    episode: Episode
    weights: Mapping[Node, str]
    logged: bool
    texts: tuple[str, str] | None = None
    remarks: tuple[str, ...] = ()


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
        except (KeyError, TypeError, IndexError, AttributeError) as error:
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
        if prompt in record and (not completion or isinstance(record.get(completion), str)):
            return [_text_entry(source, form, record, (record[prompt], record.get(completion)), template)]
    raise DataError(f"a record with {', '.join(map(str, record))} is of no known log; docs/data.md lists the forms")


def verifiers_entry(source: str, trace: Mapping[str, Any], template: ChatTemplate) -> LogEntry:
    """A trace of verifiers, whose graph has each message once, with its tokens if a trainer's client has asked."""
    form = f"verifiers {trace['verifiers']['version']}"
    named = (call for call in trace["calls"] if call.get("node") is not None)
    models = {call["node"]: str(call.get("model") or UNKNOWN_WEIGHTS) for call in named}
    entries, weights = trace["nodes"], {}
    last: list[Node | None] = []
    parents = [entry.get("parent") for entry in entries]
    for number, entry in enumerate(entries):
        node = None if parents[number] is None else last[parents[number]]
        tokens, mask = entry.get("token_ids") or [], entry.get("mask") or []
        begin = mask.index(True) if True in mask else len(tokens)
        message = [normal_message(_plain(entry["message"]))]
        if entry["sampled"] and begin == len(tokens):  # an evaluation: texts alone
            return _relayed(source, form, trace, models, template)
        for span, sampled in ((tokens[:begin], False), (tokens[begin:], True)):
            if span:
                node = Node(node, span, sampled, messages=message if sampled == entry["sampled"] else ())
        if node is not None and entry["sampled"]:
            weights[node] = models.get(number, UNKNOWN_WEIGHTS)
        last.append(node)
    tips = [node for number, node in enumerate(last) if number not in parents]
    name = str(trace["agent"]["name"])
    ends = [Trajectory(name, node, trace.get("tools") or ()) for node in tips if node is not None]
    remarks = () if trace["agent"].get("trainable", True) else (f"the agent {name} is not trained",)
    return LogEntry(source, form, Episode(ends, {}), weights, logged=True, remarks=remarks)


def _relayed(
    source: str, form: str, trace: Mapping[str, Any], models: Mapping[int, str], template: ChatTemplate
) -> LogEntry:
    """A trace without tokens: each reply is a call after the messages before it."""
    tools = normal_tools(trace.get("tools") or ())
    histories: list[list[Message]] = []
    calls = []
    for number, node in enumerate(trace["nodes"]):
        before = [] if node.get("parent") is None else histories[node["parent"]]
        histories.append([*before, normal_message(_plain(node["message"]))])
        if node["sampled"]:
            calls.append(
                LoggedCall(source, form, before, histories[-1][-1], tools, models.get(number, UNKNOWN_WEIGHTS))
            )
    (entry,) = grouped_calls(calls, template, together=True)
    return entry


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
    messages = normal_messages(request["messages"])
    return [
        LoggedCall(
            source,
            "OpenAI",
            messages,
            reply=normal_message(_plain(choice["message"])),
            tools=normal_tools(request.get("tools") or ()),
            weights=f"{weights} ({fingerprint})" if fingerprint else weights,
            prompt=response.get("prompt_token_ids") or (),
            tokens=choice.get("token_ids") or (),
        )
        for choice in response["choices"]
    ]


def grouped_calls(calls: Sequence[LoggedCall], template: ChatTemplate, together: bool = False) -> list[LogEntry]:
    """Calls as conversations: a call goes on from the newest call that it repeats, or rewrites what began as it does.

    Args:
      together: whether they are one conversation.

    Raises:
      DataError: the template refuses a call.
    """
    groups: list[list[LoggedCall]] = []
    for call in calls:
        group = groups[-1] if together and groups else _group_of(call, groups)
        if group is None:
            groups.append([call])
        else:
            group.append(call)
    return [_conversation(group, template) for group in groups]


def _group_of(call: LoggedCall, groups: Sequence[list[LoggedCall]]) -> list[LoggedCall] | None:
    """The conversation of a call; None: it begins one, as no turn of the assistant is before it."""
    if not any(message["role"] == "assistant" for message in call.messages):
        return None
    for belongs in (_goes_on, _begins_alike):
        group = next((group for group in reversed(groups) if belongs(call, group)), None)
        if group is not None:
            return group
    return None


def _goes_on(call: LoggedCall, group: Sequence[LoggedCall]) -> bool:
    """True if a call's history begins with an earlier call and its reply."""
    return any([*call.messages[: len(x.messages) + 1]] == [*x.messages, x.reply] for x in group)


def _begins_alike(call: LoggedCall, group: Sequence[LoggedCall]) -> bool:
    """True if what was said before the first turn of the assistant is the same."""
    first = next(n for n, message in enumerate(call.messages) if message["role"] == "assistant")
    return [*call.messages[:first]] == [*group[0].messages[:first]]


def _conversation(calls: Sequence[LoggedCall], template: ChatTemplate) -> LogEntry:
    """The tree of some calls: each prompt continues the longest path that it begins with, token for token."""
    paths: dict[Node, tuple[list[int], int]] = {}  # leaf -> tokens and number of messages
    weights = {}
    for call in calls:
        prompt, tokens = list(call.prompt), list(call.tokens)
        messages = list(call.messages)
        if not prompt or not tokens:
            own = template._replace(tools=call.tools)
            text = conversation_texts([*messages, call.reply], own, first=len(messages))[-1]
            begin = text.trained.index(True)
            prompt, tokens = text.tokens[:begin], text.tokens[begin:]
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


def _text_entry(
    source: str, form: str, record: Mapping[str, Any], given: tuple[Any, Any], template: ChatTemplate
) -> LogEntry:
    """A record of words whose origin it does not say: what is trained of it counts as sampled.

    Args:
      given: prompt or conversation, as text or messages, and the text that completes it.
    """
    prompt, completion = given
    messages: list[Message] = []
    tools = normal_tools(record.get("tools") or ())
    if are_messages(prompt):
        messages = [*normal_messages(prompt)]
        first = len(messages) if completion is not None else 0
        messages += [{"role": "assistant", "content": completion}] if completion is not None else []
        rows = conversation_texts(messages, template._replace(tools=tools), first)
    else:
        ids, text = encode_prompt(template.tokenizer, str(prompt))
        rows = [completed_text(ids, "completion", str(completion), template.tokenizer, before=text)]
    ends, weights = [], {}
    turns = (n for n, x in enumerate(messages) if x["role"] == "assistant" and x.get(TRAIN_FIELD) is not False)
    for row in rows:
        node: Node | None = None
        seen = turn = 0  # messages
        for sampled, group in itertools.groupby(zip(row.trained, row.tokens, strict=True), key=lambda pair: pair[0]):
            turn = turn if sampled else next(turns, 0)
            turn_messages = messages[turn : turn + 1] if sampled else messages[seen:turn]
            node = Node(node, [token for _, token in group], sampled, messages=turn_messages)
            seen = turn + 1
            if sampled:
                weights[node] = f"step {record['step']}" if "step" in record else UNKNOWN_WEIGHTS
        ends += [Trajectory(POLICY, node, tools)] if node is not None else []
    texts = None if messages else (str(prompt), str(completion))
    return LogEntry(source, form, Episode(ends, {}), weights, logged=False, texts=texts, remarks=REMARKS.get(form, ()))


def _plain(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message of a client with the fields of the normal form; others, such as annotations, say nothing of tokens."""
    fields = ("role", "content", "tool_calls", "tool_call_id", "name", "reasoning_content", "reasoning")
    plain = {name: message[name] for name in fields if message.get(name)}
    return {"content": "", **plain}
