"""Examples that are longer than a model or a flag allows: refuse, drop or shorten them, and name their lines."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np

from funrl.data.columns import rename_columns
from funrl.data.conversations import Text
from funrl.data.json_lines import DataError
from funrl.data.order import Mixture, ReorderedItems
from funrl.data.pictures import pictures_of, reading_of
from funrl.data.processors.reading import read_ahead
from funrl.data.prompts import Example
from funrl.data.supervised import TEXT_FIELDS, TextExample, TextFile, shortened

MOST_SOURCES = 10  # lines that a remark names
FitExample = TypeVar("FitExample", Example, TextExample)


class Fitting(NamedTuple):
    """Examples that are short enough, and a remark on the others, "" without any."""

    examples: Sequence[Any]
    remark: str


def suspects_of(examples: Sequence[FitExample], positions: int) -> Iterable[int]:
    """Indices of the examples that may be too long: `TextFile.suspects` of a file, else all."""
    if isinstance(examples, Mixture):
        parts = zip(examples.starts.tolist(), examples.parts, strict=False)
        return [start + place for start, part in parts for place in suspects_of(part, positions)]
    return examples.suspects(positions) if isinstance(examples, TextFile) else range(len(examples))


def long_examples(examples: Sequence[FitExample], most: int) -> dict[int, str]:
    """Indices of the examples with more than `most` tokens, and their sources (file and line).

    In a large file only `suspects_of` are checked.
    """
    sources = {}
    suspects = suspects_of(examples, most)
    ahead = examples if isinstance(examples, list) else examples_ahead(examples, suspects)
    for place, example in zip(suspects, ahead, strict=True):
        if max(map(len, _token_ids(example))) > most:
            sources[place] = example.source or f"example {place + 1}"
    return sources


def examples_ahead(examples: Sequence[object], places: Iterable[int]) -> Iterator[Any]:
    """Examples by their indices, in this order; threads read the next ones' pictures meanwhile.

    Raises:
      DataError: as `TextFile`, when it comes to the example.
    """
    files = [_file_of(examples, place) for place in places]
    reading = next((reading_of(file.tokenizer) for file, _ in files if isinstance(file, TextFile)), None)
    for (file, index), ready in read_ahead(files, _unread_pictures, reading):
        yield file.example(index, ready) if isinstance(file, TextFile) else file[index]


def _file_of(examples: Sequence[object], place: int) -> tuple[Sequence[Any], int]:
    """The file, or other sequence, that an example is in, and its index there."""
    if isinstance(examples, ReorderedItems):
        return _file_of(examples.items, examples.places[place])
    return examples.located(place) if isinstance(examples, Mixture) else (examples, place)


def _unread_pictures(located: tuple[Sequence[object], int]) -> list[Any]:
    """Pictures of an example of a file that is not kept. Raises: DataError, as `pictures_of`."""
    file, index = located
    if not isinstance(file, TextFile) or int(file.records.places[index]) in file.kept.examples:
        return []
    return pictures_of(rename_columns(file.records[index], file.fields), file.tokenizer)


def check_lengths(examples: Sequence[FitExample], most: int, tokenizer: Any, reason: str = "") -> None:
    """Check that no example has more than `most` tokens.

    Args:
      examples: prompts, or texts to learn from.
      most: tokens that one may have.
      tokenizer: of the tokens.
      reason: of the limit; "": it is the model's.

    Raises:
      DataError: some are longer; the message names the first and their number.
    """
    sources = long_examples(examples, most)
    if not sources:
        return
    place, source = next(iter(sources.items()))
    ids = _token_ids(examples[place])
    longest, tokens = max(enumerate(ids), key=lambda pair: len(pair[1]))
    example = examples[place]
    if isinstance(example, Example):
        name = "prompt"
    elif example.has_several_rows():
        name = f"conversation's row {longest + 1}"
    else:
        name = f"prompt with {TEXT_FIELDS['triples'][longest]!r}" if len(ids) > 1 else "text"
    begins = tokenizer.decode(tokens[:40])[:60]
    count = f"{len(sources)} of {len(examples)} examples are too long"
    others = f"; {count}: {named_lines(sources.values())}" if len(sources) > 1 else ""
    raise DataError(
        f"{source}: the {name} has {len(tokens)} tokens, but {reason or f'the model has {most} positions'}; "
        f"--long_prompts=drop leaves such examples out, truncate shortens them{others} (it begins {begins!r})"
    )


def fit_examples(examples: Sequence[FitExample], most: int, long: str, reason: str, tokenizer: object) -> Fitting:
    """Select or shorten examples to at most `most` tokens.

    Args:
      examples: prompts, or texts to learn from.
      most: tokens that one may have.
      long: treatment of longer ones: "error", "drop" or "truncate". A truncated prompt keeps its last tokens, and
        rewards still get its whole text; a text is `shortened`.
      reason: of the limit, for the message.
      tokenizer: of the tokens.

    Raises:
      DataError: one is longer and `long` is "error", or none is left of a file.
    """
    if long == "error":
        check_lengths(examples, most, tokenizer, reason=reason)
        return Fitting(examples, "")
    sources = long_examples(examples, most)
    lines = f"as {reason}: {named_lines(sources.values())}"
    count = f"{len(sources)} of {len(examples)}"
    if long == "truncate":  # also texts that turn out to be too long when they are read
        remark = f"{count} are shortened to {most} tokens, {lines}" if sources else ""
        return Fitting(_shortened(examples, most), remark)
    if not sources:
        return Fitting(examples, "")
    left = pick(examples, np.setdiff1d(np.arange(len(examples)), list(sources)))
    if not all(len(part) for part in (left.parts if isinstance(left, Mixture) else [left])):
        raise DataError(f"--long_prompts=drop: no example of a file is left, {lines}")
    return Fitting(left, f"{count} are left out, {lines}")


def pick(examples: Sequence[object], places: np.ndarray) -> Sequence[Any]:
    """Select examples by ascending indices; those of files are still read on access."""
    if isinstance(examples, TextFile):
        return examples[places]
    if not isinstance(examples, Mixture):
        return [examples[place] for place in places.tolist()]
    ends = np.searchsorted(places, examples.starts)
    bounds = zip(examples.parts, examples.starts, ends[:-1], ends[1:], strict=False)
    return Mixture([pick(part, places[low:high] - start) for part, start, low, high in bounds], examples.shares)


def mismatched(prompt_of: TextExample, completion_of: TextExample, positions: int) -> TextExample:
    """The prompt of one demonstration with the completion of another, cut to a model's positions."""
    (first,) = prompt_of.texts
    (second,) = completion_of.texts
    prompt = first.tokens[: first.trained.index(True)]
    completion = [token for token, trained in zip(second.tokens, second.trained, strict=True) if trained]
    completion = completion[: max(1, positions - len(prompt))]
    text = Text([*prompt, *completion], [False] * len(prompt) + [True] * len(completion))
    return completion_of._replace(texts=(text,))


