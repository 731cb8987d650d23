"""Rows on their ranks: the table that every rank knows, what is taken over all rows, and the move to other ranks.

Rows of a step are numbered 0 to B - 1. `owner` [B] names each row's rank, by its index over `axes`: the mesh axes that
split rows. A rank holds its rows' tokens [b, T] in the order of their numbers; ranks that differ in other axes hold the
same rows. Nothing here depends on the order in which ranks answer: results have the same bits on every mesh.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from funrl.across import Across, row_sums
from funrl.mesh.collectives import psum
from funrl.mesh.exchange import exchange
from funrl.mesh.mesh import Axes, Mesh, coordinates

DIGIT = 16  # bits that one count of `kth_largest` decides


def own_rows(owner: np.ndarray, mesh: Mesh, axes: Axes) -> Tensor:
    """The numbers of this rank's rows, ascending, int64."""
    return torch.from_numpy(np.flatnonzero(owner == mesh.index(axes)))


def gather_table(columns: Mapping[str, Tensor], owner: np.ndarray, mesh: Mesh, axes: Axes) -> dict[str, Tensor]:
    """Columns of all rows on every rank, exactly as their owners have them, in one collective.

    Args:
      columns: [b] or [b, K], of this rank's rows; the same names, K and dtypes on every rank.

    Returns: [B] or [B, K], on the device of each column.
    """
    own = own_rows(owner, mesh, axes)
    words = [_words(x).reshape(len(own), x.shape[1:].numel()) for x in columns.values()]
    mine = torch.cat(words, 1).to(mesh.device) if words else torch.zeros(len(own), 0, dtype=torch.int64)
    # The bits of each row, 0 on all ranks but its owner: their sum as integers is exact for any dtype.
    there = own.to(mine.device, non_blocking=True)
    whole = psum(mine.new_zeros(len(owner), mine.shape[1]).index_copy(0, there, mine), mesh, axes)
    parts = whole.split([word.shape[1] for word in words], 1)
    return {
        name: _from_words(part.to(x.device), x.dtype).reshape(len(owner), *x.shape[1:])
        for (name, x), part in zip(columns.items(), parts, strict=True)
    }


def across(owner: np.ndarray, mesh: Mesh, axes: Axes) -> Across:
    """Operations of advantage pieces over all rows, where this rank has the tokens of some.

    `sums` is one collective of B numbers; `kth_largest` is one of 2^16 counts for every 16 bits of its dtype.
    """
    own = own_rows(owner, mesh, axes)

    def sums(x_bT: Tensor) -> Tensor:
        return gather_table({"sum": row_sums(x_bT)}, owner, mesh, axes)["sum"]

    def take_own(x_B: Tensor) -> Tensor:
        return x_B[own.to(x_B.device)]

    return Across(sums, take_own, lambda x_bT, k: kth_largest(x_bT, k, mesh, axes))


def kth_largest(x_bT: Tensor, k: Tensor, mesh: Mesh, axes: Axes) -> Tensor:
    """The k-th largest number of all ranks' x.

    Its digits of 16 bits are found one after the other, the highest first: all ranks count how many of the numbers that
    agree with it so far have which next digit. A NaN is above all numbers, -0 is 0.

    Args:
      x_bT: floats of any shape, on every rank of `axes` its own.
      k: an integer tensor of no dims, from 1; above the count of all numbers it is that count.

    Returns: a number of x's dtype and of no dims, the same on every rank.
    """
    wide = x_bT.to(torch.promote_types(x_bT.dtype, torch.float32)).flatten()
    bits = wide.element_size() * 8
    # What is left out of a choice is -inf, often most numbers: these are counted once and not looked at again.
    parts = [_ascending(part[part != -torch.inf]) for part in wide.split(1 << 20)]
    lowest, left_out = _ascending(wide.new_tensor(-torch.inf)), wide.numel() - sum(map(len, parts))
    k, prefix = k.long().to(wide.device), torch.zeros((), dtype=torch.int64, device=wide.device)
    for shift in range(bits - DIGIT, -1, -DIGIT):
        first = shift + DIGIT == bits
        # Keys are signed, and so is their highest digit.
        base = prefix.new_tensor(-(1 << (DIGIT - 1))) if first else prefix << DIGIT
        counts = torch.zeros(1 << DIGIT, dtype=torch.int64, device=wide.device)
        for part in parts:
            digit = (part >> shift) - base
            counts += torch.bincount(digit[(digit >= 0) & (digit < 1 << DIGIT)], minlength=1 << DIGIT)
        digit = (lowest >> shift) - base
        within = (digit >= 0) & (digit < 1 << DIGIT)
        counts[digit.clamp(0, (1 << DIGIT) - 1)] += left_out * within
        counts = psum(counts.to(mesh.device), mesh, axes).to(wide.device)
        at_least = counts.flip(0).cumsum(0).flip(0)  # numbers whose digit is this one or a higher
        k = torch.minimum(k.clamp_min(1), at_least[0])
        digit = (at_least >= k).sum() - 1
        k = k - (at_least[digit] - counts[digit])
        prefix = base + digit
    return _from_ascending(prefix, wide.dtype).to(x_bT.dtype)


