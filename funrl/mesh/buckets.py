"""One rank's share of a plan: the messages that it sends and receives, cut into buckets of bounded size."""

from __future__ import annotations

import functools
import itertools
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch

from funrl.mesh.message_sizes import message_bytes
from funrl.mesh.plan import Box, Plan, Route, Transfers, held, volume

GOLDEN_RATIO = 0.6180339887498949
DIRECT_BYTES = 256 << 10
MESSAGE_BYTES = 4 << 20  # between two ranks, sent and received, of the leaves that are sent together
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
    plan: Plan,
    rank: int,
    bucket_bytes: int,
    *,
    native: bool = False,
    direct_bytes: int | None = None,
    donates: bool = False,
) -> tuple[Step, ...]:
    """One rank's steps. Every rank has the same number of steps, of the same dtypes.

    A rank stages (sends and receives together) at most `bucket_bytes` in a step, unless that is less than one element
    from each of its peers; in an all-gather of many ranks, at most `staged_bytes`. A rank relays a part two steps after
    it has received it, or later.

    Args:
      native: gathers are all-gathers of the backend, not messages.
      direct_bytes: a part of as many is a message by itself, so that it need not be staged where it is contiguous;
        None: `DIRECT_BYTES`.
      donates: leaves are emptied once they are sent, so that only those of one bucket are sent at a time; else many
        are, to a few peers in each step, so that messages are few and large.
    """
    direct = DIRECT_BYTES if direct_bytes is None else direct_bytes
    channels: tuple[dict[int, Channel], dict[int, Channel]] = {}, {}  # to the peers, and from them
    edges = RankEdges(plan, rank)
    steps = []
    for dtype, finished, windows, gathered in _rounds(plan, bucket_bytes, native, donates):
        if gathered:
            own = held(plan, rank)
            route = plan.route(gathered[0].leaf)
            parts = tuple(Part(leaf, _cut(own[leaf].old or (), count)[index]) for leaf, index, count in gathered)
            steps.append(Step(dtype, finished, gather=parts, axes=route.axes, ranks=plan.group(route, rank)))
            continue
        used: tuple[dict[int, Channel], dict[int, Channel]] = {}, {}
        for items, hop, low, high in windows:
            for leaf, index, count in items:
                both = edges.find(plan.takes[leaf], hop, count)
                for known, by_peer, rows in zip(channels, used, both, strict=True):
                    for _, peer, parts in rows[bisect_left(rows, (low,)) : bisect_left(rows, (high,))]:
                        if index < len(parts):
                            if peer not in by_peer:
                                by_peer[peer] = known.setdefault(peer, Channel(peer))
                            box, elements = parts[index]
                            by_peer[peer].put(Part(leaf, box), elements * dtype.itemsize >= direct)
        sends, receives = (_messages(by_peer, rank) for by_peer in used)
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


class Item(NamedTuple):
    """The `index`-th of `count` parts of every box in which a leaf is sent."""

    leaf: int
    index: int
    count: int


class Window(NamedTuple):
    """Some items on one hop, between pairs of ranks.

    Attributes:
      items: the items.
      hop: as in `Transfers`.
      low, high: first key of the pairs, and the last one plus one; see `Links`.
    """

    items: tuple[Item, ...]
    hop: int
    low: int
    high: int


class ExchangeRound(NamedTuple):
    """One step of all ranks.

    Attributes:
      dtype: of everything in it.
      finished: leaves whose holders send nothing more of them.
      windows: what is sent.
      gathered: of a native all-gather instead: what is gathered.
    """

    dtype: torch.dtype
    finished: tuple[int, ...]
    windows: tuple[Window, ...] = ()
    gathered: tuple[Item, ...] = ()


class Links(NamedTuple):
    """Transfers of a route with keys that order them.

    Of one key and hop a rank sends at most one box and receives at most one: a key is a distance between ranks, and a
    number among the boxes between the same two.
    """

    transfers: Transfers
    keys: np.ndarray
    hops: int


