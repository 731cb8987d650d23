"""Cells of a cache: what a sequence has of a fixed size, such as the states of linear attention.

A running sequence has one cell. The others may hold snapshots: copies of the cell of a text whose keys and values are
in pages. A text with a snapshot's text as its prefix continues from it; a snapshot is evicted when its cell is needed.
A lane, as of pages, has cells of its own.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from funrl.mesh.mesh import SINGLE
from funrl.models.model import Model
from funrl.rollout.native.pages import PagePool
from funrl.rollout.native.sequence import RunningSequence

Prefix = tuple[int, tuple[int, ...]]  # a text, as `PagePool.prefix` has it


class CellCopies(NamedTuple):
    """Cells to copy around a pass, (from, to) pairs; no cell is written twice.

    Attributes:
      before: to begin texts from snapshots.
      after: to fork sequences and to take snapshots.
    """

    before: list[tuple[int, int]]
    after: list[tuple[int, int]]


class CellPool:
    """The cells of a lane by number, and the sequences and snapshots that have them.

    Attributes:
      cells: number of cells; 0: sequences need none.
      snapshot_tokens: a snapshot is taken after every `snapshot_tokens` tokens of prompt and completion, in whole
        pages, at the last whole page of a prompt and at the end of a sequence; 0: there are none.
    """

    def __init__(self, pool: PagePool, cells: int = 0, snapshot_tokens: int = 0, first: int = 0):
        """Begin with empty cells, whose numbers begin with `first`, beside empty pages."""
        self.cells = cells
        self._page = pool.page_tokens
        self.snapshot_tokens = -(-snapshot_tokens // self._page) * self._page
        self._pool = pool
        self._free = list(range(first + cells - 1, first - 1, -1))
        self._snapshots: OrderedDict[Prefix, int] = OrderedDict()  # least recently used first
        self._copies = CellCopies([], [])
        self._ends: list[tuple[RunningSequence, list[int]]] = []  # texts of this pass to take snapshots of
        self._latest: dict[int, Prefix] = {}  # by cell of a decoding sequence: its last snapshot in decoding

    @property
    def has_room(self) -> bool:
        """True if another sequence can begin."""
        return not self.cells or bool(self._free or self._snapshots)

    def known(self, text: Sequence[int], shared: Sequence[int], known: int, root: int) -> int:
        """Number of the first tokens of a text, at most `known`, that a cell and pages hold.

        Args:
          shared: pages that hold the first `known` tokens.
          root: of the text's pages.
        """
        if not self.cells:
            return known
        whole = known // self._page
        if known % self._page and self._prefix(text[:known], shared[:whole], root) in self._snapshots:
            return known
        for count in range(whole, 0, -1):
            if self._prefix((), shared[:count], root) in self._snapshots:
                return count * self._page
        return 0

    def begin(self, sequence: RunningSequence, known: int, shared: Sequence[int]) -> None:
        """Give a cell to a sequence, of whose text the first `known` tokens are found in the cache.

        Args:
          sequence: it has room.
          known: a result of `known`.
          shared: pages that hold these tokens.
        """
        if not self.cells:
            return
        if not known:
            sequence.cell = self._take()
            return
        whole = known // self._page
        text = sequence.contents_of(sequence.text[:known].tolist())
        prefix = self._prefix(text, shared[:whole], sequence.root)
        if known % self._page:  # only one sequence can fill the page that ends it
            sequence.cell = self._snapshots.pop(prefix)
            return
        self._snapshots.move_to_end(prefix)
        source = self._snapshots[prefix]
        sequence.cell = self._take()
        if source != sequence.cell:
            self._copies.before.append((source, sequence.cell))

    def fork(self, leader: RunningSequence, sequence: RunningSequence) -> None:
        """Give a cell to a sequence whose text another one has computed in this pass."""
        if self.cells:
            sequence.cell = self._take()
            self._copies.after.append((leader.cell, sequence.cell))

    def cut(self, known: int, count: int, length: int) -> int:
        """Number of tokens of a text to compute next, at most `count`, to end where a snapshot is taken.

        Args:
          known: tokens of it that are computed.
          length: tokens of the text.
        """
        return count if not self._takes else min(count, self._next_end(known, length) - known)

    def chunk(self, sequence: RunningSequence, text: list[int], length: int) -> None:
        """Record that the pass computes a text up to a token where a snapshot may be taken.

        Args:
          text: of the sequence, as far as this pass computes it.
          length: tokens of the whole text.
        """
        if self._takes and len(text) < length and len(text) == self._next_end(len(text) - 1, length):
            self._ends.append((sequence, text))

    def due(self, slots: np.ndarray, known: np.ndarray) -> np.ndarray:
        """Select slots whose snapshot is due and possible.

        Args:
          slots: of decoding sequences.
          known: [all slots] tokens that each cell holds.
        """
        if not self._takes or not self.has_room:
            return slots[:0]
        return slots[known[slots] % self.snapshot_tokens == 0]

    def decode(self, sequence: RunningSequence, text: list[int]) -> None:
        """Note that the pass decodes the last token of a text, whose whole pages are registered.

        The sequence's snapshot before is then the first to be evicted.
        """
        self._ends.append((sequence, text))
        before = self._latest.pop(sequence.cell, None)
        if before in self._snapshots:
            self._snapshots.move_to_end(before, last=False)
        self._latest[sequence.cell] = self._prefix(text, self._pool.find(text, sequence.root), sequence.root)

    def take_copies(self) -> CellCopies:
        """Copies of the planned pass, snapshots included. Texts of later passes may use these."""
        room = len(self._free) + len(self._snapshots)  # beside the snapshots of this pass
        for sequence, text in self._ends:
            prefix = self._prefix(text, self._pool.find(text, sequence.root), sequence.root)
            if room and not prefix[1] and prefix not in self._snapshots:
                room -= 1
                cell = self._take()
                self._snapshots[prefix] = cell
                self._copies.after.append((sequence.cell, cell))
        copies = self._copies
        self._ends = []
        self._copies = CellCopies([], [])
        return copies

    def keep(self, sequence: RunningSequence, text: Sequence[int]) -> None:
        """Turn the cell of an ended sequence into a snapshot of its text, whose pages are registered."""
        if not self._takes or sequence.cell < 0 or sequence.overrun:
            return
        prefix = self._prefix(text, self._pool.find(text, sequence.root), sequence.root)
        if prefix not in self._snapshots:
            self._latest.pop(sequence.cell, None)
            self._snapshots[prefix] = sequence.cell
            sequence.cell = -1

    def leave(self, sequence: RunningSequence) -> None:
        """Free the cell of a sequence."""
        self._latest.pop(sequence.cell, None)
        if sequence.cell >= 0:
            self._free.append(sequence.cell)
            sequence.cell = -1

    @property
    def _takes(self) -> bool:
        """True if snapshots are taken."""
        return self.cells > 0 and self.snapshot_tokens > 0

    def _prefix(self, text: Sequence[int], shared: Sequence[int], root: int) -> Prefix:
        return self._pool.prefix(text, shared, root)

    def _last(self, length: int) -> int:
        """Tokens of the whole pages before the last two tokens of a text: the rest is a chunk, and no decoding."""
        return (length - 2) // self._page * self._page

    def _next_end(self, known: int, length: int) -> int:
        """The next place of a snapshot behind some tokens; the end of the text if there is none."""
        following = (known // self.snapshot_tokens + 1) * self.snapshot_tokens
        return min(end for end in (self._last(length), following, length) if end > known)

    def _take(self) -> int:
        """Take a cell, evicting the least recently used snapshot. There is room."""
        return self._free.pop() if self._free else self._snapshots.popitem(last=False)[1]


class LaneCells:
    """The cells of all lanes: each has equally many, and their numbers follow those of the lane before.

    Attributes:
      lanes: the pool of each lane.
    """

    def __init__(self, pages: Sequence[PagePool], cells: int = 0, snapshot_tokens: int = 0):
        """Begin with empty cells beside the empty pages of each lane; a remainder that does not divide is left out."""
        self._each = cells // len(pages)
        self.lanes = [CellPool(pool, self._each, snapshot_tokens, n * self._each) for n, pool in enumerate(pages)]
        self._by_slot = np.zeros(0, dtype=np.int64)

    def of(self, sequence: RunningSequence) -> CellPool:
        """The pool of a sequence's lane."""
        return self.lanes[sequence.lane]

    @property
    def has_room(self) -> bool:
        """True if another sequence can begin in some lane."""
        return any(pool.has_room for pool in self.lanes)

    def assign(self, sequence: RunningSequence) -> None:
        """Note the slot of a sequence."""
        if sequence.slot >= len(self._by_slot):
            self._by_slot = np.pad(self._by_slot, (0, sequence.slot + 1), constant_values=-1)
        self._by_slot[sequence.slot] = sequence.cell

    def of_slots(self, slots: np.ndarray) -> np.ndarray | None:
        """Cells of some slots; None: sequences need none."""
        return self._by_slot[slots] if self._each else None

    def due(self, slots: np.ndarray, known: np.ndarray) -> np.ndarray:
        """Select slots whose snapshot is due and possible; see `CellPool.due`."""
        if not self._each:
            return slots[:0]
        lane_N = self._by_slot[slots] // self._each
        return np.concatenate([pool.due(slots[lane_N == lane], known) for lane, pool in enumerate(self.lanes)])

    def take_copies(self) -> CellCopies:
        """Copies of the planned pass in all lanes; see `CellPool.take_copies`."""
        copies = [pool.take_copies() for pool in self.lanes]
        return CellCopies([pair for x in copies for pair in x.before], [pair for x in copies for pair in x.after])


def options_without_states(model: Model) -> dict[str, str]:
    """Options of an engine that do not go with a model, and why: with one whose layers keep states some do not."""
    if not model.pages or not model.cell_bytes(SINGLE, torch.float32):
        return {}
    states = f"layers of a {model.config.source.family} keep a state"
    return {"speculate": f"{states}, which cannot take back the tokens of a wrong draft"}
