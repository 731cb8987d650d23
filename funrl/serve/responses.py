"""The dialect of `/v1/responses`. Reference: https://platform.openai.com/docs/api-reference/responses."""

from __future__ import annotations

import json
from collections.abc import Sequence

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
    named_choice,
    plain_content,
)
from funrl.serve.chat_completions import OPENAI_IGNORED
from funrl.serve.pictures import message_content
from funrl.serve.session import DecodeIds, Exchange

RESPONSES_FIELDS = KnownFields(
    read=(
        "input",
        "instructions",
        "tools",
        "tool_choice",
        "parallel_tool_calls",
        "max_output_tokens",
        "stream",
        "temperature",
        "top_p",
    ),
    ignored=(*OPENAI_IGNORED, "truncation", "include", "reasoning", "stream_options", "text"),
    unserved={
        "previous_response_id": "send the whole history as input",
        "conversation": "send the whole history as input",
        "background": "leave it out",
        "prompt": "send its text as input",
        "top_logprobs": "leave it out",
        "max_tool_calls": "leave it out",
    },
)
_PARTS = ("input_text", "output_text", "text", "refusal")


def read_responses(body: Body) -> Ask:
    """The request of a body of `/v1/responses`."""
    form = body.values.get("text")
    if isinstance(form, dict) and (form.get("format") or {}).get("type", "text") != "text":
        raise BadRequest("text.format is not served: replies are free text", "text")
    body.check(RESPONSES_FIELDS)
    messages = [{"role": "system", "content": body.text("instructions")}] if body.values.get("instructions") else []
    given = body.values.get("input")
    if isinstance(given, str):
        messages.append({"role": "user", "content": given})
    else:
        for item in body.array("input", LONGEST_HISTORY):
            _add(messages, item)
    if not messages or messages[-1]["role"] == "assistant":
        raise BadRequest("the input must end with something that is not the assistant's", "input")
    tools = [_tool(tool) for tool in body.array("tools", MOST_TOOLS)]
    choice = body.values.get("tool_choice")
    return Ask(
        messages=messages,
        tools=tools,
        tool_choice=checked_choice(named_choice(choice, choice), tools),
        parallel=body.flag("parallel_tool_calls", True),
        max_tokens=body.whole("max_output_tokens", 1, MOST_TOKENS),
        sampling=body.sampling(),
        stream=body.flag("stream"),
    )


def response_answer(ask: Ask, exchanges: Sequence[Exchange], head: JsonObject, decode: DecodeIds) -> JsonObject:
    """The answer of `/v1/responses`."""
    (exchange,) = exchanges
    incomplete = {"reason": "max_output_tokens"} if exchange.finish == "length" else None
    used = len(exchange.prompt), len(exchange.tokens)
    return _response(ask, head, "incomplete" if incomplete else "completed") | {
        "incomplete_details": incomplete,
        "output": _output(exchange, head),
        "usage": {
            "input_tokens": used[0],
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": used[1],
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": sum(used),
        },
    }