@functools.lru_cache(maxsize=1024)
def _links(plan: Plan, take: int) -> Links:
    """The transfers of a route; those of a gather are from each rank to all others of its group."""
    route = plan.routes[take]
    transfers = route.transfers
    if transfers is None:
        groups = {rank: plan.group(route, rank) for rank in plan.src_ranks}
        pairs = np.array([(rank, peer) for rank, group in groups.items() for peer in group if peer != rank])
        boxes = {rank: route.src.box(position) for position, rank in enumerate(plan.src_ranks)}
        rows = np.array([boxes[rank] for rank in pairs[:, 0].tolist()]).reshape(len(pairs), len(route.src.shape), 2)
        transfers = Transfers(pairs[:, 0], pairs[:, 1], np.zeros(len(pairs), dtype=np.int64), rows)
    sources, targets, hops, _ = transfers
    pair = (hops * plan.world + sources) * plan.world + targets
    relayed = np.flatnonzero(hops)
    order = relayed[np.argsort(pair[relayed], kind="stable")]
    first = np.flatnonzero(np.diff(pair[order], prepend=-1))
    numbers = np.zeros(len(pair), dtype=np.int64)  # two ranks exchange one box on the first hop
    numbers[order] = np.arange(len(order)) - np.repeat(first, np.diff(first, append=len(order)))
    # Neighbouring distances have keys far apart, so that each rank has its peers at some keys of every interval.
    places = np.argsort(np.arange(plan.world) * GOLDEN_RATIO % 1).argsort()
    keys = numbers * plan.world + places[(targets - sources) % plan.world]
    return Links(transfers, keys, hops=1 + int(hops.max(initial=0)))


# Key and peer of a box that a rank sends or receives, and its parts with their elements.
Edge = tuple[int, int, list[tuple[Box, int]]]


class RankEdges:
    """Boxes that one rank sends and receives, by route."""

    def __init__(self, plan: Plan, rank: int) -> None:
        """Begin without any; they are found when they are asked for."""
        self._plan = plan
        self._rank = rank
        self._edges: dict[tuple[int, int, int], tuple[list[Edge], list[Edge]]] = {}

    def find(self, take: int, hop: int, count: int) -> tuple[list[Edge], list[Edge]]:
        """Edges that are sent and received on a hop of a route, by keys, each box in `count` parts."""
        if (take, hop, count) not in self._edges:
            transfers, keys, _ = _links(self._plan, take)
            on_hop = transfers.hops == hop
            both = []
            for own, peers in ((transfers.sources, transfers.targets), (transfers.targets, transfers.sources)):
                where = np.flatnonzero(on_hop & (own == self._rank))
                where = where[np.argsort(keys[where], kind="stable")]
                boxes = (tuple(map(tuple, box)) for box in transfers.boxes[where].tolist())
                parts = ([(part, volume(part)) for part in _cut(box, count)] for box in boxes)
                both.append(list(zip(keys[where].tolist(), peers[where].tolist(), parts, strict=True)))
            self._edges[take, hop, count] = both[0], both[1]
        return self._edges[take, hop, count]


@functools.lru_cache(maxsize=64)
def _rounds(plan: Plan, bucket_bytes: int, native: bool, donates: bool) -> tuple[ExchangeRound, ...]:
    """Every rank's steps: leaves of one dtype and kind of route after another."""
    if bucket_bytes < 1:
        raise ValueError(f"bucket_bytes is {bucket_bytes}, it must be at least 1")
    kinds: dict[tuple, list[int]] = {}
    for leaf, take in enumerate(plan.takes):
        route = plan.routes[take]
        if route.way in ("gather", "pieces"):
            gathers = native and route.way == "gather"
            kind = (route.axes, route.src.sizes) if gathers else _links(plan, take).hops
            kinds.setdefault((plan.dtypes[leaf], gathers, kind), []).append(leaf)
    rounds: list[ExchangeRound] = []
    for (_, gathers, _), leaves in kinds.items():
        if gathers:
            rounds += _gathers(plan, leaves, staged_bytes(plan.route(leaves[0]), bucket_bytes))
            continue
        if not donates:  # leaves of one route follow each other: their windows are the same
            leaves = sorted(leaves, key=lambda leaf: plan.takes[leaf])
        rounds += _exchanges(plan, leaves, bucket_bytes, donates)
    return tuple(rounds)


