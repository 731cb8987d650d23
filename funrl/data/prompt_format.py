"""From a record's prompt to a model's input: text template, system message, few-shot examples, chat template.

| prompt | becomes |
|---|---|
| text | the few-shot examples, each followed by its completion and a blank line; the text |
| text, if the format is a chat | a system message; the few-shot examples as turns; the text as the user's message |
| messages | the system message, unless they begin with one; the few-shot examples as turns; the messages |
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from funrl.data.columns import Fields, prompt_columns, rename_columns
from funrl.data.json_lines import DataError, JsonObject
from funrl.data.messages import ChatMessage, are_messages, normal_messages, normal_tools
from funrl.data.processors.form import framed
from funrl.data.records import read_records, source_problem

Messages = list[ChatMessage]
PROMPT_PLACE = "{prompt}"
PICTURE_MARK = "<image>"  # place of a picture in a text, as verl's and TRL's records have it
SEPARATOR = "\n"  # of steps, by default
OWN = "own"  # the tokenizer's chat template
TEXT_FILES = (".txt", ".md", ".jinja")  # a value with such an ending names a file
COMPLETIONS = ("completion", "answer", "solution")  # columns; the first one present is used


class Shot(NamedTuple):
    """A few-shot example."""

    prompt: str | Messages
    completion: str | Messages


class PromptFormat(NamedTuple):
    """Format of all prompts of a run.

    Attributes:
      chat: whether a text prompt becomes a user's message.
      system: text of the system message; None: none is added.
      text: template of a text prompt, with {prompt} in its place.
      shots: few-shot examples.
      tools: JSON schemas of tools, for the chat template; a record's own `tools` come first.
      arguments: further arguments of the chat template, by name.
      step_separator: text between two steps of a solution.
    """

    chat: bool = False
    system: str | None = None
    text: str = PROMPT_PLACE
    shots: tuple[Shot, ...] = ()
    tools: tuple[object, ...] = ()
    arguments: Mapping[str, object] = {}
    step_separator: str = SEPARATOR


PLAIN_PROMPTS = PromptFormat()


def format_prompt(prompt: str | Sequence[Mapping[str, Any]], form: PromptFormat) -> str | Messages:
    """Apply a format to a prompt."""
    if isinstance(prompt, str) and not form.chat:
        shots = (f"{_in_template(shot.prompt, form)}{_text_of(shot)}\n\n" for shot in form.shots)
        return "".join((*shots, _in_template(prompt, form)))
    return format_messages(prompt, form)


def format_messages(prompt: str | Sequence[Mapping[str, object]], form: PromptFormat) -> Messages:
    """Apply a format to messages, or to a text that becomes the user's; they come out in their normal form."""
    turns = _turns(prompt, form)
    own = turns[0]["role"] == "system"
    first = turns[:1] if own else [] if form.system is None else [{"role": "system", "content": form.system}]
    for shot in form.shots:
        completion = shot.completion
        reply = [{"role": "assistant", "content": completion}] if isinstance(completion, str) else completion
        first += [*_turns(shot.prompt, form), *reply]
    return first + turns[own:]


def tools_of(own: object, form: PromptFormat) -> list[Any]:
    """A record's own tools, else those of the format. Raises: DataError."""
    return normal_tools(own) or list(form.tools)


def read_shots(text: str, fields: Fields) -> tuple[Shot, ...]:
    """Read the first n records of a file as few-shot examples, by "FILE:n".

    The completion of a record is its column "completion", else "answer", else "solution".

    Args:
      text: FILE:n.
      fields: names of fields -> columns, as in `rename_columns`.

    Raises:
      DataError: the text has another form, the file cannot be read or has fewer records, or a record is unusable.
    """
    path, _, count = text.rpartition(":")
    if not path or not count.isdecimal() or int(count) < 1:
        raise DataError(f"{text}: write FILE:n, such as examples.jsonl:4")
    if problem := source_problem(path):
        raise DataError(f"{path}: {problem}")
    shots: list[Shot] = []
    for where, record in read_records(path):
        if len(shots) == int(count):
            break
        shots.append(_shot(where, record, fields))
    if len(shots) < int(count):
        raise DataError(f"{text}: the file has {len(shots)} records")
    return tuple(shots)


def text_of_flag(value: str) -> str:
    """The text in a flag, or in the .txt, .md or .jinja file that it names. Raises: DataError."""
    return text_of_file(value) if value.endswith(TEXT_FILES) else value


def template_arguments(text: str) -> JsonObject:
    """Parse arguments such as "enable_thinking:false,level:3,style:plain".

    >>> template_arguments("enable_thinking:false,level:3,style:plain")
    {'enable_thinking': False, 'level': 3, 'style': 'plain'}

    Raises:
      DataError: the text is not of this form, or names an argument twice.
    """
    pairs = [part.partition(":") for part in text.split(",") if part.strip()]
    arguments = {name.strip(): _value(value.strip()) for name, _, value in pairs}
    if not arguments or len(arguments) < len(pairs) or not all(name.isidentifier() and mark for name, mark, _ in pairs):
        raise DataError(f"{text}: write NAME:VALUE, separated by commas, as in enable_thinking:false")
    return arguments


