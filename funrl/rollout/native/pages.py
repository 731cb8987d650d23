"""Pages of a key-value cache: their users and the tokens that they hold.

A page holds the keys and values of a fixed number of consecutive tokens. Sequences with a common prefix share pages. A
page without users keeps its content until its memory is needed, so that a repeated prefix is found in the cache.
Texts of different weights, such as those of several adapters, have roots of their own and share none. The last page of
an ended sequence, the tail, is rarely full: one later sequence may take it and fill it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

ROOT = 0  # the content before the first page; other roots, for other weights, are below


class PagePool:
    """Pages by number.

    Attributes:
      pages: number of pages.
      page_tokens: tokens of a page.
      peak: largest number of pages in use at once so far.
    """

    def __init__(self, pages: int, page_tokens: int, first: int = 0):
        """Begin with empty pages; `first` is the number of the first one."""
        self.pages = pages
        self.page_tokens = page_tokens
        self.peak = 0
        self._users = dict.fromkeys(range(first, first + pages), 0)
        self._free = list(reversed(self._users))
        self._idle: OrderedDict[int, None] = OrderedDict()  # registered and unused, least recently used first
        self._known: dict[tuple[int, tuple[int, ...]], int] = {}  # (content before, tokens) -> page
        self._key: dict[int, tuple[int, tuple[int, ...]]] = {}
        self._content: dict[int, int] = {}  # of a registered page: number of its content, never used twice
        self._contents = ROOT
        self._tails: dict[tuple[int, tuple[int, ...]], int] = {}  # (content before, tokens) -> page
        self._tail: dict[int, tuple[int, tuple[int, ...]]] = {}

    @property
    def available(self) -> int:
        """Number of pages that could be taken now."""
        return len(self._free) + len(self._idle)

    @property
    def used(self) -> int:
        """Number of pages in use."""
        return self.pages - self.available

    def take(self, count: int) -> list[int]:
        """Take pages for new content, evicting the least recently used content. At most `available` pages."""
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
        """Add a user to each page."""
        for page in pages:
            self._users[page] += 1
            self._idle.pop(page, None)
        self.peak = max(self.peak, self.used)

    def give_back(self, pages: Sequence[int]) -> None:
        """Remove a user from each page of a sequence, whose pages are given in the order of its tokens."""
        for page in reversed(pages):  # so that the end of a sequence is evicted before its prefix
            self._users[page] -= 1
            if self._users[page]:
                continue
            if page in self._key or page in self._tail:
                self._idle[page] = None
            else:
                self._free.append(page)

    def find(self, tokens: Sequence[int], root: int = ROOT) -> list[int]:
        """Find the pages of the longest known prefix of a text, in whole pages. They need `share` before use."""
        shared = []
        before = root
        size = self.page_tokens
        for low in range(0, len(tokens) - size + 1, size):
            page = self._known.get((before, tuple(tokens[low : low + size])))
            if page is None:
                break
            shared.append(page)
            before = self._content[page]
        return shared

    def find_tail(self, tokens: Sequence[int], shared: Sequence[int], root: int = ROOT) -> list[int]:
        """Find a tail without users that holds exactly the rest of a text, behind the pages of `find`.

        Its page needs `share`, and then `fill`, before use. The result is empty if there is none.
        """
        page = self._tails.get(self.prefix(tokens, shared, root))
        return [] if page is None or self._users[page] else [page]

    def fill(self, page: int) -> None:
        """Unregister a page as a prefix tail before its owner appends to it."""
        del self._tails[self._tail.pop(page)]

    def remember_tail(self, tokens: Sequence[int], pages: Sequence[int], root: int = ROOT) -> None:
        """Register all pages of an ended text whose keys and values are computed, the last one as its tail."""
        self.remember(tokens, pages, root)
        shared = self.find(tokens, root)
        if not 0 < len(tokens) - len(shared) * self.page_tokens < self.page_tokens:
            return
        key = self.prefix(tokens, shared, root)
        page = pages[len(shared)]
        if page not in self._key and page not in self._tail and key not in self._tails:
            self._tails[key] = page
            self._tail[page] = key

    def prefix(self, tokens: Sequence[int], shared: Sequence[int], root: int = ROOT) -> tuple[int, tuple[int, ...]]:
        """A text as the content of its known pages, those of `find`, and the tokens behind them."""
        before = self._content[shared[-1]] if shared else root
        return before, tuple(tokens[len(shared) * self.page_tokens :])

    def remember(self, tokens: Sequence[int], pages: Sequence[int], root: int = ROOT) -> None:
        """Register the whole pages of a text whose keys and values are computed, or will be in this pass."""
        before = root
        size = self.page_tokens
        for i in range(min(len(tokens) // size, len(pages))):
            key = (before, tuple(tokens[i * size : (i + 1) * size]))
            page = self._known.get(key)
            if page is None:
                page = pages[i]
                if page in self._key:
                    return  # it is registered with other content, of a text that diverged
                self._contents += 1
                self._known[key] = page
                self._key[page] = key
                self._content[page] = self._contents
            before = self._content[page]

    def _forget(self, page: int) -> None:
        if page in self._tail:
            self.fill(page)
            return
        del self._known[self._key.pop(page)]
        del self._content[page]
