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
from funrl.kinds import FIELD_KINDS, FieldKind, Value, line_places
from funrl.mesh.collectives import ascending_keys, from_ascending_keys, psum, ragged_all_to_all
from funrl.mesh.mesh import AXES, Axes, Mesh, MeshError
from funrl.processes.device_memory import copy_to_device

TOKEN = FIELD_KINDS["token"]
DIGIT = 16  # bits that one count of `kth_largest` decides


def own_rows(owner: np.ndarray, mesh: Mesh, axes: Axes) -> Tensor:
    """The numbers of this rank's rows, ascending, int64; none where it is not in the mesh."""
    return torch.from_numpy(
        np.flatnonzero(owner == mesh.index(axes) if mesh.here else np.zeros(len(owner), dtype=bool))
    )


def gather_table(columns: Mapping[str, Tensor], owner: np.ndarray, mesh: Mesh, axes: Axes) -> dict[str, Tensor]:
    """Columns of all rows on every rank, exactly as their owners have them, in one collective.

    Args:
      columns: [b] or [b, K], of this rank's rows; the same names, K and dtypes on every rank.

    Returns: [B] or [B, K], on the device of each column.
    """
    if not mesh.here:
        raise MeshError(f"rows of the mesh {mesh} over {mesh.ranks}: process {mesh.process} has no table of them")
    own = own_rows(owner, mesh, axes)
    words = [_words(x).reshape(len(own), x.shape[1:].numel()) for x in columns.values()]
    mine = torch.cat(words, 1).to(mesh.device) if words else torch.zeros(len(own), 0, dtype=torch.int64)
    # The bits of each row, 0 on all ranks but its owner: their sum as integers is exact for any dtype.
    there = copy_to_device(own, mine.device)
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
        return gather_table({"sum": row_sums(x_bT)}, owner, mesh, axes=axes)["sum"]

    def take_own(x_B: Tensor) -> Tensor:
        return x_B[own.to(x_B.device)]

    return Across(sums, take_own, lambda x_bT, k: kth_largest(x_bT, k, mesh, axes=axes))


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
    parts = [ascending_keys(part[part != -torch.inf]).long() for part in wide.split(1 << 20)]
    lowest = ascending_keys(wide.new_tensor(-torch.inf)).long()
    left_out = wide.numel() - sum(map(len, parts))
    k = k.long().to(wide.device)
    prefix = torch.zeros((), dtype=torch.int64, device=wide.device)
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
    return from_ascending_keys(prefix, wide.dtype).to(x_bT.dtype)


ROW_MULTIPLE = 8  # tokens that the width of rows is a multiple of after a move


class MovedRows(NamedTuple):
    """Rows after a move.

    Attributes:
      fields: values of the rows that this rank has now, in the order of their numbers.
      sent, received: bytes to and from other ranks.
    """

    fields: dict[str, Value]
    sent: int
    received: int


class Owners(NamedTuple):
    """The ranks that hold some rows.

    Attributes:
      index: [B] each row's rank, as an index over the row axes of `mesh`.
      mesh: the ranks.
    """

    index: np.ndarray
    mesh: Mesh


class RowRoute(NamedTuple):
    """Rows on their way between the ranks of `axes`; each array has numbers of rows.

    Attributes:
      before, after: rows that this rank has before and after, ascending.
      sent, received: rows that go to and come from the ranks, this one included, one rank after the other.
      receivers, senders: the rank to which, or from which, each of these goes.
      mesh, axes: whose ranks exchange them.
    """

    before: np.ndarray
    after: np.ndarray
    sent: np.ndarray
    receivers: np.ndarray
    received: np.ndarray
    senders: np.ndarray
    mesh: Mesh
    axes: Axes


def move_rows(
    fields: Mapping[str, Value],
    lengths: np.ndarray,
    owner: np.ndarray,
    to: np.ndarray,
    mesh: Mesh,
    kinds: Mapping[str, FieldKind] | None = None,
) -> MovedRows:
    """Send rows from the ranks that have them to others, without padding.

    Every rank knows `lengths`, `owner` and `to` of all rows. Fields per token take one collective together, any other
    field one of its own, after one that tells all ranks how much of it each row has. Beside the rows before and after,
    a rank holds a copy of what it sends and one of what it receives.

    Args:
      fields: values of this rank's rows in the order of their numbers; the same names and dtypes on every rank. int64
        per token is sent as int32, which rows have anyhow: ids, places and numbers of sequences are below 2^31.
      lengths: [B] tokens of each row.
      owner, to: [B] each row's rank before and after, as an index over the row axes of the mesh.
      kinds: by field; "token" where it is not named.
    """
    axes = mesh.row_axes
    me = int(mesh.index(axes))
    mine = np.flatnonzero(owner == me)
    coming = np.flatnonzero(to == me)
    sent = mine[np.argsort(to[mine], kind="stable")]
    received = coming[np.argsort(owner[coming], kind="stable")]
    route = RowRoute(mine, coming, sent, to[sent], received=received, senders=owner[received], mesh=mesh, axes=axes)
    counts = _row_counts(fields, kinds or {}, lengths, owners=Owners(owner, mesh))
    return _moved(fields, kinds or {}, lengths, counts=counts, route=route)


