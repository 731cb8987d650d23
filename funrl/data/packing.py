"""Assign examples to ranks and pack them end to end into micro-batches of few sizes.

An example is a unit that must stay together: a row, a pair, a group. `pack` computes the rank, the micro-batch and the
offset of every row from the lengths alone, and every rank computes the same plan. All decisions use integer arithmetic,
so the plan is the same on every machine.
"""

from __future__ import annotations

import functools
import heapq
import itertools
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from funrl.processes.device_memory import copy_to_device

UNIT = 1024  # work of one token; the work of attention is rounded to 1 / UNIT of a token
_ENOUGH = 1.003
_TRIES = 64  # examples tried for one that fits, as examples of equal work can differ in length


class PackingError(ValueError):
    """An example fits no micro-batch; the message names it and a size that would hold it."""


class RowCost(NamedTuple):
    """Work of a row: n + pair * (pairs of a token and one that it sees), in units of one token's work.

    Attributes:
      pair: FLOPs of attention for one pair of tokens, divided by the FLOPs of everything else for one token. For a
        decoder, in both forward and backward, 4 * layers * heads * head / (2 * parameters).
      window: number of tokens that a token sees, including itself; None: all before it.
    """

    pair: float = 0.0
    window: int | None = None

    def work(self, lengths: np.ndarray) -> np.ndarray:
        """Work of rows of these lengths, int64 in 1 / UNIT of a token's."""
        n = np.asarray(lengths, dtype=np.int64)
        pairs = n * (n + 1) // 2
        if self.window is not None:
            beyond = np.maximum(n - self.window, 0)
            pairs = pairs - beyond * (beyond + 1) // 2
        return UNIT * n + np.rint(UNIT * self.pair * pairs).astype(np.int64)


class Packing(NamedTuple):
    """Places of all rows of a mini-batch. R ranks, M micro-batches on each.

    Attributes:
      rank: [rows] int64, the rank that computes each row.
      micro: [rows] int64, the number of its micro-batch on that rank.
      start: [rows] int64, the offset of its first token there; rows of an example are neighbours, in their order.
      size: [M, R] int64, tokens of each micro-batch, its padding included; one without rows has the smallest size.
    """

    rank: np.ndarray
    micro: np.ndarray
    start: np.ndarray
    size: np.ndarray

    def own(self, rank: int) -> Iterator[tuple[np.ndarray, int]]:
        """The rows of each micro-batch of a rank, in order of their offsets, and its size."""
        mine = np.flatnonzero(self.rank == rank)
        mine = mine[np.lexsort((mine, self.start[mine], self.micro[mine]))]
        cuts = np.searchsorted(self.micro[mine], np.arange(1, len(self.size)))
        for rows, size in zip(np.split(mine, cuts), self.size[:, rank], strict=True):
            yield rows, int(size)


