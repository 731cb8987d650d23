"""Users' regular expressions, with a bound on the time of a search.

They use the library `regex`, which has the syntax of Python's `re` and supports a timeout; `re` does not, and an
expression such as (a+)+$ can make it backtrack forever.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import regex

SEARCH_TIMEOUT_S = 5.0  # of one search, in seconds of this process
_SHOWN = 200  # characters of a pattern in a message


class PatternError(ValueError):
    """A pattern is not a regular expression, or its search took too long."""


@functools.lru_cache(maxsize=1024)
def compile_pattern(pattern: str, flags: int = 0) -> Any:
    """Compile a regular expression; cached.

    Args:
      pattern: the expression.
      flags: flags as in `re`.

    Raises:
      PatternError: it is not one.
    """
    if not isinstance(pattern, str):
        raise PatternError(f"a regular expression is text, not {pattern!r}")
    try:
        return regex.compile(pattern, flags)
    except regex.error as error:
        raise PatternError(f"{pattern[:_SHOWN]!r} is not a regular expression: {error}") from None


def matches_anywhere(compiled: object, text: str) -> bool:
    """True if a compiled pattern matches anywhere in a text. Raises: PatternError, after `SEARCH_TIMEOUT_S`."""
    return next(matches_in(compiled, text), None) is not None


def matches_in(compiled: Any, text: str) -> Iterator[Any]:
    """Yield the matches of a compiled pattern in a text. Raises: PatternError, after `SEARCH_TIMEOUT_S`."""
    try:
        yield from compiled.finditer(text, timeout=SEARCH_TIMEOUT_S)
    except TimeoutError:
        raise PatternError(
            f"the pattern {compiled.pattern[:_SHOWN]!r} was still searching a text of {len(text)} characters after "
            f"{SEARCH_TIMEOUT_S:g} s: repetitions within repetitions, such as (a+)+, backtrack; write it without them"
        ) from None
