"""Which bytes go where when a tree changes its layout: pure data, made without a process group, equal on every rank.

A `Route` is the plan of one kind of tensor (all tensors with the same two layouts); a `Plan` says which route every
leaf of a tree takes. Of the ways a tensor can go, the first that fits is taken:

| way | when | what is sent |
|---|---|---|
| `alias` | every rank keeps its box | nothing; the buffer is shared |
| `local` | every rank already holds what its new box needs | nothing; a copy inside the rank |
| `gather` | the new box is the union of the equal boxes of the ranks along some mesh axes | one all-gather over them |
| `pieces` | otherwise | the intersections of old and new boxes, point to point |

In each of them a rank receives exactly the elements that it lacks, each once, which is the least that is possible.
"""

from __future__ import annotations

import functools
import hashlib
import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch

from funrl import trees
from funrl.mesh import mesh as meshes
from funrl.mesh.mesh import AXES, MeshError
from funrl.mesh.rules import Layout

Box = tuple[tuple[int, int], ...]
RANKS_PER_NODE = 8


class Transfer(NamedTuple):
    """One box of one tensor, in the whole tensor's coordinates, from one rank to others."""

    source: int
    targets: tuple[int, ...]
    box: Box


@dataclass(frozen=True)
class Route:
    """How every tensor with these two layouts goes.

    Attributes:
      src, dst: the layouts.
      way: "alias", "local", "gather" or "pieces".
      axes: of a gather: the source mesh's axes over which the shards are put together.
      transfers: of pieces: everything that is sent.
    """

    src: Layout
    dst: Layout
    way: str
    axes: tuple[str, ...] = ()
    transfers: tuple[Transfer, ...] = ()

    @functools.cached_property
    def groups(self) -> tuple[tuple[int, ...], ...]:
        """Of a gather: which ranks gather together, each group in the order of the mesh."""
        if self.way != "gather":
            return ()
        return tuple(map(tuple, meshes.members(dict(zip(AXES, self.src.sizes, strict=True)), self.axes)))


@dataclass(frozen=True)
class Plan:
    """The routes of a tree.

    Attributes:
      names: of the leaves, in the order of `trees.leaves`.
      dtypes: what every leaf arrives as; a leaf that has another dtype is cast as it is packed.
      routes: the distinct routes.
      takes: for every leaf the index of its route.
      digest: of all of the above; ranks that agree on it agree on the plan.
    """

    names: tuple[str, ...]
    dtypes: tuple[torch.dtype, ...]
    routes: tuple[Route, ...] = field(repr=False)
    takes: tuple[int, ...] = field(repr=False)
    digest: str

    def __hash__(self) -> int:
        return hash(self.digest)

    @property
    def world(self) -> int:
        return self.routes[0].src.world if self.routes else 1

    def route(self, leaf: int) -> Route:
        return self.routes[self.takes[leaf]]


class Held(NamedTuple):
    """What one rank holds of one leaf.

    Attributes:
      old, new: its boxes before and after, and their shapes.
      stays: what is in both, None if nothing is; `taken` and `put` are its slices of the old and the new tensor.
    """

    old: Box
    new: Box
    old_shape: tuple[int, ...]
    new_shape: tuple[int, ...]
    stays: Box | None
    taken: tuple[slice, ...]
    put: tuple[slice, ...]


@functools.lru_cache(maxsize=64)
def held(plan: Plan, rank: int) -> tuple[Held, ...]:
    """What `rank` holds of every leaf."""
    of = []
    for route in plan.routes:
        old, new = route.src.box(rank), route.dst.box(rank)
        both = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(old, new, strict=True))
        stays = both if all(high > low for low, high in both) else None
        of.append(Held(old, new, shape(old), shape(new), stays, slices(both, old), slices(both, new)))
    return tuple(of[take] for take in plan.takes)


def slices(box: Box, inside: Box) -> tuple[slice, ...]:
    """Where a box lies in a tensor that holds the box `inside`."""
    return tuple(slice(low - start, high - start) for (low, high), (start, _) in zip(box, inside, strict=True))


def shape(box: Box) -> tuple[int, ...]:
    """The shape of a tensor that holds the box."""
    return tuple(high - low for low, high in box)


