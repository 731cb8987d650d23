"""Pages of an engine whose backend has several lanes: groups of devices, each with pages and sequences of its own.

All pages of a sequence are in one lane, and sequences of different lanes share none. Most backends have one lane.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from funrl.rollout.native.cells import CellPool, LaneCells
from funrl.rollout.native.pages import PagePool
from funrl.rollout.native.sequence import RunningSequence


class LanePages:
    """The pages of all lanes: each has equally many, and their numbers follow those of the lane before.

    Attributes:
      lanes: the pool of each lane.
    """

    def __init__(self, lanes: int, pages: int, page_tokens: int):
        """Begin with empty pages; a remainder of `pages` that does not divide is left out."""
        each = pages // lanes
        self.lanes = [PagePool(each, page_tokens, first=lane * each) for lane in range(lanes)]

    def of(self, sequence: RunningSequence) -> PagePool:
        """The pool of a sequence's lane."""
        return self.lanes[sequence.lane]

    @property
    def pages(self) -> int:
        """Number of pages."""
        return sum(pool.pages for pool in self.lanes)

    @property
    def available(self) -> int:
        """Number of pages that could be taken now."""
        return sum(pool.available for pool in self.lanes)

    @property
    def used(self) -> int:
        """Number of pages in use."""
        return sum(pool.used for pool in self.lanes)

    @property
    def peak(self) -> int:
        """Sum of the largest numbers of pages in use at once so far."""
        return sum(pool.peak for pool in self.lanes)

    def has_one_for_each(self, sequences: Iterable[RunningSequence]) -> bool:
        """True if each of some sequences could take a page now."""
        left = [pool.available for pool in self.lanes]
        for sequence in sequences:
            left[sequence.lane] -= 1
        return min(left) >= 0


class KnownPrefix(NamedTuple):
    """The part of a waiting text that a lane's cache holds.

    Attributes:
      pages: that hold it; they need `share` before use.
      known: its number of tokens.
      tail: its last page, if a sequence has to fill it: empty, or one page.
    """

    pages: list[int]
    known: int
    tail: list[int]


def known_prefix(pool: PagePool, cells: CellPool, sequence: RunningSequence) -> KnownPrefix:
    """Find the longest prefix of a waiting sequence's text in a lane, without its last token."""
    text = sequence.contents_of(sequence.text.tolist())
    root = sequence.root
    shared = pool.find(text[:-1], root)
    known = len(shared) * pool.page_tokens
    tail = pool.find_tail(text[: sequence.known_before], shared, root) if known < sequence.known_before else []
    if tail:
        known = sequence.known_before
        shared += tail
    known = cells.known(text, shared, sequence.pages_before(known, pool.page_tokens), root)
    shared = shared[: -(-known // pool.page_tokens)]
    return KnownPrefix(shared, known, tail if known % pool.page_tokens else [])


def by_prefix(pages: LanePages, cells: LaneCells, sequence: RunningSequence, lanes: Iterable[int]) -> list[int]:
    """Lanes in the order to try for a waiting sequence: first the one that has computed most of its begin."""
    lanes = list(lanes)
    if not sequence.known_before or len(lanes) == 1:
        return lanes
    return sorted(lanes, key=lambda lane: -known_prefix(pages.lanes[lane], cells.lanes[lane], sequence).known)


def lane_room(lanes: int, running: Sequence[RunningSequence], rows: int) -> dict[int, int]:
    """Number of sequences that may begin in each lane, where that is not 0; lanes with the most room are first.

    Args:
      lanes: number of lanes.
      running: all running sequences, whose siblings that are yet to begin count too.
      rows: sequences of all lanes together; each lane has an even share of them.
    """
    if len(running) >= rows:
        return {}
    if lanes == 1:  # of most engines, in every pass in which a request waits
        left = rows - len(running) - sum(len(sequence.siblings) for sequence in running)
        return {0: left} if left > 0 else {}
    counts = [0] * lanes
    for sequence in running:
        counts[sequence.lane] += 1 + len(sequence.siblings)
    most = -(-rows // lanes) if sum(counts) < rows else 0
    return {lane: most - counts[lane] for lane in sorted(range(lanes), key=counts.__getitem__) if counts[lane] < most}


class LaneRows(NamedTuple):
    """Rows of a pass whose lanes are computed by ranks of their own.

    Attributes:
      own: index of each row of this rank's lane.
      most: rows of the lane that has most.
      lane_R, index_R: lane of each row, and its number there.
    """

    own: np.ndarray
    most: int
    lane_R: np.ndarray
    index_R: np.ndarray

    def places(self, rows: int) -> np.ndarray:
        """Place of each row where the lanes, of this many rows each, stand one after the other."""
        return self.lane_R * rows + self.index_R


def places_in_lanes(lane_N: np.ndarray, lanes: int) -> tuple[np.ndarray, int]:
    """Places of things in lanes of equally many rows, one lane after the other, and the rows of a lane.

    The things of a lane stay in order.
    """
    counts_L = np.bincount(lane_N, minlength=lanes)
    rows = bucket(int(counts_L.max()))
    order_N = np.argsort(lane_N, kind="stable")
    at_N = np.empty(len(lane_N), dtype=np.int64)
    lane_of_N = lane_N[order_N].astype(np.int64)
    at_N[order_N] = np.arange(len(lane_N)) - (np.cumsum(counts_L) - counts_L)[lane_of_N] + lane_of_N * rows
    return at_N, rows


def bucket(count: int, most: int | None = None) -> int:
    """The next power of two, at most `most`: few different sizes occur."""
    size = 1 << max(0, count - 1).bit_length()
    return size if most is None else min(size, most)