def read_tools(path: str) -> tuple[object, ...]:
    """Read tools from a JSON file, a list of schemas with names. Raises: DataError."""
    text = text_of_file(path)
    try:
        tools = normal_tools(text)
    except DataError as error:
        raise DataError(f"{path}: {error}") from error
    if not tools:
        raise DataError(f"{path}: it has no tool, and does nothing; leave it out")
    return tuple(tools)


def text_of_file(path: str) -> str:
    """Read a file as text. Raises: DataError."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = (getattr(error, "strerror", None) or str(error)).lower()
        raise DataError(f"{path}: it cannot be read: {reason}") from error


def _shot(where: str, record: object, fields: Fields) -> Shot:
    try:
        record = prompt_columns(rename_columns(record, fields)) if isinstance(record, Mapping) else {}
    except DataError as error:
        raise DataError(f"{where}: {error}") from error
    completion = next((record[name] for name in COMPLETIONS if record.get(name) is not None), None)
    if not record.get("prompt") or not (isinstance(completion, str) or are_messages(completion)):
        raise DataError(f"{where}: an example has a prompt, and a text or messages as its {', '.join(COMPLETIONS)}")
    try:
        return Shot(_normal(record["prompt"]), _normal(completion))
    except DataError as error:
        raise DataError(f"{where}: {error}") from error


def _normal(given: Any) -> str | Messages:
    return normal_messages(given) if are_messages(given) else given


def _turns(prompt: str | Sequence[Mapping[str, object]], form: PromptFormat) -> Messages:
    if isinstance(prompt, str):
        return [{"role": "user", "content": _in_template(prompt, form)}]
    return normal_messages(prompt)


def _text_of(shot: Shot) -> str:
    if isinstance(shot.completion, str):
        return shot.completion
    raise DataError("the completions of --few_shot are messages, but this prompt is text; give --chat_template=own")


def _in_template(prompt: object, form: PromptFormat) -> str:
    if not isinstance(prompt, str):
        raise DataError("the examples of --few_shot are messages, but this prompt is text; give --chat_template=own")
    return form.text.replace(PROMPT_PLACE, prompt)


def _value(text: str) -> object:
    try:
        return json.loads(text)
    except ValueError:
        return text


def marked(prompt: Any, tokenizer: Any) -> Any:
    """A prompt of a record with pictures, in which marks for them are what the model reads.

    Args:
      prompt: text or messages.
      tokenizer: with a form.
    """
    if isinstance(prompt, str):
        tower = tokenizer.picture_form.tower
        if tower.layout.frame is not None:
            return framed(prompt.replace(PICTURE_MARK, tokenizer.convert_ids_to_tokens(tower.begin)), tokenizer)
        ids = [x for x in (tower.begin, tower.placeholder, tower.end) if x is not None]
        return prompt.replace(PICTURE_MARK, "".join(tokenizer.convert_ids_to_tokens(ids)))
    return [{**message, "content": _parts(message.get("content"))} for message in prompt]


def with_own_pictures(content: str | Sequence[Mapping[str, Any]], pictures: Sequence[object]) -> list[JsonObject]:
    """Messages whose parts hold their pictures.

    Args:
      content: messages that say where they are, by parts without them; or a text, which becomes the user's message.
      pictures: in the order of their places; without any place they come before the first text of a user.

    Raises:
      DataError: there are other places than pictures.
    """
    if isinstance(content, str):
        content = [{"role": "user", "content": _parts(content)}]
    messages = [{**message} for message in content]
    if not any(part["type"] == "image" for message in messages for part in _list_of(message)):
        first = next((message for message in messages if message["role"] == "user"), messages[0])
        first["content"] = [*({"type": "image"} for _ in pictures), *_list_of(first)]
    places = sum(part["type"] == "image" for message in messages for part in _list_of(message))
    if places != len(pictures):
        raise DataError(f"there are {places} places for pictures in the messages, and {len(pictures)} pictures")
    rest = iter(pictures)
    for message in messages:
        if isinstance(message.get("content"), list):
            message["content"] = [
                {**part, "image": next(rest)} if part["type"] == "image" else part for part in message["content"]
            ]
    return messages


def _list_of(message: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The parts of a message; one with calls of tools may have none."""
    content = message.get("content")
    return [{"type": "text", "text": content}] if isinstance(content, str) else list(content or ())


def _parts(content: Any) -> Any:
    if isinstance(content, list):
        return [{"type": "image"} if part["type"] == "image" else part for part in content]
    if content is None or PICTURE_MARK not in content:
        return content
    parts: list[dict[str, str]] = []
    for number, text in enumerate(content.split(PICTURE_MARK)):
        parts += [{"type": "image"}] if number else []
        parts += [{"type": "text", "text": text}] if text else []
    return parts
