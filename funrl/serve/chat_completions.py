"""The dialects of `/v1/chat/completions` and `/v1/completions`, and of `/inference/v1/generate`, which has token ids.

Reference: https://platform.openai.com/docs/api-reference/chat; token ids as in vLLM,
  https://docs.vllm.ai/en/latest/serving/openai_compatible_server.html
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from typing import Any

from funrl.serve.asks import (
    LONGEST_HISTORY,
    MOST_CHOICES,
    MOST_TOKENS,
    MOST_TOOLS,
    SAMPLING_FIELDS,
    SEEDS,
    Ask,
    BadRequest,
    Body,
    KnownFields,
    call_message,
    checked_choice,
    checked_ids,
    function_tool,
    named_choice,
    plain_content,
)
from funrl.serve.pictures import message_content
from funrl.serve.session import DecodeIds, Exchange

OPENAI_IGNORED = (
    "model",
    "user",
    "metadata",
    "store",
    "service_tier",
    "safety_identifier",
    "prompt_cache_key",
    "priority",
    "request_id",
    "session_id",
    "cache_salt",
    "verbosity",
    "reasoning_effort",
    "skip_special_tokens",
    "prompt_cache_retention",
)
_READ = (
    "n",
    "seed",
    "stop",
    "stream",
    "stream_options",
    "return_token_ids",
    "return_tokens_as_token_ids",
    "max_tokens",
    "logprobs",
    *SAMPLING_FIELDS,
)
_UNSERVED = {
    "response_format": "replies are free text; say in the messages what form is wanted",
    "logit_bias": "leave it out",
    "presence_penalty": "use repetition_penalty",
    "frequency_penalty": "use repetition_penalty",
    "stop_token_ids": "use stop, with texts",
    "top_logprobs": "only the sampled token's log-probability is known; use logprobs",
    "chat_template_kwargs": "they are fixed when the server starts (--template_arguments)",
    "guided_json": "replies are free text",
    "structured_outputs": "replies are free text",
    "prediction": "leave it out",
    "web_search_options": "give a tool instead",
}
CHAT_FIELDS = KnownFields(
    (
        *_READ,
        "messages",
        "tools",
        "tool_choice",
        "parallel_tool_calls",
        "max_completion_tokens",
        "modalities",
        "include_reasoning",
    ),
    OPENAI_IGNORED,
    _UNSERVED | {"functions": "use tools", "function_call": "use tool_choice", "audio": "only text is served"},
)
COMPLETIONS_FIELDS = KnownFields(
    (*_READ, "prompt"),
    OPENAI_IGNORED,
    _UNSERVED | {"echo": "a reply does not repeat its prompt", "suffix": "leave it out", "best_of": "use n"},
)
FINISH = {"stop": "stop", "length": "length", "calls": "tool_calls"}


def read_chat(body: Body) -> Ask:
    """The request of a body of `/v1/chat/completions`."""
    modalities = body.array("modalities", 8)
    if modalities not in ([], ["text"]):
        raise BadRequest(f"modalities={modalities} is not served; only text is", "modalities")
    _allow_text_format(body)
    body.check(CHAT_FIELDS)
    messages = [_message(message) for message in body.array("messages", LONGEST_HISTORY)]
    if not messages:
        raise BadRequest("messages are needed, at least one", "messages")
    if messages[-1]["role"] == "assistant":
        raise BadRequest("the last message is the assistant's; a reply answers someone else's", "messages")
    tools = [_tool(tool) for tool in body.array("tools", MOST_TOOLS)]
    choice = body.values.get("tool_choice")
    function = choice.get("function") if isinstance(choice, dict) else None
    most = body.whole("max_completion_tokens", 1, MOST_TOKENS) or body.whole("max_tokens", 1, MOST_TOKENS)
    return dataclasses.replace(
        _shared(body),
        messages=messages,
        tools=tools,
        tool_choice=checked_choice(named_choice(choice, function), tools),
        parallel=body.flag("parallel_tool_calls", True),
        max_tokens=most,
        logprobs=body.flag("logprobs"),
        reasoning=None if body.values.get("include_reasoning") is None else body.flag("include_reasoning"),
    )


def read_text(body: Body) -> Ask:
    """The request of a body of `/v1/completions`, whose prompt is a text or token ids."""
    body.check(COMPLETIONS_FIELDS)
    prompt = body.values.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], (str, list)):
        prompt = prompt[0]
    text = prompt if isinstance(prompt, str) else ""
    return dataclasses.replace(
        _shared(body),
        text=text,
        tokens=() if text else checked_ids(prompt, "prompt"),
        max_tokens=body.whole("max_tokens", 1, MOST_TOKENS) or 16,
        logprobs=body.whole("logprobs", 0, 1) is not None,
    )


def chat_answer(ask: Ask, exchanges: Sequence[Exchange], head: dict[str, Any], decode: DecodeIds) -> dict[str, Any]:
    """The answer of `/v1/chat/completions`.

    Args:
      head: id, time and name of the model.
      decode: token ids -> text, for the tokens of log-probabilities.
    """
    choices = []
    for index, exchange in enumerate(exchanges):
        message: dict[str, Any] = {"role": "assistant", "content": exchange.content or None, "refusal": None}
        message |= _thoughts(exchange)
        if exchange.calls:
            message["tool_calls"] = _calls(exchange)
        else:
            message["content"] = exchange.content
        choice = {"index": index, "message": message, **_ending(exchange)}
        choice["logprobs"] = {"content": _logprobs(ask, exchange, decode)} if ask.logprobs else None
        choices.append(choice | _ids(ask, exchange))
    whole = {**head, "object": "chat.completion", "choices": choices, "usage": usage(exchanges)}
    return whole | _prompt_ids(ask, exchanges)


def text_answer(ask: Ask, exchanges: Sequence[Exchange], head: dict[str, Any], decode: DecodeIds) -> dict[str, Any]:
    """The answer of `/v1/completions`; see `chat_answer`."""
    choices = []
    for index, exchange in enumerate(exchanges):
        choice: dict[str, Any] = {"index": index, "text": exchange.content, **_ending(exchange), "logprobs": None}
        if ask.logprobs:
            entries = _logprobs(ask, exchange, decode)
            tokens = [entry["token"] for entry in entries]
            logps = [entry["logprob"] for entry in entries]
            choice["logprobs"] = {"tokens": tokens, "token_logprobs": logps, "top_logprobs": None, "text_offset": []}
        choices.append(choice | _ids(ask, exchange))
    whole = {**head, "object": "text_completion", "choices": choices, "usage": usage(exchanges)}
    return whole | _prompt_ids(ask, exchanges)


class ChatEvents:
    """The events of a stream of `/v1/chat/completions`."""

    def __init__(self, ask: Ask, head: dict[str, Any], decode: DecodeIds):
        self._ask = ask
        self._head = {**head, "object": "chat.completion.chunk"}
        self._decode = decode

    def begin(self) -> list[str]:
        """The first event of each reply."""
        opening = {"role": "assistant", "content": ""}
        return [self._event(index, opening) for index in range(self._ask.count)]

    def text(self, index: int, text: str) -> list[str]:
        """A further piece of a reply's content."""
        return [self._event(index, {"content": text})]

    def end(self, exchanges: Sequence[Exchange], rests: Sequence[str]) -> list[str]:
        """The rest of each reply.

        Args:
          rests: of the contents.
        """
        events = []
        for index, (exchange, rest) in enumerate(zip(exchanges, rests, strict=True)):
            if exchange.thoughts:
                events.append(self._event(index, _thoughts(exchange)))
            if rest:
                events += self.text(index, rest)
            if exchange.calls:
                numbered = [{"index": n, **call} for n, call in enumerate(_calls(exchange))]
                events.append(self._event(index, {"tool_calls": numbered}))
            further = _ending(exchange) | _ids(self._ask, exchange)
            if self._ask.logprobs:
                further["logprobs"] = {"content": _logprobs(self._ask, exchange, self._decode)}
            events.append(self._event(index, {}, **further, **_prompt_ids(self._ask, exchanges)))
        if self._ask.usage:
            events.append(event({**self._head, "choices": [], "usage": usage(exchanges)}))
        return [*events, "data: [DONE]\n\n"]

    def _event(self, index: int, delta: dict[str, Any], **further: object) -> str:
        ids = {"prompt_token_ids": further.pop("prompt_token_ids")} if "prompt_token_ids" in further else {}
        choice = {"index": index, "delta": delta, "finish_reason": None, "logprobs": None, **further}
        return event({**self._head, **ids, "choices": [choice]})


