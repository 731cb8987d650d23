"""The next pass: decoding, chunks of prompts, who gets pages and who waits.

It depends on the requests and on what was drawn, not on time, so that all ranks of a replica decide alike.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import torch

from funrl.compiled_kernels.paged_attention import read_pages
from funrl.rollout.backends import PassWork
from funrl.rollout.flights import Flights, LiveRequest
from funrl.rollout.pages import PagePool


class PassPlan(NamedTuple):
    """One pass.

    Attributes:
      work: for the backend.
      drawing: seats that draw a token.
      sources: the row of what the backend finds of each of them.
      ahead: tokens of the seat's draft before each of them; None: there are no drafts.
      copies: (from, to) pages to copy behind the pass.
    """

    work: PassWork
    drawing: Sequence[int]
    sources: Sequence[int]
    ahead: Sequence[int] | None
    copies: Sequence[tuple[int, int]]


class Scheduler:
    """Waiting and running requests, and the pages.

    Attributes:
      max_rows: requests that run at once at most.
      pool: the pages.
      prefilled, cached, preempted: as in `EngineCost`.
    """

    def __init__(
        self, flights: Flights, max_rows: int, page_tokens: int, pass_tokens: int, speculate: int = 0, few_rows: int = 0
    ):
        """
        Args:
          speculate: tokens of a draft at most.
          few_rows: tokens of a pass, drafts included, up to which there are drafts.
        """
        self.max_rows, self.pool = max_rows, PagePool(0, page_tokens)
        self._speculate, self._few_rows = speculate, few_rows
        self.prefilled = self.cached = self.preempted = 0
        self._peak, self._wanted = 0, 0
        self._flights, self._page, self._pass_tokens = flights, page_tokens, pass_tokens
        self._waiting: deque[LiveRequest] = deque()
        self._running: list[LiveRequest] = []  # in the order of their admission
        self._known = np.zeros(0, dtype=np.int64)  # of each seat: tokens whose keys and values are computed
        self._owned = np.zeros(0, dtype=np.int64)  # of each seat: pages
        self._most = np.zeros(0, dtype=np.int64)  # of each seat: pages that it can come to own
        self._table = np.zeros((0, 1), dtype=np.int32)

    @property
    def peak_pages(self) -> int:
        """The most pages that were in use at once."""
        return max(self._peak, self.pool.peak)

    @property
    def short_of_pages(self) -> bool:
        """True if some request has to be put back before the next pass."""
        seats = self._seats()
        return int((self._owned[seats] * self._page <= self._known[seats]).sum()) > self.pool.available

    @property
    def waiting(self) -> int:
        """Requests that wait for a place."""
        return len(self._waiting)

    def take(self, flights: Sequence[LiveRequest]) -> None:
        """Let requests wait."""
        self._waiting.extend(flights)
        each = (-(-flight.limit // self._page) for flight in self._flights.numbers.values())
        self._wanted = sum(heapq.nlargest(self.max_rows, each))

    def wanted_pages(self) -> int:
        """Pages that the requests in flight can use at once."""
        return self._wanted

    def resize(self, pages: int) -> None:
        """Have so many pages, with nothing in them; nothing runs."""
        self._peak, self.pool = self.peak_pages, PagePool(pages, self._page)

    def restart(self) -> None:
        """Put all running requests back. All draws have been looked at."""
        while self._running:
            self._put_back(self._running[-1])

    def release(self, gone: Iterable[LiveRequest]) -> None:
        """Take back the pages and places of requests that ended."""
        for flight in gone:
            if flight.computed:
                self.pool.remember(flight.text[:-1].tolist(), flight.pages)
            self._leave(flight)

    def plan(self) -> PassPlan | None:
        """The next pass; None: nothing waits or runs.

        Raises:
          RuntimeError: a request waits that the cache can never take.
        """
        decoding = self._with_room()
        chunks = self._chunks(self._pass_tokens - len(decoding))
        if not len(decoding) and not chunks:
            if self._waiting:
                raise RuntimeError(f"the cache of {self.pool.pages} pages has no room for a request that waits")
            return None
        decoding = decoding[np.argsort(self._known[decoding], kind="stable")]  # those of about one length together
        drafts = self._drafts(decoding)
        seats = [*decoding.tolist(), *(flight.seat for flight, _ in chunks)]
        counts = [*(drafts + 1).tolist(), *(count for _, count in chunks)]
        ends = (self._known[seats] + counts).tolist()
        tokens = self._tokens_of(decoding, drafts, chunks)
        table_SP = torch.from_numpy(self._table[seats, : self._read(max(ends))])
        self._known[seats] = ends
        draws, drawing, ahead = _draws(seats, counts, self._flights.lengths[seats] - ends, len(decoding))
        sources, copies = list(range(len(draws))), []
        leaders = {flight.seat: flight for flight in self._running if flight.siblings}
        for source, seat in enumerate(drawing[:] if leaders else ()):
            for flight in self._fork(leaders[seat], copies) if seat in leaders else ():
                drawing.append(flight.seat)
                sources.append(source)
                ahead.append(0)
        self.prefilled += sum(count for _, count in chunks)
        work = PassWork(tokens, counts, ends, table_SP, draws)
        return PassPlan(work, drawing, sources, ahead if drafts.any() else None, copies)

    def settle(self) -> None:
        """Forget the keys and values of drafts that were not drawn."""
        if self._speculate:
            seats = self._seats()
            self._known[seats] = np.minimum(self._known[seats], self._flights.lengths[seats] - 1)

    def _drafts(self, decoding: np.ndarray) -> np.ndarray:
        """Tokens of a draft that each decoding seat has now, with pages for them. Where many rows are decoded together
        there are none: a pass takes about as much longer as it has tokens more."""
        drafts = np.zeros(len(decoding), dtype=np.int64)
        left = self._few_rows - len(decoding) if self._speculate else 0
        running = {flight.seat: flight for flight in self._running} if left > 0 else {}
        for i, seat in enumerate(decoding.tolist() if left > 0 else ()):
            flight, needed = running[seat], int(self._known[seat]) + 1
            room = int(self._owned[seat]) * self._page - needed
            spare = self.pool.available > len(running)
            most = min(self._speculate, left, room + self._page * spare)
            drafts[i] = self._flights.draft(flight, most) if most > 0 else 0
            left -= int(drafts[i])
            if drafts[i] > room:
                self._give(flight, self.pool.take(1))
        return drafts

    def _tokens_of(
        self, decoding: np.ndarray, drafts: np.ndarray, chunks: Sequence[tuple[LiveRequest, int]]
    ) -> torch.Tensor:
        """The new tokens of a pass."""
        last = self._flights.last_tokens(decoding)
        if drafts.any():
            pairs = zip(decoding.tolist(), drafts.tolist(), strict=True)
            some = [self._flights.tokens_at(seat, int(self._known[seat]), count + 1) for seat, count in pairs]
            tokens = [torch.from_numpy(np.concatenate(some)).to(last.device)]
        else:
            tokens = [last]
        for flight, count in chunks:
            new = self._flights.tokens_at(flight.seat, int(self._known[flight.seat]), count)
            tokens.append(torch.from_numpy(new).to(last.device))
        return torch.cat(tokens)

    def _read(self, end: int) -> int:
        return read_pages(end, self._page)

    def _seats(self) -> np.ndarray:
        return np.fromiter((flight.seat for flight in self._running), dtype=np.int64, count=len(self._running))

    def _with_room(self) -> np.ndarray:
        """Seats that decode, each with a page for its token; the requests that came last are put back for it."""
        seats = self._seats()
        lacking = self._owned[seats] * self._page <= self._known[seats]
        for flight in [self._running[i] for i in np.flatnonzero(lacking)]:
            while flight.seat >= 0 and not self.pool.available:
                self.preempted += 1
                self._put_back(self._running[-1])
            if flight.seat >= 0:
                self._give(flight, self.pool.take(1))
        seats = self._seats()
        return seats[self._known[seats] == self._flights.lengths[seats] - 1]

    def _chunks(self, budget: int) -> list[tuple[LiveRequest, int]]:
        """The next tokens of texts that are not computed yet: those that run first, then those that wait."""
        chunks, budget = [], max(budget, 1)
        for flight in self._running:
            left = int(self._flights.lengths[flight.seat] - self._known[flight.seat])
            if left > 1 and budget:  # where one is left it is computed with those that decode
                budget -= self._chunk(chunks, flight, min(left, budget))
        while budget and (flight := self._admit()) is not None:
            left = len(flight.text) - int(self._known[flight.seat])
            budget -= self._chunk(chunks, flight, min(left, budget))
        return chunks

    def _chunk(self, chunks: list[tuple[LiveRequest, int]], flight: LiveRequest, count: int) -> int:
        """Compute the next tokens of a text in this pass. Who is admitted to it already finds them in the pages."""
        chunks.append((flight, count))
        text = self._flights.text_of(flight, int(self._known[flight.seat]) + count)
        self.pool.remember(text, flight.pages)
        return count

    def _admit(self) -> LiveRequest | None:
        """The request that waits longest, with a seat and pages for its text; None: it has to wait on."""
        promised = sum(len(flight.siblings) for flight in self._running)
        if not self._waiting or len(self._running) + promised >= self.max_rows:
            return None
        flight = self._waiting[0]
        text = flight.text.tolist()
        found = self.pool.find(text[:-1])
        self.pool.share(found)
        lacking = -(-len(text) // self._page) - len(found)
        seats = self._seats()
        growing = int((self._owned[seats] < self._most[seats]).sum())  # which will need a page before long
        if self.pool.available < lacking + growing:
            self.pool.give_back(found)
            return None
        self._waiting.popleft()
        self._seat(flight, found + self.pool.take(lacking), len(found) * self._page)
        self.cached += len(found) * self._page
        while flight.untouched and self._waiting and _siblings(flight, self._waiting[0]):
            flight.siblings.append(self._waiting.popleft())
        return flight

    def _fork(self, leader: LiveRequest, copies: list[tuple[int, int]]) -> list[LiveRequest]:
        """The siblings of a request whose prompt is computed: they share its whole pages and copy the last one."""
        whole, rest = divmod(len(leader.text), self._page)
        forked: list[LiveRequest] = []
        for flight in leader.siblings:
            if len(self._running) >= self.max_rows or self.pool.available < bool(rest):
                break
            pages = leader.pages[:whole]
            self.pool.share(pages)
            if rest:
                pages = pages + self.pool.take(1)
                copies.append((leader.pages[whole], pages[whole]))
            self._seat(flight, pages, len(leader.text))
            self.cached += len(leader.text)
            forked.append(flight)
        self._waiting.extendleft(reversed(leader.siblings[len(forked) :]))
        leader.siblings = []
        return forked

    def _seat(self, flight: LiveRequest, pages: list[int], known: int) -> None:
        self._flights.seat(flight)
        seats = len(self._flights.lengths)
        if seats > len(self._known):
            more = seats - len(self._known)
            self._known, self._owned, self._most = (
                np.pad(x, (0, more)) for x in (self._known, self._owned, self._most)
            )
            self._table = np.pad(self._table, ((0, more), (0, 0)))
        self._known[flight.seat], self._owned[flight.seat], flight.pages = known, 0, []
        self._most[flight.seat] = -(-flight.limit // self._page)
        self._table[flight.seat] = 0
        self._give(flight, pages)
        self._running.append(flight)

    def _give(self, flight: LiveRequest, pages: list[int]) -> None:
        begin = len(flight.pages)
        flight.pages += pages
        width = self._table.shape[1]
        needed = self._read(len(flight.pages) * self._page)
        if needed > width:
            self._table = np.pad(self._table, ((0, 0), (0, max(needed, 2 * width) - width)))
        self._table[flight.seat, begin : len(flight.pages)] = pages
        self._owned[flight.seat] = len(flight.pages)

    def _put_back(self, flight: LiveRequest) -> None:
        """Let a running request wait again, before all others."""
        siblings, flight.siblings = flight.siblings, []
        self._leave(flight)
        self._flights.unseat(flight)
        self._waiting.extendleft(reversed([flight, *siblings]))

    def _leave(self, flight: LiveRequest) -> None:
        """Take a request out of all lists, and its pages back."""
        self.pool.give_back(flight.pages)
        flight.pages = []
        if flight in self._running:
            self._running.remove(flight)
            self._waiting.extendleft(reversed(flight.siblings))
            flight.siblings = []
        elif flight in self._waiting:
            self._waiting.remove(flight)
        else:
            for other in self._running:
                if flight in other.siblings:
                    other.siblings.remove(flight)


def _siblings(one: LiveRequest, other: LiveRequest) -> bool:
    """True if two requests begin with the same prompt and nothing behind it."""
    return other.untouched and len(one.text) == len(other.text) and bool((one.text == other.text).all())


def _draws(
    seats: Sequence[int], counts: Sequence[int], lacking: np.ndarray, decoding: int
) -> tuple[list[int], list[int], list[int]]:
    """Numbers of the tokens of a pass behind which something is drawn, their seats, and the draft's tokens before each.

    Args:
      seats, counts: of each sequence, its new tokens.
      lacking: tokens of each sequence that are not computed by this pass.
      decoding: the first so many sequences draw behind each of their tokens.
    """
    draws, drawing, ahead, end = [], [], [], 0
    for i, (seat, count) in enumerate(zip(seats, counts, strict=True)):
        begin, end = end, end + count
        some = range(begin if i < decoding else end - 1, end) if i < decoding or not lacking[i] else range(0)
        draws += some
        drawing += [seat] * len(some)
        ahead += range(len(some))
    return draws, drawing, ahead
