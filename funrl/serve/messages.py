"""The dialect of `/v1/messages` and its `/count_tokens`. Reference: https://docs.anthropic.com/en/api/messages."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from funrl.data.json_lines import JsonObject
from funrl.serve.asks import (
    LONGEST_HISTORY,
    MOST_TOKENS,
    MOST_TOOLS,
    Ask,
    BadRequest,
    Body,
    KnownFields,
    call_message,
    checked_choice,
    function_tool,
    plain_content,
)
from funrl.serve.pictures import message_content
from funrl.serve.session import DecodeIds, Exchange

# Type of `thinking` -> whether the client gets it; it does not change how much the policy thinks.
THINKING = {"enabled": True, "adaptive": True, "disabled": False}
MESSAGES_FIELDS = KnownFields(
    read=(
        "messages",
        "system",
        "max_tokens",
        "stop_sequences",
        "stream",
        "temperature",
        "top_p",
        "top_k",
        "tools",
        "tool_choice",
        "thinking",
    ),
    ignored=("model", "metadata", "service_tier", "container", "context_management", "betas", "output_config"),
    unserved={"mcp_servers": "give tools", "output_format": "replies are free text"},
)


def read_messages(body: Body) -> Ask:
    """The request of a body of `/v1/messages`."""
    body.check(MESSAGES_FIELDS)
    thinking = body.values.get("thinking")
    if thinking is not None and (not isinstance(thinking, dict) or thinking.get("type") not in THINKING):
        raise BadRequest(f"thinking must have one of the types {', '.join(THINKING)}", "thinking")
    system = plain_content(body.values.get("system"), "system")
    messages: list[JsonObject] = [{"role": "system", "content": system}] if body.values.get("system") else []
    for message in body.array("messages", LONGEST_HISTORY):
        messages += _messages(message)
    if not messages or messages[-1]["role"] in ("assistant", "system"):
        raise BadRequest("the last message must be the user's", "messages")
    tools = [_tool(tool) for tool in body.array("tools", MOST_TOOLS)]
    given = body.values.get("tool_choice") or {"type": "auto"}
    return Ask(
        messages=messages,
        tools=tools,
        tool_choice=checked_choice(_choice(given), tools),
        parallel=not given.get("disable_parallel_tool_use", False),
        stop=body.stops("stop_sequences"),
        max_tokens=body.whole("max_tokens", 1, MOST_TOKENS),
        sampling=body.sampling(),
        stream=body.flag("stream"),
        reasoning=None if thinking is None else THINKING[thinking["type"]],
    )


def read_counted(body: Body) -> Ask:
    """The request of a body of `/v1/messages/count_tokens`."""
    return read_messages(Body({"max_tokens": 1} | body.values))


def message_answer(ask: Ask, exchanges: Sequence[Exchange], head: JsonObject, decode: DecodeIds) -> JsonObject:
    """The answer of `/v1/messages`."""
    (exchange,) = exchanges
    blocks: list[JsonObject] = []
    if ask.reasoning and exchange.thoughts:
        blocks.append({"type": "thinking", "thinking": exchange.thoughts, "signature": ""})
    if exchange.content or not exchange.calls:
        blocks.append({"type": "text", "text": exchange.content})
    blocks += [
        {"type": "tool_use", "id": call.number, "name": call.name, "input": dict(call.arguments)}
        for call in exchange.calls
    ]
    return {**_opening(head), "content": blocks, **_ending(exchange), "usage": _usage(exchange)}


class MessageEvents:
    """The events of a stream of `/v1/messages`."""

    def __init__(self, ask: Ask, head: JsonObject, decode: DecodeIds):
        self._ask = ask
        self._head = head
        self._open = False
        self._place = 0  # of the block of text

    def begin(self) -> list[str]:
        """The message without its content."""
        usage = {"input_tokens": 0, "output_tokens": 0}
        message = {**_opening(self._head), "content": [], "stop_reason": None, "stop_sequence": None, "usage": usage}
        return [_event("message_start", message=message)]

    def text(self, index: int, text: str) -> list[str]:
        """A further piece of the text."""
        events = []
        if not self._open:
            self._open = True
            block = {"type": "text", "text": ""}
            events.append(_event("content_block_start", index=self._place, content_block=block))
        return [*events, _event("content_block_delta", index=self._place, delta={"type": "text_delta", "text": text})]

    def end(self, exchanges: Sequence[Exchange], rests: Sequence[str]) -> list[str]:
        """The rest of the message."""
        (exchange,) = exchanges
        (rest,) = rests
        events = []
        if self._ask.reasoning and exchange.thoughts:  # before any text, as such a reply is not streamed
            block = {"type": "thinking", "thinking": "", "signature": ""}
            delta = {"type": "thinking_delta", "thinking": exchange.thoughts}
            events += _block_events(0, block, delta)
            self._place = 1
        events += self.text(0, rest) if rest or not (self._open or exchange.calls) else []
        number = self._place
        if self._open:
            events.append(_event("content_block_stop", index=self._place))
            number += 1
        for place, call in enumerate(exchange.calls, number):
            block = {"type": "tool_use", "id": call.number, "name": call.name, "input": {}}
            delta = {"type": "input_json_delta", "partial_json": json.dumps(call.arguments)}
            events += _block_events(place, block, delta)
        events.append(_event("message_delta", delta=_ending(exchange), usage=_usage(exchange)))
        return [*events, _event("message_stop")]


def _event(kind: str, **fields: object) -> str:
    return f"event: {kind}\ndata: {json.dumps({'type': kind, **fields})}\n\n"


def _block_events(place: int, block: JsonObject, delta: JsonObject) -> list[str]:
    fields = {"start": {"content_block": block}, "delta": {"delta": delta}, "stop": {}}
    return [_event(f"content_block_{kind}", index=place, **more) for kind, more in fields.items()]


def _opening(head: JsonObject) -> JsonObject:
    return {"id": head["id"], "type": "message", "role": "assistant", "model": head["model"]}


def _ending(exchange: Exchange) -> JsonObject:
    reasons = {"stop": "end_turn", "length": "max_tokens", "calls": "tool_use"}
    reason = "stop_sequence" if exchange.stop is not None else reasons[exchange.finish]
    return {"stop_reason": reason, "stop_sequence": exchange.stop}


def _usage(exchange: Exchange) -> dict[str, int]:
    return {"input_tokens": len(exchange.prompt), "output_tokens": len(exchange.tokens)}


def _messages(value: Any) -> list[JsonObject]:
    """A message as chat templates take it, after the results of tools that it has."""
    role = value.get("role") if isinstance(value, dict) else None
    if role not in ("user", "assistant"):
        raise BadRequest(f"a message has the role {role!r}; user and assistant are known", "messages")
    content = value.get("content")
    blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
    if not isinstance(blocks, list) or not all(isinstance(block, dict) for block in blocks):
        raise BadRequest("the content of a message must be a text or a list of blocks", "messages")
    kinds = [block.get("type") for block in blocks]
    known = ("text", "tool_use", "thinking") if role == "assistant" else ("text", "image", "tool_result")
    others = [kind for kind in kinds if kind not in known]
    if others:
        raise BadRequest(f"a block of type {others[0]!r} is not served; only text, pictures and tools are", "messages")
    if role == "assistant":
        texts = plain_content([block for block in blocks if block["type"] == "text"], "messages")
        uses = [block for block in blocks if block["type"] == "tool_use"]
        calls = [(str(use.get("id", "")), str(use.get("name", "")), use.get("input") or {}) for use in uses]
        message = call_message(texts, calls, "messages")
        thoughts = "".join(str(block.get("thinking", "")) for block in blocks if block["type"] == "thinking")
        return [{**message, "reasoning_content": thoughts} if thoughts else message]
    results = [
        {
            "role": "tool",
            "content": message_content(block.get("content"), "messages"),
            "tool_call_id": str(block.get("tool_use_id", "")),
        }
        for block in blocks
        if block["type"] == "tool_result"
    ]
    content = message_content([block for block in blocks if block["type"] != "tool_result"], "messages")
    return [*results, *([{"role": "user", "content": content}] if content or not results else [])]


def _tool(value: object) -> JsonObject:
    if isinstance(value, dict) and value.get("type", "custom") != "custom":
        raise BadRequest(
            f"a tool of type {value['type']!r} is not served; give functions with an input_schema", "tools"
        )
    renamed = {**value, "parameters": value.get("input_schema")} if isinstance(value, dict) else value
    return function_tool(renamed, "tools")


def _choice(value: Any) -> str:
    kind = value.get("type") if isinstance(value, dict) else None
    if kind == "tool" and isinstance(value.get("name"), str):
        return value["name"]
    if kind not in ("auto", "any", "none"):
        raise BadRequest("tool_choice must have the type auto, any, none, or tool with a name", "tool_choice")
    return "required" if kind == "any" else kind
