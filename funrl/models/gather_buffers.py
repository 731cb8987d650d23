"""Buffers in which shards are gathered and gradients scattered: one message for many weights, the same on every rank.

A dim that the ranks do not divide is split in ceiling chunks: the last ranks have less of it, or nothing. In a message
every rank has as much room as the first, which has most; what is in the rest of it is never read.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import torch.nn.functional as F
from torch import Tensor

from funrl.mesh.mesh import AXES
from funrl.mesh.message_sizes import LARGEST_BYTES, message_bytes
from funrl.mesh.rules import Layout, gather_axes

ALIGNMENT = 64  # elements: every weight begins where a kernel likes it to


class Bucket(NamedTuple):
    """Leaves of a group that are gathered over the same axes, in one flat buffer.

    Attributes:
      axes: in the order of the mesh.
      sizes: of these axes.
      elements: of one rank's buffer.
      trained: whether the leaves have gradients.
    """

    axes: tuple[str, ...]
    sizes: tuple[int, ...]
    elements: int
    trained: bool

    @property
    def ranks(self) -> int:
        return math.prod(self.sizes)


class Place(NamedTuple):
    """Position of a gathered leaf in the buffers of its group.

    Attributes:
      bucket: the number of its bucket.
      begin: its first element in a rank's buffer; in the gathered buffer it is `ranks` times that.
      shard, whole: its shapes before and after; the first is that of the largest shard.
      padded: the shape of as many of these side by side: larger than `whole` where the ranks do not divide it.
      grid: the padded shape with every gathered dim unfolded into the axes that split it and the rest.
      order: the dims of `grid` in the order in which the shards arrive: the axes, then the dims of a shard.
    """

    bucket: int
    begin: int
    shard: tuple[int, ...]
    whole: tuple[int, ...]
    padded: tuple[int, ...]
    grid: tuple[int, ...]
    order: tuple[int, ...]


class Buffers(NamedTuple):
    """Buffers of a group; a leaf that is not gathered has no place."""

    buckets: tuple[Bucket, ...]
    places: tuple[Place | None, ...]

    @property
    def trained(self) -> list[Place]:
        """Places of the leaves that have gradients."""
        return [place for place in self.places if place is not None and self.buckets[place.bucket].trained]


@functools.lru_cache(maxsize=256)
def buffers_of(
    names: tuple[str, ...], stored: tuple[Layout, ...], compute: tuple[Layout, ...], trained: tuple[bool, ...]
) -> Buffers:
    """Buffers for leaves of these layouts: one for each distinct set of axes to gather over, trained and not.

    Raises:
      MeshError: a leaf cannot be gathered from one layout to the other.
    """
    buckets: dict[tuple[tuple[str, ...], bool], Bucket] = {}
    places: list[Place | None] = []
    for name, have, want, learns in zip(names, stored, compute, trained, strict=True):
        over = gather_axes(name, have, want)
        sizes = dict(zip(AXES, have.sizes, strict=True))
        axes = tuple(axis for axis in AXES if any(axis in dims for dims in over))
        if not axes:
            places.append(None)
            continue
        key = axes, learns
        bucket = buckets.get(key) or Bucket(axes, tuple(sizes[axis] for axis in axes), 0, trained=learns)
        shard = have.local_shape()
        padded = tuple(n * math.prod(sizes[axis] for axis in dims) for n, dims in zip(shard, over, strict=True))
        grid = [part for dim, dims in enumerate(over) for part in (*dims, dim)]
        lengths = tuple(shard[part] if isinstance(part, int) else sizes[part] for part in grid)
        order = tuple(grid.index(part) for part in (*axes, *range(len(shard))))
        number = list({**buckets, key: bucket}).index(key)
        places.append(
            Place(number, bucket.elements, shard, whole=want.local_shape(), padded=padded, grid=lengths, order=order)
        )
        elements = bucket.elements + -(-math.prod(shard) // ALIGNMENT) * ALIGNMENT
        buckets[key] = bucket._replace(elements=elements)
    return Buffers(tuple(buckets.values()), tuple(places))


def layers_together(buffers: Buffers, itemsize: int) -> int:
    """Number of layers that are gathered in one message: more than one where a rank's piece of one layer is small.

    Between nodes layers join until they fill a message of `message_bytes`. Inside of a node each goes by itself.

    Args:
      buffers: of one layer.
      itemsize: bytes of a number that is sent.
    """
    sizes = [(message_bytes(bucket.ranks, 0), bucket.elements * bucket.ranks * itemsize) for bucket in buffers.buckets]
    far = [(wanted, nbytes) for wanted, nbytes in sizes if wanted]
    if not far:
        return 1
    wanted, largest = max(far, key=lambda pair: pair[1])
    return max(1, min(-(-wanted // largest), LARGEST_BYTES // sum(nbytes for _, nbytes in sizes)))


def slot(flat: Tensor, place: Place, shape: tuple[int, ...]) -> Tensor:
    """The part of a rank's buffer that has its shard, of `shape`, of a leaf."""
    room = flat.narrow(0, place.begin, math.prod(place.shard)).view(place.shard)
    return room if shape == place.shard else room[tuple(slice(n) for n in shape)]


def whole_of(buffer: Tensor, place: Place, bucket: Bucket) -> Tensor:
    """A weight in the gathered buffer."""
    return buffer.narrow(0, place.begin * bucket.ranks, math.prod(place.whole)).view(place.whole)


def put_together(rows: Tensor, whole: Tensor, place: Place, bucket: Bucket) -> None:
    """Copy a leaf's shards from the ranks' buffers [ranks, elements] to where it is whole."""
    shards = _shards(rows, place, bucket)
    if place.padded == place.whole:
        _grid(whole, place).copy_(shards)
        return
    unfolded = shards.permute([place.order.index(dim) for dim in range(len(place.order))])
    whole.copy_(unfolded.reshape(place.padded)[tuple(slice(n) for n in place.whole)])


def take_apart(whole: Tensor, rows: Tensor, place: Place, bucket: Bucket) -> None:
    """Copy a whole leaf to the ranks' buffers [ranks, elements], shard by shard. What pads it is 0."""
    lacks = [longer - n for n, longer in zip(place.whole, place.padded, strict=True)]
    if any(lacks):
        whole = F.pad(whole, [n for lack in reversed(lacks) for n in (0, lack)])
    _shards(rows, place, bucket).copy_(_grid(whole.contiguous(), place))


def _grid(whole: Tensor, place: Place) -> Tensor:
    """A view of a whole weight as [axes..., shard...]."""
    return whole.view(place.grid).permute(place.order)


def _shards(rows: Tensor, place: Place, bucket: Bucket) -> Tensor:
    """A view of a leaf's shards in the ranks' buffers [ranks, elements] as [axes..., shard...]."""
    shards = rows[:, place.begin : place.begin + math.prod(place.shard)]
    return shards.unflatten(1, place.shard).unflatten(0, bucket.sizes)
