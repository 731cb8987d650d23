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
from funrl.rollout.native.backends import PassWork
from funrl.rollout.native.flights import Flights
from funrl.rollout.native.live_request import LiveRequest
from funrl.rollout.native.pages import PagePool


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
    drawing: np.ndarray
    sources: np.ndarray
    ahead: np.ndarray | None
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
        self._running_seats: np.ndarray | None = None  # of these; None: somebody came or went
        self._lacking = 0  # pages that the first one that waits lacked when it was last tried; 0: it was not
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
        return len(self._without_page(self._seats())) > self.pool.available

    @property
    def waiting(self) -> int:
        """Requests that wait for a place."""
        return len(self._waiting)

    def take(self, flights: Sequence[LiveRequest]) -> None:
        """Let requests wait."""
        self._waiting.extend(flights)
        self._lacking = 0
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
            self._lacking = 0
            if flight.computed:
                self.pool.remember(flight.text[:-1].tolist(), flight.pages)
            self._leave(flight)

    def only_decoding(self) -> np.ndarray | None:
        """Seats of the next pass, each with a page for its token, where it only decodes; see `decoded`.

        None: it computes prompts too, or begins a request, or has to put one back. None may be left that decode: those
        that run have all drawn their last token, which was not looked at.
        """
        seats = self._seats()
        if not len(seats) or (self._flights.lengths[seats] - self._known[seats] > 1).any() or self._may_admit(seats):
            return None
        lacking = self._without_page(seats)
        if len(lacking) > self.pool.available:
            return None
        for seat in lacking.tolist():
            flight = self._flights.holder(seat)
            assert flight is not None
            self._give(flight, self.pool.take(1))
        return seats[~self._flights.full(seats)]

    def decoded(self, seats: np.ndarray) -> None:
        """Note that a pass has computed one token of each of some seats."""
        self._known[seats] += 1

    def pages_of(self, seats: np.ndarray) -> np.ndarray:
        """Number of pages of each of some seats."""
        return self._owned[seats]

    def most_pages_of(self, seats: np.ndarray) -> int:
        """The most pages that one of some seats can come to have."""
        return int(self._most[seats].max(initial=1))

    def table_of(self, seats: np.ndarray, pages: int) -> np.ndarray:
        """The first pages of each of some seats, [seats, pages] int32; those behind its last one are any."""
        table = self._table[seats, :pages]
        return np.pad(table, ((0, 0), (0, pages - table.shape[1])))

    def plan(self) -> PassPlan | None:
        """The next pass; None: nothing waits or runs, or those that run have all drawn their last token.

        Raises:
          RuntimeError: a request waits that the cache can never take.
        """
        decoding = self._with_room()
        chunks = self._chunks(self._pass_tokens - len(decoding))
        if not len(decoding) and not chunks:
            if self._waiting and not self._running:
                raise RuntimeError(f"the cache of {self.pool.pages} pages has no room for a request that waits")
            return None
        decoding = decoding[np.argsort(self._known[decoding], kind="stable")]  # those of about one length together
        drafts = self._drafts(decoding)
        seats = np.concatenate([decoding, np.array([flight.seat for flight, _ in chunks], dtype=np.int64)])
        counts = np.concatenate([drafts + 1, np.array([count for _, count in chunks], dtype=np.int64)])
        ends = self._known[seats] + counts
        tokens = self._tokens_of(decoding, drafts, chunks)
        table_SP = torch.from_numpy(self._table[seats, : self._read(int(ends.max()))])
        self._known[seats] = ends
        draws, drawing, ahead = _draws(seats, counts, self._flights.lengths[seats] - ends, len(decoding))
        sources, copies = np.arange(len(draws)), []
        forks = self._forks(drawing, copies)
        if forks:
            forked, begun = np.array(forks).T
            drawing, sources = np.concatenate([drawing, forked]), np.concatenate([sources, begun])
            ahead = np.concatenate([ahead, np.zeros_like(forked)])
        self.prefilled += sum(count for _, count in chunks)
        work = PassWork(tokens, counts, ends, table_SP, draws)
        return PassPlan(work, drawing, sources, ahead if drafts.any() else None, copies)

    def _forks(self, drawing: np.ndarray, copies: list[tuple[int, int]]) -> list[tuple[int, int]]:
        """Seats of the siblings of those that draw now, and the draw of which each begins."""
        leaders = {flight.seat: flight for flight in self._running if flight.siblings}
        if not leaders:
            return []
        return [
            (flight.seat, source)
            for source, seat in enumerate(drawing.tolist())
            if seat in leaders
            for flight in self._fork(leaders[seat], copies)
        ]

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
        if self._running_seats is None:
            seats = (flight.seat for flight in self._running)
            self._running_seats = np.fromiter(seats, dtype=np.int64, count=len(self._running))
        return self._running_seats

    def _without_page(self, seats: np.ndarray) -> np.ndarray:
        """Those of some seats that have no page for their next token, and have not drawn their last one."""
        return seats[(self._owned[seats] * self._page <= self._known[seats]) & ~self._flights.full(seats)]

    def _may_admit(self, seats: np.ndarray) -> bool:
        """True if one that waits may begin with the next pass, as far as is known without a look at its text."""
        if not self._waiting or len(seats) >= self.max_rows:
            return False
        return not self._lacking or self.pool.available >= self._lacking + self._growing()

    def _growing(self) -> int:
        """Running requests that will need a page before long."""
        seats = self._seats()
        return int((self._owned[seats] < self._most[seats]).sum())

    def _with_room(self) -> np.ndarray:
        """Seats that decode, each with a page for its token; the requests that came last are put back for it."""
        for seat in self._without_page(self._seats()).tolist():
            flight = self._flights.holder(seat)
            while flight is not None and flight.seat >= 0 and not self.pool.available:
                self.preempted += 1
                self._put_back(self._running[-1])
            if flight is not None and flight.seat >= 0:
                self._give(flight, self.pool.take(1))
        seats = self._seats()
        lengths = self._flights.lengths[seats]
        return seats[(self._known[seats] == lengths - 1) & ~self._flights.full(seats)]

    def _chunks(self, budget: int) -> list[tuple[LiveRequest, int]]:
        """The next tokens of texts that are not computed yet: those that run first, then those that wait."""
        chunks, budget, seats = [], max(budget, 1), self._seats()
        left_S = self._flights.lengths[seats] - self._known[seats]
        for i in np.flatnonzero(left_S > 1).tolist():  # where one is left it is computed with those that decode
            if budget:
                budget -= self._chunk(chunks, self._running[i], min(int(left_S[i]), budget))
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
        if not self._waiting or len(self._running) >= self.max_rows:
            return None
        if len(self._running) + sum(len(flight.siblings) for flight in self._running) >= self.max_rows:
            return None
        flight = self._waiting[0]
        text = flight.text.tolist()
        found = self.pool.find(text[:-1])
        self.pool.share(found)
        lacking = -(-len(text) // self._page) - len(found)
        if self.pool.available < lacking + self._growing():
            self.pool.give_back(found)
            self._lacking = lacking
            return None
        self._lacking = 0
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
        self._running_seats = None

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
            self._running_seats = None
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
    seats: np.ndarray, counts: np.ndarray, lacking: np.ndarray, decoding: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Numbers of the tokens of a pass behind which something is drawn, their seats, and the draft's tokens before each.

    Args:
      seats, counts: of each sequence, its new tokens.
      lacking: tokens of each sequence that are not computed by this pass.
      decoding: the first so many sequences draw behind each of their tokens.
    """
    if len(seats) == decoding == counts.sum():  # nearly always: no prompts, no drafts
        return np.arange(decoding), seats, np.zeros_like(seats)
    drawn = np.where(np.arange(len(seats)) < decoding, counts, lacking == 0)  # of each sequence
    ahead = np.arange(drawn.sum()) - np.repeat(np.cumsum(drawn) - drawn, drawn)
    return np.repeat(np.cumsum(counts) - drawn, drawn) + ahead, np.repeat(seats, drawn), ahead
