"""Functions of static shapes, each captured as a CUDA graph when it is met again."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor

log = logging.getLogger(__name__)
Compute = Callable[[], tuple[Tensor, ...]]


class CapturedFunctions:
    """CUDA graphs by key, which share their memory; they run one after another.

    What a function reads and writes besides its results has to stay where it is until `drop`. Its results stay until
    another one runs. The first run of a key is eager: kernels are loaded and chosen by it. Where a function cannot be
    captured it stays eager, and the log says why.
    """

    def __init__(self, device: torch.device, problem: str | None = None):
        """
        Args:
          problem: a reason why nothing is captured; None: on CUDA all is.
        """
        self._capture = device.type == "cuda" and problem is None
        self._met: set[Hashable] = set()
        self._graphs: dict[Hashable, tuple[torch.cuda.CUDAGraph, tuple[Tensor, ...]]] = {}
        self._pool: Any = None

    @property
    def captured(self) -> int:
        """Graphs that there are now."""
        return len(self._graphs)

    def drop(self) -> None:
        """Forget all graphs, and give their memory back."""
        self._graphs.clear()
        self._pool = None

    def run(self, key: Hashable, compute: Compute) -> tuple[Tensor, ...]:
        """The results of a function, which is always the same for a key."""
        if not self._capture or key not in self._met:
            self._met.add(key)
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
            # Other threads may use the device meanwhile, such as one that writes a checkpoint.
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                results = compute()
        except RuntimeError as error:
            log.warning("passes are not captured as CUDA graphs: %s", error)
            self._capture = False
            return False
        self._graphs[key] = graph, results
        return True
