"""One rank's share of a plan: the messages that it sends and receives, cut into buckets of bounded size."""

from __future__ import annotations

import functools
import itertools
from typing import NamedTuple

import numpy as np
import torch

from funrl.mesh.message_sizes import message_bytes
from funrl.mesh.plan import Box, Plan, Route, held, volume

DIRECT_BYTES = 256 << 10
NEAR = 32  # distances between ranks whose messages may be started as one group


class Part(NamedTuple):
    """A box of one leaf, in the whole tensor's coordinates."""

    leaf: int
    box: Box


class Message(NamedTuple):
    """One message from one rank to another.

    Attributes:
      peer: the other rank.
      tag: how many messages have gone between the two in this direction before.
      parts: in the order in which they are packed.
    """

    peer: int
    tag: int
    parts: tuple[Part, ...]


class Step(NamedTuple):
    """One bucket of one rank.

    Attributes:
      dtype: of everything in the bucket.
      sends, receives: messages, nearest ranks first.
      gather: of a native all-gather instead: the parts of this rank, each at the same place in every rank's shard.
      axes, ranks: the all-gather's axes of the source mesh, and who takes part, in the order of the mesh.
      finished: leaves that this rank sends nothing more of.
    """

    dtype: torch.dtype
    finished: tuple[int, ...]
    sends: tuple[Message, ...] = ()
    receives: tuple[Message, ...] = ()
    gather: tuple[Part, ...] = ()
    axes: tuple[str, ...] = ()
    ranks: tuple[int, ...] = ()


