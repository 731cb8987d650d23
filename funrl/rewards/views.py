"""Views of a completion for reward functions: its text, its text with special tokens, or its answer alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

TEXT = "text"
MARKS = "marks"
ANSWER = "answer"
TEXT_VIEWS = {
    TEXT: "all of it, without special tokens",
    MARKS: "all of it, with special tokens such as <think>, but without end tokens",
    ANSWER: "its answer, without special tokens: of a reply with channels or special tags of thoughts, only the answer",
}


class TextView(NamedTuple):
    """View of a completion that a function reads.

    Attributes:
      name: one of `TEXT_VIEWS`.
      example: a text that it must be able to read; a run whose tokenizer cannot write it is refused. "": any.
    """

    name: str = TEXT
    example: str = ""


def read_as(name: str, example: str = "") -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """A decorator that says what a reward function reads; without it, it reads the text without special tokens.

    Args:
      name: one of `TEXT_VIEWS`.
      example: as of `TextView`.

    Raises:
      ValueError: there is no such view.

    Example:
      >>> @read_as("marks", example="<think>so</think> 4")
      ... def thinks(prompt, completion, **fields):
      ...     return float("</think>" in completion)
      >>> view_of(thinks).name
      'marks'
    """
    if name not in TEXT_VIEWS:
        raise ValueError(f"read_as({name!r}): it is one of {', '.join(TEXT_VIEWS)}")

    def mark(function: Callable[..., object]) -> Callable[..., Any]:
        setattr(function, "view", TextView(name, example))  # noqa: B010
        return function

    return mark


def view_of(function: Callable[..., object]) -> TextView:
    """View that a function reads, as `read_as` says it; of a partial that of its function."""
    given = getattr(function, "view", None)
    if given is None and hasattr(function, "func"):
        given = getattr(function.func, "view", None)
    return given if isinstance(given, TextView) else TextView()