def hand_over(
    fields: Mapping[str, Value],
    lengths: np.ndarray,
    before: Owners,
    after: Owners,
    kinds: Mapping[str, FieldKind] | None = None,
) -> MovedRows:
    """`move_rows` between two meshes over the same processes, such as the one to generate on and the one to train on.

    A row that several ranks hold before the move is sent by one of them to each rank that needs it, and by none to a
    rank that has it.
    """
    owner, source = before
    to, target = after
    me = target.rank
    has = row_indices(source)
    wants = row_indices(target)
    mine = np.flatnonzero(owner == has[me])
    coming = np.flatnonzero(to == wants[me])
    by_target = mine[np.argsort(to[mine], kind="stable")]
    counts_to = np.bincount(to[mine], minlength=int(wants.max()) + 1)
    peers = np.arange(target.world)
    peers = peers[_senders(has, has[me], peers) == me]
    wanted = counts_to[wants[peers]]
    sent = by_target[line_places((np.cumsum(counts_to) - counts_to)[wants[peers]], wanted).numpy()]
    sender_of_row = _senders(has, owner[coming], me)
    order = np.argsort(sender_of_row, kind="stable")
    route = RowRoute(
        mine,
        coming,
        sent,
        np.repeat(peers, wanted),
        received=coming[order],
        senders=sender_of_row[order],
        mesh=target,
        axes=tuple(target.sizes),
    )
    counts = _row_counts(fields, kinds or {}, lengths, owners=before)
    return _moved(fields, kinds or {}, lengths, counts=counts, route=route)


def _senders(has: np.ndarray, index: np.ndarray | int, peers: np.ndarray | int) -> np.ndarray:
    """The rank that hands rows of an index over to a peer: itself where it has them. The arguments are broadcast.

    Args:
      has: [world] the index whose rows each rank has; as many ranks have each index.
    """
    holders = np.argsort(has, kind="stable").reshape(int(has.max()) + 1, -1)
    return np.where(has[peers] == index, peers, holders[index, peers % holders.shape[1]])


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
        has = row_indices(source)
        wants = row_indices(target)
    ways, of_row = np.unique(np.stack([owner, to]), axis=1, return_inverse=True)
    tokens = np.bincount(of_row.ravel(), lengths, minlength=ways.shape[1]).astype(np.int64)
    sent, received, messages = np.zeros((3, len(has)), dtype=np.int64)
    (index, wanted), tokens = ways[:, tokens > 0, None], tokens[tokens > 0]
    peers = np.argsort(wants, kind="stable").reshape(int(wants.max()) + 1, -1)[wanted[:, 0]]
    counts = np.where(has[peers] == index, 0, tokens[:, None])
    senders = _senders(has, index, peers)
    np.add.at(received, peers, counts)
    np.add.at(sent, senders, counts)
    np.add.at(messages, senders, counts > 0)
    return MoveTraffic(sent, received, messages)


def token_bytes(fields: Mapping[str, Tensor]) -> int:
    """Bytes that a move sends of one token."""
    return sum(_line_bytes(x.flatten(0, 1), True) for x in fields.values())


def row_indices(mesh: Mesh) -> np.ndarray:
    """[world] the index over the row axes of every rank of a mesh."""
    positions = np.unravel_index(np.arange(mesh.world), [mesh.sizes[axis] for axis in AXES])
    index = np.zeros(mesh.world, dtype=np.int64)
    for axis in mesh.row_axes:
        index = index * mesh.sizes[axis] + positions[AXES.index(axis)]
    return index


def _row_counts(
    fields: Mapping[str, Value],
    kinds: Mapping[str, FieldKind],
    lengths: np.ndarray,
    owners: Owners,
) -> dict[str, np.ndarray]:
    """[B] lines of all rows, of the fields that are not per token; one collective where there are such fields."""
    owner, mesh = owners
    axes = mesh.row_axes
    own = lengths[owner == int(mesh.index(axes))]
    columns = {
        name: torch.from_numpy(kinds[name].counts(x, own))
        for name, x in fields.items()
        if not kinds.get(name, TOKEN).per_token
    }
    return {name: x.numpy() for name, x in gather_table(columns, owner, mesh, axes=axes).items()} if columns else {}


