"""Prompts from files of records or of records in memory."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from funrl.data.columns import Fields, prompt_columns, rename_columns
from funrl.data.conversations import encode_prompt
from funrl.data.json_lines import DataError, JsonObject
from funrl.data.messages import are_messages, check_chat_roles, normal_messages
from funrl.data.order import places_in_order
from funrl.data.pictures import expand_placeholders, picture_form_of, pictures_of, reading_of
from funrl.data.processors.reading import ReadPatches, read_ahead
from funrl.data.prompt_format import PLAIN_PROMPTS, PromptFormat, format_prompt, marked, tools_of, with_own_pictures
from funrl.data.records import FORMATS, read_records, rows_in_memory, source_problem
from funrl.data.tokenizer import TextTokenizer, TokenizerError

if TYPE_CHECKING:  # it imports torch
    from funrl.kinds import OwnedLines

RESERVED = ("completion",)  # arguments that every reward function gets
T = TypeVar("T")


class PromptError(ValueError):
    """A prompts file cannot be used; the message names the file, the line or row and the problem."""


class Prompt(NamedTuple):
    """A prompt to complete, with the other fields of its record.

    Attributes:
      prompt: text, or chat messages with "role" and "content".
      fields: the record's other fields, which reward functions get by name.
      source: its file, and line or row.
    """

    prompt: str | list[JsonObject]
    fields: JsonObject
    source: str = ""


class Example(NamedTuple):
    """A tokenized prompt.

    Attributes:
      tokens: ids of the prompt, including special tokens and chat template.
      text: the prompt as reward functions get it.
      fields: the record's other fields, which reward functions get by name.
      source: its file, and line or row.
      messages: messages of a chat prompt; None for a text.
      conversational: whether the record's own prompt is a chat, not a text that the format turns into one.
      owned: values that it owns, such as its pictures; with a model that reads such, all examples have some.
      opening: messages whose parts hold its pictures, for environments; None: it has no pictures.
    """

    tokens: list[int]
    text: str
    fields: JsonObject
    source: str = ""
    messages: Sequence[Mapping[str, Any]] | None = None
    conversational: bool = False
    owned: OwnedLines | None = None
    opening: Sequence[Mapping[str, Any]] | None = None


def load_prompts(path: str | Path, fields: Fields | None = None) -> list[Prompt]:
    """Load the prompts of a file, whose records have a prompt (text or messages) and further fields; see `records`.

    Args:
      fields: names of fields -> columns, as in `rename_columns`; `prompt_columns` has further names of columns.

    Raises:
      PromptError: the file is missing, empty or unreadable; a record is not an object, or lacks a usable prompt.
    """
    if problem := source_problem(path):
        raise PromptError(f"{path}: {problem}; prompts are {FORMATS}, with a field 'prompt'")
    try:
        prompts = [prompt_of_record(where, record, fields or {}) for where, record in read_records(path)]
    except DataError as error:
        raise PromptError(str(error)) from error
    if not prompts:
        raise PromptError(f"{path}: the file is empty; prompts are {FORMATS}, with a field 'prompt'")
    return prompts


def check_prompts(records: Sequence[object], fields: Fields | None = None) -> list[Prompt]:
    """Prompts of records in memory, each with "prompt" and further fields, like the records of a file.

    Args:
      fields: as in `load_prompts`.

    Raises:
      PromptError: there are no records, or one is not a mapping or lacks a usable prompt.
    """
    if not records:
        raise PromptError("there are no prompts; each is a dict with a field 'prompt'")
    return [
        prompt_of_record(f"prompt {n}", record, fields or {}) for n, record in enumerate(rows_in_memory(records), 1)
    ]


def encode_prompts(prompts: Sequence[Prompt], tokenizer: TextTokenizer, form: PromptFormat) -> list[Example]:
    """Tokenize prompts, except the few-shot examples. Raises: PromptError, as in `encode`."""
    shown = [shot.prompt for shot in form.shots]
    wanted = [prompt for prompt in prompts if prompt.prompt not in shown]
    ahead = read_ahead(wanted, lambda prompt: _pictures(prompt, tokenizer), reading_of(tokenizer))
    examples = [encode(prompt, tokenizer, form, read) for prompt, read in ahead]
    if not examples:
        raise PromptError(f"{prompts[0].source}: all of its prompts are examples of --few_shot; give another file")
    return examples


def encode(
    prompt: Prompt, tokenizer: TextTokenizer, form: PromptFormat = PLAIN_PROMPTS, read: ReadPatches | None = None
) -> Example:
    """Format and tokenize a prompt.

    Args:
      prompt: of a record.
      tokenizer: of the model.
      form: of the prompt.
      read: as in `expand_placeholders`.

    Raises:
      PromptError: the tokenizer or the chat template refuses it, or it has no tokens.
    """
    where = f"{prompt.source}: " if prompt.source else ""
    see = picture_form_of(tokenizer)
    try:
        pictures = _pictures(prompt, tokenizer)
        formatted = format_prompt(prompt.prompt, form)
        if not isinstance(formatted, str):
            check_chat_roles(formatted, tokenizer.chat_template)
        content = marked(formatted, tokenizer) if pictures else formatted
        tools = tools_of(prompt.fields.get("tools"), form)
        tokens, text = encode_prompt(tokenizer, content, tools, arguments=form.arguments)
        tokens, owned = (tokens, None) if see is None else expand_placeholders(tokens, pictures, see, read)
    except (TokenizerError, DataError) as error:
        raise PromptError(f"{where}{error}") from error
    except Exception as error:  # tokenizers raise plain ones
        raise PromptError(f"{where}the tokenizer refuses it: {error}") from error
    if not tokens:
        raise PromptError(f"{where}prompt {prompt.prompt!r} has no tokens")
    messages = None if isinstance(content, str) else content
    opening = with_own_pictures(formatted if messages is None else messages, pictures) if pictures else None
    return Example(
        tokens,
        text,
        prompt.fields,
        source=prompt.source,
        messages=messages,
        conversational=not isinstance(prompt.prompt, str),
        owned=owned,
        opening=opening,
    )


def _pictures(prompt: Prompt, tokenizer: TextTokenizer) -> list[Any]:
    return pictures_of({**prompt.fields, "prompt": prompt.prompt}, tokenizer)


def prompt_batch(prompts: Sequence[T], count: int, seed: int, consumed: int) -> list[T]:
    """The prompts at the next positions of the order; see `places_in_order`."""
    return [prompts[place] for place in places_in_order(prompts, count, seed, position=consumed).tolist()]


def prompt_of_record(where: str, record: object, fields: Fields) -> Prompt:
    """The prompt of a record that is at some place. Raises: PromptError."""
    if not isinstance(record, dict):
        raise PromptError(f'{where}: a JSON object is needed, such as {{"prompt": "..."}}; this is {_short(record)}')
    try:
        record = prompt_columns(rename_columns(record, fields))
    except DataError as error:
        raise PromptError(f"{where}: {error}") from error
    if "prompt" not in record:
        raise PromptError(
            f"{where}: there is no field 'prompt'; the fields are {sorted(record)}: --fields=prompt:COLUMN names the "
            "column that has it"
        )
    taken = [name for name in RESERVED if name in record]
    if taken:
        raise PromptError(
            f"{where}: a field cannot be called {taken[0]!r}, since the reward function gets that argument from the "
            "model; "
            f"--fields=reference:{taken[0]} gives it another name"
        )
    others = {k: v for k, v in record.items() if k != "prompt"}
    return Prompt(_check_prompt(where, record["prompt"]), others, where)


def _check_prompt(where: str, prompt: Any) -> str | list[JsonObject]:
    if isinstance(prompt, str) and prompt:
        return prompt
    if are_messages(prompt):
        try:
            return normal_messages(prompt)
        except DataError as error:
            raise PromptError(f"{where}: 'prompt', {error}") from error
    raise PromptError(
        f"{where}: 'prompt' must be text that is not empty, or a list of messages "
        f'{{"role": "user", "content": "..."}}; it is {_short(prompt)}'
    )


def _short(value: object) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= 80 else text[:77] + "..."