def packed_sizes(token_budget: int, longest: int, multiple: int = 1, parts: int = 16) -> tuple[int, ...]:
    """Sizes of micro-batches, ascending: the token budget, its fractions k / parts down to a half, and so on.

    The same fractions are taken of its half, its quarter, down to 1 / 128.

    Args:
      token_budget: tokens of the largest micro-batch.
      longest: tokens of the longest example; the budget is raised to it.
      multiple: sizes are multiples of it, such as sp * tp.
      parts: fractions of the budget; half as many sizes lie between a size and its half.

    Example: packed_sizes(64, 10, 8, 4) is (8, 16, 24, 32, 48, 64), and packed_sizes(64, 90, 8, 4) ends with 72, 96.
    """
    most = max(token_budget, longest, 1)
    step = _round_up(-(-most // parts), multiple)
    sizes = [_round_up(most, step)]
    while sizes[-1] > max(step, most // 128):
        if sizes[-1] <= step * parts // 2:
            step = _round_up(-(-step // 2), multiple)
        sizes.append(sizes[-1] - step)
    return tuple(reversed(sizes))


def pack(
    lengths: Sequence[int] | np.ndarray,
    ranks: int,
    sizes: Sequence[int],
    max_segments: int,
    example: Sequence[int] | np.ndarray | None = None,
    cost: RowCost = RowCost(),  # noqa: B008  (immutable)
) -> Packing:
    """Pack rows into micro-batches so that micro-batch i takes all ranks about the same time.

    Several plans are compared (bins filled one by one with the largest example that fits, completely or to an equal
    share of the work; examples spread over a given number of bins, each to the bin with the least work). The result is
    the plan that finishes first if micro-batch i begins when all ranks have finished i - 1.

    Args:
      lengths: [rows] tokens of each row.
      ranks: R, how many ranks share the rows.
      sizes: tokens of a micro-batch, ascending, as `packed_sizes` makes them.
      max_segments: bound on the rows of a micro-batch.
      example: [rows] number of each row's example; rows of one example go together. None: each row alone.
      cost: how work grows with a row's length.

    Raises:
      PackingError: an example has more tokens than the largest size or more rows than `max_segments`.

    Example: pack([5, 1, 4, 2], 2, (6,), 8).rank is [0, 0, 1, 1].
    References: Johnson, 1973, Near-optimal bin packing algorithms (best fit, worst fit decreasing); Graham, 1969,
      https://doi.org/10.1137/0117039
    """
    lengths = np.asarray(lengths, dtype=np.int64)
    units = _units(lengths, example, cost)
    rule = _rule(units, ranks, sizes, max_segments=max_segments, cost=cost)
    rank, micro, size = _align(_best(units, rule), units, rule)
    return _packing(lengths, rank[units.of_row], micro[units.of_row], size=size, example=units.of_row)


def pack_owned(
    lengths: Sequence[int] | np.ndarray,
    owner: Sequence[int] | np.ndarray,
    ranks: int,
    sizes: Sequence[int],
    max_segments: int,
    cost: RowCost = RowCost(),  # noqa: B008  (immutable)
) -> Packing:
    """Pack rows as `pack` does, each on the rank that owns it.

    Args:
      lengths: [rows] tokens of each row.
      owner: [rows] the rank that has each row.
      ranks: R, how many ranks share the rows.
      sizes: tokens of a micro-batch, ascending, as `packed_sizes` makes them.
      max_segments: rows of a micro-batch, at most.
      cost: how work grows with a row's length.

    Raises:
      PackingError: as in `pack`.
    """
    lengths = np.asarray(lengths, dtype=np.int64)
    units = _units(lengths, None, cost)
    rule = _rule(units, ranks, sizes, max_segments=max_segments, cost=cost)
    rank, micro, size = _stay(np.array(owner, dtype=np.int64), units, rule)
    return _packing(lengths, rank, micro, size=size, example=units.of_row)


def _packing(
    lengths: np.ndarray, rank: np.ndarray, micro: np.ndarray, size: np.ndarray, example: np.ndarray
) -> Packing:
    """Packing of rows with known ranks and micro-batches, which keeps the rows of an example together."""
    order = np.lexsort((np.arange(len(lengths)), example, micro, rank))
    ends = np.cumsum(lengths[order])
    first = np.ones(len(order), dtype=bool)
    first[1:] = (rank[order][1:] != rank[order][:-1]) | (micro[order][1:] != micro[order][:-1])
    before = ends - lengths[order]
    start = np.empty_like(lengths)
    start[order] = before - np.maximum.accumulate(np.where(first, before, 0))
    return Packing(rank, micro, start, size=size)


def lockstep_work(packing: Packing, lengths: Sequence[int] | np.ndarray, cost: RowCost) -> int:
    """Time of a packing: sum over micro-batches of the slowest rank's work, in 1 / UNIT of a token's work.

    The work of the rows divided by `ranks` times this is the efficiency.
    """
    lengths = np.asarray(lengths, dtype=np.int64)
    total = UNIT * packing.size
    np.add.at(total, (packing.micro, packing.rank), cost.work(lengths) - UNIT * lengths)
    return int(total.max(1, initial=0).sum())


class _Ascending(NamedTuple):
    """Examples in ascending order of work, as plain numbers for loops over them."""

    work: list[int]
    tokens: list[int]
    rows: list[int]


class _Units(NamedTuple):
    """Examples: [U] arrays, and [rows] which of them a row belongs to."""

    tokens: np.ndarray
    rows: np.ndarray
    work: np.ndarray
    of_row: np.ndarray

    def ascending(self, order: np.ndarray) -> _Ascending:
        """Examples by their numbers, which are in ascending order of work."""
        return _Ascending(*(column[order].tolist() for column in (self.work, self.tokens, self.rows)))


class _Rule(NamedTuple):
    """Bins, and for each number of tokens the largest work of an example: that of one row, up to rounding."""

    ranks: int
    sizes: np.ndarray
    max_segments: int
    most_work: list[int]

    @property
    def largest(self) -> int:
        return int(self.sizes[-1])

    @property
    def overhead(self) -> int:
        """Fixed work of a micro-batch: launching kernels and reading weights."""
        return UNIT * self.largest // 64


def _units(lengths: np.ndarray, example: Sequence[int] | np.ndarray | None, cost: RowCost) -> _Units:
    work = cost.work(lengths)
    if example is None:
        return _Units(lengths, np.ones_like(lengths), work, of_row=np.arange(len(lengths)))
    numbers, of_row = np.unique(np.asarray(example), return_inverse=True)
    totals = np.zeros((3, len(numbers)), dtype=np.int64)
    for total, column in zip(totals, (lengths, np.ones_like(lengths), work), strict=True):
        np.add.at(total, of_row, column)
    tokens, rows, works = totals
    return _Units(tokens, rows, works, of_row=of_row)


def _rule(units: _Units, ranks: int, sizes: Sequence[int], max_segments: int, cost: RowCost) -> _Rule:
    """The bins for some examples. Raises: PackingError, an example fits nowhere."""
    for column, limit, unit in ((units.tokens, sizes[-1], "tokens"), (units.rows, max_segments, "rows")):
        if len(column) and column.max() > limit:
            row = int(np.flatnonzero(units.of_row == column.argmax())[0])
            raise PackingError(
                f"the example of row {row} has {column.max()} {unit}, a micro-batch holds {limit}; raise the "
                f"{'token budget' if unit == 'tokens' else 'number of segments'}"
            )
    most = _most_work(cost, int(sizes[-1]), max_segments)
    return _Rule(ranks, np.asarray(sizes, dtype=np.int64), max_segments, most_work=most)


@functools.lru_cache(maxsize=8)
def _most_work(cost: RowCost, largest: int, max_segments: int) -> list[int]:
    return (cost.work(np.arange(largest + 1)) + max_segments).tolist()


def _best(units: _Units, rule: _Rule) -> np.ndarray:
    """The plan that finishes first, or the first plan within `_ENOUGH` of perfect balance without padding."""
    best = np.zeros(0, dtype=np.int64)
    least = None
    for bins in _plans(units, rule):
        work, _ = _bin_work(bins, int(bins.max(initial=-1)) + 1, units, rule=rule)
        time = int(np.sort(work)[::-1][:: rule.ranks].sum())
        cost = time + -(-len(work) // rule.ranks) * rule.overhead
        if least is None or cost < least:
            best = bins
            least = cost
        if time * rule.ranks <= _ENOUGH * int(units.work.sum()):
            break
    return best


def _plans(units: _Units, rule: _Rule) -> Iterator[np.ndarray]:
    """Candidate plans, each the number of every example's bin [U]."""
    order = np.argsort(units.work, kind="stable")
    ascending = units.ascending(order)
    fewest = _fewest(int(units.tokens.sum()), int(units.rows.sum()), rule, ranks=rule.ranks)
    candidates = itertools.chain(
        (_fill(ascending, rule, level) for level in (False, True)),
        (_spread(ascending, rule.ranks * deep, rule) for deep in range(fewest, fewest + 3)),
    )
    for of_place in candidates:
        if of_place is not None:
            bins = np.empty(len(order), dtype=np.int64)
            bins[order] = of_place
            yield bins


def _fewest(tokens: int, rows: int, rule: _Rule, ranks: int) -> int:
    """Lower bound on the number of micro-batches per rank."""
    return max(1, -(-tokens // (ranks * rule.largest)), -(-rows // (ranks * rule.max_segments)))


def _fill(ascending: _Ascending, rule: _Rule, level: bool) -> list[int]:
    """Fill bins one by one with the largest example that fits; returns the bin of each example.

    Args:
      ascending: the examples.
      rule: of the bins.
      level: let each `ranks` bins end at the same work: that of the largest example left, or what is left divided by
        the bins that it takes at least, whichever is more. False: fill them to the largest size.
    """
    work, tokens, rows = ascending
    largest = rule.largest
    most_work = rule.most_work
    left = len(work)
    bins = [0] * left
    nearest = list(range(left + 1))  # see `_nearest`; places count from 1
    remaining = sum(work)
    count = target = 0
    while left:
        if count % rule.ranks == 0:
            share = -(-remaining // rule.ranks)
            deep = max(1, -(-share * 50 // (51 * UNIT * largest)))  # 2% above the size is a matter of attention
            target = max(work[_nearest(nearest, len(work)) - 1], -(-share // deep))
        gap = target if level else remaining
        room = largest
        segments = rule.max_segments
        while left and segments:
            place = _nearest(nearest, bisect_right(work, min(gap, most_work[room])))
            tries = _TRIES
            while place and tries and (tokens[place - 1] > room or rows[place - 1] > segments):
                place = _nearest(nearest, place - 1)
                tries -= 1
            if not place or not tries:
                break
            nearest[place] = place - 1
            index = place - 1
            bins[index] = count
            gap -= work[index]
            room -= tokens[index]
            segments -= rows[index]
            remaining -= work[index]
            left -= 1
        count += 1
    return bins


def _nearest(nearest: list[int], place: int) -> int:
    """The largest place up to one that is left; 0: none is.

    Args:
      nearest: of each place itself where it is left, else a lower one that is no lower than the result. Shortened.
    """
    while nearest[place] != place:
        nearest[place] = nearest[nearest[place]]
        place = nearest[place]
    return place


def _spread(ascending: _Ascending, count: int, rule: _Rule) -> list[int] | None:
    """Give each example, the largest first, to the bin with the least work; close bins that it does not fit in.

    Returns: the bin of each example; None where all bins were closed before the last example.
    """
    heap = list(range(count))  # work * count + number of each bin that is open
    room = [rule.largest] * count
    segments = [rule.max_segments] * count
    bins = [0] * len(ascending.work)
    for index in range(len(bins) - 1, -1, -1):
        tokens = ascending.tokens[index]
        rows = ascending.rows[index]
        while heap and (tokens > room[heap[0] % count] or rows > segments[heap[0] % count]):
            heapq.heappop(heap)
        if not heap:
            return None
        least = heap[0] % count
        bins[index] = least
        room[least] -= tokens
        segments[least] -= rows
        heapq.heapreplace(heap, heap[0] + ascending.work[index] * count)
    return bins


def _bin_work(bins: np.ndarray, count: int, units: _Units, rule: _Rule) -> tuple[np.ndarray, np.ndarray]:
    """Work of each bin, its padding included, and its size."""
    tokens, work = np.zeros((2, count), dtype=np.int64)
    np.add.at(tokens, bins, units.tokens)
    np.add.at(work, bins, units.work)
    size = rule.sizes[np.searchsorted(rule.sizes, tokens)]
    return work + UNIT * (size - tokens), size


def _align(bins: np.ndarray, units: _Units, rule: _Rule) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Rank and micro-batch of each example, and the sizes [M, R]. Bins of similar work get the same micro-batch.

    Among these, the bin with the most work goes to the rank with the least work so far.
    """
    deep = max(1, -(-(int(bins.max(initial=-1)) + 1) // rule.ranks))
    work, size = _bin_work(bins, deep * rule.ranks, units, rule=rule)
    by_work = np.argsort(-work, kind="stable").reshape(deep, rule.ranks)
    had = np.zeros(rule.ranks, dtype=np.int64)
    rank, micro = np.empty((2, by_work.size), dtype=np.int64)
    sizes = np.empty((deep, rule.ranks), dtype=np.int64)
    for number, these in enumerate(by_work):
        least_first = np.argsort(had, kind="stable")
        rank[these] = least_first
        micro[these] = number
        sizes[number, least_first] = size[these]
        had[least_first] += work[these]
    return rank[bins], micro[bins], sizes


def _stay(homes: np.ndarray, units: _Units, rule: _Rule) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """As `_align`, with given ranks of the examples."""
    alone = rule._replace(ranks=1)
    order = np.lexsort((units.work, homes))
    ends = np.cumsum(np.bincount(homes, minlength=rule.ranks)).tolist()
    columns = units.ascending(order)
    parts = [_Ascending(*(column[begin:end] for column in columns)) for begin, end in itertools.pairwise([0, *ends])]
    full = [_fill(part, alone, level=False) for part in parts]
    deep = max([1, *(max(bins, default=0) + 1 for bins in full)])
    plans = [full]
    if deep > 1:
        plans.append([_spread(part, deep, alone) or bins for part, bins in zip(parts, full, strict=True)])
    candidates = []
    for plan in plans:
        bins = np.empty(len(homes), dtype=np.int64)
        bins[order] = homes[order] * deep + np.fromiter(itertools.chain(*plan), np.int64, len(homes))
        work, size = (x.reshape(rule.ranks, deep) for x in _bin_work(bins, rule.ranks * deep, units, rule=rule))
        by_work = np.argsort(-work, axis=1, kind="stable")
        time = int(np.take_along_axis(work, by_work, 1).max(0).sum())
        candidates.append((time, bins, by_work, size))
    _, bins, by_work, size = min(candidates, key=lambda candidate: candidate[0])
    micro = np.argsort(by_work, axis=1).ravel()[bins]
    return homes, micro, np.take_along_axis(size, by_work, 1).T


def pad_rows(rows: Sequence[Sequence[int]], pad: int, multiple: int = 1) -> np.ndarray:
    """Right-pad rows of token ids to int32 [rows, width], with a width that is a multiple of `multiple`."""
    width = _round_up(max(map(len, rows), default=0), multiple)
    out = np.full((len(rows), width), pad, dtype=np.int32)
    for to, row in zip(out, rows, strict=True):
        to[: len(row)] = row
    return out


def _round_up(length: int, multiple: int) -> int:
    return -(-length // multiple) * multiple


class Slots(NamedTuple):
    """Source of each token of a packed micro-batch [1, N]. S is the fixed maximum of segments.

    Attributes:
      source: [N] int64, index into the flattened rows [b * T]; 0 at padding.
      used: [1, N] bool, false at padding.
      positions: [1, N] int32, 0 at the first token of each row and at padding.
      segments: [1, N] int32, 1 for the first row, 2 for the next, ..., 0 at padding.
      offsets: [S + 1] int32, start and end of the segments, as `varlen_attention` takes them.
      total: number of tokens that are not padding; they come first.
      longest: length of the longest row, rounded up to a power of two or N, so that few values occur.
    """

    source: Tensor
    used: Tensor
    positions: Tensor
    segments: Tensor
    offsets: Tensor
    total: int
    longest: int

    def to(self, device: torch.device) -> Slots:
        """The same on a device."""
        return self._make(copy_to_device(x, device) if isinstance(x, Tensor) else x for x in self)


def shortest_first(lengths: np.ndarray, offsets: np.ndarray, *groups: np.ndarray) -> np.ndarray:
    """Order of rows in their micro-batch: by length, so that neighbours of one length share a call of CPU attention.

    Args:
      lengths: [rows] tokens of each row.
      offsets: [rows] by which rows of one length are in order: `Packing.start`, or numbers in its order.
      groups: [rows] each, keys that come before the length, the main one last; none if it is one micro-batch.

    Example:
      >>> shortest_first(np.array([3, 2, 3]), np.array([5, 3, 0])).tolist()
      [1, 2, 0]
    """
    return np.lexsort((offsets, lengths, *groups))


def slots(lengths: np.ndarray, rows: np.ndarray, width: int, size: int, max_segments: int) -> Slots:
    """Slots of some rows, end to end in the given order.

    Args:
      lengths: [b] tokens of this rank's rows.
      rows: indices of some of them, as in `Packing.own` but local to this rank.
      width: T of the rows' fields [b, T].
      size: N, at least the sum of the rows' lengths.
      max_segments: S, at least the number of rows.

    Raises:
      ValueError: there are more rows or tokens than fit.

    Example: slots([2, 3], [1, 0], 4, 6, 2).source is [4, 5, 6, 0, 1, 0], .offsets is [0, 3, 5].
    """
    rows = np.asarray(rows, dtype=np.int64)
    own = np.asarray(lengths, dtype=np.int64)[rows]
    total = int(own.sum())
    if len(rows) > max_segments or total > size:
        raise ValueError(f"{len(rows)} rows of {total} tokens do not fit in {max_segments} segments of {size} tokens")
    ends = np.cumsum(own)
    positions = np.zeros(size, dtype=np.int32)
    positions[:total] = np.arange(total) - np.repeat(ends - own, own)
    source = np.zeros(size, dtype=np.int64)
    segments = np.zeros(size, dtype=np.int32)
    source[:total] = np.repeat(rows * width, own) + positions[:total]
    segments[:total] = np.repeat(np.arange(1, len(rows) + 1), own)
    offsets = np.full(max_segments + 1, total, dtype=np.int32)
    offsets[0] = 0
    offsets[1 : len(rows) + 1] = ends
    longest = min(size, 1 << max(int(own.max(initial=1)) - 1, 0).bit_length())
    segments_1N = torch.from_numpy(segments).unsqueeze(0)
    return Slots(
        torch.from_numpy(source),
        used=segments_1N > 0,
        positions=torch.from_numpy(positions).unsqueeze(0),
        segments=segments_1N,
        offsets=torch.from_numpy(offsets),
        total=total,
        longest=longest,
    )


def pack_tokens(x_bT: Tensor, at: Slots, fill: float = 0) -> Tensor:
    """A field [b, T, ...] of a rank's rows as [1, N, ...]; `fill` at padding."""
    x_1N = x_bT.flatten(0, 1)[at.source].unsqueeze(0)
    return torch.where(at.used.view(1, -1, *(1,) * (x_bT.ndim - 2)), x_1N, fill)


def unpack_tokens(x_1N: Tensor, at: Slots, into_bT: Tensor) -> Tensor:
    """Write the tokens of a micro-batch to their places in `into_bT` [b, T, ...], in place."""
    into_bT.view(-1, *into_bT.shape[2:])[at.source[: at.total]] = x_1N[0, : at.total].to(into_bT.dtype)
    return into_bT