class Moved(NamedTuple):
    """Rows after a move.

    Attributes:
      fields: [b', T', ...] of the rows that this rank has now, in the order of their numbers.
      sent, received: bytes to and from other ranks.
    """

    fields: dict[str, Tensor]
    sent: int
    received: int


def move_rows(
    fields: Mapping[str, Tensor],
    lengths: np.ndarray,
    owner: np.ndarray,
    to: np.ndarray,
    mesh: Mesh,
    axes: Axes,
    fill: Mapping[str, float] | None = None,
    multiple: int = 8,
) -> Moved:
    """Send rows from the ranks that have them to others, all fields in one collective, and no padding.

    Every rank knows `lengths`, `owner` and `to` of all rows. Beside the rows before and after, a rank holds a copy of
    what it sends and one of what it receives.

    Args:
      fields: [b, T, ...] of this rank's rows in the order of their numbers; the same names and dtypes on every rank.
        int64 is sent as int32, which rows have anyhow: ids, places and numbers of sequences are below 2^31.
      lengths: [B] tokens of each row.
      owner, to: [B] each row's rank before and after.
      fill: by field, what stands behind a row's end; 0 where it is not named.
      multiple: T' is the longest row's length rounded up to a multiple of it.
    """
    ranks, me = mesh.size(axes), int(mesh.index(axes))
    mine, coming = np.flatnonzero(owner == me), np.flatnonzero(to == me)
    sends = [mine[to[mine] == peer] for peer in range(ranks)]
    receives = [coming[owner[coming] == peer] for peer in range(ranks)]
    return _exchanged(fields, lengths, (mine, sends), (coming, receives), me, mesh, axes, fill or {}, multiple)


def hand_over(
    fields: Mapping[str, Tensor],
    lengths: np.ndarray,
    owner: np.ndarray,
    source: Mesh,
    to: np.ndarray,
    target: Mesh,
    fill: Mapping[str, float] | None = None,
    multiple: int = 8,
) -> Moved:
    """`move_rows` between two meshes over the same processes, such as the one to generate on and the one to train on.

    A row that several ranks of `source` hold alike is sent by one of them to each rank of `target` that needs it, and
    by none to a rank that has it.

    Args:
      owner, to: [B] each row's rank before and after, as indices over the row axes of `source` and of `target`.
    """
    me, world, everyone = target.rank, target.world, tuple(target.sizes)
    has, wants = row_indices(source), row_indices(target)

    def sender(index: int, peer: int) -> int:
        return int(_senders(has, index, np.array([peer]))[0])

    mine, coming = np.flatnonzero(owner == has[me]), np.flatnonzero(to == wants[me])
    none = mine[:0]
    sends = [mine[to[mine] == wants[peer]] if sender(int(has[me]), peer) == me else none for peer in range(world)]
    from_peer = [sender(index, me) for index in range(source.size(source.row_axes))]
    by_index = [coming[owner[coming] == index] for index in range(len(from_peer))]
    receives = [none] * world
    for index, peer in enumerate(from_peer):
        receives[peer] = np.concatenate([receives[peer], by_index[index]])
    return _exchanged(fields, lengths, (mine, sends), (coming, receives), me, target, everyone, fill or {}, multiple)


def _senders(has: np.ndarray, index: int, peers: np.ndarray) -> np.ndarray:
    """The rank that hands rows of an index over to each of some peers: itself where it has them.

    Args:
      has: [world] the index whose rows each rank has.
    """
    holders = np.flatnonzero(has == index)
    return np.where(has[peers] == index, peers, holders[peers % len(holders)])


class MoveTraffic(NamedTuple):
    """Tokens that a move sends, by rank.

    Attributes:
      sent, received: [ranks] tokens to and from other ranks.
      messages: [ranks] how many ranks each one sends to.
    """

    sent: np.ndarray
    received: np.ndarray
    messages: np.ndarray


def move_traffic(lengths: np.ndarray, owner: np.ndarray, source: Mesh, to: np.ndarray, target: Mesh) -> MoveTraffic:
    """Traffic of `move_rows`, or of `hand_over` where the meshes differ; by index over the row axes, or by rank.

    Args: as there.
    """
    if source.sizes == target.sizes:
        has = wants = np.arange(target.size(target.row_axes))
    else:
        has, wants = row_indices(source), row_indices(target)
    ways, of_row = np.unique(np.stack([owner, to]), axis=1, return_inverse=True)
    tokens = np.bincount(of_row.ravel(), lengths, minlength=ways.shape[1]).astype(np.int64)
    sent, received, messages = np.zeros((3, len(has)), dtype=np.int64)
    for (index, wanted), count in zip(ways.T[tokens > 0], tokens[tokens > 0], strict=True):
        peers = np.flatnonzero((wants == wanted) & (has != index))
        senders = _senders(has, index, peers)
        received[peers] += count
        np.add.at(sent, senders, count)
        np.add.at(messages, senders, 1)
    return MoveTraffic(sent, received, messages)


