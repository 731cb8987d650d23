"""The endless, stateless order in which training takes items, with optional sampling weights.

The seed and a position p determine the item at p: all items in a shuffled order, then all in another, and so on; for a
mixture, the items of each part by its share. A run that resumes at a position takes the items that it would have taken
without the interruption, for any earlier batch sizes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import NamedTuple, TypeVar, overload

import numpy as np

from funrl.data.mixture import Mixture
from funrl.seeds import derived_seed

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
