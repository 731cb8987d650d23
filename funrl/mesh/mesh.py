"""A named mesh of devices: one process per device, four axes, written "dp4,tp2" on the command line.

The axes are, outermost first, `data`, `expert`, `sequence` and `tensor`; tensor parallelism is innermost because it
talks most and neighbours are nearest. An axis that is not named has size 1. Ranks are numbered row-major. A mesh is
over all processes of a run, or over some of them: two meshes are two views of the same devices, or of disjoint ones.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from funrl.mesh.text import AXES, ROW_AXES, SHORT, TOKEN_AXES, MeshError, parse, text

__all__ = [
    "AXES",
    "ROW_AXES",
    "SHORT",
    "SINGLE",
    "TOKEN_AXES",
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
Ranks = range | tuple[int, ...]


@dataclass(frozen=True)
class Mesh:
    """This process's view of the mesh.

    Attributes:
      row_axes, token_axes: axes that split a batch's rows, and axes that split its tokens. A rank's loss is that
        of its own rows, the same on every rank of the other axes; a rank's gradient is that of its own tokens.
      sizes: size of each of `AXES`.
      rank: this process's number in the mesh, row-major over `AXES`; -1 in a process outside.
      device: where this process's tensors are.
      groups: name of the process group of every combination of axes that are larger than 1.
      indices: position on each axis; given only by the simulator, where it differs within one process.
      over: the processes of the mesh by their numbers in the run, in the order of the mesh; None: all of them.
      process: this process's number in the run; -1: that of `rank`.
      timeout: how long a rank waits for another in a collective before that is an error; None: torch's default.
      driven: sizes of the mesh of devices that this process alone drives, by programs of another backend, as one rank
        of this mesh; None: it has one device.
      nodes: its ranks of `expert` by nodes; None: they are on one.
    """

    sizes: dict[str, int] = field(default_factory=lambda: dict.fromkeys(AXES, 1))
    rank: int = 0
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    groups: dict[tuple[str, ...], str] = field(default_factory=dict, repr=False)
    indices: dict[str, Any] | None = field(default=None, repr=False)
    over: Ranks | None = None
    process: int = -1
    timeout: timedelta | None = None
    driven: dict[str, int] | None = field(default=None, repr=False)
    nodes: ExpertNodes | None = field(default=None, repr=False)

    row_axes: ClassVar[tuple[str, ...]] = ROW_AXES
    token_axes: ClassVar[tuple[str, ...]] = TOKEN_AXES

    def __post_init__(self) -> None:
        if self.here and self.indices is None:  # once, not where torch.compile traces through
            object.__setattr__(self, "indices", coordinates(self.sizes, self.rank))
        if self.here and self.process < 0:
            object.__setattr__(self, "process", self.ranks[self.rank])

    @property
    def ranks(self) -> Ranks:
        """The processes of the mesh, by their numbers in the run, in the order of the mesh."""
        return range(self.world) if self.over is None else self.over

    @property
    def here(self) -> bool:
        """True if this process is in the mesh."""
        return self.rank >= 0

    @property
    def world(self) -> int:
        return math.prod(self.sizes.values())

    @property
    def lanes(self) -> int:
        """Number of micro-batches that this process computes at a time: one on each of its devices with own rows."""
        return 1 if self.driven is None else math.prod(self.driven[axis] for axis in ROW_AXES)

    def size(self, axes: Axes) -> int:
        size = 1  # a plain loop: torch.compile traces through here
        for axis in _tuple(axes):
            size *= self.sizes[axis]
        return size

    def index(self, axes: Axes) -> Any:
        """Position along `axes`, the first outermost. An int, or a simulated one under `simulate`."""
        if self.indices is None:
            raise MeshError(f"process {self.process} is not in the mesh {self} over {self.ranks}")
        index: Any = 0
        for axis in _tuple(axes):
            index = index * self.sizes[axis] + self.indices[axis]
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


class ExpertNodes(NamedTuple):
    """Ranks of `expert` on several nodes, as two meshes of the same processes.

    Attributes:
      across: its axis `expert` has the ranks with one place in their nodes, one of each node.
      inside: its axis `expert` has the ranks of one node.
    """

    across: Mesh
    inside: Mesh


def with_nodes(mesh: Mesh, node: int | None, group_of: Callable[[dict[str, int]], str | None]) -> Mesh:
    """The mesh with the ranks of `expert` by nodes, where several nodes have as many of them.

    Args:
      node: ranks of each node; None: all ranks are on one.
      group_of: name of this process's group over the axis `expert` of a mesh of other sizes over the same processes;
        None in a process outside.
    """
    if node is None or not isinstance(mesh.ranks, range) or mesh.ranks.step > 1 or mesh.ranks.start % node:
        return mesh
    sizes = mesh.sizes
    near, rest = divmod(node, sizes["sequence"] * sizes["tensor"])
    if rest or sizes["expert"] <= near or sizes["expert"] % near:
        return mesh
    count = sizes["expert"] // near
    split = (
        {**sizes, "expert": count, "sequence": near * sizes["sequence"]},
        {**sizes, "data": sizes["data"] * count, "expert": near},
    )
    names = [group_of(own) if own["expert"] > 1 else None for own in split]
    if not mesh.here:
        return mesh
    expert = mesh.index("expert")
    tensor = {axes: name for axes, name in mesh.groups.items() if axes == ("tensor",)}
    parts = []
    for own, name, place in zip(split, names, (expert // near, expert % near), strict=True):
        groups = tensor if name is None else {("expert",): name, **tensor}
        parts.append(dataclasses.replace(mesh, sizes=own, groups=groups, indices={"expert": place}))
    return dataclasses.replace(mesh, nodes=ExpertNodes(*parts))


def single(device: torch.device | str = "cpu") -> Mesh:
    """The mesh of one device: every collective on it is the identity and no process group exists."""
    return Mesh(device=torch.device(device))


def coordinates(sizes: dict[str, int], rank: int) -> dict[str, int]:
    """Position of `rank` on each axis.

    Raises:
      MeshError: the mesh has no such rank.
    """
    position = {}
    outer = rank
    for axis in reversed(AXES):
        outer, position[axis] = divmod(outer, sizes[axis])
    if outer:
        raise MeshError(f"the mesh {text(sizes)} has no rank {rank}")
    return position


def ranks_of(numbers: Sequence[int]) -> Ranks:
    """The numbers as a range if they are one, which takes the same memory for any number of ranks."""
    step = numbers[1] - numbers[0] if len(numbers) > 1 else 1
    regular = step > 0 and all(b - a == step for a, b in itertools.pairwise(numbers))
    return range(numbers[0], numbers[-1] + 1, step) if regular else tuple(numbers)


def members(sizes: dict[str, int], axes: tuple[str, ...]) -> list[list[int]]:
    """Ranks of every group over `axes`: they agree on all other axes. In the order of their first rank."""
    ranks = np.arange(math.prod(sizes.values())).reshape([sizes[axis] for axis in AXES])
    last = [number for number, axis in enumerate(AXES) if axis in axes]
    size = math.prod(sizes[axis] for axis in axes)
    return np.moveaxis(ranks, last, range(len(AXES) - len(last), len(AXES))).reshape(-1, size).tolist()


def peers(sizes: dict[str, int], axes: tuple[str, ...], rank: int) -> list[int]:
    """Ranks of the group over `axes` that `rank` is in, in the order of the mesh."""
    group = [0]
    stride = 1
    own = coordinates(sizes, rank)
    for axis in reversed(AXES):
        indices = range(sizes[axis]) if axis in axes else (own[axis],)
        group = [position * stride + inner for position in indices for inner in group]
        stride *= sizes[axis]
    return group


def combinations(sizes: dict[str, int]) -> list[tuple[str, ...]]:
    """Every non-empty combination of the axes that are larger than 1."""
    large = [a for a in AXES if sizes[a] > 1]
    return [c for n in range(1, len(large) + 1) for c in itertools.combinations(large, n)]


def _tuple(axes: Axes) -> tuple[str, ...]:
    return (axes,) if isinstance(axes, str) else tuple(axes)


SINGLE = single()
