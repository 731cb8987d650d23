"""Requests of clients, whatever dialect they speak, and the checks of a body's fields."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from funrl.data.json_lines import DataError, JsonObject
from funrl.data.messages import decoded_arguments
from funrl.rollout.episodes import Message
from funrl.rollout.sampling_parameters import SMALLEST_TEMPERATURE

MOST_CHOICES = 128
MOST_STOPS = 16
LONGEST_STOP = 1000  # characters
LONGEST_HISTORY = 100_000  # messages
MOST_TOOLS = 1000
MOST_TOKENS = 1 << 31
SEEDS = (-(1 << 63), (1 << 63) - 1)
SAMPLING_FIELDS = ("temperature", "top_p", "min_p", "top_k", "repetition_penalty")


class BadRequest(ValueError):
    """A request that cannot be served.

    Attributes:
      status: of the answer.
      field: of the body that is wrong; "": none.
      code: a word for programs.
    """

    def __init__(self, message: str, field: str = "", status: int = 400, code: str = "invalid_request"):
        super().__init__(message)
        self.status = status
        self.field = field
        self.code = code


class KnownFields(NamedTuple):
    """Fields that a body may have.

    Attributes:
      read: they are served.
      ignored: they change nothing that this server does.
      unserved: field -> what to do instead; it may have the value null, false, 0, {} or [].
    """

    read: Collection[str]
    ignored: Collection[str]
    unserved: Mapping[str, str]


@dataclasses.dataclass(frozen=True)
class Ask:
    """A request for replies.

    Attributes:
      messages: of the conversation so far, as chat templates take them; empty where there is another prompt.
      tokens: ids of the whole prompt; empty where there are messages or a text.
      text: the whole prompt; "" where there are messages or tokens.
      tools: JSON schemas of functions.
      tool_choice: "auto", "none" (calls are text), "required", or the name of the function that must be called.
      parallel: whether a reply may make several calls.
      count: replies to sample.
      seed: makes equal requests give equal replies; None: they differ.
      stop: texts that end a reply; they are no part of it.
      stop_tokens: end tokens that the client has chosen among the tokenizer's.
      max_tokens: bound on the tokens of a reply; None: that of the server.
      sampling: fields of `Sampling` that the client chooses.
      logprobs: whether the client wants log-probabilities.
      token_ids: whether it wants the token ids of prompt and replies.
      ids_as_text: whether log-probabilities name tokens as "token_id:7".
      stream: whether the answer comes in pieces.
      usage: whether a stream ends with the numbers of tokens.
      size: bytes of its body.
      reasoning: whether the client wants what the policy thinks, apart from the content; None: it does not say, and
        gets it so where calls are read, else in the content.
    """

    messages: Sequence[Message] = ()
    tokens: Sequence[int] = ()
    text: str = ""
    tools: Sequence[Mapping[str, Any]] = ()
    tool_choice: str = "auto"
    parallel: bool = True
    count: int = 1
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_tokens: tuple[int, ...] = ()
    max_tokens: int | None = None
    sampling: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    logprobs: bool = False
    token_ids: bool = False
    ids_as_text: bool = False
    stream: bool = False
    usage: bool = False
    size: int = 0
    reasoning: bool | None = None


class Body:
    """Fields of a JSON body, each checked when it is read."""

    def __init__(self, values: Any):
        if not isinstance(values, dict):
            raise BadRequest(f"the body is {_short(values)}, it must be a JSON object")
        self.values: JsonObject = values

    def check(self, fields: KnownFields) -> None:
        """Refuse fields that would change the answer and are not served."""
        for name, value in self.values.items():
            if name in fields.unserved and value:
                raise BadRequest(f"{name}={_short(value)} is not served: {fields.unserved[name]}", name)
            if not any(name in known for known in fields):
                raise BadRequest(f"{name!r} is not a field of this endpoint", name)

    def text(self, name: str, default: str | None = None) -> str:
        """A text; without a default it must be given."""
        value = self.values.get(name)
        if value is None and default is not None:
            return default
        if not isinstance(value, str):
            raise BadRequest(f"{name} is {_short(value)}, it must be a text", name)
        return value

    def flag(self, name: str, default: bool = False) -> bool:
        """True or false."""
        value = self.values.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise BadRequest(f"{name} is {_short(value)}, it must be true or false", name)
        return value

    def whole(self, name: str, low: int, high: int) -> int | None:
        """A whole number in bounds; None: it is not given."""
        value = self.values.get(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise BadRequest(f"{name} is {_short(value)}, it must be a whole number from {low} to {high}", name)
        return value

    def number(self, name: str, low: float, high: float) -> float | None:
        """A number in bounds; None: it is not given."""
        value = self.values.get(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value <= high:
            raise BadRequest(f"{name} is {_short(value)}, it must be a number from {low:g} to {high:g}", name)
        return float(value)

    def array(self, name: str, most: int) -> list[Any]:
        """A list; empty: it is not given."""
        value = self.values.get(name)
        if value is None:
            return []
        if not isinstance(value, list) or len(value) > most:
            raise BadRequest(f"{name} must be a list of at most {most}, not {_short(value)}", name)
        return value

    def stops(self, name: str = "stop") -> tuple[str, ...]:
        """Texts that end a reply: one, or a list of them."""
        value = self.values.get(name)
        texts = [] if value is None else [value] if isinstance(value, str) else value
        if not isinstance(texts, list) or len(texts) > MOST_STOPS:
            raise BadRequest(f"{name} must be a text or a list of at most {MOST_STOPS}", name)
        for text in texts:
            if not isinstance(text, str) or not 0 < len(text) <= LONGEST_STOP:
                raise BadRequest(f"{name} has {_short(text)}, a text of 1 to {LONGEST_STOP} characters is needed", name)
        return tuple(texts)

    def sampling(self) -> JsonObject:
        """The fields of `Sampling` that are given, by its names."""
        temperature = self.number("temperature", 0, 100)
        chosen = {
            "temperature": temperature,
            "top_p": self.number("top_p", 0, 1),
            "min_p": self.number("min_p", 0, 1),
            "repetition_penalty": self.number("repetition_penalty", 0.01, 100),
            "top_k": self.whole("top_k", -1, 1 << 31),
        }
        fields = {name: value for name, value in chosen.items() if value is not None}
        if fields.get("top_k") == -1:
            fields["top_k"] = 0
        if fields.get("top_p") == 0:
            fields["top_p"] = 1e-9
        if temperature is not None:
            fields["greedy"] = temperature < SMALLEST_TEMPERATURE
            if fields["greedy"]:
                del fields["temperature"]
        return fields


def plain_content(content: object, field: str, kinds: Collection[str] = ("text",)) -> str:
    """The text of a message: a text, or a list of parts of text.

    Args:
      field: that it stands in, for errors.
      kinds: types of parts that hold text.
    """
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise BadRequest(f"{field} is {_short(content)}, it must be a text or a list of parts", field)
    texts = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind not in kinds or not isinstance(part.get("text"), str):
            raise BadRequest(f"{field} has a part {_short(part)}; only text is served", field)
        texts.append(part["text"])
    return "".join(texts)


def call_message(content: str, calls: Sequence[tuple[str, str, object]], field: str) -> JsonObject:
    """A message of the assistant.

    Args:
      calls: (id, name, arguments) of each call; arguments are an object, or its JSON text.
      field: that they stand in, for errors.
    """
    message: JsonObject = {"role": "assistant", "content": content}
    if calls:
        message["tool_calls"] = [
            {"type": "function", "id": number, "function": {"name": name, "arguments": _arguments(given, field)}}
            for number, name, given in calls
        ]
    return message


def function_tool(value: object, field: str) -> JsonObject:
    """A tool as chat templates take it, of an object with a name, a description and parameters."""
    if not isinstance(value, dict) or not isinstance(value.get("name"), str) or not value["name"]:
        raise BadRequest(f"{field} is {_short(value)}, it must be a function with a name", field)
    parameters = value.get("parameters") or {"type": "object", "properties": {}}
    if not isinstance(parameters, dict):
        raise BadRequest(f"the parameters of {value['name']} are {_short(parameters)}, they must be a schema", field)
    description = value.get("description") or ""
    function = {"name": value["name"], "description": str(description), "parameters": parameters}
    return {"type": "function", "function": function}


def checked_ids(value: object, field: str) -> list[int]:
    """Token ids, at least one."""
    if not isinstance(value, list) or not value:
        raise BadRequest(f"{field} must be a text or a list of token ids, for one prompt", field)
    if not all(isinstance(token, int) and not isinstance(token, bool) and 0 <= token < 1 << 31 for token in value):
        raise BadRequest(f"{field} has something else than token ids", field)
    return value


def named_choice(value: object, function: object) -> str:
    """Choice of a function: "auto", "none", "required", or a name.

    Args:
      value: as the client gives it.
      function: the part of it that has a name.
    """
    if value is None:
        return "auto"
    if isinstance(value, str) and value in ("auto", "none", "required"):
        return value
    if isinstance(function, dict) and isinstance(function.get("name"), str):
        return function["name"]
    raise BadRequest("tool_choice must be 'auto', 'none', 'required', or name a function", "tool_choice")


def checked_choice(choice: str, tools: Sequence[Mapping[str, Any]]) -> str:
    """A tool choice that there is a tool for."""
    names = [tool["function"]["name"] for tool in tools]
    if choice in ("auto", "none"):
        return choice
    if not tools:
        raise BadRequest(f"tool_choice is {choice!r}, and there are no tools", "tool_choice")
    if choice != "required" and choice not in names:
        raise BadRequest(f"tool_choice names {choice!r}; the tools are {', '.join(names)}", "tool_choice")
    return choice


def _arguments(given: object, field: str) -> JsonObject:
    try:
        return decoded_arguments(given)
    except DataError as error:
        raise BadRequest(str(error), field) from None


def _short(value: object) -> str:
    """A value as JSON, cut off."""
    text = ""
    for part in json.JSONEncoder().iterencode(value[:100] if isinstance(value, str | list) else value):
        text += part
        if len(text) > 100:
            break
    return text if len(text) <= 100 else text[:97] + "..."
