"""The endless, stateless order in which training takes items of one or several files, with optional sampling weights.

The seed and a position p determine the item at p: all items in a shuffled order, then all in another, and so on; for a
mixture, the items of each part by its share. A run that resumes at a position takes the items that it would have taken
without the interruption, for any earlier batch sizes.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, TypeVar, overload

import numpy as np

from funrl.data.json_lines import DataError
from funrl.seeds import derived_seed

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


CHANCE_BLOCK = 1024  # positions whose random numbers are generated together
CHANCES = 0xC4A2CE  # separates their random streams from those of the shuffles
AnyItem = TypeVar("AnyItem")


class ReorderedItems(Sequence[AnyItem]):
    """Some items of a sequence, each read on access.

    Args:
      items: the sequence.
      places: indices into it.
    """

    def __init__(self, items: Sequence[AnyItem], places: Sequence[int]):
        self.items = items
        self.places = places

    def __len__(self) -> int:
        return len(self.places)

    @overload
    def __getitem__(self, index: int) -> AnyItem: ...
    @overload
    def __getitem__(self, index: slice) -> ReorderedItems[AnyItem]: ...
    def __getitem__(self, index: int | slice) -> AnyItem | ReorderedItems[AnyItem]:
        if isinstance(index, slice):
            return ReorderedItems(self.items, self.places[index])
        return self.items[self.places[index]]


class OrderedItems(NamedTuple):
    """Items taken from the order.

    Attributes:
      positions: [count] position of each item in the order, ascending.
      places: [count] index of each item in the sequence.
      end: next position in the order.
    """

    positions: np.ndarray
    places: np.ndarray
    end: int


def places_in_order(items: Sequence[object], count: int, seed: int, position: int) -> np.ndarray:
    """Indices of the items at the next positions of the order, [count].

    Args:
      items: N items, at least 1; a `Mixture` may have shares.
      count: number of positions; may exceed N.
      seed: of the shuffles.
      position: the first position.
    """
    if not isinstance(items, Mixture) or items.shares is None:
        return _shuffled(len(items), count, seed, position=position)
    part_C, earlier = items.next_parts(count, seed, position)
    places_C = np.zeros(count, dtype=np.int64)
    for number, part in enumerate(items.parts):
        mine_C = part_C == number
        own = _shuffled(len(part), int(mine_C.sum()), derived_seed(seed, number), position=int(earlier[number]))
        places_C[mine_C] = items.starts[number] + own
    return places_C


def take_next(
    items: Sequence[object], count: int, seed: int, position: int, weights: np.ndarray | None = None
) -> OrderedItems:
    """Take the next items of the order, by rejection sampling if there are weights.

    The item at a position is taken with the probability weight / largest weight, by a random number that the seed and
    the position determine; otherwise it is skipped until it comes up again. So items of the largest weight are always
    taken, items of weight 0 never, and equal weights change nothing.

    Args:
      items: as in `places_in_order`.
      count: number of items to take.
      seed: of the shuffles.
      position: the first position.
      weights: [N] at least 0, and not all 0; None: all equal.
    """
    if weights is None or not count:
        end = position + count
        return OrderedItems(np.arange(position, end), places_in_order(items, count, seed, position=position), end)
    chance_N = weights / weights.max()
    span = 2 * count
    positions: list[int] = []
    places: list[int] = []
    while len(places) < count:
        come_up = places_in_order(items, span, seed, position=position)
        taken = np.flatnonzero(_chances(seed, position, span) < chance_N[come_up])[: count - len(places)]
        positions += (position + taken).tolist()
        places += come_up[taken].tolist()
        position += span
        span = min(2 * span, max(len(items), 2 * count))
    return OrderedItems(np.array(positions), np.array(places), positions[-1] + 1)


def order_digest(items: Sequence[object], seed: int, lengths: Sequence[int] = ()) -> int:
    """Digest of an order below 2^63: of the seed, the parts, their shares, and the lengths of items."""
    parts, shares = (items.parts, items.shares) if isinstance(items, Mixture) else ([items], None)
    facts = repr((seed, [len(part) for part in parts], shares and list(shares))).encode()
    digest = hashlib.sha256(facts + np.array(lengths, dtype=np.int64).tobytes()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


def _shuffled(total: int, count: int, seed: int, position: int) -> np.ndarray:
    """Next indices of the endless sequence of shuffles of 0 to `total` - 1, [count]."""
    epochs = range(position // total, -(-(position + count) // total))
    orders = [np.random.default_rng((seed, epoch)).permutation(total) for epoch in epochs]
    begin = position - epochs.start * total
    return np.concatenate([np.zeros(0, np.int64), *orders])[begin : begin + count]


def _chances(seed: int, position: int, count: int) -> np.ndarray:
    """Random numbers in [0, 1) of the next positions, [count]."""
    first, begin = divmod(position, CHANCE_BLOCK)
    blocks = range(first, first - (-(begin + count) // CHANCE_BLOCK))
    blocks_of_chances = [np.random.default_rng((seed, CHANCES, block)).random(CHANCE_BLOCK) for block in blocks]
    return np.concatenate(blocks_of_chances)[begin : begin + count]