def token_bytes(fields: Mapping[str, Tensor]) -> int:
    """Bytes that a move sends of one token."""
    return sum(_record(x).bytes for x in fields.values())


def row_indices(mesh: Mesh) -> np.ndarray:
    """[world] the index over the row axes of every rank of a mesh."""
    at = [coordinates(mesh.sizes, rank) for rank in range(mesh.world)]
    index = np.zeros(mesh.world, dtype=np.int64)
    for axis in mesh.row_axes:
        index = index * mesh.sizes[axis] + np.array([one[axis] for one in at])
    return index


def _exchanged(
    fields: Mapping[str, Tensor],
    lengths: np.ndarray,
    before: tuple[np.ndarray, list[np.ndarray]],
    after: tuple[np.ndarray, list[np.ndarray]],
    me: int,
    mesh: Mesh,
    axes: Axes,
    fill: Mapping[str, float],
    multiple: int,
) -> Moved:
    """The rows after an exchange.

    Args:
      before: numbers of the rows that this rank has, and of those that it sends to each rank of `axes`.
      after: numbers of the rows that this rank is to have, and of those that it receives of each.
      me: this rank's place among the peers.
    """
    (mine, sends), (coming, receives) = before, after
    if not fields:
        return Moved({}, 0, 0)
    send = [int(lengths[rows].sum()) for rows in sends]
    receive = [int(lengths[rows].sum()) for rows in receives]
    sent_rows, received_rows = np.concatenate(sends), np.concatenate(receives)
    width = -(-int(lengths[coming].max(initial=1)) // multiple) * multiple
    records = {name: _record(x) for name, x in fields.items()}
    some = next(iter(fields.values()))
    source = _tokens(np.searchsorted(mine, sent_rows), lengths[sent_rows], some.shape[1]).to(some.device)
    flat = torch.cat(
        [_bytes(x.flatten(0, 1)[source].to(records[name].dtype)) for name, x in fields.items()], 1
    )  # one line of bytes a token
    arrived = exchange(flat, send, receive, mesh, axes)
    del flat
    target = _tokens(np.searchsorted(coming, received_rows), lengths[received_rows], width).to(some.device)
    begin, out = 0, {}
    for name, x in fields.items():
        record = records[name]
        column = arrived[:, begin : begin + record.bytes].clone(memory_format=torch.contiguous_format)
        begin += record.bytes
        rows = x.new_full((len(coming) * width, *x.shape[2:]), fill.get(name, 0))
        rows[target] = column.view(-1).view(record.dtype).reshape(-1, *x.shape[2:]).to(x.dtype)
        out[name] = rows.unflatten(0, (len(coming), width))
    line = token_bytes(fields)
    return Moved(out, (sum(send) - send[me]) * line, (sum(receive) - receive[me]) * line)


class _Record(NamedTuple):
    """Format in which one token of a field is sent."""

    dtype: torch.dtype
    bytes: int


def _record(x_bT: Tensor) -> _Record:
    dtype = torch.int32 if x_bT.dtype == torch.int64 else x_bT.dtype
    return _Record(dtype, x_bT.shape[2:].numel() * dtype.itemsize)


def _bytes(x: Tensor) -> Tensor:
    """[n, ...] as bytes [n, bytes of one]."""
    one = x.shape[1:].numel() * x.element_size()
    return x.contiguous().reshape(-1).view(torch.uint8).view(len(x), one)


def _tokens(rows: np.ndarray, lengths: np.ndarray, width: int) -> Tensor:
    """Places of the tokens of some rows in flattened [b * width], end to end."""
    ends = np.cumsum(lengths)
    total = int(ends[-1]) if len(ends) else 0
    return torch.from_numpy(np.repeat(rows * width - (ends - lengths), lengths) + np.arange(total))


def _words(x: Tensor) -> Tensor:
    """Bits of each number in an int64 of its own."""
    if x.dtype == torch.float64:
        return x.contiguous().view(torch.int64)
    if x.dtype.is_floating_point:
        return x.float().contiguous().view(torch.int32).long()
    return x.long()


def _from_words(x: Tensor, dtype: torch.dtype) -> Tensor:
    if dtype == torch.float64:
        return x.contiguous().view(dtype)
    if dtype.is_floating_point:
        return x.int().view(torch.float32).to(dtype)
    return x.to(dtype)


def _ascending(x: Tensor) -> Tensor:
    """int64 keys in the order of x."""
    x = torch.where(x.isnan(), torch.nan, x + 0.0)  # one NaN, one zero
    bits, low = (x.view(torch.int64), 2**63 - 1) if x.dtype == torch.float64 else (x.view(torch.int32), 2**31 - 1)
    return torch.where(bits < 0, bits ^ low, bits).long()


def _from_ascending(key: Tensor, dtype: torch.dtype) -> Tensor:
    if dtype == torch.float64:
        return torch.where(key < 0, key ^ (2**63 - 1), key).view(dtype)
    return torch.where(key < 0, key ^ (2**31 - 1), key).int().view(dtype)