class TextEvents(ChatEvents):
    """The events of a stream of `/v1/completions`."""

    def __init__(self, ask: Ask, head: dict[str, Any], decode: DecodeIds):
        super().__init__(ask, head, decode)
        self._head["object"] = "text_completion"

    def begin(self) -> list[str]:
        """Nothing: there is no message to open."""
        return []

    def _event(self, index: int, delta: dict[str, Any], **further: object) -> str:
        ids = {"prompt_token_ids": further.pop("prompt_token_ids")} if "prompt_token_ids" in further else {}
        text = delta.get("content", "")
        choice = {"index": index, "text": text, "finish_reason": None, "logprobs": None, **further}
        return event({**self._head, **ids, "choices": [choice]})


def event(value: dict[str, Any]) -> str:
    """A server-sent event."""
    return f"data: {json.dumps(value)}\n\n"


def usage(exchanges: Sequence[Exchange]) -> dict[str, Any]:
    """Token counts; a prompt counts once."""
    prompt = len(exchanges[0].prompt)
    written = sum(len(exchange.tokens) for exchange in exchanges)
    return {"prompt_tokens": prompt, "completion_tokens": written, "total_tokens": prompt + written}


def _shared(body: Body) -> Ask:
    """A request with the fields that both endpoints have."""
    options = body.values.get("stream_options") or {}
    if not isinstance(options, dict):
        raise BadRequest("stream_options must be an object", "stream_options")
    return Ask(
        count=body.whole("n", 1, MOST_CHOICES) or 1,
        seed=body.whole("seed", *SEEDS),
        stop=body.stops(),
        sampling=body.sampling(),
        stream=body.flag("stream"),
        usage=bool(options.get("include_usage")),
        token_ids=body.flag("return_token_ids"),
        ids_as_text=body.flag("return_tokens_as_token_ids"),
    )