def _moved(
    fields: Mapping[str, Value],
    kinds: Mapping[str, FieldKind],
    lengths: np.ndarray,
    counts: Mapping[str, np.ndarray],
    route: RowRoute,
) -> MovedRows:
    """The rows after a move; T of the fields per token is the longest row's length rounded up to `ROW_MULTIPLE`.

    Args:
      counts: [B] lines of each row, of the fields that are not per token.
    """
    width = -(-int(lengths[route.after].max(initial=1)) // ROW_MULTIPLE) * ROW_MULTIPLE
    per_token = {name: x for name, x in fields.items() if name not in counts}
    groups = [(per_token, lengths)] if per_token else []
    groups += [({name: fields[name]}, of_rows) for name, of_rows in counts.items()]
    out = dict[str, Value]()
    sent = 0
    received = 0
    for group, of_rows in groups:
        some = {name: kinds.get(name, TOKEN) for name in group}
        moved = _exchange_lines(group, some, of_rows, width=width, route=route)
        out |= moved.fields
        sent += moved.sent
        received += moved.received
    return MovedRows({name: out[name] for name in fields}, sent, received)


def _exchange_lines(
    fields: Mapping[str, Value], kinds: Mapping[str, FieldKind], counts: np.ndarray, width: int, route: RowRoute
) -> MovedRows:
    """Fields of one number of lines per row after a move, in one collective.

    Args:
      counts: [B] lines of each row.
      width: T of the fields per token afterwards.
    """
    ranks = route.mesh.size(route.axes)
    send = _sums_of(counts[route.sent], route.receivers, ranks)
    receive = _sums_of(counts[route.received], route.senders, ranks)
    packed = pack_rows(fields, kinds, np.searchsorted(route.before, route.sent), counts[route.sent])
    size = packed.shape[1]
    arrived = ragged_all_to_all(packed, send, receive, mesh=route.mesh, axes=route.axes)
    del packed
    out = blank_rows(fields, kinds, counts[route.after], width)
    unpack_rows(arrived, out, kinds, np.searchsorted(route.after, route.received), counts[route.received])
    me = int(route.mesh.index(route.axes))
    return MovedRows(out, (sum(send) - send[me]) * size, (sum(receive) - receive[me]) * size)


def _sums_of(counts: np.ndarray, ranks_of: np.ndarray, ranks: int) -> list[int]:
    """Sum of the counts of each rank."""
    sums = np.zeros(ranks, dtype=np.int64)
    np.add.at(sums, ranks_of, counts)
    return sums.tolist()


def pack_rows(
    fields: Mapping[str, Value], kinds: Mapping[str, FieldKind], places: np.ndarray, counts: np.ndarray
) -> Tensor:
    """The lines of some rows, end to end, as bytes [lines, bytes of a line].

    Args:
      places: of the rows in the fields.
      counts: lines of each of them.
    """
    columns = []
    for name, x in fields.items():
        lines = kinds[name].lines(x)
        source = line_places(kinds[name].begins(x)[places], counts).to(lines.device)
        columns.append(_bytes(lines[source].to(_sent_dtype(lines, kinds[name].per_token))))
    return torch.cat(columns, 1)


def blank_rows(
    fields: Mapping[str, Value], kinds: Mapping[str, FieldKind], counts: np.ndarray, width: int
) -> dict[str, Value]:
    """Rows of zeros of these numbers of lines, with the dtypes and trailing shapes of the fields; T is `width`."""
    return {name: kinds[name].blank(kinds[name].lines(x), counts, width) for name, x in fields.items()}


def unpack_rows(
    packed: Tensor,
    out: Mapping[str, Value],
    kinds: Mapping[str, FieldKind],
    places: np.ndarray,
    counts: np.ndarray,
) -> None:
    """Put the lines of `pack_rows` into the rows at some places of `out`."""
    begin = 0
    for name, value in out.items():
        kind = kinds[name]
        lines = kind.lines(value)
        size = _line_bytes(lines, kind.per_token)
        column = packed[:, begin : begin + size].clone(memory_format=torch.contiguous_format)
        begin += size
        target = line_places(kind.begins(value)[places], counts).to(lines.device)
        values = column.view(-1).view(_sent_dtype(lines, kind.per_token)).reshape(-1, *lines.shape[1:])
        lines[target] = values.to(lines.dtype)


def packed_bytes(fields: Mapping[str, Value], kinds: Mapping[str, FieldKind]) -> int:
    """Bytes of a line of `pack_rows`."""
    return sum(_line_bytes(kinds[name].lines(x), kinds[name].per_token) for name, x in fields.items())


def _sent_dtype(lines: Tensor, per_token: bool) -> torch.dtype:
    return torch.int32 if per_token and lines.dtype == torch.int64 else lines.dtype


def _line_bytes(lines: Tensor, per_token: bool) -> int:
    return lines.shape[1:].numel() * _sent_dtype(lines, per_token).itemsize


def _bytes(x: Tensor) -> Tensor:
    """[n, ...] as bytes [n, bytes of one]."""
    size = x.shape[1:].numel() * x.element_size()
    return x.contiguous().reshape(-1).view(torch.uint8).view(len(x), size)


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
