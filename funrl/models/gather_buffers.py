"""Buffers in which shards are gathered and gradients scattered, the same on every rank.

A large leaf has a buffer of its own; small ones share one. Where the outermost dim of a leaf is split, the shards in
the order of the ranks are the whole leaf: in a buffer of its own it is gathered into place, and its gradient is
scattered from where it is. Any other leaf is copied once between the ranks' shards and the whole.

A dim that the ranks do not divide is split in ceiling chunks: the last ranks have less of it, or nothing. In a message
every rank has as much room as the first, which has most. What is in the rest of it is never read, unless the dim stays
split while the layer computes: it is 0 then.
"""

from __future__ import annotations

import collections
import functools
import math
from collections.abc import Iterable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from funrl import trees
from funrl.mesh import collectives
from funrl.mesh.mesh import AXES, Mesh
from funrl.mesh.message_sizes import LARGEST_BYTES, message_bytes
from funrl.mesh.rules import AxisPart, Layout, gather_axes
from funrl.models.weight_dtypes import narrow_weight

ALIGNMENT = 64  # elements: every weight begins where a kernel likes it to
# Elements of a shard from which on it is a message of its own. For less, latency counts more than a copy: with gloo 7
# messages of 2^12 float32 over 2 ranks take 7 ms and one of all of them 1 ms, copies included; at 2^16 both take 4 ms.
OWN_MESSAGE = 1 << 16
GROUPED_MESSAGE = 1 << 12  # the same where the backend starts several messages together, and one more costs little


class Bucket(NamedTuple):
    """Leaves of a group that are gathered over the same axes, in one buffer.

    Attributes:
      axes: in the order of the mesh.
      ranks: over these axes.
      elements: of one rank's buffer.
      trained: whether the leaves have gradients.
      leaves: their numbers in the group.
      in_place: whether the ranks' buffers, one after the other, are the whole leaf, which is then the only one.
    """

    axes: tuple[str, ...]
    ranks: int
    elements: int
    trained: bool
    leaves: tuple[int, ...] = ()
    in_place: bool = False


class BufferPlace(NamedTuple):
    """Position of a gathered leaf in the buffers of its group.

    Attributes:
      bucket: the number of its bucket.
      begin: its first element in a rank's buffer; in the gathered buffer it is `ranks` times that.
      shard, whole: its shapes before and after; the first is that of the largest shard.
      padded: the shape of as many of these side by side: larger than `whole` where the ranks do not divide it.
      grid: the padded shape with every gathered dim unfolded into the parts of axes that split it and the rest.
      order: the dims of `grid` in the order in which the shards arrive: the parts of axes, then the dims of a shard.
    """

    bucket: int
    begin: int
    shard: tuple[int, ...]
    whole: tuple[int, ...]
    padded: tuple[int, ...] = ()
    grid: tuple[int, ...] = ()
    order: tuple[int, ...] = ()


class Buffers(NamedTuple):
    """Buffers of a group; a leaf that is not gathered has no place."""

    buckets: tuple[Bucket, ...]
    places: tuple[BufferPlace | None, ...]

    @property
    def trained(self) -> list[BufferPlace]:
        """Places of the leaves that have gradients."""
        return [place for place in self.places if place is not None and self.buckets[place.bucket].trained]

    def places_of(self, bucket: Bucket) -> list[tuple[int, BufferPlace]]:
        """The leaves of a bucket by their numbers in the group, and their places."""
        return [(leaf, place) for leaf in bucket.leaves if (place := self.places[leaf]) is not None]

    def by_axes(self, buckets: Iterable[int]) -> dict[tuple[str, ...], list[int]]:
        """Some buckets, by their numbers, for each tuple of axes: they are sent together."""
        together: dict[tuple[str, ...], list[int]] = {}
        for number in buckets:
            together.setdefault(self.buckets[number].axes, []).append(number)
        return together


class GatherDtypes(NamedTuple):
    """Dtypes of gathered weights.

    Attributes:
      compute: floating point, of the weights and of what is sent, but for `weight_dtypes.WIDE`.
      reduce: in which gradients are sent and summed, before they are cast to that of the shards; None: the latter.
    """

    compute: torch.dtype
    reduce: torch.dtype | None = None


class Group(NamedTuple):
    """Leaves that are gathered together, such as a layer's."""

    shards: trees.Tree
    buffers: Buffers
    mesh: Mesh
    dtypes: GatherDtypes