def _allow_text_format(body: Body) -> None:
    if body.values.get("response_format") == {"type": "text"}:
        del body.values["response_format"]


def _message(value: Any) -> dict[str, Any]:
    """A message as chat templates take it."""
    role = value.get("role") if isinstance(value, dict) else None
    if role not in ("system", "developer", "user", "assistant", "tool"):
        raise BadRequest(f"a message has the role {role!r}; system, user, assistant and tool are known", "messages")
    if role == "assistant":
        content = plain_content(value.get("content"), "messages", ("text", "refusal"))
        calls = value.get("tool_calls") or []
        if not isinstance(calls, list):
            raise BadRequest("the tool_calls of a message must be a list", "messages")
        message = call_message(content, [_given_call(call) for call in calls], "messages")
        thoughts = value.get("reasoning") or value.get("reasoning_content")
        return {**message, "reasoning_content": thoughts} if isinstance(thoughts, str) else message
    if role in ("user", "tool"):
        message = {"role": role, "content": message_content(value.get("content"), "messages")}
    else:
        message = {"role": "system", "content": plain_content(value.get("content"), "messages")}
    for name in ("name", "tool_call_id"):
        if isinstance(value.get(name), str):
            message[name] = value[name]
    return message


def _given_call(call: Any) -> tuple[str, str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise BadRequest("a tool call of a message needs a function with a name", "messages")
    return str(call.get("id", "")), function["name"], function.get("arguments")


def _tool(value: object) -> dict[str, Any]:
    if not isinstance(value, dict) or value.get("type") != "function":
        raise BadRequest("tools must be functions: {'type': 'function', 'function': {...}}", "tools")
    return function_tool(value.get("function"), "tools")


def _thoughts(exchange: Exchange) -> dict[str, str]:
    """Thoughts by the name that vLLM gives them, and by the name that it and others gave them before."""
    return dict.fromkeys(("reasoning", "reasoning_content"), exchange.thoughts) if exchange.thoughts else {}


def _calls(exchange: Exchange) -> list[dict[str, Any]]:
    return [
        {
            "id": call.number,
            "type": "function",
            "function": {"name": call.name, "arguments": json.dumps(call.arguments)},
        }
        for call in exchange.calls
    ]


def _ending(exchange: Exchange) -> dict[str, Any]:
    return {"finish_reason": FINISH[exchange.finish], "stop_reason": exchange.stop}


def _ids(ask: Ask, exchange: Exchange) -> dict[str, Any]:
    return {"token_ids": exchange.tokens} if ask.token_ids else {}


def _prompt_ids(ask: Ask, exchanges: Sequence[Exchange]) -> dict[str, Any]:
    return {"prompt_token_ids": exchanges[0].prompt} if ask.token_ids else {}


def _logprobs(ask: Ask, exchange: Exchange, decode: DecodeIds) -> list[dict[str, Any]]:
    """Log-probabilities in nats, under the distribution that was sampled from."""
    entries = []
    for token, logp in zip(exchange.tokens, exchange.logp.tolist(), strict=True):
        text = f"token_id:{token}" if ask.ids_as_text else decode([token])
        entries.append({"token": text, "logprob": logp, "bytes": list(text.encode()), "top_logprobs": []})
    return entries


MOST_STOP_TOKENS = 1024
GENERATE_FIELDS = KnownFields(
    read=("token_ids", "sampling_params", "stream"),
    ignored=OPENAI_IGNORED,
    unserved={"features": "only text is served", "kv_transfer_params": "leave it out"},
)
GENERATE_PARAMETERS = KnownFields(
    read=("n", "seed", "stop", "max_tokens", "min_tokens", "logprobs", "stop_token_ids", *SAMPLING_FIELDS),
    ignored=(
        "skip_special_tokens",
        "detokenize",
        "output_kind",
        "include_stop_str_in_output",
        "extra_args",
        "routed_experts_prompt_start",  # no experts are returned
    ),
    unserved={
        "prompt_logprobs": "only sampled tokens have log-probabilities",
        "presence_penalty": "use repetition_penalty",
        "frequency_penalty": "use repetition_penalty",
        "ignore_eos": "a reply ends at the stop tokens of the model",
        "logit_bias": "leave it out",
        "structured_outputs": "replies are free text",
    },
)


def read_generate(body: Body) -> Ask:
    """The request of a body of `/inference/v1/generate`."""
    body.check(GENERATE_FIELDS)
    if body.flag("stream"):
        raise BadRequest("a stream of token ids is not served; use stream=false", "stream")
    parameters = Body(body.values.get("sampling_params") or {})
    parameters.check(GENERATE_PARAMETERS)
    stop_tokens = parameters.array("stop_token_ids", MOST_STOP_TOKENS)
    if parameters.whole("min_tokens", 0, MOST_TOKENS):
        raise BadRequest("min_tokens is not served; leave it out", "min_tokens")
    return Ask(
        tokens=checked_ids(body.values.get("token_ids"), "token_ids"),
        count=parameters.whole("n", 1, MOST_CHOICES) or 1,
        seed=parameters.whole("seed", *SEEDS),
        stop=parameters.stops(),
        stop_tokens=tuple(checked_ids(stop_tokens, "stop_token_ids")) if stop_tokens else (),
        max_tokens=parameters.whole("max_tokens", 1, MOST_TOKENS),
        sampling=parameters.sampling(),
        logprobs=parameters.whole("logprobs", 0, 1) is not None,
        token_ids=True,
        ids_as_text=True,
    )


def generate_answer(ask: Ask, exchanges: Sequence[Exchange], head: dict[str, Any], decode: DecodeIds) -> dict[str, Any]:
    """The answer of `/inference/v1/generate`."""
    choices = []
    for index, exchange in enumerate(exchanges):
        entries = [
            {"token": f"token_id:{token}", "logprob": logp, "bytes": None, "top_logprobs": []}
            for token, logp in zip(exchange.tokens, exchange.logp.tolist(), strict=True)
        ]
        finish = FINISH["stop" if exchange.finish == "calls" else exchange.finish]
        logprobs = {"content": entries} if ask.logprobs else None
        choices.append({"index": index, "token_ids": exchange.tokens, "finish_reason": finish, "logprobs": logprobs})
    versions = [exchange.version for exchange in exchanges]
    return {"request_id": head["id"], "choices": choices, "weight_version": max(versions), "prompt_logprobs": None}
