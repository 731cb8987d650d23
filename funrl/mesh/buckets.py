"""One rank's share of a plan: the messages that it sends and receives, cut into buckets of bounded size."""

from __future__ import annotations

import functools
import itertools
from collections import defaultdict
from typing import NamedTuple

import numpy as np
import torch

from funrl.mesh.plan import Box, Plan, Route, held, volume

DIRECT_BYTES = 256 << 10
NEAR = 32  # distances between ranks whose messages may be started as one group


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
      dtype: of everything in the bucket.
      sends, receives: messages, nearest ranks first.
      gather: of a native all-gather instead: the parts of this rank, each at the same place in every rank's shard.
      ranks: who takes part in the all-gather, in the order of the mesh.
      finished: leaves that this rank sends nothing more of.
    """

    dtype: torch.dtype
    finished: tuple[int, ...]
    sends: tuple[Message, ...] = ()
    receives: tuple[Message, ...] = ()
    gather: tuple[Part, ...] = ()
    ranks: tuple[int, ...] = ()


@functools.lru_cache(maxsize=64)
def program(
    plan: Plan, rank: int, bucket_bytes: int, native: bool = False, direct_bytes: int | None = None
) -> tuple[Step, ...]:
    """One rank's steps. Every rank has the same number of steps, of the same dtypes.

    A rank stages (sends and receives together) at most `bucket_bytes` in a step, unless that is less than one element
    from each of its peers.

    Args:
      native: gathers are all-gathers of the backend, not messages.
      direct_bytes: a part of as many is a message by itself, so that it need not be staged where it is contiguous;
        None: `DIRECT_BYTES`.
    """
    direct = DIRECT_BYTES if direct_bytes is None else direct_bytes
    buckets = _buckets(plan, bucket_bytes)
    last = {item.leaf: i for i, bucket in enumerate(buckets) for item in bucket}
    mine: dict[tuple[int, int, int], tuple[list[Pieces], list[Pieces]]] = {}
    tags: tuple[dict[int, int], dict[int, int]] = {}, {}
    steps = []
    for i, bucket in enumerate(buckets):
        dtype, route = plan.dtypes[bucket[0].leaf], plan.route(bucket[0].leaf)
        finished = tuple(dict.fromkeys(item.leaf for item in bucket if last[item.leaf] == i))
        if native and route.way == "gather":
            own = held(plan, rank)
            parts = tuple(Part(leaf, _cut(own[leaf].old, count)[at]) for leaf, at, count in bucket)
            ranks = next(group for group in route.groups if rank in group)
            steps.append(Step(dtype, finished, gather=parts, ranks=ranks))
            continue
        small, large = ((defaultdict[int, list[Part]](list), defaultdict[int, list[Part]](list)) for _ in range(2))
        for leaf, at, count in bucket:
            key = plan.takes[leaf], count, dtype.itemsize
            if key not in mine:
                mine[key] = _mine(plan.routes[key[0]], rank, count, direct // dtype.itemsize)
            for direction, transfers in enumerate(mine[key]):
                for peer, boxes, alone in transfers:
                    if at < len(boxes):
                        (large if alone[at] else small)[direction][peer].append(Part(leaf, boxes[at]))
        sends, receives = (_messages(*three, rank) for three in zip(small, large, tags, strict=True))
        steps.append(Step(dtype, finished, sends, receives))
    return tuple(steps)


def groups(step: Step, rank: int) -> list[tuple[list[int], list[int]]]:
    """The numbers of the receives and the sends of a step that are started together, group after group.

    NCCL cuts a group of hundreds of operations into kernels, on every rank in its own way, and a kernel of one rank can
    then wait for a later one of another that waits for it (https://github.com/pytorch/pytorch/issues/174288). Here both
    ranks of a message have it in the group of the same number, which holds those of similar distances only.
    """
    found: dict[int, tuple[list[int], list[int]]] = {}
    for way, messages in enumerate((step.receives, step.sends)):
        for i, message in enumerate(messages):
            found.setdefault((abs(message.peer - rank) - 1) // NEAR, ([], []))[way].append(i)
    return [found[number] for number in sorted(found)]


def _messages(
    small: dict[int, list[Part]], large: dict[int, list[Part]], tags: dict[int, int], rank: int
) -> tuple[Message, ...]:
    """The parts to or from each peer as messages: small ones together, each large one alone."""
    messages = []
    for peer in sorted(small.keys() | large.keys(), key=lambda other: (abs(other - rank), other)):
        tag = tags.get(peer, 0)
        if peer in small:
            messages.append(Message(peer, tag, tuple(small[peer])))
            tag += 1
        for part in large.get(peer, ()):
            messages.append(Message(peer, tag, (part,)))
            tag += 1
        tags[peer] = tag
    return tuple(messages)


class Pieces(NamedTuple):
    """A box on its way from or to a peer, in parts.

    Attributes:
      boxes: the parts.
      alone: which of them are messages by themselves.
    """

    peer: int
    boxes: tuple[Box, ...]
    alone: tuple[bool, ...]


def _mine(route: Route, rank: int, count: int, large: int) -> tuple[list[Pieces], list[Pieces]]:
    """What `rank` sends and what it receives on a route, in `count` parts; `large` elements are a message."""
    outgoing: list[tuple[int, Box]] = []
    incoming: list[tuple[int, Box]] = []
    if route.way == "pieces":
        outgoing = [(target, t.box) for t in route.transfers if t.source == rank for target in t.targets]
        incoming = [(t.source, t.box) for t in route.transfers if rank in t.targets]
    elif route.way == "gather":
        peers = [peer for group in route.groups if rank in group for peer in group if peer != rank]
        outgoing = [(peer, route.src.box(rank)) for peer in peers]
        incoming = [(peer, route.src.box(peer)) for peer in peers]

    def cut(peer: int, box: Box) -> Pieces:
        boxes = _cut(box, count)
        return Pieces(peer, boxes, tuple(volume(part) >= large for part in boxes))

    return [cut(*one) for one in outgoing], [cut(*one) for one in incoming]


class Item(NamedTuple):
    """The `at`-th of `count` parts of every box in which a leaf is sent."""

    leaf: int
    at: int
    count: int


def _buckets(plan: Plan, bucket_bytes: int) -> list[list[Item]]:
    """What is in every bucket: leaves of one dtype that go in one way, in turn until it is full."""
    if bucket_bytes < 1:
        raise ValueError(f"bucket_bytes is {bucket_bytes}, it must be at least 1")
    kinds: dict[tuple, list[int]] = {}
    for leaf, take in enumerate(plan.takes):
        route = plan.routes[take]
        if route.way in ("gather", "pieces"):
            kinds.setdefault((plan.dtypes[leaf], route.way, route.axes, route.src.sizes), []).append(leaf)
    costs: dict[tuple[int, int], tuple[int, int]] = {}
    buckets: list[list[Item]] = []
    for (dtype, *_), leaves in kinds.items():
        room = 0
        for leaf in leaves:
            key = plan.takes[leaf], dtype.itemsize
            if key not in costs:
                costs[key] = _parts(plan.route(leaf), dtype.itemsize, bucket_bytes)
            count, cost = costs[key]
            for at in range(count):
                if room < cost:
                    buckets.append([])
                    room = bucket_bytes
                buckets[-1].append(Item(leaf, at, count))
                room -= cost
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
    for source, targets, box in route.transfers:
        staged[source] += sizes[box] * len(targets)
        staged[list(targets)] += sizes[box]
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
