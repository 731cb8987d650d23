"""Plans of a change of layout: which bytes go where, as pure data, without a process group, equal on every rank.

The two layouts may be on the same ranks or on different ones, which may have some or none in common; ranks are numbered
as in the run. A `Route` is the plan of one kind of tensor (all tensors with the same two layouts); a `Plan` says which
route every leaf of a tree takes. Of the ways a tensor can go, the first that fits is taken:

| way | when | what is sent |
|---|---|---|
| `alias` | every rank keeps its box | nothing; the buffer is shared |
| `local` | every rank already holds what its new box needs | nothing; a copy inside the rank |
| `gather` | the new box is the union of the equal boxes of the ranks along some mesh axes | one all-gather over them |
| `pieces` | otherwise | the intersections of old and new boxes, point to point |

In each of them a rank receives exactly the elements that it lacks, each once, which is the least that is possible.
Where the layouts are on different ranks and fewer ranks hold a piece than need it, a rank that has received it relays
it to the next one: the sources send each piece once, or once to every `LONGEST_CHAIN` ranks.
"""

from __future__ import annotations

import functools
import hashlib
import heapq
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import optree
import torch

from funrl import trees
from funrl.mesh import mesh as meshes
from funrl.mesh.mesh import AXES, MeshError, Ranks
from funrl.mesh.rules import Layout

Box = tuple[tuple[int, int], ...]
RANKS_PER_NODE = 8
LONGEST_CHAIN = 8  # ranks that relay a piece; each adds latency


class Transfers(NamedTuple):
    """Boxes of one tensor on their way, in the whole tensor's coordinates: one row for each box and target.

    Attributes:
      sources, targets: [n] ranks.
      hops: [n] number of targets that have received the box before the source, which relays it; 0: it holds the box.
      boxes: [n, dims, 2] first and last index plus one.
    """

    sources: np.ndarray
    targets: np.ndarray
    hops: np.ndarray
    boxes: np.ndarray

    @property
    def volumes(self) -> np.ndarray:
        """Number of elements of each box."""
        return (self.boxes[:, :, 1] - self.boxes[:, :, 0]).prod(1)


