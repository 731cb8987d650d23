"""A named mesh of devices: one process per device, four axes, written "dp4,tp2" on the command line.

The axes are, outermost first, `data`, `expert`, `sequence` and `tensor`; tensor parallelism is innermost because it
talks most and neighbours are nearest. An axis that is not named has size 1. Ranks are numbered row-major.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
import torch.distributed as dist

from funrl.mesh.text import AXES, ROW_AXES, SHORT, MeshError, parse, text

__all__ = [
    "AXES",
    "ROW_AXES",
    "SHORT",
    "Mesh",
    "MeshError",
    "combinations",
    "coordinates",
    "members",
    "parse",
    "single",
    "text",
]

Axes = str | tuple[str, ...]


@dataclass(frozen=True)
class Mesh:
    """This process's view of the mesh.

    Attributes:
      row_axes, token_axes: the axes that split a batch's rows, and those that split its tokens. A rank's loss is the
        sum over its own tokens, and the same on every rank of the other axes.
      sizes: size of each of `AXES`.
      rank: this process's number, row-major over `AXES`.
      device: where this process's tensors live.
      groups: name of the process group of every combination of axes that are larger than 1.
      indices: position on each axis; given only by the simulator, where it differs within one process.
    """

    sizes: dict[str, int] = field(default_factory=lambda: dict.fromkeys(AXES, 1))
    rank: int = 0
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    groups: dict[tuple[str, ...], str] = field(default_factory=dict, repr=False)
    indices: dict[str, Any] | None = field(default=None, repr=False)

    row_axes: ClassVar[tuple[str, ...]] = ROW_AXES
    token_axes: ClassVar[tuple[str, ...]] = ("data", "expert", "sequence")

    @property
    def world(self) -> int:
        return math.prod(self.sizes.values())

    def size(self, axes: Axes) -> int:
        size = 1  # a plain loop: torch.compile traces through here
        for axis in _tuple(axes):
            size *= self.sizes[axis]
        return size

    def index(self, axes: Axes) -> Any:
        """Position along `axes`, the first outermost. An int, or a simulated one under `simulate`."""
        at = self.indices or coordinates(self.sizes, self.rank)
        index: Any = 0
        for axis in _tuple(axes):
            index = index * self.sizes[axis] + at[axis]
        return index

    def group_name(self, axes: Axes) -> str:
        """Name of the process group over `axes`, which functional collectives take; only for sizes above 1."""
        return self.groups[self._key(axes)]

    def group(self, axes: Axes) -> Any:
        """The process group over `axes`; only for sizes above 1."""
        return dist.distributed_c10d._resolve_process_group(self.group_name(axes))  # type: ignore[attr-defined]

    def _key(self, axes: Axes) -> tuple[str, ...]:
        wanted = _tuple(axes)
        return tuple([a for a in AXES if a in wanted and self.sizes[a] > 1])

    def __str__(self) -> str:
        return text(self.sizes)


def single(device: torch.device | str = "cpu") -> Mesh:
    """The mesh of one device: every collective on it is the identity and no process group exists."""
    return Mesh(device=torch.device(device))


def coordinates(sizes: dict[str, int], rank: int) -> dict[str, int]:
    """Position of `rank` on each axis."""
    at = {}
    for axis in reversed(AXES):
        rank, at[axis] = divmod(rank, sizes[axis])
    return at


def members(sizes: dict[str, int], axes: tuple[str, ...]) -> list[list[int]]:
    """The ranks of every group over `axes`: they agree on all other axes. In order of their first rank."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for rank in range(math.prod(sizes.values())):
        at = coordinates(sizes, rank)
        groups.setdefault(tuple(at[a] for a in AXES if a not in axes), []).append(rank)
    return list(groups.values())


def combinations(sizes: dict[str, int]) -> list[tuple[str, ...]]:
    """Every non-empty combination of the axes that are larger than 1."""
    large = [a for a in AXES if sizes[a] > 1]
    return [c for n in range(1, len(large) + 1) for c in itertools.combinations(large, n)]


def _tuple(axes: Axes) -> tuple[str, ...]:
    return (axes,) if isinstance(axes, str) else tuple(axes)
