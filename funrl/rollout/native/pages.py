"""Pages of a key-value cache: who uses which, and which tokens they hold.

A page holds the keys and values of a fixed number of neighbouring tokens. Sequences that begin alike share pages. A
page that nobody uses keeps its content until its memory is needed, so that a prefix that comes again is found.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

ROOT = 0  # the content before the first page


class PagePool:
    """Pages by number, from 0.

    Attributes:
      pages: how many there are.
      page_tokens: tokens of a page.
      peak: the most that were in use at once.
    """

    def __init__(self, pages: int, page_tokens: int):
        self.pages = pages
        self.page_tokens = page_tokens
        self.peak = 0
        self._users = [0] * pages
        self._free = list(range(pages - 1, -1, -1))
        self._idle: OrderedDict[int, None] = OrderedDict()  # known and not in use, the longest unused first
        self._known: dict[tuple[int, tuple[int, ...]], int] = {}  # (content before, tokens) -> page
        self._key: dict[int, tuple[int, tuple[int, ...]]] = {}
        self._content: dict[int, int] = {}  # of a known page: a number that no other content ever has
        self._contents = ROOT

    @property
    def available(self) -> int:
        """Pages that could be taken now."""
        return len(self._free) + len(self._idle)

    @property
    def used(self) -> int:
        """Pages in use."""
        return self.pages - self.available

    def take(self, count: int) -> list[int]:
        """Pages for new content; the oldest unused content is forgotten for it. Ask `available` first."""
        taken = []
        for _ in range(count):
            if self._free:
                page = self._free.pop()
            else:
                page, _ = self._idle.popitem(last=False)
                self._forget(page)
            self._users[page] = 1
            taken.append(page)
        self.peak = max(self.peak, self.used)
        return taken

    def share(self, pages: Sequence[int]) -> None:
        """Count one more user of each page."""
        for page in pages:
            self._users[page] += 1
            self._idle.pop(page, None)
        self.peak = max(self.peak, self.used)

    def give_back(self, pages: Sequence[int]) -> None:
        """Count one user less of each page of a sequence, given in the order of its tokens."""
        for page in reversed(pages):  # so that the end of a sequence is forgotten before what it stands on
            self._users[page] -= 1
            if self._users[page]:
                continue
            if page in self._key:
                self._idle[page] = None
            else:
                self._free.append(page)

    def find(self, tokens: Sequence[int]) -> list[int]:
        """Pages that hold the longest known beginning of a text, in whole pages; see `share`."""
        shared = []
        before = ROOT
        size = self.page_tokens
        for low in range(0, len(tokens) - size + 1, size):
            page = self._known.get((before, tuple(tokens[low : low + size])))
            if page is None:
                break
            shared.append(page)
            before = self._content[page]
        return shared

    def remember(self, tokens: Sequence[int], pages: Sequence[int]) -> None:
        """Let `find` find the whole pages of a text whose keys and values are computed, or will be in this pass."""
        before = ROOT
        size = self.page_tokens
        for i in range(min(len(tokens) // size, len(pages))):
            key = (before, tuple(tokens[i * size : (i + 1) * size]))
            page = self._known.get(key)
            if page is None:
                page = pages[i]
                if page in self._key:
                    return  # it is known as other content: that of a text that went another way
                self._contents += 1
                self._known[key] = page
                self._key[page] = key
                self._content[page] = self._contents
            before = self._content[page]

    def _forget(self, page: int) -> None:
        del self._known[self._key.pop(page)]
        del self._content[page]