def plan(src: trees.Tree, dst: trees.Tree, dtypes: trees.Tree, ranks_per_node: int = RANKS_PER_NODE) -> Plan:
    """The plan that takes a tree from the layouts `src` to the layouts `dst`; from the cache where it was made before.

    Args:
      src, dst: trees of `Layout` of the same structure.
      dtypes: what arrives: one dtype, or a tree of dtypes.
      ranks_per_node: ranks `n k` to `n k + n - 1` are near each other; a piece comes from the own node where it can.

    Raises:
      MeshError: the trees differ in their names or in a shape, or the meshes differ in their number of devices.
    """
    ours, theirs = trees.named(src), dict(trees.named(dst))
    names = tuple(name for name, _ in ours)
    if set(names) != set(theirs):
        lacks, extra = sorted(set(names) - set(theirs)), sorted(set(theirs) - set(names))
        raise MeshError(f"the two trees have different leaves: only the first has {lacks}, only the second {extra}")
    if isinstance(dtypes, torch.dtype):
        kinds = (dtypes,) * len(names)
    else:
        kinds = tuple(trees.leaves(dtypes))
        if len(kinds) != len(names):
            raise MeshError(f"{len(names)} layouts but {len(kinds)} dtypes")
    return _plan(names, kinds, tuple((lay, theirs[name]) for name, lay in ours), ranks_per_node)


@functools.lru_cache(maxsize=64)
def _plan(names: tuple[str, ...], dtypes: tuple[torch.dtype, ...], pairs: tuple[tuple[Layout, Layout], ...], near: int):
    for name, (src, dst) in zip(names, pairs, strict=True):
        if src.shape != dst.shape:
            raise MeshError(f"{name}: its shape is {src.shape} in one layout and {dst.shape} in the other")
        if src.world != dst.world:
            raise MeshError(
                f"{name}: the meshes {_text(src)} ({src.world} devices) and {_text(dst)} ({dst.world} devices) "
                "must be factorisations of the same devices"
            )
        if src.world != pairs[0][0].world:
            raise MeshError(f"{name}: lies on {src.world} devices, {names[0]} on {pairs[0][0].world}")
    members: dict[tuple[Layout, Layout], list[int]] = {}
    for leaf, pair in enumerate(pairs):
        members.setdefault(pair, []).append(leaf)
    routes: list[Route] = []
    takes = [0] * len(names)
    load = np.zeros(pairs[0][0].world if pairs else 1)
    for (src, dst), its in members.items():
        variants = _routes(src, dst, [dtypes[leaf].itemsize for leaf in its], load, near)
        for turn, leaf in enumerate(its):
            takes[leaf] = len(routes) + turn % len(variants)
        routes.extend(variants)
    digest = hashlib.sha256(repr((names, dtypes, routes, takes)).encode()).hexdigest()
    return Plan(names, dtypes, tuple(routes), tuple(takes), digest)


def _text(layout: Layout) -> str:
    return meshes.text(dict(zip(AXES, layout.sizes, strict=True)))


def _routes(src: Layout, dst: Layout, itemsizes: list[int], load: np.ndarray, near: int) -> list[Route]:
    """The routes that tensors of one kind take in turn, so that the replicas share the sending. Adds to `load`."""
    if src.spec == dst.spec and src.sizes == dst.sizes:
        return [Route(src, dst, "alias")]
    old, new = _boxes(src), _boxes(dst)
    if old == new:
        return [Route(src, dst, "alias")]
    axes = _gather_axes(src, old, new)
    if axes:
        return [Route(src, dst, "gather", axes)]
    wanted = _wanted(old, new)
    if not wanted:
        return [Route(src, dst, "local")]
    replicas = max(len(holders) for _, holders, _ in wanted)
    turns = min(replicas, len(itemsizes), 8)
    routes = []
    for turn in range(turns):
        weight = sum(itemsizes[turn::turns])
        transfers = []
        for box, holders, needers in wanted:
            transfers += _assign(box, holders, needers, weight * volume(box), load, near)
        routes.append(Route(src, dst, "pieces", transfers=tuple(transfers)))
    return routes


def _boxes(layout: Layout) -> list[Box]:
    return [layout.box(rank) for rank in range(layout.world)]


def volume(box: Box) -> int:
    """Number of elements."""
    return math.prod(high - low for low, high in box)


def _gather_axes(src: Layout, old: list[Box], new: list[Box]) -> tuple[str, ...]:
    """The axes along which ranks hold equal boxes that together are the new box of each of them; () if there are none.

    Boxes of a layout are equal or disjoint, so boxes inside the new one with its volume in sum are a partition of it.
    """
    sizes = dict(zip(AXES, src.sizes, strict=True))
    elements = volume(old[0])
    if elements == 0 or any(volume(box) != elements for box in old):
        return ()
    for axes in meshes.combinations(sizes):
        parts = math.prod(sizes[a] for a in axes)
        if not set(axes) <= set(src.axes) or any(elements * parts != volume(box) for box in new):
            continue
        groups = meshes.members(sizes, axes)
        alike = all(new[rank] == new[ranks[0]] for ranks in groups for rank in ranks)
        if alike and all(_inside(a, b) for a, b in zip(old, new, strict=True)):
            return axes
    return ()