def _gathers(plan: Plan, leaves: Sequence[int], bucket_bytes: int) -> list[ExchangeRound]:
    """Fill buckets of native all-gathers with leaves of one dtype, in turn until a bucket is full."""
    buckets: list[list[Item]] = []
    room = 0
    for leaf in leaves:
        route = plan.route(leaf)
        staged = functools.partial(_gathered_bytes, route, plan.dtypes[leaf].itemsize)
        count = _parts(volume(route.src.box(0)), bucket_bytes, staged)
        cost = staged(count)
        for index in range(count):
            if room < cost:
                buckets.append([])
                room = bucket_bytes
            buckets[-1].append(Item(leaf, index, count))
            room -= cost
    last = {item.leaf: i for i, bucket in enumerate(buckets) for item in bucket}
    return [
        ExchangeRound(
            plan.dtypes[bucket[0].leaf],
            tuple(dict.fromkeys(item.leaf for item in bucket if last[item.leaf] == i)),
            gathered=tuple(bucket),
        )
        for i, bucket in enumerate(buckets)
    ]


def _gathered_bytes(route: Route, itemsize: int, parts: int) -> int:
    """Bytes that a rank stages of one of some parts of a gather."""
    return (route.gathers + 1) * max(map(volume, _cut(route.src.box(0), parts))) * itemsize


def staged_bytes(route: Route, bucket_bytes: int) -> int:
    """The most that a rank stages in a step: more than `bucket_bytes` where its own piece of a gather was small."""
    return message_bytes(route.gathers, bucket_bytes) if route.way == "gather" else bucket_bytes


