"""Prompts from a file of JSON lines, and the endless order in which training takes them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, overload

import numpy as np

from funrl.data.json_lines import parse_line

RESERVED = ("completion",)  # names that a reward function is given anyway
T = TypeVar("T")


class PromptError(ValueError):
    """A prompts file that cannot be used; the message names the file, the line and what is wrong with it."""


class Prompt(NamedTuple):
    """A prompt to complete, with the fields of its line.

    Attributes:
      prompt: text, or chat messages with "role" and "content".
      fields: whatever else the line holds; the reward function gets it by name.
    """

    prompt: str | list[dict[str, str]]
    fields: dict[str, Any]


def load_prompts(path: str | Path) -> list[Prompt]:
    """All prompts of a file with one `{"prompt": text or messages, ...fields}` per line; blank lines are skipped.

    Raises:
      PromptError: the file is missing, empty or a directory; a line is no JSON object, or lacks a usable prompt.
    """
    path = Path(path)
    if not path.is_file():
        problem = "this is a directory" if path.is_dir() else "no such file"
        raise PromptError(f"{path}: {problem}; prompts are JSON lines, each with a field 'prompt'")
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise PromptError(f"{path}: it cannot be read: {error.strerror}") from error
    prompts = [_parse(f"{path}, line {n}", line) for n, line in enumerate(lines, 1) if line.strip()]
    if not prompts:
        raise PromptError(f"{path}: the file is empty; prompts are JSON lines, each with a field 'prompt'")
    return prompts


def check_prompts(records: Sequence[Any]) -> list[Prompt]:
    """Prompts of records in memory, each with "prompt" and further fields, as the lines of a file.

    Raises:
      PromptError: there is none, or one is not a mapping or lacks a usable prompt.
    """
    if not records:
        raise PromptError("there are no prompts; each is a dict with a field 'prompt'")
    return [_check_record(f"prompt {n}", record) for n, record in enumerate(records, 1)]


class Drawn(Sequence[T]):
    """Some items of a sequence, read when they are asked for and not before.

    Args:
      items: the sequence.
      places: of the items in it.
    """

    def __init__(self, items: Sequence[T], places: Sequence[int]):
        self.items, self.places = items, places

    def __len__(self) -> int:
        return len(self.places)

    @overload
    def __getitem__(self, index: int) -> T: ...
    @overload
    def __getitem__(self, index: slice) -> Drawn[T]: ...
    def __getitem__(self, index: int | slice) -> T | Drawn[T]:
        if isinstance(index, slice):
            return Drawn(self.items, self.places[index])
        return self.items[self.places[index]]


def drawn_places(total: int, count: int, seed: int, consumed: int) -> list[int]:
    """The next `count` of an endless sequence of places: all in a shuffled order, then all in another, and so on.

    It has no state: a run that goes on after `consumed` items takes those that it would have taken without a stop,
    whatever the batch sizes before.

    Args:
      total: N items, at least 1.
      count: how many; may exceed N.
      seed: of the shuffles.
      consumed: how many were taken before.
    """
    orders: dict[int, np.ndarray] = {}
    places = []
    for at in range(consumed, consumed + count):
        epoch, place = divmod(at, total)
        if epoch not in orders:
            orders[epoch] = np.random.default_rng((seed, epoch)).permutation(total)
        places.append(int(orders[epoch][place]))
    return places


def prompt_batch(prompts: Sequence[T], count: int, seed: int, consumed: int) -> list[T]:
    """The prompts at the next `drawn_places`."""
    return [prompts[place] for place in drawn_places(len(prompts), count, seed, consumed)]


def _parse(where: str, line: bytes) -> Prompt:
    try:
        record = parse_line(line)
    except UnicodeDecodeError as error:
        raise PromptError(f"{where}: not UTF-8 text ({error.reason} at byte {error.start})") from error
    except json.JSONDecodeError as error:
        raise PromptError(f"{where}: not valid JSON: {error.msg} at column {error.colno}") from error
    except ValueError as error:
        raise PromptError(f"{where}: {error}") from error
    return _check_record(where, record)


def _check_record(where: str, record: Any) -> Prompt:
    if not isinstance(record, dict):
        raise PromptError(f'{where}: a JSON object is needed, such as {{"prompt": "..."}}; this is {_short(record)}')
    if "prompt" not in record:
        raise PromptError(f"{where}: there is no field 'prompt'; the fields are {sorted(record)}")
    taken = [name for name in RESERVED if name in record]
    if taken:
        raise PromptError(
            f"{where}: a field cannot be called {taken[0]!r}, the reward function gets that from the model"
        )
    fields = {k: v for k, v in record.items() if k != "prompt"}
    return Prompt(_check_prompt(where, record["prompt"]), fields)


def _check_prompt(where: str, prompt: Any) -> str | list[dict[str, str]]:
    if isinstance(prompt, str) and prompt:
        return prompt
    if isinstance(prompt, list) and prompt and all(map(_is_message, prompt)):
        return prompt
    raise PromptError(
        f"{where}: 'prompt' must be text that is not empty, or a list of messages "
        f'{{"role": "user", "content": "..."}}; it is {_short(prompt)}'
    )


def _is_message(x: Any) -> bool:
    return isinstance(x, dict) and isinstance(x.get("role"), str) and isinstance(x.get("content"), str)


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 80 else text[:77] + "..."
