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
from funrl.processes import heartbeat


class Clock:
    """Seconds by phase. A phase may recur; `take` empties the clock.

    On a GPU they are those from the moment that it comes to the work of a phase to its end; only `take` waits for it.

    Args:
      device: the device whose work counts to the phase that issued it; None: the CPU.
    """

    def __init__(self, device: torch.device | None = None) -> None:
        self.seconds: dict[str, float] = {}
        self.on_gpu = device is not None and device.type == "cuda"
        self._running: set[str] = set()
        self._spans: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        if name in self._running:  # whose time is counted once
            yield
            return
        self._running.add(name)
        start = _recorded_event() if self.on_gpu else None
        start_s = time.perf_counter()
        try:
            with heartbeat.phase(name):
                yield
        finally:
            self._running.discard(name)
            if start is None:
                self._add(name, time.perf_counter() - start_s)
            else:
                self._spans.append((name, start, _recorded_event()))

    def _add(self, name: str, seconds: float) -> None:
        self.seconds[name] = self.seconds.get(name, 0.0) + seconds

    def move(self, seconds: float, name: str, to: str) -> None:
        """Count seconds of one phase as those of another."""
        self._add(name, -seconds)
        self._add(to, seconds)

    def take(self) -> dict[str, float]:
        """Return the seconds of each phase so far, and start again from none."""
        if self._spans:
            self._spans[-1][2].synchronize()  # the others have come before it
        for name, start, end in self._spans:
            self._add(name, start.elapsed_time(end) / 1e3)
        seconds = self.seconds
        self.seconds = {}
        self._spans = []
        return seconds


def _recorded_event() -> torch.cuda.Event:
    """An event in the order of the GPU's work."""
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def memory_metrics(mesh: Mesh) -> dict[str, float]:
    """Memory in 10^9 bytes, of the rank that has most.

    It is the peak so far, of the device where there is one, and what the process holds on the host now.
    """
    peak, now = _resident()
    if mesh.device.type == "cuda":
        peak = float(torch.cuda.max_memory_allocated(mesh.device))
    held = torch.tensor([peak, now], dtype=torch.float64, device=mesh.device)
    peak, now = (collectives.pmax(held, mesh, tuple(mesh.sizes)) / 1e9).tolist()
    return {"memory/peak_gb": peak} | ({"memory/host_gb": now} if now else {})


def _resident() -> tuple[float, float]:
    """Bytes that this process has held on the host at most, and holds now, 0 where Linux's /proc is not.

    On Linux `getrusage` would give a process the peak of the one that has started it, where that is larger.
    """
    try:
        with open("/proc/self/status") as file:
            held = dict(line.split(":", 1) for line in file if line.startswith(("VmHWM:", "VmRSS:")))
        return float(held["VmHWM"].split()[0]) * 1024, float(held["VmRSS"].split()[0]) * 1024
    except (OSError, KeyError):
        unit = 1 if sys.platform == "darwin" else 1024
        return float(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit), 0.0
