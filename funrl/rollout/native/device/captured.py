"""Functions of static shapes, each captured as a CUDA graph when it is called a second time."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Hashable
from typing import Any

import torch
from torch import Tensor

from funrl.mesh.collectives import pmax
from funrl.mesh.mesh import Mesh
from funrl.mesh.text import REPLICA_AXES

log = logging.getLogger(__name__)
Compute = Callable[[], tuple[Tensor, ...]]


class CapturedFunctions:
    """CUDA graphs by key, which share their memory and run one after another.

    What a function reads and writes, apart from its results, must keep its address until `drop`. Results are valid
    until the next run of any function. The first run of a key is eager, which loads and chooses kernels, and connects
    the ranks. If a function cannot be captured, all of its kind stay eager, and the log says why, once.

    The ranks of a replica run the same keys in the same order. After each capture they agree whether all have
    succeeded: a rank that replays and one that computes would not meet in the same collectives.

    Attributes:
      uncaptured: number of runs of kinds that cannot be captured.
    """

    def __init__(self, mesh: Mesh):
        """Begin without a captured function. Only functions on CUDA are captured."""
        self.uncaptured = 0
        self._mesh = mesh
        self._capture = mesh.device.type == "cuda"
        self._eager: set[str] = set()  # kinds that cannot be captured
        self._seen: set[Hashable] = set()
        self._graphs: dict[Hashable, tuple[torch.cuda.CUDAGraph, tuple[Tensor, ...]]] = {}
        self._pool: Any = None

    @property
    def captured(self) -> int:
        """Number of graphs."""
        return len(self._graphs)

    @property
    def keys(self) -> Collection[Any]:
        """Keys of the graphs."""
        return self._graphs.keys()

    def drop(self) -> None:
        """Forget all graphs and free their memory."""
        self._graphs.clear()
        self._pool = None

    def drop_where(self, unused: Callable[[Any], bool]) -> None:
        """Forget the functions whose keys are unused, and their graphs; later graphs take their memory."""
        self._seen = {key for key in self._seen if not unused(key)}
        self._graphs = {key: graph for key, graph in self._graphs.items() if not unused(key)}
        if not self._graphs:
            self._pool = None

    def run(self, key: Hashable, compute: Compute, kind: str = "passes") -> tuple[Tensor, ...]:
        """Run a function, which must always be the same for a key.

        Args:
          key: of the function.
          compute: the function.
          kind: of the function, for people.
        """
        if not self._capture or kind in self._eager or key not in self._seen:
            self._seen.add(key)
            self.uncaptured += kind in self._eager
            return compute()
        if key not in self._graphs and not self._captured_by_all(key, compute, kind):
            self.uncaptured += 1
            return compute()
        graph, results = self._graphs[key]
        graph.replay()
        return results

    def _captured_by_all(self, key: Hashable, compute: Compute, kind: str) -> bool:
        """Capture a function on every rank of a replica or on none. Collective; the host waits for the answer."""
        captured = self._try_capture(key, compute, kind)
        if self._mesh.size(REPLICA_AXES) > 1:
            failed = torch.tensor(float(not captured), device=self._mesh.device)
            captured = not pmax(failed, self._mesh, REPLICA_AXES).item()
        if not captured:
            self._eager.add(kind)
            self.drop()
        return captured

    def _try_capture(self, key: Hashable, compute: Compute, kind: str) -> bool:
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        try:
            # Other threads may use the device during the capture, such as one that writes a checkpoint.
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                results = compute()
        except RuntimeError as error:
            log.warning(
                "rank %d cannot capture %s as CUDA graphs, and all compute them eagerly: %s",
                self._mesh.rank,
                kind,
                error,
            )
            return False
        self._graphs[key] = graph, results
        return True
