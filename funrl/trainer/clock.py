"""Seconds and memory of a run."""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from funrl.mesh import collectives
from funrl.mesh.mesh import Mesh


class Clock:
    """Seconds by phase. Phases may recur; `take` empties the clock."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start

    def move(self, seconds: float, name: str, to: str) -> None:
        """Count seconds of one phase as those of another."""
        self.seconds[name] -= seconds
        self.seconds[to] = self.seconds.get(to, 0.0) + seconds

    def take(self) -> dict[str, float]:
        taken, self.seconds = self.seconds, {}
        return taken


def peak_memory_gb(mesh: Mesh) -> float:
    """The largest memory that any rank has held so far, in 10^9 bytes: device memory on a GPU, else resident memory."""
    if mesh.device.type == "cuda":
        peak = float(torch.cuda.max_memory_allocated(mesh.device))
    else:
        unit = 1 if sys.platform == "darwin" else 1024
        peak = float(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit)
    everyone = tuple(mesh.sizes)
    return collectives.pmax(torch.tensor(peak, dtype=torch.float64, device=mesh.device), mesh, everyone).item() / 1e9
