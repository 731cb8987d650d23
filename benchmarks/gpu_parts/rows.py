"""Rows of the table of `gpu.py`, their roofline, and medians of a device's own time."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch

from funrl.cost.tracing.hardware import Hardware

TURNS = 30  # timed calls at most
TIMED_S = 1.0  # in which no further call is begun
LEAST_TURNS = 3
Run = Callable[[], object]


class Bench(NamedTuple):
    """Device and sizes of a measurement.

    Attributes:
      device: the device that is measured.
      hardware: its row of the dry run's table, which bounds are computed from.
      small: the smallest sizes, for a try on a CPU.
    """

    device: torch.device
    hardware: Hardware
    small: bool


class Row(NamedTuple):
    """One number.

    Attributes:
      name: what is measured.
      value: the number, a median where there are several turns; None: it could not be had, and `note` says why.
      unit: "ms", "s", "tokens/s" or "GB".
      bound: the roofline in the same unit; of memory the dry run's prediction; None: there is none.
      flops, nbytes: work that the roofline is computed from.
      note: a remark.
      failed: whether it should have been had.
    """

    name: str
    value: float | None
    unit: str
    bound: float | None = None
    flops: float | None = None
    nbytes: float | None = None
    note: str = ""
    failed: bool = False

    @property
    def share(self) -> float | None:
        """Share of the roofline that is reached; of memory the prediction over what was measured."""
        if not self.value or not self.bound:
            return None
        return self.value / self.bound if self.unit == "tokens/s" else self.bound / self.value


Rows = Iterator[Row]


def roofline_seconds(hardware: Hardware, flops: float, nbytes: float) -> float:
    """Seconds that work in 16 bits takes at least, at the data sheet's peak and bandwidth."""
    return max(flops / hardware.half, nbytes / hardware.bandwidth)


def timed_row(bench: Bench, name: str, seconds: float, flops: float, nbytes: float = 0.0, note: str = "") -> Row:
    """A row of seconds, in ms, beside its roofline."""
    bound = 1e3 * roofline_seconds(bench.hardware, flops, nbytes)
    return Row(name, 1e3 * seconds, "ms", bound, flops=flops, nbytes=nbytes, note=note)


def median_seconds(bench: Bench, run: Run, captured: bool = False) -> float:
    """Median seconds of a call, by the device's own events, after one that loads and chooses kernels.

    Args:
      bench: where.
      run: the call; on a GPU all turns are issued before the host waits.
      captured: replay a CUDA graph of it, so that the host's time does not count.
    """
    run()
    if bench.device.type == "cpu":
        return statistics.median(_cpu_spans(run))
    run = graph_of(run) if captured else run
    torch.cuda.synchronize()
    begin = time.perf_counter()
    run()
    torch.cuda.synchronize()
    turns = max(LEAST_TURNS, min(TURNS, int(TIMED_S / (time.perf_counter() - begin))))
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(turns)]
    for start, end in events:
        start.record()
        run()
        end.record()
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(end) / 1e3 for start, end in events)


def _cpu_spans(run: Run) -> list[float]:
    spans: list[float] = []
    while len(spans) < LEAST_TURNS or (len(spans) < TURNS and sum(spans) < TIMED_S / 100):
        begin = time.perf_counter()
        run()
        spans.append(time.perf_counter() - begin)
    return spans


def graph_of(run: Run) -> Run:
    """Replay of a CUDA graph of a call."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


def now(device: torch.device) -> float:
    """Seconds of the clock, when the device has done all its work."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()