@functools.lru_cache(maxsize=64)
def program(
    plan: Plan, rank: int, bucket_bytes: int, native: bool = False, direct_bytes: int | None = None
) -> tuple[Step, ...]:
    """One rank's steps. Every rank has the same number of steps, of the same dtypes.

    A rank stages (sends and receives together) at most `bucket_bytes` in a step, unless that is less than one element
    from each of its peers; where many ranks gather together, at most `staged_bytes`.

    Args:
      native: gathers are all-gathers of the backend, not messages.
      direct_bytes: a part of as many is a message by itself, so that it need not be staged where it is contiguous;
        None: `DIRECT_BYTES`.
    """
    direct = DIRECT_BYTES if direct_bytes is None else direct_bytes
    buckets = _buckets(plan, bucket_bytes)
    last = {item.leaf: i for i, bucket in enumerate(buckets) for item in bucket}
    mine: dict[tuple[int, int, int], tuple[list[Pieces], list[Pieces]]] = {}
    channels: tuple[dict[int, Channel], dict[int, Channel]] = {}, {}  # to the peers, and from them
    steps = []
    for i, bucket in enumerate(buckets):
        dtype = plan.dtypes[bucket[0].leaf]
        route = plan.route(bucket[0].leaf)
        finished = tuple(dict.fromkeys(item.leaf for item in bucket if last[item.leaf] == i))
        if native and route.way == "gather":
            own = held(plan, rank)
            parts = tuple(Part(leaf, _cut(own[leaf].old or (), count)[index]) for leaf, index, count in bucket)
            steps.append(Step(dtype, finished, gather=parts, axes=route.axes, ranks=plan.group(route, rank)))
            continue
        for leaf, index, count in bucket:
            key = plan.takes[leaf], count, dtype.itemsize
            if key not in mine:
                mine[key] = _mine(plan, plan.routes[key[0]], rank, count=count, large=direct // dtype.itemsize)
            for by_peer, pieces in zip(channels, mine[key], strict=True):
                for peer, boxes, alone in pieces:
                    if index < len(boxes):
                        by_peer.setdefault(peer, Channel(peer)).put(Part(leaf, boxes[index]), alone[index])
        sends, receives = (_messages(by_peer, rank) for by_peer in channels)
        steps.append(Step(dtype, finished, sends, receives=receives))
    return tuple(steps)


def starts_together(step: Step, rank: int) -> list[tuple[list[int], list[int]]]:
    """The numbers of the receives and the sends of a step that are started together, group after group.

    NCCL cuts a group of hundreds of operations into kernels, on every rank in its own way, and a kernel of one rank can
    then wait for a later one of another that waits for it (https://github.com/pytorch/pytorch/issues/174288). Here both
    ranks of a message have it in the group of the same number, which holds those of similar distances only.
    """
    groups: dict[int, tuple[list[int], list[int]]] = {}
    for way, messages in enumerate((step.receives, step.sends)):
        for i, message in enumerate(messages):
            groups.setdefault((abs(message.peer - rank) - 1) // NEAR, ([], []))[way].append(i)
    return [groups[number] for number in sorted(groups)]


class Channel:
    """Messages to one peer, or from it: small parts of a bucket go together, each large one alone."""

    def __init__(self, peer: int) -> None:
        self.peer = peer
        self.sent = 0
        self.together: list[Part] = []
        self.alone: list[Part] = []

    def put(self, part: Part, alone: bool) -> None:
        (self.alone if alone else self.together).append(part)

    def take(self) -> list[Message]:
        """The messages of what has been put in since the last time."""
        contents = [tuple(self.together)] if self.together else []
        contents += [(part,) for part in self.alone]
        messages = [Message(self.peer, self.sent + i, parts) for i, parts in enumerate(contents)]
        self.sent += len(messages)
        self.together = []
        self.alone = []
        return messages


def _messages(channels: dict[int, Channel], rank: int) -> tuple[Message, ...]:
    """The next messages of all channels, nearest peers first."""
    near = sorted(channels.values(), key=lambda channel: (abs(channel.peer - rank), channel.peer))
    return tuple(message for channel in near for message in channel.take())


class Pieces(NamedTuple):
    """A box on its way from or to a peer, in parts.

    Attributes:
      boxes: the parts.
      alone: which of them are messages by themselves.
    """

    peer: int
    boxes: tuple[Box, ...]
    alone: tuple[bool, ...]


def _mine(plan: Plan, route: Route, rank: int, count: int, large: int) -> tuple[list[Pieces], list[Pieces]]:
    """Pieces that `rank` sends and receives on a route, in `count` parts; `large` elements are a message."""
    outgoing: list[tuple[int, Box]] = []
    incoming: list[tuple[int, Box]] = []
    if route.way == "pieces":
        outgoing = [(target, t.box) for t in route.transfers if t.source == rank for target in t.targets]
        incoming = [(t.source, t.box) for t in route.transfers if rank in t.targets]
    elif route.way == "gather":
        group = plan.group(route, rank)
        boxes = {peer: route.src.box(plan.src_ranks.index(peer)) for peer in group}
        outgoing = [(peer, boxes[rank]) for peer in group if peer != rank]
        incoming = [(peer, boxes[peer]) for peer in group if peer != rank]

    def cut(peer: int, box: Box) -> Pieces:
        boxes = _cut(box, count)
        return Pieces(peer, boxes, tuple(volume(part) >= large for part in boxes))

    return [cut(*piece) for piece in outgoing], [cut(*piece) for piece in incoming]


class Item(NamedTuple):
    """The `at`-th of `count` parts of every box in which a leaf is sent."""

    leaf: int
    at: int
    count: int


def _buckets(plan: Plan, bucket_bytes: int) -> list[list[Item]]:
    """Fill buckets: leaves of one dtype and one route, in turn until a bucket is full."""
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
        most = staged_bytes(plan.route(leaves[0]), bucket_bytes)
        for leaf in leaves:
            key = plan.takes[leaf], dtype.itemsize
            if key not in costs:
                costs[key] = _parts(plan.route(leaf), plan.world, dtype.itemsize, bucket_bytes=most)
            count, cost = costs[key]
            for index in range(count):
                if room < cost:
                    buckets.append([])
                    room = most
                buckets[-1].append(Item(leaf, index, count))
                room -= cost
    return buckets


def staged_bytes(route: Route, bucket_bytes: int) -> int:
    """The most that a rank stages in a step: more than `bucket_bytes` where its own piece of a gather was small."""
    return message_bytes(route.gathers, bucket_bytes) if route.way == "gather" else bucket_bytes


def _parts(route: Route, world: int, itemsize: int, bucket_bytes: int) -> tuple[int, int]:
    """Number of parts for a leaf, so that no rank stages more than a bucket; and the most bytes that a part stages."""
    volumes = {t.box: volume(t.box) for t in route.transfers} or {(): 0}
    largest = max(volumes.values()) or volume(route.src.box(0))
    parts = 1
    while True:
        cost = _staged(route, world, parts) * itemsize
        if cost <= bucket_bytes or parts >= largest:
            return parts, cost
        parts = min(largest, max(parts + 1, parts * cost // bucket_bytes))


def _staged(route: Route, world: int, parts: int) -> int:
    """The most elements that any rank sends and receives of one part."""
    if route.way == "gather":
        return (route.gathers + 1) * max(volume(b) for b in _cut(route.src.box(0), parts))
    staged = np.zeros(world, dtype=np.int64)
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
