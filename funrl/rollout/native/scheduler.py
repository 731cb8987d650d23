"""Scheduling of passes: which sequences decode, which chunks of prompts are computed, and who gets pages.

It depends on the requests and the sampled tokens, not on time, so that all ranks of a replica make the same decisions.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterable, Sequence

import numpy as np
import torch

from funrl.compiled_kernels.paged_attention import read_pages
from funrl.rollout.native.cache_sizes import CacheDemand
from funrl.rollout.native.cells import LaneCells
from funrl.rollout.native.device.host_copy import device_copy
from funrl.rollout.native.lanes import LanePages, by_prefix, known_prefix, lane_room
from funrl.rollout.native.passes import PassPlan, PassWork, sampled_positions
from funrl.rollout.native.sequence import RunningSequence
from funrl.rollout.native.sequences import RunningSequences


class Scheduler:
    """Waiting and running requests, and the pages.

    Attributes:
      max_rows: bound on the requests that run at once.
      lanes: number of lanes that pages and cells are in.
      pool: the pages.
      cells: the cells.
      demand: sizes that the cache should have.
      prefilled, cached, preempted, recomputed: as in `EngineCost`.
    """

    def __init__(
        self,
        sequences: RunningSequences,
        max_rows: int,
        page_tokens: int,
        pass_tokens: int,
        speculate: int = 0,
        few_rows: int = 0,
    ):
        """Make a scheduler without requests or pages.

        Args:
          sequences: the running sequences.
          max_rows: bound on the requests that run at once.
          page_tokens: tokens of a page.
          pass_tokens: bound on the new tokens of a pass.
          speculate: bound on the tokens of a draft.
          few_rows: tokens of a pass, drafts included, up to which there are drafts.
        """
        self.max_rows = max_rows
        self.lanes = 1
        self.pool = LanePages(1, 0, page_tokens)
        self.cells = LaneCells(self.pool.lanes)
        self.demand = CacheDemand(page_tokens)
        self._speculate = speculate
        self._few_rows = few_rows
        self.prefilled = self.cached = self.preempted = self.recomputed = 0
        self._peak = 0
        self._sequences = sequences
        self._page = page_tokens
        self._pass_tokens = pass_tokens
        self._waiting: deque[RunningSequence] = deque()
        self._running: list[RunningSequence] = []  # in the order of their admission
        self._running_slots: np.ndarray | None = None  # their slots; None: they have changed
        self._lacking = 0  # pages that the first waiting request lacked when last tried; 0: not tried
        # By slot: tokens whose keys and values are computed, pages, pages that it may need in the end, adapter, lane.
        self._known, self._owned, self._most, self._adapters, self._lane = np.zeros((5, 0), dtype=np.int64)
        self._adapts = False  # whether a sequence has had an adapter
        self._table = np.zeros((0, 1), dtype=np.int32)

    @property
    def peak_pages(self) -> int:
        """Largest number of pages in use at once so far."""
        return max(self._peak, self.pool.peak)

    @property
    def short_of_pages(self) -> bool:
        """True if a request has to be preempted before the next pass."""
        lacking = self._holders(self._without_page(self._slots()))
        return bool(lacking) and not self.pool.has_one_for_each(lacking)

    @property
    def waiting(self) -> int:
        """Number of requests that wait for a slot."""
        return len(self._waiting)

    def take(self, sequences: Sequence[RunningSequence]) -> None:
        """Enqueue requests."""
        self._waiting.extend(sequences)
        self._lacking = 0
        self.demand.update(heapq.nlargest(self.max_rows, (x.limit for x in self._sequences.by_number.values())))

    def resize(self, pages: int, cells: int) -> None:
        """Replace the cache by empty pages and cells. No request may be running."""
        self._peak = self.peak_pages
        self.pool = LanePages(self.lanes, pages, self._page)
        self.cells = LaneCells(self.pool.lanes, cells, self.demand.snapshot_tokens)

    def restart(self) -> None:
        """Preempt all running requests. All sampled tokens have been polled."""
        while self._running:
            self._put_back(self._running[-1])

    def release(self, gone: Iterable[RunningSequence]) -> None:
        """Release the pages and rows of ended requests."""
        for sequence in gone:
            self._lacking = 0
            if sequence.computed:
                text = sequence.contents_of(sequence.text[:-1].tolist())
                self.pool.of(sequence).remember_tail(text, sequence.pages, sequence.root)
                self.cells.of(sequence).keep(sequence, text)
            self._leave(sequence)

    def only_decoding(self) -> np.ndarray | None:
        """Slots of the next pass, each with a page for its token, if it only decodes; see `decoded`.

        None: it also computes prompts, begins a request, has to preempt one or takes a snapshot. The result is empty if
        all running requests have sampled their last token, which has not been polled yet.
        """
        slots = self._slots()
        if not len(slots) or (self._sequences.lengths[slots] - self._known[slots] > 1).any() or self._may_admit(slots):
            return None
        if len(self.cells.due(slots, self._known + 1)):
            return None
        lacking = self._holders(self._without_page(slots))
        if lacking and not self.pool.has_one_for_each(lacking):
            return None
        for sequence in lacking:
            self._give(sequence, self.pool.of(sequence).take(1))
        return slots[~self._sequences.full(slots)]

    def steady(self, passes: int) -> bool:
        """True if no request waits, and no running one reaches its limit or the end of its pages within some passes."""
        slots = self._slots()
        left = np.minimum(self._sequences.left(slots), self._owned[slots] * self._page - self._known[slots])
        return not self._waiting and bool((left > passes).all())

    def decoded(self, slots: np.ndarray) -> None:
        """Record that a pass has computed one token of each of some slots."""
        self._known[slots] += 1

    def adapters_of(self, slots: np.ndarray) -> np.ndarray:
        """Adapter index of each slot; -1: none."""
        return self._adapters[slots]

    def lanes_of(self, slots: np.ndarray) -> np.ndarray:
        """Lane of each of some slots."""
        return self._lane[slots]

    def pages_of(self, slots: np.ndarray) -> np.ndarray:
        """Number of pages of each of some slots."""
        return self._owned[slots]

    def most_pages_of(self, slots: np.ndarray) -> int:
        """Largest number of pages that one of some slots may need in the end."""
        return int(self._most[slots].max(initial=1))

    def page_at(self, slots: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """Page that holds the token at each of some positions, in the sequences of their slots."""
        return self._table[slots, positions // self._page].astype(np.int64)

    def table_of(self, slots: np.ndarray, pages: int) -> np.ndarray:
        """First pages of some slots, [slots, pages] int32. Entries after a slot's last page are arbitrary."""
        table = self._table[slots, :pages]
        return np.pad(table, ((0, 0), (0, pages - table.shape[1])))

    def plan(self) -> PassPlan | None:
        """Plan the next pass; None: no request needs one, as all running ones have sampled their last token.

        Raises:
          RuntimeError: the cache can never hold a waiting request.
        """
        decoding = self._with_room()
        chunks = self._chunks(self._pass_tokens - len(decoding))
        if not len(decoding) and not chunks:
            if self._waiting and not self._running:
                raise RuntimeError(f"the cache of {self.pool.pages} pages has no room for a request that waits")
            return None
        # Neighbours have similar lengths and one adapter.
        if len(decoding) > 1:
            decoding = decoding[np.argsort(self._known[decoding], kind="stable")]
        if self._adapts:
            decoding = decoding[np.argsort(self._adapters[decoding], kind="stable")]
        drafts = self._drafts(decoding)
        slots = np.concatenate([decoding, np.array([sequence.slot for sequence, _ in chunks], dtype=np.int64)])
        counts = np.concatenate([drafts + 1, np.array([count for _, count in chunks], dtype=np.int64)])
        ends = self._known[slots] + counts
        tokens = self._tokens_of(decoding, drafts, chunks)
        table_SP = torch.from_numpy(self._table[slots, : read_pages(int(ends.max()), self._page)])
        self._known[slots] = ends
        for sequence in self._holders(self.cells.due(decoding, self._known)):
            self.cells.of(sequence).decode(sequence, self._register(sequence, int(self._known[sequence.slot])))
        positions, sampling_slots, ahead = sampled_positions(
            slots, counts, self._sequences.lengths[slots] - ends, decoding=len(decoding)
        )
        sources = np.arange(len(positions))
        copies = []
        forks = self._forks(sampling_slots, copies)
        if forks:
            forked, begun = np.array(forks).T
            sampling_slots = np.concatenate([sampling_slots, forked])
            sources = np.concatenate([sources, begun])
            ahead = np.concatenate([ahead, np.zeros_like(forked)])
        self.prefilled += sum(count for _, count in chunks)
        adapters = self._adapters[slots] if self._adapts else None
        owners = self._sequences.owners_of(slots)
        given = tokens, counts, ends, table_SP, positions
        work = PassWork(*given, adapters=adapters, cells=self.cells.of_slots(slots), requests=owners)
        ahead = ahead if drafts.any() else None
        cell_copies = self.cells.take_copies()
        return PassPlan(work, slots, sampling_slots, sources, ahead=ahead, copies=copies, cell_copies=cell_copies)

    def _forks(self, sampling_slots: np.ndarray, copies: list[tuple[int, int]]) -> list[tuple[int, int]]:
        """Fork the siblings of sampling requests; returns (slot of a sibling, index of its first sample) pairs."""
        leaders = {sequence.slot: sequence for sequence in self._running if sequence.siblings}
        return [
            (sequence.slot, source)
            for source, slot in enumerate(sampling_slots.tolist() if leaders else ())
            if slot in leaders
            for sequence in self._fork(leaders[slot], copies)
        ]

    def settle(self) -> None:
        """Discard the keys and values of rejected drafts."""
        if self._speculate:
            slots = self._slots()
            self._known[slots] = np.minimum(self._known[slots], self._sequences.lengths[slots] - 1)

    def _drafts(self, decoding: np.ndarray) -> np.ndarray:
        """Draft tokens for each decoding slot and give it pages for them; returns the number of tokens of each.

        There are no drafts where many rows decode together: the time of a pass is then proportional to its tokens.
        """
        drafts = np.zeros(len(decoding), dtype=np.int64)
        left = self._few_rows - len(decoding) if self._speculate else 0
        running = {sequence.slot: sequence for sequence in self._running} if left > 0 else {}
        for i, slot in enumerate(decoding.tolist() if left > 0 else ()):
            sequence = running[slot]
            needed = int(self._known[slot]) + 1
            room = int(self._owned[slot]) * self._page - needed
            spare = self.pool.of(sequence).available > len(running)
            most = min(self._speculate, left, room + self._page * spare)
            drafts[i] = self._sequences.draft(sequence, most) if most > 0 else 0
            left -= int(drafts[i])
            if drafts[i] > room:
                self._give(sequence, self.pool.of(sequence).take(1))
        return drafts

    def _tokens_of(
        self, decoding: np.ndarray, drafts: np.ndarray, chunks: Sequence[tuple[RunningSequence, int]]
    ) -> torch.Tensor:
        """New tokens of a pass."""
        last = self._sequences.last_tokens(decoding)
        if drafts.any():
            pairs = zip(decoding.tolist(), drafts.tolist(), strict=True)
            texts = [self._sequences.tokens_at(slot, int(self._known[slot]), count + 1) for slot, count in pairs]
            tokens = [device_copy(np.concatenate(texts), last.device)]
        else:
            tokens = [last]
        for sequence, count in chunks:
            new = self._sequences.tokens_at(sequence.slot, int(self._known[sequence.slot]), count)
            tokens.append(device_copy(new, last.device))
        return torch.cat(tokens)

    def _slots(self) -> np.ndarray:
        if self._running_slots is None:
            slots = (sequence.slot for sequence in self._running)
            self._running_slots = np.fromiter(slots, dtype=np.int64, count=len(self._running))
        return self._running_slots

    def _holders(self, slots: np.ndarray) -> list[RunningSequence]:
        """The running requests of some slots."""
        return [x for slot in slots.tolist() if (x := self._sequences.holder(slot)) is not None]

    def _without_page(self, slots: np.ndarray) -> np.ndarray:
        """Select slots that have no page for their next token and have not sampled their last one."""
        return slots[(self._owned[slots] * self._page <= self._known[slots]) & ~self._sequences.full(slots)]

    def _may_admit(self, slots: np.ndarray) -> bool:
        """True if a waiting request may begin with the next pass, decided without searching the cache for its text."""
        if not self._waiting or len(slots) >= self.max_rows or not self.cells.has_room:
            return False
        pools = enumerate(self.pool.lanes)
        return not self._lacking or any(x.available >= self._lacking + self._growing(lane) for lane, x in pools)

    def _growing(self, lane: int) -> int:
        """Number of running requests of a lane that may need another page."""
        slots = self._slots()
        if self.lanes > 1:
            slots = slots[self._lane[slots] == lane]
        return int((self._owned[slots] < self._most[slots]).sum())

    def _with_room(self) -> np.ndarray:
        """Slots that decode, each with a page for its token; the latest requests are preempted to get these pages."""
        for sequence in self._holders(self._without_page(self._slots())):
            pool = self.pool.of(sequence)
            while sequence.slot >= 0 and not pool.available:
                self.preempted += 1
                self._put_back(next(x for x in reversed(self._running) if x.lane == sequence.lane))
            if sequence.slot >= 0:
                self._give(sequence, pool.take(1))
        slots = self._slots()
        lengths = self._sequences.lengths[slots]
        return slots[(self._known[slots] == lengths - 1) & ~self._sequences.full(slots)]

    def _chunks(self, budget: int) -> list[tuple[RunningSequence, int]]:
        """Chunks of texts that are not computed yet: first of running requests, then of waiting ones."""
        chunks = []
        budget = max(budget, 1)
        slots = self._slots()
        left_S = self._sequences.lengths[slots] - self._known[slots]
        for i in np.flatnonzero(left_S > 1).tolist():  # a text with one token left decodes
            if budget > 0:
                budget -= self._chunk(chunks, self._running[i], int(left_S[i]), budget)
        while budget > 0 and (sequence := self._admit()) is not None:
            left = len(sequence.text) - int(self._known[sequence.slot])
            budget -= self._chunk(chunks, sequence, left, budget)
        return chunks

    def _chunk(
        self, chunks: list[tuple[RunningSequence, int]], sequence: RunningSequence, left: int, budget: int
    ) -> int:
        """Add the next of the `left` tokens of a text to this pass; returns their number.

        Requests that are admitted after it already find them in the pages.
        """
        known = int(self._known[sequence.slot])
        cells = self.cells.of(sequence)
        count = sequence.chunk_end(known, known + cells.cut(known, min(left, budget), known + left)) - known
        chunks.append((sequence, count))
        cells.chunk(sequence, self._register(sequence, known + count), known + left)
        return count

    def _register(self, sequence: RunningSequence, count: int) -> list[int]:
        """Register the whole pages of the first `count` tokens of a text, and return its tokens as pages know them."""
        text = sequence.contents_of(self._sequences.text_of(sequence, count))
        self.pool.of(sequence).remember(text, sequence.pages, sequence.root)
        return text

    def _admit(self) -> RunningSequence | None:
        """Admit the first waiting request: give it a slot and pages for its text; None: it must keep waiting."""
        if not self._waiting or not self.cells.has_room:
            return None
        sequence = self._waiting[0]
        rows = self.max_rows if self.lanes == 1 else min(self.max_rows, len(self._sequences.by_number))
        room = lane_room(self.lanes, self._running, rows)
        lanes = by_prefix(self.pool, self.cells, sequence, room)
        return sequence if any(self._begins(sequence, lane, room[lane]) for lane in lanes) else None

    def _begins(self, sequence: RunningSequence, lane: int, room: int) -> bool:
        """Admit the first waiting request to a lane that has room for rows; False: it lacks pages or a cell."""
        pool = self.pool.lanes[lane]
        cells = self.cells.lanes[lane]
        if not cells.has_room:
            return False
        shared, known, tail = known_prefix(pool, cells, sequence)
        pool.share(shared)
        lacking = -(-len(sequence.text) // self._page) - len(shared)
        if pool.available < lacking + self._growing(lane):
            pool.give_back(shared)
            self._lacking = lacking
            return False
        self._lacking = 0
        self._waiting.popleft()
        sequence.lane = lane
        for page in tail:
            pool.fill(page)
        again = max(0, sequence.known_before - known)
        sequence.recomputed += again
        self.recomputed += again
        cells.begin(sequence, known, shared)
        self._assign_slot(sequence, shared + pool.take(lacking), known)
        self.cached += known
        most = len(self._waiting) if self.lanes == 1 else min(len(self._waiting), room - 1)
        while len(sequence.siblings) < most and sequence.untouched and sequence.is_sibling(self._waiting[0]):
            sequence.siblings.append(self._waiting.popleft())
        return True

    def _fork(self, leader: RunningSequence, copies: list[tuple[int, int]]) -> list[RunningSequence]:
        """Admit the siblings of a request whose prompt is computed: share its whole pages and copy the last one."""
        whole, rest = divmod(len(leader.text), self._page)
        pool = self.pool.of(leader)
        cells = self.cells.of(leader)
        forked: list[RunningSequence] = []
        for sequence in leader.siblings:
            if len(self._running) >= self.max_rows or pool.available < bool(rest) or not cells.has_room:
                break
            cells.fork(leader, sequence)
            sequence.lane = leader.lane
            pages = leader.pages[:whole]
            pool.share(pages)
            if rest:
                pages = pages + pool.take(1)
                copies.append((leader.pages[whole], pages[whole]))
            self._assign_slot(sequence, pages, len(leader.text))
            self.cached += len(leader.text)
            forked.append(sequence)
        self._waiting.extendleft(reversed(leader.siblings[len(forked) :]))
        leader.siblings = []
        return forked

    def _assign_slot(self, sequence: RunningSequence, pages: list[int], known: int) -> None:
        self._sequences.assign_slot(sequence)
        slots = len(self._sequences.lengths)
        if slots > len(self._known):
            more = slots - len(self._known)
            arrays = (self._known, self._owned, self._most, self._adapters, self._lane)
            self._known, self._owned, self._most, self._adapters, self._lane = (np.pad(x, (0, more)) for x in arrays)
            self._table = np.pad(self._table, ((0, more), (0, 0)))
        self._known[sequence.slot] = known
        self._owned[sequence.slot] = 0
        self._adapters[sequence.slot] = sequence.adapter
        self._lane[sequence.slot] = sequence.lane
        self.cells.assign(sequence)
        self._adapts |= sequence.adapter >= 0
        sequence.pages = []
        self._most[sequence.slot] = -(-sequence.limit // self._page)
        self._table[sequence.slot] = 0
        self._give(sequence, pages)
        self._running.append(sequence)
        self._running_slots = None

    def _give(self, sequence: RunningSequence, pages: list[int]) -> None:
        begin = len(sequence.pages)
        sequence.pages += pages
        width = self._table.shape[1]
        needed = read_pages(len(sequence.pages) * self._page, self._page)
        if needed > width:
            self._table = np.pad(self._table, ((0, 0), (0, max(needed, 2 * width) - width)))
        self._table[sequence.slot, begin : len(sequence.pages)] = pages
        self._owned[sequence.slot] = len(sequence.pages)

    def _put_back(self, sequence: RunningSequence) -> None:
        """Preempt a running request: it waits again, before all others."""
        siblings, sequence.siblings = sequence.siblings, []
        sequence.known_before = int(self._known[sequence.slot])
        self._leave(sequence)
        self._sequences.release_slot(sequence)
        self._waiting.extendleft(reversed([sequence, *siblings]))

    def _leave(self, sequence: RunningSequence) -> None:
        """Remove a request from all lists and release its pages."""
        self.pool.of(sequence).give_back(sequence.pages)
        sequence.pages = []
        self.cells.of(sequence).leave(sequence)
        if sequence in self._running:
            self._running.remove(sequence)
            self._running_slots = None
            self._waiting.extendleft(reversed(sequence.siblings))
            sequence.siblings = []
        elif sequence in self._waiting:
            self._waiting.remove(sequence)
        else:
            for other in self._running:
                if sequence in other.siblings:
                    other.siblings.remove(sequence)