class Scatter(NamedTuple):
    """Gradients of a bucket on their way.

    Attributes:
      summed: this rank's sums, flat.
      sent: what is sent, which must stay until then.
      casts: the gradients in the dtype of the shards, and the parts of `summed` that they are to be copied from.
    """

    summed: Tensor
    sent: Tensor
    casts: list[tuple[Tensor, Tensor]]


@functools.lru_cache(maxsize=256)
def buffers_of(
    names: tuple[str, ...],
    stored: tuple[Layout, ...],
    compute: tuple[Layout, ...],
    trained: tuple[bool, ...],
    least: int,
) -> Buffers:
    """Buffers for leaves of these layouts.

    A leaf whose shard has `least` elements has one of its own. The others share one for each distinct set of axes to
    gather over, trained and not.

    Raises:
      MeshError: a leaf cannot be gathered from one layout to the other.
    """
    buckets: list[Bucket] = []
    shared: dict[tuple[tuple[str, ...], bool], int] = {}
    places: list[BufferPlace | None] = []
    for leaf, (name, have, want, learns) in enumerate(zip(names, stored, compute, trained, strict=True)):
        over = gather_axes(name, have, want)
        axes = tuple(axis for axis in AXES if any(axis in dims for dims in over))
        if not axes:
            places.append(None)
            continue
        elements = math.prod(have.local_shape())
        alone = elements >= least
        number = len(buckets) if alone else shared.setdefault((axes, learns), len(buckets))
        if number == len(buckets):
            sizes = dict(zip(AXES, have.sizes, strict=True))
            buckets.append(Bucket(axes, math.prod(sizes[axis] for axis in axes), 0, trained=learns))
        bucket = buckets[number]
        splits = [own[len(kept) :] for own, kept in zip(have.splits, want.spec, strict=True)]
        place = _place(BufferPlace(number, bucket.elements, have.local_shape(), whole=want.local_shape()), splits)
        places.append(place)
        buckets[number] = bucket._replace(
            elements=bucket.elements + (elements if alone else -(-elements // ALIGNMENT) * ALIGNMENT),
            leaves=(*bucket.leaves, leaf),
            in_place=alone and _arrives_whole(place),
        )
    return Buffers(tuple(buckets), tuple(places))


def least_elements() -> int:
    """Elements of a shard from which on it is a message of its own."""
    return GROUPED_MESSAGE if collectives.groups_messages() else OWN_MESSAGE


def _place(place: BufferPlace, splits: list[tuple[AxisPart, ...]]) -> BufferPlace:
    """The place with the grid of its shards; `splits`: for each dim what is gathered."""
    padded = tuple(n * math.prod(split.size for split in own) for n, own in zip(place.shard, splits, strict=True))
    grid = [part for dim, own in enumerate(splits) for part in (*own, dim)]
    lengths = tuple(place.shard[part] if isinstance(part, int) else part.size for part in grid)
    arriving = [part for axis in AXES for part in grid if isinstance(part, AxisPart) and part.axis == axis]
    order = tuple(grid.index(part) for part in (*arriving, *range(len(place.shard))))
    return place._replace(padded=padded, grid=lengths, order=order)


def _arrives_whole(place: BufferPlace) -> bool:
    """True if the shards in the order of the ranks are the leaf, and what pads it is behind it."""
    in_order = [part for part in place.order if place.grid[part] > 1]
    outermost = next((dim for dim, n in enumerate(place.padded) if n > 1), 0)
    return in_order == sorted(in_order) and place.padded[outermost + 1 :] == place.whole[outermost + 1 :]


def layers_together(buffers: Buffers, itemsize: int) -> int:
    """Number of layers that are gathered in one message: more than one where a rank's piece of one layer is small.

    Between nodes layers join until they fill a message of `message_bytes`. Inside of a node each goes by itself.

    Args:
      buffers: of one layer.
      itemsize: bytes of a number that is sent.
    """
    sizes = [
        (message_bytes(buckets[0].ranks, 0), sum(bucket.elements * bucket.ranks * itemsize for bucket in buckets))
        for numbers in buffers.by_axes(range(len(buffers.buckets))).values()
        for buckets in [[buffers.buckets[number] for number in numbers]]
    ]
    far = [(wanted, nbytes) for wanted, nbytes in sizes if wanted]
    if not far:
        return 1
    wanted, largest = max(far, key=lambda pair: pair[1])
    return max(1, min(-(-wanted // largest), LARGEST_BYTES // sum(nbytes for _, nbytes in sizes)))


def slot(flat: Tensor, place: BufferPlace, shape: tuple[int, ...]) -> Tensor:
    """The part of a rank's buffer that has its shard, of `shape`, of a leaf."""
    room = flat.narrow(0, place.begin, math.prod(place.shard)).view(place.shard)
    return room if shape == place.shard else room[tuple(slice(n) for n in shape)]


def whole_of(buffer: Tensor, place: BufferPlace, bucket: Bucket) -> Tensor:
    """A weight in the gathered buffer."""
    return buffer.narrow(0, place.begin * bucket.ranks, math.prod(place.whole)).view(place.whole)


def pack_shards(shards: list[Tensor], buffers: Buffers, dtype: torch.dtype) -> list[Tensor]:
    """A rank's buffer of each bucket, flat: shards in a dtype. A shard that fills one is the buffer itself.

    Args:
      shards: of all leaves of the group.
      buffers: of the group.
      dtype: of the buffers.
    """
    flats: list[Tensor] = []
    slots: list[Tensor] = []
    copied: list[Tensor] = []
    shards = [narrow_weight(x.detach(), dtype) for x in shards]
    for bucket in buffers.buckets:
        first = shards[bucket.leaves[0]]
        if _fills(first, bucket.elements, dtype):
            flats.append(first.view(-1))
            continue
        places = buffers.places_of(bucket)
        full = all(tuple(shards[leaf].shape) == place.shard for leaf, place in places)
        flats.append((torch.empty if full else torch.zeros)(bucket.elements, dtype=dtype, device=first.device))
        for leaf, place in places:
            slots.append(slot(flats[-1], place, tuple(shards[leaf].shape)))
            copied.append(shards[leaf])
    if slots:
        torch._foreach_copy_(slots, copied)
    return flats


def assembled(flat: Tensor, buffers: Buffers, number: int) -> Tensor:
    """The buffer of a bucket in which every leaf is whole and contiguous: `flat` itself, or a copy.

    Args:
      flat: the ranks' buffers, one after the other.
      number: of the bucket.
    """
    bucket = buffers.buckets[number]
    if bucket.in_place:
        return flat
    rows = flat.view(bucket.ranks, bucket.elements)
    buffer = flat.new_empty(flat.shape)
    for _, place in buffers.places_of(bucket):
        _put_together(rows, whole_of(buffer, place, bucket), place)
    return buffer


def pack_gradients(
    gradients: dict[int, Tensor], buffers: Buffers, number: int, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """The ranks' buffers of a bucket, one after the other, with their shards of whole gradients.

    A gradient that fills it is the buffer itself. What pads the shards is undefined.

    Args:
      gradients: by the number of the leaf in the group; missing ones are 0.
      number: of the bucket.
      dtype, device: of the buffers.
    """
    bucket = buffers.buckets[number]
    size = bucket.ranks * bucket.elements
    first = gradients.get(bucket.leaves[0])
    if first is not None and bucket.in_place and _fills(first, size, dtype):
        return first.detach().view(-1)
    flat = torch.empty(size, dtype=dtype, device=device)
    for leaf, place in buffers.places_of(bucket):
        whole = gradients.get(leaf)
        if whole is None:
            _shards(flat.view(bucket.ranks, bucket.elements), place).zero_()
        elif bucket.in_place:
            whole_of(flat, place, bucket).copy_(whole)
        else:
            _take_apart(whole, flat.view(bucket.ranks, bucket.elements), place)
    return flat


def start_gather(group: Group) -> collections.deque[Tensor]:
    """Begin to gather a group, all buckets over the same axes together; the results are not there yet."""
    buffers = group.buffers
    arriving: dict[int, Tensor] = {}
    with torch.no_grad():
        flats = pack_shards(trees.leaves(group.shards), buffers, group.dtypes.compute)
    for axes, numbers in buffers.by_axes(range(len(flats))).items():
        gathers = collectives.start_all_gathers([flats[number] for number in numbers], group.mesh, axes)
        arriving |= zip(numbers, gathers, strict=True)
    return collections.deque(arriving[number] for number in sorted(arriving))


def land_gather(group: Group, arriving: collections.deque[Tensor]) -> list[Tensor]:
    """The ranks' buffers, when they are there, as buffers in which every weight is contiguous."""
    buffers = []
    for number in range(len(group.buffers.buckets)):  # what has been copied goes before the next is
        buffers.append(assembled(collectives.wait(arriving.popleft()), group.buffers, number))
    return buffers


def start_scatter(
    group: Group,
    grads: tuple[Tensor | None, ...],
    shapes: list[tuple[int, ...]],
    dtype: torch.dtype,
    leaving: list[Scatter],
) -> list[Tensor]:
    """Begin to sum and split whole gradients: the shards, which are there when `leaving` has landed.

    Args:
      group: the leaves.
      grads: of the trained leaves; None is 0.
      shapes: of their shards.
      dtype: of the shards.
      leaving: what is on its way is added to it.
    """
    buffers = group.buffers
    reduced = group.dtypes.reduce or dtype
    trained = sorted(leaf for bucket in buffers.buckets if bucket.trained for leaf in bucket.leaves)
    whole = {leaf: grad for leaf, grad in zip(trained, grads, strict=True) if grad is not None}
    shape_of = dict(zip(trained, shapes, strict=True))
    shards: dict[int, Tensor] = {}
    numbers = [number for number, bucket in enumerate(buffers.buckets) if bucket.trained]
    for axes, together in buffers.by_axes(numbers).items():
        sent = [pack_gradients(whole, buffers, number, reduced, group.mesh.device) for number in together]
        sums = collectives.start_psum_scatters(sent, group.mesh, axes)
        for number, flat, summed in zip(together, sent, sums, strict=True):
            places = buffers.places_of(buffers.buckets[number])
            parts = {leaf: slot(summed, place, shape_of[leaf]) for leaf, place in places}
            casts = [] if reduced == dtype else [(x.new_empty(x.shape, dtype=dtype), x) for x in parts.values()]
            shards |= zip(parts, (cast for cast, _ in casts), strict=True) if casts else parts
            leaving.append(Scatter(summed, flat, casts))
    return [shards[leaf] for leaf in trained]


def land_scatters(leaving: list[Scatter]) -> None:
    """Wait for the sums on their way: the shards' gradients are there. Nothing is on its way then."""
    for scatter in leaving:
        collectives.wait(scatter.summed)
    casts = [cast for scatter in leaving for cast in scatter.casts]
    if casts:
        torch._foreach_copy_([shard for shard, _ in casts], [part for _, part in casts])
    leaving.clear()


def _fills(x: Tensor, elements: int, dtype: torch.dtype) -> bool:
    return x.numel() == elements and x.dtype == dtype and x.is_contiguous()


def _put_together(rows: Tensor, whole: Tensor, place: BufferPlace) -> None:
    """Copy a leaf's shards from the ranks' buffers [ranks, elements] to where it is whole."""
    shards = _shards(rows, place)
    if place.padded == place.whole:
        _grid(whole, place).copy_(shards)
        return
    unfolded = shards.permute([place.order.index(dim) for dim in range(len(place.order))])
    whole.copy_(unfolded.reshape(place.padded)[tuple(slice(n) for n in place.whole)])


def _take_apart(whole: Tensor, rows: Tensor, place: BufferPlace) -> None:
    """Copy a whole leaf to the ranks' buffers [ranks, elements], shard by shard. What pads it is 0."""
    lacks = [longer - n for n, longer in zip(place.whole, place.padded, strict=True)]
    if any(lacks):
        whole = F.pad(whole, [n for lack in reversed(lacks) for n in (0, lack)])
    _shards(rows, place).copy_(_grid(whole, place))


def _grid(whole: Tensor, place: BufferPlace) -> Tensor:
    """A view of a whole weight as [axes..., shard...]."""
    return whole.view(place.grid).permute(place.order)


def _shards(rows: Tensor, place: BufferPlace) -> Tensor:
    """A view of a leaf's shards in the ranks' buffers [ranks, elements] as [axes..., shard...]."""
    shards = rows[:, place.begin : place.begin + math.prod(place.shard)]
    ranks = [place.grid[part] for part in place.order[: -len(place.shard)]]
    return shards.unflatten(1, place.shard).unflatten(0, ranks)
