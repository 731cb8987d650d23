"""Texts that are longer than a model or a flag allows: refused, left out or shortened, and named with their lines."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from funrl.data.json_lines import DataError
from funrl.data.mixture import Mixture
from funrl.data.supervised import TEXT_FIELDS, TextExample, TextFile, shortened

MOST_SOURCES = 10  # lines that a remark names


class FittingTexts(NamedTuple):
    """Texts that are short enough, and a remark on the others; "" where there are none."""

    examples: Sequence[TextExample]
    remark: str


class LongTexts(NamedTuple):
    """Examples that are too long.

    Attributes:
      places: of all.
      sources: of the first of them, the file and the line.
      first: example.
    """

    places: list[int]
    sources: list[str]
    first: TextExample | None


def suspects_of(examples: Sequence[TextExample], positions: int) -> Iterable[int]:
    """Places of the examples to look at for one that is too long: of a file `TextFile.suspects`, else all."""
    if isinstance(examples, Mixture):
        parts = zip(examples.starts.tolist(), examples.parts, strict=False)
        return [start + place for start, part in parts for place in suspects_of(part, positions)]
    return examples.suspects(positions) if isinstance(examples, TextFile) else range(len(examples))


def long_texts(examples: Sequence[TextExample], most: int) -> LongTexts:
    """The examples with a text of more than `most` tokens; of a large file only `suspects` are looked at."""
    found = LongTexts([], [], None)
    for place in suspects_of(examples, most):
        one = examples[place]
        if max(len(text.tokens) for text in one.texts) > most:
            found.places.append(place)
            if len(found.sources) < MOST_SOURCES:
                found.sources.append(one.source or f"example {place + 1}")
            found = found._replace(first=found.first or one)
    return found


def check_lengths(examples: Sequence[TextExample], most: int, tokenizer: Any, reason: str = "") -> None:
    """Compare texts with the longest one that is allowed.

    Args:
      reason: of the limit; "": it is the model's.

    Raises:
      DataError: naming the first example that is longer, and how many there are.
    """
    places, sources, first = long_texts(examples, most)
    if first is None:
        return
    longest, text = max(enumerate(first.texts), key=lambda pair: len(pair[1].tokens))
    name = "text" if len(first.texts) == 1 else f"prompt with {TEXT_FIELDS['preferences'][longest]!r}"
    begins = tokenizer.decode(text.tokens[:40])[:60]
    others = f"; {len(places)} of {len(examples)} examples are too long: {named_lines(sources, len(places))}"
    raise DataError(
        f"{sources[0]}: the {name} has {len(text.tokens)} tokens, but {reason or f'the model has {most} positions'}; "
        "--long_prompts=drop leaves such texts out, truncate shortens them"
        f"{others if len(places) > 1 else ''} (it begins {begins!r})"
    )


def fit_texts(examples: Sequence[TextExample], most: int, how: str, reason: str, tokenizer: Any) -> FittingTexts:
    """Texts of at most so many tokens.

    Args:
      how: with a longer one: "error", "drop", or "truncate", as `shortened` does.
      reason: of the limit, for the message.

    Raises:
      DataError: one is longer and `how` is "error", or none is left of a file.
    """
    if how == "error":
        check_lengths(examples, most, tokenizer, reason)
        return FittingTexts(examples, "")
    places, sources, _ = long_texts(examples, most)
    lines = f"as {reason}: {named_lines(sources, len(places))}"
    if how == "truncate":  # also those that are found to be too long when they are drawn
        done = f"{len(places)} of {len(examples)} are shortened to {most} tokens, {lines}"
        return FittingTexts(_shortened(examples, most), done if places else "")
    if not places:
        return FittingTexts(examples, "")
    left = _without(examples, np.array(places))
    if not all(len(part) for part in (left.parts if isinstance(left, Mixture) else [left])):
        raise DataError(f"--long_prompts=drop: no text is left of a file, {lines}")
    return FittingTexts(left, f"{len(places)} of {len(examples)} are left out, {lines}")


def named_lines(sources: Sequence[str], count: int) -> str:
    """The first of `count` lines by file.

    >>> named_lines(["a.jsonl, line 3", "a.jsonl, line 7", "b.jsonl, line 2"], 8)
    'a.jsonl, line 3, 7; b.jsonl, line 2 and 5 more'
    """
    by_file: dict[str, list[str]] = {}
    for source in sources:
        numbered = re.fullmatch(r"(.*) (\d+)", source)
        numbers = by_file.setdefault(numbered[1] if numbered else source, [])
        numbers += [numbered[2]] if numbered else []
    named = "; ".join(f"{file} {', '.join(dict.fromkeys(numbers))}".strip() for file, numbers in by_file.items())
    return named + (f" and {count - len(sources)} more" if count > len(sources) else "")


def _shortened(examples: Sequence[TextExample], most: int) -> Sequence[TextExample]:
    if isinstance(examples, Mixture):
        return Mixture([_shortened(part, most) for part in examples.parts], examples.shares)
    if isinstance(examples, TextFile):
        return examples.at_most(most)
    return [shortened(one, most) for one in examples]


def _without(examples: Sequence[TextExample], places: np.ndarray) -> Sequence[TextExample]:
    """All but the examples at these places, in ascending order."""
    if isinstance(examples, Mixture):
        starts = examples.starts.tolist()
        parts = [
            _without(part, places[(places >= start) & (places < start + len(part))] - start)
            for start, part in zip(starts, examples.parts, strict=False)
        ]
        return Mixture(parts, examples.shares)
    rest = np.setdiff1d(np.arange(len(examples)), places)
    return examples[rest] if isinstance(examples, TextFile) else [examples[place] for place in rest.tolist()]