def named_lines(sources: Iterable[str]) -> str:
    """Describe the first of some lines, grouped by file.

    >>> named_lines(["a.jsonl, line 3", "a.jsonl, line 7", "b.jsonl, line 2"])
    'a.jsonl, line 3, 7; b.jsonl, line 2'
    """
    lines = list(sources)
    by_file: dict[str, list[str]] = {}
    for source in lines[:MOST_SOURCES]:
        numbered = re.fullmatch(r"(.*) (\d+)", source)
        numbers = by_file.setdefault(numbered[1] if numbered else source, [])
        numbers += [numbered[2]] if numbered else []
    named = "; ".join(f"{file} {', '.join(dict.fromkeys(numbers))}".strip() for file, numbers in by_file.items())
    return named + (f" and {len(lines) - MOST_SOURCES} more" if len(lines) > MOST_SOURCES else "")


def _token_ids(example: Example | TextExample) -> list[list[int]]:
    """Token ids of a prompt, or of each text of an example."""
    return [example.tokens] if isinstance(example, Example) else [text.tokens for text in example.texts]


def _shortened(examples: Sequence[FitExample], most: int) -> Sequence[Any]:
    if isinstance(examples, Mixture):
        return Mixture([_shortened(part, most) for part in examples.parts], examples.shares)
    if isinstance(examples, TextFile):
        return dataclasses.replace(examples, most=most)
    return [
        example._replace(tokens=example.tokens[-most:]) if isinstance(example, Example) else shortened(example, most)
        for example in examples
    ]
