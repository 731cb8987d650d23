"""Small pieces that the loop needs on every mesh: one-bucket reductions, gathered rows, phases with their time."""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from funrl import trees
from funrl.mesh import collectives
from funrl.mesh.mesh import Axes, Mesh

BUCKET_BYTES = 128 << 20  # that are summed in one collective; a larger leaf goes alone


def psum_tree(tree: trees.Tree, mesh: Mesh, axes: Axes) -> trees.Tree:
    """Sums every leaf over `axes`, many in one collective: latency counts once, not once a leaf."""
    if mesh.size(axes) == 1:
        return tree
    values = trees.leaves(tree)
    summed: list[Tensor] = list(values)
    for dtype in sorted({v.dtype for v in values}, key=str):
        for which in _buckets(values, dtype):
            bucket = torch.cat([values[i].reshape(-1) for i in which])
            parts = collectives.psum(bucket, mesh, axes).split([values[i].numel() for i in which])
            for i, part in zip(which, parts, strict=True):
                summed[i] = part.view(values[i].shape)
    return trees.fill(tree, summed)


def _buckets(values: Sequence[Tensor], dtype: torch.dtype) -> Iterator[list[int]]:
    """The numbers of the values of a dtype, in runs of at most `BUCKET_BYTES`."""
    bucket: list[int] = []
    room = BUCKET_BYTES
    for i, value in enumerate(values):
        if value.dtype == dtype:
            if bucket and value.nbytes > max(room, 0):
                yield bucket
                bucket, room = [], BUCKET_BYTES
            bucket.append(i)
            room -= value.nbytes
    if bucket:
        yield bucket


def own_range(count: int, mesh: Mesh, axes: Axes) -> range:
    """This rank's contiguous share of `count` things over `axes`; shares differ by at most one."""
    parts, at = mesh.size(axes), mesh.index(axes)
    return range(count * at // parts, count * (at + 1) // parts)


def gather_rows(columns: Sequence[Tensor], count: int, mesh: Mesh, axes: Axes) -> list[Tensor]:
    """Joins the ranks' `own_range` rows of each column into all `count` rows, on every rank, in one collective.

    Args:
      columns: [R, ...] tensors of this rank's rows, integers below 2^53, booleans or floats.
      count: rows of all ranks.
    """
    parts = mesh.size(axes)
    if parts == 1:
        return list(columns)
    rows = len(columns[0])
    widths = [c.shape[1:].numel() for c in columns]
    flat = torch.cat([c.reshape(rows, n).to(torch.float64) for c, n in zip(columns, widths, strict=True)], 1)
    most = -(-count // parts)
    padded = torch.cat([flat, flat.new_zeros(most - rows, flat.shape[1])])
    whole = collectives.all_gather(padded, mesh, axes).view(parts, most, sum(widths))
    counts = [count * (i + 1) // parts - count * i // parts for i in range(parts)]
    joined = torch.cat([whole[i, :n] for i, n in enumerate(counts)])
    return [
        part.reshape(count, *c.shape[1:]).to(c.dtype) for part, c in zip(joined.split(widths, 1), columns, strict=True)
    ]


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
