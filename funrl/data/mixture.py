"""Several files as one sequence of items, which may be drawn by weights."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, TypeVar, overload

import numpy as np

from funrl.data.json_lines import DataError

DRAWS = 1000  # among which each part has its share exactly
WEIGHTED = re.compile(r"(.+)@(\d+\.?\d*|\.\d+)")
MixedItem = TypeVar("MixedItem")


class WeightedFile(NamedTuple):
    """A file and the weight by which its items are drawn; None: as often as those of the other files."""

    path: str
    weight: float | None


def weighted_files(text: str) -> list[WeightedFile]:
    """The files in "a.jsonl@0.7,b.parquet@0.3" or "a.jsonl,b.parquet"; a path that exists is one file.

    >>> weighted_files("a.jsonl@0.7,b.parquet@0.3")
    [WeightedFile(path='a.jsonl', weight=0.7), WeightedFile(path='b.parquet', weight=0.3)]

    Raises:
      DataError: only some have weights, or a weight is too small.
    """
    if Path(text).exists():
        return [WeightedFile(text, None)]
    files = []
    for part in (part.strip() for part in text.split(",") if part.strip()):
        match = None if Path(part).exists() else WEIGHTED.fullmatch(part)
        files.append(WeightedFile(match[1], float(match[2])) if match else WeightedFile(part, None))
    if len({file.weight is None for file in files}) != 1:
        raise DataError(f"{text}: give each file a weight, as in a.jsonl@0.7,b.jsonl@0.3, or none")
    if files[0].weight is not None:
        shares_of([file.weight or 0.0 for file in files])
    return files


def shares_of(weights: Sequence[float]) -> tuple[int, ...]:
    """Draws of each weight among 1,000, which they add up to.

    >>> shares_of([2, 1])
    (667, 333)

    Raises:
      DataError: one of them would have none.
    """
    if min(weights) <= 0 or min(weights) / sum(weights) * DRAWS < 1:
        raise DataError(
            f"the weight {min(weights):g} is less than a thousandth of all; leave its file out, or raise it"
        )
    exact = np.array(weights) / sum(weights) * DRAWS
    shares = np.floor(exact).astype(int)
    shares[np.argsort(shares - exact, kind="stable")[: DRAWS - shares.sum()]] += 1
    return tuple(shares.tolist())


class Mixture(Sequence[MixedItem]):
    """The items of several parts, one part after the other; drawn by the parts' shares.

    Attributes:
      parts: each of one item at least.
      shares: of each part among 1,000 draws; None: every item is drawn as often as any other.
      starts: [parts + 1] place of the first item of each part, and the number of all items.
    """

    def __init__(self, parts: Sequence[Sequence[MixedItem]], shares: Sequence[int] | None):
        self.parts = parts
        self.shares = shares
        self.starts = np.cumsum([0, *map(len, parts)])

    def __len__(self) -> int:
        return int(self.starts[-1])

    @overload
    def __getitem__(self, index: int) -> MixedItem: ...
    @overload
    def __getitem__(self, index: slice) -> list[MixedItem]: ...
    def __getitem__(self, index: int | slice) -> MixedItem | list[MixedItem]:
        if isinstance(index, slice):
            return [self[place] for place in range(*index.indices(len(self)))]
        place = range(len(self))[index]
        part = int(np.searchsorted(self.starts, place, side="right")) - 1
        return self.parts[part][place - int(self.starts[part])]

    def next_parts(self, count: int, seed: int, consumed: int) -> tuple[np.ndarray, np.ndarray]:
        """The part of each of the next `count` draws, and how many of each part were drawn before.

        In every 1,000 draws each part has its share, in an order that the seed fixes.
        """
        assert self.shares is not None
        first, begin = divmod(consumed, DRAWS)
        blocks = range(first, first - (-(begin + count) // DRAWS))
        pieces = [np.random.default_rng((seed, block)).permutation(self._block()) for block in blocks]
        order = np.concatenate(pieces) if pieces else np.zeros(0, int)
        earlier = np.bincount(order[:begin], minlength=len(self.parts)) + first * np.array(self.shares)
        return order[begin : begin + count], earlier

    def _block(self) -> np.ndarray:
        assert self.shares is not None
        return np.repeat(np.arange(len(self.parts)), self.shares)
