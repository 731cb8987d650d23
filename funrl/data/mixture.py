"""Several files as one sequence of items, which may be sampled by weight."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, TypeVar, overload

import numpy as np

from funrl.data.json_lines import DataError

DRAWS = 1000  # block of samples in which each part has exactly its share
WEIGHTED = re.compile(r"(.+)@(\d+\.?\d*|\.\d+)")
MixedItem = TypeVar("MixedItem")


class WeightedFile(NamedTuple):
    """A file and the sampling weight of its items; None: all items of all files are equally frequent."""

    path: str
    weight: float | None


def weighted_files(text: str) -> list[WeightedFile]:
    """Parse "a.jsonl@0.7,b.parquet@0.3" or "a.jsonl,b.parquet"; a path that exists is a single file.

    >>> weighted_files("a.jsonl@0.7,b.parquet@0.3")
    [WeightedFile(path='a.jsonl', weight=0.7), WeightedFile(path='b.parquet', weight=0.3)]

    Raises:
      DataError: only some files have weights, or a weight is too small.
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
    """Share of each weight in 1,000 items; the shares add up to 1,000.

    >>> shares_of([2, 1])
    (667, 333)

    Raises:
      DataError: a share would be 0.
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
    """The items of several parts, part by part, which are sampled by the parts' shares.

    Attributes:
      parts: parts of at least one item each.
      shares: share of each part in 1,000 items; None: all items are equally frequent.
      starts: [parts + 1] index of the first item of each part, and the number of all items.
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
        part, place = self.located(index)
        return part[place]

    def located(self, index: int) -> tuple[Sequence[MixedItem], int]:
        """The part that an item is in, and its index there."""
        place = range(len(self))[index]
        part = int(np.searchsorted(self.starts, place, side="right")) - 1
        return self.parts[part], place - int(self.starts[part])

    def next_parts(self, count: int, seed: int, consumed: int) -> tuple[np.ndarray, np.ndarray]:
        """Part of each of the next `count` items, and the number of items taken from each part before.

        In every 1,000 items each part has its share, in an order that the seed determines.
        """
        shares = np.array(self.shares or ())
        block = np.repeat(np.arange(len(self.parts)), shares)
        first, begin = divmod(consumed, DRAWS)
        blocks = range(first, first - (-(begin + count) // DRAWS))
        pieces = [np.random.default_rng((seed, number)).permutation(block) for number in blocks]
        order = np.concatenate(pieces) if pieces else np.zeros(0, int)
        earlier = np.bincount(order[:begin], minlength=len(self.parts)) + first * shares
        return order[begin : begin + count], earlier