@dataclass(frozen=True, eq=False)
class Route:
    """Route of every tensor with these two layouts.

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
    transfers: Transfers | None = None

    @property
    def gathers(self) -> int:
        """Of a gather: how many ranks gather together."""
        return math.prod(size for axis, size in zip(AXES, self.src.sizes, strict=True) if axis in self.axes)


@dataclass(frozen=True, eq=False)
class Plan:
    """The routes of a tree.

    Attributes:
      structure: of the tree.
      names: of the leaves, in the order of `trees.leaves`.
      dtypes: what every leaf arrives as; a leaf that has another dtype is cast as it is packed.
      routes: the distinct routes.
      takes: for every leaf the index of its route.
      src_ranks, dst_ranks: the ranks that the layouts are on, in the order of their meshes.
      digest: of all of the above; ranks that agree on it agree on the plan.
    """

    structure: optree.PyTreeSpec = field(repr=False)
    names: tuple[str, ...]
    dtypes: tuple[torch.dtype, ...]
    routes: tuple[Route, ...] = field(repr=False)
    takes: tuple[int, ...] = field(repr=False)
    src_ranks: Ranks
    dst_ranks: Ranks
    digest: str

    def __hash__(self) -> int:
        return hash(self.digest)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Plan) and self.digest == other.digest

    @property
    def world(self) -> int:
        """Number of ranks up to the last one that takes part."""
        return 1 + max(self.src_ranks[-1], self.dst_ranks[-1])

    def route(self, leaf: int) -> Route:
        return self.routes[self.takes[leaf]]

    def group(self, route: Route, rank: int) -> tuple[int, ...]:
        """Of a gather: the ranks that gather together with `rank`, in the order of the mesh."""
        sizes = dict(zip(AXES, route.src.sizes, strict=True))
        return tuple(self.src_ranks[i] for i in meshes.peers(sizes, route.axes, self.src_ranks.index(rank)))


class LeafParts(NamedTuple):
    """Parts of one leaf on one rank.

    Attributes:
      old, new: its boxes before and after; None where the rank is in only one of the meshes.
      stays: what is in both, None if nothing is; `taken` and `put` are its slices of the old and the new tensor.
    """

    old: Box | None
    new: Box | None
    stays: Box | None = None
    taken: tuple[slice, ...] = ()
    put: tuple[slice, ...] = ()


@functools.lru_cache(maxsize=64)
def held(plan: Plan, rank: int) -> tuple[LeafParts, ...]:
    """Parts of every leaf on `rank`."""
    of = []
    for route in plan.routes:
        old = box_of(route.src, plan.src_ranks, rank)
        new = box_of(route.dst, plan.dst_ranks, rank)
        if old is None or new is None:
            of.append(LeafParts(old, new))
            continue
        both = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(old, new, strict=True))
        stays = both if all(high > low for low, high in both) else None
        of.append(LeafParts(old, new, stays, taken=slices(both, old), put=slices(both, new)))
    return tuple(of[take] for take in plan.takes)


def box_of(layout: Layout, ranks: Ranks, rank: int) -> Box | None:
    """The box that a rank of the run holds in a layout on `ranks`; None if it is not one of them."""
    return layout.box(ranks.index(rank)) if rank in ranks else None


def slices(box: Box, inside: Box) -> tuple[slice, ...]:
    """Position of a box in a tensor that holds the box `inside`."""
    return tuple(slice(low - start, high - start) for (low, high), (start, _) in zip(box, inside, strict=True))


def shape(box: Box | None) -> tuple[int, ...]:
    """Shape of a tensor that holds the box."""
    assert box is not None
    return tuple(high - low for low, high in box)


def plan(
    src: trees.Tree,
    dst: trees.Tree,
    dtypes: trees.Tree,
    ranks_per_node: int = RANKS_PER_NODE,
    src_ranks: Ranks | None = None,
    dst_ranks: Ranks | None = None,
) -> Plan:
    """The plan that takes a tree from the layouts `src` to the layouts `dst`; from the cache where it was made before.

    Args:
      src, dst: trees of `Layout` of the same structure.
      dtypes: what arrives: one dtype, or a tree of dtypes.
      ranks_per_node: ranks `n k` to `n k + n - 1` are near each other; a piece comes from the own node where it can.
      src_ranks, dst_ranks: `Mesh.ranks` of the meshes that the layouts are on; None: all ranks of one run.

    Raises:
      MeshError: the trees differ in their names or in a shape, or the layouts are not for as many devices as there are
        ranks.
    """
    ours = trees.named(src)
    theirs = dict(trees.named(dst))
    names = tuple(name for name, _ in ours)
    if set(names) != set(theirs):
        lacks = sorted(set(names) - set(theirs))
        extra = sorted(set(theirs) - set(names))
        raise MeshError(f"the two trees have different leaves: only the first has {lacks}, only the second {extra}")
    if isinstance(dtypes, torch.dtype):
        kinds = (dtypes,) * len(names)
    else:
        kinds = tuple(trees.leaves(dtypes))
        if len(kinds) != len(names):
            raise MeshError(f"{len(names)} layouts but {len(kinds)} dtypes")
    pairs = tuple((layout, theirs[name]) for name, layout in ours)
    first = pairs[0][0].world if pairs else 1
    ranks = src_ranks or dst_ranks or range(first), dst_ranks or src_ranks or range(first)
    return _plan(optree.tree_structure(src), names, kinds, pairs=pairs, ranks=ranks, near=ranks_per_node)


@functools.lru_cache(maxsize=64)
def _plan(
    structure: optree.PyTreeSpec,
    names: tuple[str, ...],
    dtypes: tuple[torch.dtype, ...],
    pairs: tuple[tuple[Layout, Layout], ...],
    ranks: tuple[Ranks, Ranks],
    near: int,
) -> Plan:
    for name, (src, dst) in zip(names, pairs, strict=True):
        if src.shape != dst.shape:
            raise MeshError(f"{name}: its shape is {src.shape} in one layout and {dst.shape} in the other")
        if (src.world, dst.world) != (len(ranks[0]), len(ranks[1])):
            raise MeshError(
                f"{name}: the meshes {_text(src)} ({src.world} devices) and {_text(dst)} ({dst.world} devices) of its "
                f"layouts are not over the {len(ranks[0])} ranks of the source and the {len(ranks[1])} of the target"
            )
    members: dict[tuple[Layout, Layout], list[int]] = {}
    for leaf, pair in enumerate(pairs):
        members.setdefault(pair, []).append(leaf)
    routes: list[Route] = []
    takes = [0] * len(names)
    load = np.zeros(1 + max(ranks[0][-1], ranks[1][-1]))
    for (src, dst), its in members.items():
        variants = _routes(src, dst, ranks, itemsizes=[dtypes[leaf].itemsize for leaf in its], load=load, near=near)
        for turn, leaf in enumerate(its):
            takes[leaf] = len(routes) + turn % len(variants)
        routes.extend(variants)
    digest = hashlib.sha256(repr((structure, names, dtypes, takes, ranks)).encode())
    for route in routes:
        digest.update(repr((route.src, route.dst, route.way, route.axes)).encode())
        for array in route.transfers or ():
            digest.update(array.tobytes())
    src_ranks, dst_ranks = ranks
    return Plan(
        structure,
        names,
        dtypes,
        routes=tuple(routes),
        takes=tuple(takes),
        src_ranks=src_ranks,
        dst_ranks=dst_ranks,
        digest=digest.hexdigest(),
    )


def _text(layout: Layout) -> str:
    return meshes.text(dict(zip(AXES, layout.sizes, strict=True)))


def _routes(
    src: Layout, dst: Layout, ranks: tuple[Ranks, Ranks], itemsizes: list[int], load: np.ndarray, near: int
) -> list[Route]:
    """The routes that tensors of one kind take in turn, so that the replicas share the sending. Adds to `load`."""
    same = ranks[0] == ranks[1]
    if same and src.spec == dst.spec and src.sizes == dst.sizes:
        return [Route(src, dst, "alias")]
    old = _boxes(src, ranks[0])
    new = _boxes(dst, ranks[1])
    if old == new:
        return [Route(src, dst, "alias")]
    axes = _gather_axes(src, list(old.values()), list(new.values())) if same else ()
    if axes:
        return [Route(src, dst, "gather", axes=axes)]
    boxes, wanted = _wanted(old, new)
    if not wanted:
        return [Route(src, dst, "local")]
    replicas = max(len(holders) for holders, _ in wanted)
    turns = min(replicas, len(itemsizes), 8)
    apart = not set(ranks[0]) & set(ranks[1])
    volumes = (boxes[:, :, 1] - boxes[:, :, 0]).prod(1).tolist()
    routes = []
    for turn in range(turns):
        weight = sum(itemsizes[turn::turns])
        rows: list[tuple[int, int, int, int]] = []
        for number, (holders, needers) in enumerate(wanted):
            chains = _chains(needers, len(holders), number + turn) if apart else [[rank] for rank in needers]
            firsts = [chain[0] for chain in chains]
            sources = _assign(holders, firsts, weight * volumes[number], load=load, near=near)
            for source, chain in zip(sources, chains, strict=True):
                rows.extend(zip([source, *chain], chain, range(len(chain)), itertools.repeat(number)))
        sources, targets, hops, pieces = np.array(rows).T.copy()
        routes.append(Route(src, dst, "pieces", transfers=Transfers(sources, targets, hops, boxes[pieces])))
    return routes


def _boxes(layout: Layout, ranks: Ranks) -> dict[int, Box]:
    return {rank: layout.box(position) for position, rank in enumerate(ranks)}


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
        same = all(new[rank] == new[ranks[0]] for ranks in groups for rank in ranks)
        if same and all(_inside(a, b) for a, b in zip(old, new, strict=True)):
            return axes
    return ()


def _inside(inner: Box, outer: Box) -> bool:
    return all(low >= lowest and high <= highest for (low, high), (lowest, highest) in zip(inner, outer, strict=True))


def _wanted(old: dict[int, Box], new: dict[int, Box]) -> tuple[np.ndarray, list[tuple[list[int], list[int]]]]:
    """Boxes [n, dims, 2] that somebody lacks, and of each the ranks that hold it and the ranks that need it."""
    holders = _by_box(old)
    needers = _by_box(new)
    dims = len(next(iter(old.values())))
    have, need = (np.array(list(boxes)).reshape(len(boxes), dims, 2) for boxes in (holders, needers))
    low = np.maximum(need[:, None, :, 0], have[None, :, :, 0])
    high = np.minimum(need[:, None, :, 1], have[None, :, :, 1])
    where = np.argwhere((high > low).all(-1))
    held = list(holders.values())
    wants = list(needers.values())
    pairs = where.tolist()
    ranks = [(held[h], wants[n]) for n, h in pairs]
    boxes = np.stack([low[where[:, 0], where[:, 1]], high[where[:, 0], where[:, 1]]], axis=2)
    if old.keys().isdisjoint(new):
        return boxes, ranks
    holding = [set(ranks) for ranks in held]
    lacking = [[rank for rank in wants[n] if rank not in holding[h]] for n, h in pairs]
    some = [i for i, needing in enumerate(lacking) if needing]
    return boxes[some], [(ranks[i][0], lacking[i]) for i in some]


def _by_box(boxes: dict[int, Box]) -> dict[Box, list[int]]:
    ranks: dict[Box, list[int]] = {}
    for rank, box in boxes.items():
        if volume(box):
            ranks.setdefault(box, []).append(rank)
    return ranks


def _chains(needers: list[int], holders: int, turn: int) -> list[list[int]]:
    """Divide the ranks that need a piece into chains: in a chain each rank relays the piece to the next.

    There are as many chains as ranks that hold the piece, and more where chains would be longer than `LONGEST_CHAIN`.
    Pieces begin at other ranks in turn, so that all of them receive as much from the holders.
    """
    count = len(needers)
    chains = max(min(holders, count), -(-count // LONGEST_CHAIN))
    first = turn % count
    ring = needers[first:] + needers[:first]
    return [ring[count * i // chains : count * (i + 1) // chains] for i in range(chains)]


def _assign(holders: list[int], needers: list[int], nbytes: int, load: np.ndarray, near: int) -> list[int]:
    """For every rank that needs a piece the least loaded of its holders, of those in its node if there are any."""
    if len(holders) == 1:
        load[holders[0]] += nbytes * len(needers)
        return holders * len(needers)
    chosen = []
    heaps: dict[int, list[tuple[float, int]]] = {}
    nodes = {rank // near for rank in holders}
    for target in needers:
        node = target // near if target // near in nodes else -1
        if node not in heaps:
            close = [rank for rank in holders if node in (-1, rank // near)]
            heaps[node] = [(load[rank], rank) for rank in close]
            heapq.heapify(heaps[node])
        loaded, source = heaps[node][0]
        heapq.heapreplace(heaps[node], (loaded + nbytes, source))
        load[source] += nbytes
        chosen.append(source)
    return chosen


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
        if route.transfers is not None:
            ends = route.transfers.targets if receive else route.transfers.sources
            elements = np.zeros(plan.world, dtype=np.int64)
            np.add.at(elements, ends, route.transfers.volumes)
            total = [nbytes + weight * count for nbytes, count in zip(total, elements.tolist(), strict=True)]
        if route.way == "gather":
            for position, rank in enumerate(plan.src_ranks):
                total[rank] += (route.gathers - 1) * volume(route.src.box(position)) * weight
    return total


def lower_bound_bytes(plan: Plan) -> list[int]:
    """The least that each rank can receive: the elements of its new box that its old box lacks, from boxes alone."""
    weights: dict[tuple[Layout, Layout], int] = {}
    for leaf, take in enumerate(plan.takes):
        pair = plan.routes[take].src, plan.routes[take].dst
        weights[pair] = weights.get(pair, 0) + plan.dtypes[leaf].itemsize
    total = [0] * plan.world
    for (src, dst), weight in weights.items():
        for position, rank in enumerate(plan.dst_ranks):
            old = box_of(src, plan.src_ranks, rank)
            new = dst.box(position)
            total[rank] += volume(new) * weight
            if old is not None:
                both = tuple((max(a, c), max(a, c, min(b, d))) for (a, b), (c, d) in zip(old, new, strict=True))
                total[rank] -= volume(both) * weight
    return total
