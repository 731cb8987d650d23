"""Which bytes go where when a tree changes its layout: pure data, made without a process group, equal on every rank.

A `Route` is the plan of one kind of tensor (all tensors with the same two layouts); a `Plan` says which route every
leaf of a tree takes; `program` is one rank's share of a plan, cut into buckets. Of the ways a tensor can go, the one
that fits is taken, in this order:

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
import itertools
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
DIRECT_BYTES = 256 << 10


class Transfer(NamedTuple):
    """One box of one tensor, in the whole tensor's coordinates, from one rank to another."""

    source: int
    target: int
    box: Box


@dataclass(frozen=True)
class Route:
    """How every tensor with these two layouts goes.

    Attributes:
      src, dst: the layouts.
      way: "alias", "local", "gather" or "pieces".
      groups: of a gather: which ranks gather together, each in the order of the mesh.
      transfers: of pieces: everything that is sent.
    """

    src: Layout
    dst: Layout
    way: str
    groups: tuple[tuple[int, ...], ...] = ()
    transfers: tuple[Transfer, ...] = ()


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
    groups = _gather_groups(src, old, new)
    if groups:
        return [Route(src, dst, "gather", groups)]
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


def _gather_groups(src: Layout, old: list[Box], new: list[Box]) -> tuple[tuple[int, ...], ...]:
    """The groups of ranks whose old boxes, all of one size, make up each member's new box; () if there are none.

    Boxes of a layout are equal or disjoint, so boxes inside the new one with its volume in sum are a partition of it.
    """
    sizes = dict(zip(AXES, src.sizes, strict=True))
    elements = volume(old[0])
    if elements == 0 or any(volume(box) != elements for box in old):
        return ()
    for axes in meshes.combinations(sizes):
        if not set(axes) <= set(src.axes):
            continue
        if any(elements * math.prod(sizes[a] for a in axes) != volume(box) for box in new):
            continue
        groups = meshes.members(sizes, axes)
        if all(len({new[r] for r in ranks}) == 1 for ranks in groups) and all(
            _inside(old[r], new[r]) for ranks in groups for r in ranks
        ):
            return tuple(tuple(ranks) for ranks in groups)
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
    transfers = []
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
            transfers.append(Transfer(source, target, box))
    return transfers


class Part(NamedTuple):
    """A box of one leaf, in the whole tensor's coordinates."""

    leaf: int
    box: Box


class Message(NamedTuple):
    """What goes from one rank to another at once.

    Attributes:
      peer: the other rank.
      tag: how many messages have gone between the two in this direction before.
      parts: in the order in which they are packed.
    """

    peer: int
    tag: int
    parts: tuple[Part, ...]


class Step(NamedTuple):
    """What one rank does in one bucket.

    Attributes:
      way: "gather" (every rank in `ranks` sends the same to every other) or "pieces".
      ranks: who takes part, in the order of the mesh.
      dtype: of everything in the bucket.
      sends, receives: the messages, nearest ranks first.
      finished: leaves that this rank sends nothing more of.
    """

    way: str
    ranks: tuple[int, ...]
    dtype: torch.dtype
    sends: tuple[Message, ...]
    receives: tuple[Message, ...]
    finished: tuple[int, ...]


@functools.lru_cache(maxsize=64)
def program(plan: Plan, rank: int, bucket_bytes: int) -> tuple[Step, ...]:
    """One rank's steps. Every rank has the same number of steps, of the same ways and dtypes.

    A rank stages (sends and receives together) at most `bucket_bytes` in a step, unless that is less than one element
    from each of its peers. A part of at least `DIRECT_BYTES` is a message by itself, so that it need not be staged
    where it is contiguous.
    """
    buckets = _buckets(plan, bucket_bytes)
    last = {leaf: i for i, (_, _, items) in enumerate(buckets) for leaf, _, _ in items}
    mine = [_mine(route, rank) for route in plan.routes]
    tags: tuple[dict[int, int], dict[int, int]] = {}, {}
    steps = []
    for i, (way, groups, items) in enumerate(buckets):
        dtype = plan.dtypes[items[0][0]]
        parts: tuple[dict[int, list[Part]], dict[int, list[Part]]] = {}, {}
        for leaf, part, count in items:
            for by_peer, transfers in zip(parts, mine[plan.takes[leaf]], strict=True):
                for peer, box in transfers:
                    cut = _cut(box, count)
                    if part < len(cut):
                        by_peer.setdefault(peer, []).append(Part(leaf, cut[part]))
        sends, receives = (_messages(*both, rank, dtype.itemsize) for both in zip(parts, tags, strict=True))
        ranks = next(g for g in groups if rank in g) if way == "gather" else tuple(range(plan.world))
        finished = tuple(dict.fromkeys(leaf for leaf, _, _ in items if last[leaf] == i))
        steps.append(Step(way, ranks, dtype, sends, receives, finished))
    return tuple(steps)