def _parts(largest: int, most: int, staged: Callable[[int], int]) -> int:
    """Number of parts such that each stages at most `most` bytes, or has one of `largest` elements."""
    parts = 1
    while (cost := staged(parts)) > most and parts < largest:
        parts = min(largest, max(parts + 1, parts * cost // most))
    return parts


def _exchanges(plan: Plan, leaves: Sequence[int], bucket_bytes: int, donates: bool) -> list[ExchangeRound]:
    """Rounds of the messages of leaves of one dtype and number of hops.

    Leaves go in windows. A window's pairs of ranks are divided among rounds so that no rank stages more than a bucket.
    A window's hop is two windows after the hop before, which is two rounds at least; so hops of several windows share
    rounds, and each has its share of a bucket.
    """
    dtype = plan.dtypes[leaves[0]]
    hops = _links(plan, plan.takes[leaves[0]]).hops
    share = max(1, bucket_bytes // hops)
    windows = _windows(plan, leaves, share, donates)
    last = {item.leaf: i for i, window in enumerate(windows) for item in window}
    finished: dict[int, list[int]] = {}
    for leaf, i in last.items():
        finished.setdefault(i, []).append(leaf)
    bounds: dict[tuple, list[int]] = {}

    def slices(i: int, hop: int) -> list[Window]:
        """The rounds of a window's hop."""
        if not 0 <= i < len(windows):
            return []
        window = tuple(windows[i])
        contents = hop, *sorted(Counter((plan.takes[leaf], count) for leaf, _, count in window).items())
        if contents not in bounds:
            bounds[contents] = _bounds(plan, contents[1:], hop, share // dtype.itemsize)
        return [Window(window, hop, low, high) for low, high in itertools.pairwise(bounds[contents])]

    rounds = []
    for i in range(len(windows) + 2 * (hops - 1)):
        together = [slices(i - 2 * hop, hop) for hop in range(hops)]
        count = max(1, *(len(each) for each in together))
        for number in range(count):
            own = tuple(each[number] for each in together if number < len(each))
            rounds.append(ExchangeRound(dtype, tuple(finished.get(i, ())) if number == count - 1 else (), own))
    return rounds


def _windows(plan: Plan, leaves: Sequence[int], share: int, donates: bool) -> list[list[Item]]:
    """Divide leaves among windows: those of a bucket where they are donated, else as many as make large messages."""
    windows: list[list[Item]] = []
    costs: dict[int, tuple[int, int, int]] = {}
    by_pair = by_rank = 0  # bytes in the newest window
    for leaf in leaves:
        take = plan.takes[leaf]
        if take not in costs:
            costs[take] = _costs(plan, take, plan.dtypes[leaf].itemsize, share)
        count, pair, rank = costs[take]
        for index in range(count):
            is_full = by_pair + pair > MESSAGE_BYTES and by_rank + rank > share
            if not windows or by_pair + pair > share or is_full or (donates and by_rank + rank > share):
                windows.append([])
                by_pair = by_rank = 0
            windows[-1].append(Item(leaf, index, count))
            by_pair += pair
            by_rank += rank
    return windows


def _costs(plan: Plan, take: int, itemsize: int, share: int) -> tuple[int, int, int]:
    """Parts for a leaf, and bytes of one of them: between two ranks in both directions, and of a rank on all hops."""
    transfers = _links(plan, take).transfers

    def largest(count: int) -> int:
        return int(_part_volumes(plan, take, count).max()) * itemsize

    count = _parts(int(transfers.volumes.max()), max(1, share // 4), largest)
    volumes = _part_volumes(plan, take, count)
    loads = sum(np.bincount(ends, volumes, plan.world) for ends in (transfers.sources, transfers.targets))
    return count, 2 * largest(count), int(np.max(loads)) * itemsize


@functools.lru_cache(maxsize=1024)
def _part_volumes(plan: Plan, take: int, count: int) -> np.ndarray:
    """Elements of the largest of `count` parts of each box of a route."""
    boxes = _links(plan, take).transfers.boxes
    lengths = boxes[:, :, 1] - boxes[:, :, 0]
    codes = np.zeros(len(lengths), dtype=np.int64)
    for dim in lengths.T:
        codes = codes * (dim.max() + 1) + dim
    _, first, places = np.unique(codes, return_index=True, return_inverse=True)
    cuts = (_cut(tuple((0, length) for length in shape), count) for shape in lengths[first].tolist())
    return np.array([max(map(volume, cut)) for cut in cuts], dtype=np.int64)[places]


def _bounds(plan: Plan, contents: Sequence[tuple[tuple[int, int], int]], hop: int, most: int) -> list[int]:
    """Divide the keys of a window so that no rank sends and receives more than `most` elements between two bounds.

    Args:
      contents: (route, parts of each of its boxes) and the number of such items.
      hop: what is sent.
      most: elements, unless one key has more.
    """
    entries = []
    for (take, count), items in contents:
        transfers, keys, _ = _links(plan, take)
        where = np.flatnonzero(transfers.hops == hop)
        elements = items * _part_volumes(plan, take, count)[where]
        for ends in (transfers.sources, transfers.targets):
            entries.append((ends[where], keys[where], elements))
    ranks, keys, elements = (np.concatenate(columns) for columns in zip(*entries, strict=True))
    if not len(keys):
        return []
    order = np.lexsort((keys, ranks))
    ranks, keys, elements = ranks[order], keys[order], elements[order]
    total = np.cumsum(elements)
    end = int(keys.max()) + 1
    places = ranks * end + keys
    own = np.unique(ranks)
    ends = np.searchsorted(ranks, own, side="right")
    bounds = [int(keys.min())]
    while bounds[-1] < end:
        begins = np.searchsorted(places, own * end + bounds[-1])
        before = np.where(begins > 0, total[begins - 1], 0)
        stops = np.minimum(np.searchsorted(total, before + most, side="right"), ends)
        limits = keys[stops[stops < ends]]
        bounds.append(max(bounds[-1] + 1, int(limits.min(initial=end))))
    return bounds


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