def _inside(inner: Box, outer: Box) -> bool:
    return all(low >= lowest and high <= highest for (low, high), (lowest, highest) in zip(inner, outer, strict=True))


def _wanted(old: list[Box], new: list[Box]) -> list[tuple[Box, list[int], list[int]]]:
    """Every piece that somebody lacks, with the ranks that hold it and the ranks that need it."""
    holders, needers = _by_box(old), _by_box(new)
    have, need = np.array(list(holders)), np.array(list(needers))  # [boxes, dims, 2]
    low = np.maximum(need[:, None, :, 0], have[None, :, :, 0])
    high = np.minimum(need[:, None, :, 1], have[None, :, :, 1])
    where = np.argwhere((high > low).all(-1))
    held, wants = list(holders.values()), list(needers.values())
    lows, highs = low[where[:, 0], where[:, 1]].tolist(), high[where[:, 0], where[:, 1]].tolist()
    wanted = []
    for (n, h), lo, hi in zip(where.tolist(), lows, highs, strict=True):
        has = set(held[h])
        lacking = [rank for rank in wants[n] if rank not in has]
        if lacking:
            wanted.append((tuple(zip(lo, hi, strict=True)), held[h], lacking))
    return wanted


def _by_box(boxes: list[Box]) -> dict[Box, list[int]]:
    ranks: dict[Box, list[int]] = {}
    for rank, box in enumerate(boxes):
        if volume(box):
            ranks.setdefault(box, []).append(rank)
    return ranks


def _assign(box: Box, holders: list[int], needers: list[int], nbytes: int, load: np.ndarray, near: int):
    """For every rank that needs a piece the least loaded of its holders, of those in its node if there are any."""
    if len(holders) == 1:
        load[holders[0]] += nbytes * len(needers)
        return [Transfer(holders[0], tuple(needers), box)]
    chosen: dict[int, list[int]] = {}
    by_node: dict[int, list[int]] = {}
    for rank in needers:
        by_node.setdefault(rank // near, []).append(rank)
    for node, targets in by_node.items():
        close = [rank for rank in holders if rank // near == node] or holders
        heap = [(load[rank], rank) for rank in close]
        heapq.heapify(heap)
        for target in targets:
            loaded, source = heap[0]
            heapq.heapreplace(heap, (loaded + nbytes, source))
            load[source] += nbytes
            chosen.setdefault(source, []).append(target)
    return [Transfer(source, tuple(targets), box) for source, targets in chosen.items()]


def received_bytes(plan: Plan, leaves: Sequence[int] | None = None) -> list[int]:
    """Bytes that each rank receives, over all leaves or the given ones."""
    return _count(plan, leaves, receive=True)


def sent_bytes(plan: Plan, leaves: Sequence[int] | None = None) -> list[int]:
    """Bytes that each rank sends; a member of a gather sends what a ring sends, all parts but one."""
    return _count(plan, leaves, receive=False)


def _count(plan: Plan, leaves: Sequence[int] | None, receive: bool) -> list[int]:
    weights: dict[int, int] = {}
    for leaf in range(len(plan.names)) if leaves is None else leaves:
        weights[plan.takes[leaf]] = weights.get(plan.takes[leaf], 0) + plan.dtypes[leaf].itemsize
    total = [0] * plan.world
    for take, weight in weights.items():
        route = plan.routes[take]
        for source, targets, box in route.transfers:
            for target in targets:
                total[target if receive else source] += volume(box) * weight
        for group in route.groups:
            for rank in group:
                total[rank] += (len(group) - 1) * volume(route.src.box(rank)) * weight
    return total


def lower_bound_bytes(plan: Plan) -> list[int]:
    """The least that each rank can receive: the elements of its new box that its old box lacks, from boxes alone."""
    weights: dict[tuple[Layout, Layout], int] = {}
    for leaf, take in enumerate(plan.takes):
        pair = plan.routes[take].src, plan.routes[take].dst
        weights[pair] = weights.get(pair, 0) + plan.dtypes[leaf].itemsize
    total = [0] * plan.world
    for (src, dst), weight in weights.items():
        if src == dst:
            continue
        for rank in range(plan.world):
            old, new = src.box(rank), dst.box(rank)
            both = tuple((max(a, c), max(max(a, c), min(b, d))) for (a, b), (c, d) in zip(old, new, strict=True))
            total[rank] += (volume(new) - volume(both)) * weight
    return total