class ResponseEvents:
    """The events of a stream of `/v1/responses`."""

    def __init__(self, ask: Ask, head: JsonObject, decode: DecodeIds):
        self._ask = ask
        self._head = head
        self._decode = decode
        self._count = 0
        self._text = ""
        self._open = False

    def begin(self) -> list[str]:
        """The response without its output."""
        response = _response(self._ask, self._head, "in_progress")
        return [self._event(f"response.{kind}", response=response) for kind in ("created", "in_progress")]

    def text(self, index: int, text: str) -> list[str]:
        """A further piece of the text."""
        events = []
        if not self._open:
            self._open = True
            item = _text_item(self._head, "", "in_progress") | {"content": []}
            part = {"type": "output_text", "text": "", "annotations": []}
            events.append(self._event("response.output_item.added", output_index=0, item=item))
            events.append(self._event("response.content_part.added", **self._place(), part=part))
        self._text += text
        return [*events, self._event("response.output_text.delta", **self._place(), delta=text, logprobs=[])]

    def end(self, exchanges: Sequence[Exchange], rests: Sequence[str]) -> list[str]:
        """The rest of the response."""
        (exchange,) = exchanges
        (rest,) = rests
        events = self.text(0, rest) if rest or not (self._open or exchange.calls) else []
        whole = response_answer(self._ask, exchanges, self._head, self._decode)
        items = whole["output"]
        if self._open:
            part = {"type": "output_text", "text": self._text, "annotations": []}
            events.append(self._event("response.output_text.done", **self._place(), text=self._text, logprobs=[]))
            events.append(self._event("response.content_part.done", **self._place(), part=part))
            if items and items[0]["type"] == "message":
                events.append(self._event("response.output_item.done", output_index=0, item=items[0]))
        for place, item in enumerate(items):
            if item["type"] == "function_call":
                events += self._call(place, item)
        kind = "response.incomplete" if whole["status"] == "incomplete" else "response.completed"
        return [*events, self._event(kind, response=whole)]

    def _call(self, place: int, item: JsonObject) -> list[str]:
        where = {"output_index": place, "item_id": item["id"]}
        opened = item | {"arguments": "", "status": "in_progress"}
        arguments = item["arguments"]
        return [
            self._event("response.output_item.added", output_index=place, item=opened),
            self._event("response.function_call_arguments.delta", **where, delta=arguments),
            self._event("response.function_call_arguments.done", **where, arguments=arguments, name=item["name"]),
            self._event("response.output_item.done", output_index=place, item=item),
        ]

    def _place(self) -> JsonObject:
        return {"item_id": "msg_" + self._head["id"], "output_index": 0, "content_index": 0}

    def _event(self, kind: str, **fields: object) -> str:
        numbered = {"type": kind, "sequence_number": self._count, **fields}
        self._count += 1
        return f"event: {kind}\ndata: {json.dumps(numbered)}\n\n"


def _response(ask: Ask, head: JsonObject, status: str) -> JsonObject:
    return {
        "id": "resp_" + head["id"],
        "object": "response",
        "created_at": head["created"],
        "model": head["model"],
        "status": status,
        "error": None,
        "incomplete_details": None,
        "instructions": None,
        "metadata": {},
        "output": [],
        "parallel_tool_calls": ask.parallel,
        "temperature": None,
        "top_p": None,
        "tool_choice": ask.tool_choice if ask.tool_choice in ("auto", "none", "required") else "auto",
        "tools": [{**tool["function"], "type": "function", "strict": False} for tool in ask.tools],
    }


def _output(exchange: Exchange, head: JsonObject) -> list[JsonObject]:
    items = []
    if exchange.content or not exchange.calls:
        items.append(_text_item(head, exchange.content, "incomplete" if exchange.finish == "length" else "completed"))
    for call in exchange.calls:
        item = {"type": "function_call", "id": "fc_" + call.number, "call_id": call.number, "name": call.name}
        items.append(item | {"arguments": json.dumps(call.arguments), "status": "completed"})
    return items


def _text_item(head: JsonObject, text: str, status: str) -> JsonObject:
    part = {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
    return {"type": "message", "id": "msg_" + head["id"], "role": "assistant", "status": status, "content": [part]}


def _add(messages: list[JsonObject], item: object) -> None:
    """Add an item of the input to the messages."""
    if not isinstance(item, dict):
        raise BadRequest("the input must be a text or a list of items", "input")
    kind = item.get("type", "message")
    if kind == "function_call_output":
        output = message_content(item.get("output"), "input", _PARTS)
        messages.append({"role": "tool", "content": output, "tool_call_id": str(item.get("call_id", ""))})
    elif kind == "function_call":
        call = str(item.get("call_id", "")), str(item.get("name", "")), item.get("arguments")
        new = call_message("", [call], "input")
        if messages and messages[-1]["role"] == "assistant":  # calls and text of one reply are items of their own
            messages[-1]["tool_calls"] = [*messages[-1].get("tool_calls", ()), *new["tool_calls"]]
        else:
            messages.append(new)
    elif kind == "message":
        role = item.get("role")
        if role not in ("system", "developer", "user", "assistant"):
            raise BadRequest(f"a message has the role {role!r}; system, user and assistant are known", "input")
        read = message_content if role == "user" else plain_content
        content = read(item.get("content"), "input", _PARTS)
        messages.append({"role": "system" if role == "developer" else role, "content": content})
    elif kind != "reasoning":
        raise BadRequest(f"an item of type {kind!r} is not served; messages and functions are", "input")


def _tool(value: object) -> JsonObject:
    if not isinstance(value, dict) or value.get("type") != "function":
        raise BadRequest("tools must be functions: {'type': 'function', 'name': ..., 'parameters': ...}", "tools")
    return function_tool(value, "tools")