def _messages(by_peer: dict[int, list[Part]], tags: dict[int, int], rank: int, itemsize: int) -> tuple[Message, ...]:
    """The parts to or from each peer as messages: small ones together, each large one alone."""
    messages = []
    for peer in sorted(by_peer, key=lambda other: (abs(other - rank), other)):
        large = [part for part in by_peer[peer] if volume(part.box) * itemsize >= DIRECT_BYTES]
        small = tuple(part for part in by_peer[peer] if volume(part.box) * itemsize < DIRECT_BYTES)
        for parts in [small] * bool(small) + [(part,) for part in large]:
            messages.append(Message(peer, tags.get(peer, 0), parts))
            tags[peer] = tags.get(peer, 0) + 1
    return tuple(messages)


def _mine(route: Route, rank: int) -> tuple[list[tuple[int, Box]], list[tuple[int, Box]]]:
    """What `rank` sends and what it receives on a route, each with the peer."""
    if route.way == "pieces":
        outgoing = [(t.target, t.box) for t in route.transfers if t.source == rank]
        return outgoing, [(t.source, t.box) for t in route.transfers if t.target == rank]
    if route.way == "gather":
        peers = [peer for group in route.groups if rank in group for peer in group if peer != rank]
        return [(peer, route.src.box(rank)) for peer in peers], [(peer, route.src.box(peer)) for peer in peers]
    return [], []


def _buckets(plan: Plan, bucket_bytes: int) -> list[tuple[str, tuple, list[tuple[int, int, int]]]]:
    """(way, groups, [(leaf, part, of how many parts)]) of every bucket; leaves of one dtype and way fill it in turn."""
    if bucket_bytes < 1:
        raise ValueError(f"bucket_bytes is {bucket_bytes}, it must be at least 1")
    kinds: dict[tuple, list[int]] = {}
    for leaf, take in enumerate(plan.takes):
        route = plan.routes[take]
        if route.way in ("gather", "pieces"):
            kinds.setdefault((route.way, route.groups, plan.dtypes[leaf]), []).append(leaf)
    costs: dict[tuple[int, int], tuple[int, int]] = {}
    buckets = []
    for (way, groups, dtype), its in kinds.items():
        room, items = 0, []
        for leaf in its:
            key = plan.takes[leaf], dtype.itemsize
            if key not in costs:
                costs[key] = _parts(plan.route(leaf), dtype.itemsize, bucket_bytes)
            parts, cost = costs[key]
            for part in range(parts):
                if items and room < cost:
                    buckets.append((way, groups, items))
                    items = []
                if not items:
                    room = bucket_bytes
                items.append((leaf, part, parts))
                room -= cost
        if items:
            buckets.append((way, groups, items))
    return buckets


def _parts(route: Route, itemsize: int, bucket_bytes: int) -> tuple[int, int]:
    """In how many parts a leaf must go so that no rank stages more than a bucket, and what a part stages at most."""
    volumes = {t.box: volume(t.box) for t in route.transfers} or {(): 0}
    largest = max(volumes.values()) or volume(route.src.box(0))
    parts = 1
    while True:
        cost = _staged(route, parts) * itemsize
        if cost <= bucket_bytes or parts >= largest:
            return parts, cost
        parts = min(largest, max(parts + 1, parts * cost // bucket_bytes))


def _staged(route: Route, parts: int) -> int:
    """The most elements that any rank sends and receives of one part."""
    if route.way == "gather":
        return (len(route.groups[0]) + 1) * max(volume(b) for b in _cut(route.src.box(0), parts))
    staged = np.zeros(route.src.world, dtype=np.int64)
    sizes = {box: max(volume(b) for b in _cut(box, parts)) for box in {t.box for t in route.transfers}}
    for source, target, box in route.transfers:
        staged[source] += sizes[box]
        staged[target] += sizes[box]
    return int(staged.max())


@functools.lru_cache(maxsize=1 << 14)
def _cut(box: Box, parts: int) -> tuple[Box, ...]:
    """`box` in at most `parts` nearly equal boxes: along the first dim that is long enough."""
    if parts == 1 or volume(box) <= 1:
        return (box,)
    lengths = [high - low for low, high in box]
    dim = next((d for d, length in enumerate(lengths) if length >= parts), lengths.index(max(lengths)))
    low, high = box[dim]
    slices = min(parts, high - low)
    edges = [low + (high - low) * i // slices for i in range(slices + 1)]
    cut: list[Box] = []
    for i, (begin, end) in enumerate(itertools.pairwise(edges)):
        share = parts * (i + 1) // slices - parts * i // slices
        cut.extend(_cut((*box[:dim], (begin, end), *box[dim + 1 :]), share))
    return tuple(cut)


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
        for source, target, box in route.transfers:
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
