"""Functions of static shapes, each captured as a CUDA graph when it is called a second time."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor

log = logging.getLogger(__name__)
Compute = Callable[[], tuple[Tensor, ...]]


class CapturedFunctions:
    """CUDA graphs by key, which share their memory and run one after another.

    What a function reads and writes, apart from its results, must keep its address until `drop`. Results are valid
    until the next run of any function. The first run of a key is eager, which loads and chooses kernels. If a function
    cannot be captured, all stay eager, and the log says why.
    """

    def __init__(self, device: torch.device, problem: str | None = None):
        """Begin without a captured function.

        Args:
          device: of the functions; only those on CUDA are captured.
          problem: reason not to capture anything; None: there is none.
        """
        self._capture = device.type == "cuda" and problem is None
        self._seen: set[Hashable] = set()
        self._graphs: dict[Hashable, tuple[torch.cuda.CUDAGraph, tuple[Tensor, ...]]] = {}
        self._pool: Any = None

    @property
    def captured(self) -> int:
        """Number of graphs."""
        return len(self._graphs)

    def drop(self) -> None:
        """Forget all graphs and free their memory."""
        self._graphs.clear()
        self._pool = None

    def run(self, key: Hashable, compute: Compute) -> tuple[Tensor, ...]:
        """Run a function, which must always be the same for a key."""
        if not self._capture or key not in self._seen:
            self._seen.add(key)
            return compute()
        if key not in self._graphs and not self._try_capture(key, compute):
            return compute()
        graph, results = self._graphs[key]
        graph.replay()
        return results

    def _try_capture(self, key: Hashable, compute: Compute) -> bool:
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        try:
            # Other threads may use the device during the capture, such as one that writes a checkpoint.
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                results = compute()
        except RuntimeError as error:
            log.warning("passes are not captured as CUDA graphs: %s", error)
            self._capture = False
            return False
        self._graphs[key] = graph, results
        return True
