"""Sizes of a cache: free memory where none is given, tokens of a page and of a pass."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch

from funrl.mesh.collectives import pmax
from funrl.mesh.launch import local_ranks
from funrl.mesh.mesh import Mesh
from funrl.mesh.text import REPLICA_AXES

FREE_SHARE = 0.5  # of the free memory
log = logging.getLogger(__name__)


def free_bytes(mesh: Mesh) -> int:
    """Free memory of this rank's device; ranks on a CPU share the machine's evenly.

    On a GPU it is what the device has free and what torch's allocator holds without using it, such as the cache and the
    activations of the step before, which the device counts as taken.
    """
    if mesh.device.type == "cuda":
        unused = torch.cuda.memory_reserved(mesh.device) - torch.cuda.memory_allocated(mesh.device)
        return torch.cuda.mem_get_info(mesh.device)[0] + unused
    try:
        with open("/proc/meminfo") as lines:
            free = next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration):  # not Linux
        free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
    return free // local_ranks(mesh.world)


class CacheSizes(NamedTuple):
    """Page count and cell count of a cache."""

    pages: int
    cells: int


NO_CACHE = CacheSizes(0, 0)


class CacheDemand:
    """Sizes of a cache that would hold all unfinished requests at once, and what ended ones should leave.

    Attributes:
      reserved: tokens of ended requests that the cache should have room for.
      snapshot_tokens: tokens between two snapshots of a cell; 0: there are none.
      lanes: number of lanes that pages and cells are in.
    """

    def __init__(self, page_tokens: int):
        """Begin without requests."""
        self.reserved = self.snapshot_tokens = 0
        self.lanes = 1
        self._page = page_tokens
        self._unfinished = NO_CACHE
        self._longest = 1

    def update(self, limits: Sequence[int]) -> None:
        """Note the largest lengths of the requests that can run at once, in decreasing order."""
        longest = limits[: -(-len(limits) // self.lanes)]  # what a lane may have at once
        pages = sum(-(-limit // self._page) for limit in longest)
        cells = len(longest)
        if self.snapshot_tokens:
            cells += sum(2 + limit // self.snapshot_tokens for limit in longest)
        self._unfinished = CacheSizes(self.lanes * pages, self.lanes * cells)
        self._longest = max([self._longest, *limits])

    @property
    def longest_pages(self) -> int:
        """Pages with which each lane can hold the longest request so far."""
        return self.lanes * -(-self._longest // self._page)

    def sizes(self) -> CacheSizes:
        """Pages, and cells with those of snapshots."""
        pages, cells = self._unfinished
        waiting = self.reserved // self._longest if self.snapshot_tokens and cells else 0
        waiting = self.lanes * -(-waiting // self.lanes)
        reserved = self.lanes * -(-self.reserved // (self._page * self.lanes))
        return CacheSizes(pages + reserved, cells + waiting)


class CacheBytes(Protocol):
    """Bytes of a page and of a cell, 0: there are no cells; and number of lanes that these are in."""

    page_bytes: int
    cell_bytes: int
    lanes: int


class CacheRoom:
    """Bound on the bytes of a cache on a rank, and the sizes that fit in it.

    Attributes:
      beside: number of sequences that are computed at a time in pages of their own beside the cache, within its bound.
    """

    def __init__(self, mesh: Mesh, each: CacheBytes, cache_bytes: int, free_share: float, spare: CacheSizes):
        """Begin; memory is measured when it is first needed.

        Args:
          mesh: of the engine.
          each: bytes of a page and of a cell, and the lanes.
          cache_bytes: the bound; 0: a share of the free memory.
          free_share: that share.
          spare: unused pages and cells beside those of the sizes.
        """
        self.beside = 0
        self._mesh = mesh
        self._each = each
        self._given = cache_bytes
        self._free_share = free_share
        self._spare = spare
        self._bytes: int | None = None

    def forget(self) -> None:
        """Measure the free memory again when it is next needed."""
        self._bytes = None

    def takes(self, nbytes: int) -> bool:
        """True if every rank's device has this much free memory beside the cache. Collective over `REPLICA_AXES`."""
        lacking = torch.tensor(float(free_bytes(self._mesh) < nbytes), device=self._mesh.device)
        return not pmax(lacking, self._mesh, REPLICA_AXES).item()

    def most_pages(self) -> int:
        """Bound on the pages, beside one cell of each lane. Collective over `REPLICA_AXES` where memory is measured."""
        return max(0, (self._room() - self._each.lanes * self._each.cell_bytes) // self._each.page_bytes)

    def longest_pages(self) -> int:
        """Bound on the pages of one sequence. Collective as `most_pages`."""
        return self.most_pages() // (self._each.lanes + self.beside)

    def grown(self, sizes: CacheSizes, wanted: CacheSizes, least_pages: int) -> CacheSizes:
        """Larger sizes where more is wanted and fits, at least twice as large; else the same.

        If what is wanted does not fit, there are fewer pages and cells in the same ratio. Where sequences are computed
        beside a cache without cells, it leaves room for the longest ones, and shrinks for longer ones.

        Args:
          sizes: of the cache.
          wanted: pages and cells that could be used.
          least_pages: pages of the longest sequence in each lane, which fit beside a cell of each.
        """
        page_bytes = self._each.page_bytes
        cell_bytes = self._each.cell_bytes
        pages = max(wanted.pages, 2 * sizes.pages) if wanted.pages > sizes.pages else sizes.pages
        if not cell_bytes:
            most = self.most_pages() - self.beside * (least_pages // self._each.lanes)
            kept = min(sizes.pages, most) if self.beside else sizes.pages
            return CacheSizes(max(kept, min(pages, most)) if pages > sizes.pages else kept, 0)
        cells = max(wanted.cells, 2 * sizes.cells) if wanted.cells > sizes.cells else sizes.cells
        if (pages, cells) == sizes:
            return sizes
        room = self._room()
        if sizes.pages >= least_pages and room - _bytes_of(sizes, self._each) < page_bytes + cell_bytes:
            return sizes  # it is full already
        needed = _bytes_of(CacheSizes(pages, cells), self._each)
        if needed > room:
            most = (room - least_pages * page_bytes) // cell_bytes
            cells = max(self._each.lanes, min(int(cells * room / needed), most))
            pages = (room - cells * cell_bytes) // page_bytes
        return CacheSizes(pages, cells)

    def _room(self) -> int:
        """Bytes beside the spare part. The same on all ranks of a replica."""
        if self._bytes is None:
            given = self._given
            if not given:
                free = self._free_share * free_bytes(self._mesh)
                free = torch.tensor(free, dtype=torch.float64, device=self._mesh.device)
                given = -int(pmax(-free, self._mesh, REPLICA_AXES).item())
            spare = self._spare.pages * self._each.page_bytes + self._spare.cells * self._each.cell_bytes
            self._bytes = max(0, given - spare)
            log.info("the cache may have %d pages of keys and values, %.3g GB", self.most_pages(), given / 1e9)
        return self._bytes


def _bytes_of(sizes: CacheSizes, each: CacheBytes) -> int:
    return sizes.pages * each.page_bytes + sizes.cells * each.cell_bytes


def page_tokens(device: str) -> int:
    """Tokens of a page. Kernels on a GPU need 256."""
    return 16 if device == "cpu" else 256


def pass_tokens(device: str) -> int:
    """Bound on the new tokens of a pass, so that decoding does not wait long for prompts."""
    return 1024 if device == "cpu" else 8192
