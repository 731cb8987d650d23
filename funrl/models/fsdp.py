"""Sharded weights: a layer's shards are gathered right before it computes, and its whole weights go right after.

What is gathered is the difference of two layouts: how a parameter is stored, and how its layer computes with it.
`gathered` gives a tree to compute with. Looking at a part of it gathers that part: all shards of a layer that are split
over the same axes in one collective, cast to the dtype to compute in before they are sent. The parts of a tree are used
in the order of its names, so while one computes the gather of the next is on its way: `embed`, the layers, `unembed`.
The backward pass does not find the whole weights in memory either: autograd saves a note of which part of which layer
each was, and they are gathered again, in the other direction and again one layer ahead. A layer's gradients are summed
and split over the same axes, in the dtype of the shards, while the layer before it computes.

    forward    gather 0 | compute 0, gather 1 | compute 1, gather 2 | ...
    backward   ... | back through 2, gather 1 | back through 1, gather 0, scatter 2 | back through 0, scatter 1 | ...
"""

from __future__ import annotations

import collections
import contextlib
import functools
import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from funrl import trees
from funrl.mesh import collectives
from funrl.mesh.mesh import AXES, Mesh
from funrl.mesh.rules import Layout, gather_axes
from funrl.models.weight_dtypes import cast_weights, weight_dtype

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
      shard, whole: its shapes before and after.
      grid: the whole shape with every gathered dim unfolded into the axes that split it and the rest.
      order: the dims of `grid` in the order in which the shards arrive: the axes, then the dims of a shard.
    """

    bucket: int
    begin: int
    shard: tuple[int, ...]
    whole: tuple[int, ...]
    grid: tuple[int, ...]
    order: tuple[int, ...]


class Buffers(NamedTuple):
    """Buffers of a group; a leaf that is not gathered has no place."""

    buckets: tuple[Bucket, ...]
    places: tuple[Place | None, ...]


class Group(NamedTuple):
    """Leaves that are gathered together, such as a layer's, and the dtype to compute in."""

    shards: trees.Tree
    buffers: Buffers
    mesh: Mesh
    dtype: torch.dtype


class Saved(NamedTuple):
    """Note that autograd keeps of a gathered weight: its part, buffer and group."""

    group: int
    bucket: int
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int


def gathered(params: trees.Tree, stored: trees.Tree, compute: trees.Tree, mesh: Mesh, dtype: torch.dtype) -> trees.Tree:
    """Weights to compute with, in `dtype`: a model sees them in the layouts `compute`.

    A tree whose two layouts are the same is cast and nothing else. Otherwise the result gathers when it is looked at:
    `tree[name]` one leaf or group, iterating over a tuple of layers one layer after the other. Each look gathers again.

    Args:
      params: this rank's shards; gradients reach them summed over the axes that are gathered, and over no others. Those
        that require none are gathered and nothing else: nothing is computed, kept or sent for a gradient of theirs.
      stored, compute: layouts of the same structure, of the shards and of the result.
      mesh: the mesh of both.
      dtype: floating point, of the results and of what is sent, but for `weight_dtypes.WIDE`; gradients are reduced in
        the dtype of `params`.

    Raises:
      MeshError: a leaf cannot be gathered from one layout to the other.
    """
    if all(have == want for have, want in zip(trees.leaves(stored), trees.leaves(compute), strict=True)):
        return cast_weights(params, dtype)
    groups: list[Group] = []
    tree = _numbered(params, stored, compute, functools.partial(_group, groups, mesh, dtype))
    return _view(tree, GatherSchedule(groups))


def regathering(layers: Any) -> contextlib.AbstractContextManager:
    """Inside, autograd saves a note instead of the weights of `layers`, if they are gathered at all."""
    if isinstance(layers, Layers) and torch.is_grad_enabled():
        return torch.autograd.graph.saved_tensors_hooks(layers.note, layers.remember)
    return contextlib.nullcontext()


def _numbered(params: Any, stored: Any, compute: Any, number: Any) -> Any:
    """The tree with the number of its group in place of each group: a leaf, a layer, or a dict of leaves."""
    if isinstance(params, dict) and not all(isinstance(x, Tensor) for x in params.values()):
        return {name: _numbered(params[name], stored[name], compute[name], number) for name in sorted(params)}
    if isinstance(params, tuple):
        numbers = [number(*layer) for layer in zip(params, stored, compute, strict=True)]
        return range(numbers[0], numbers[0] + len(numbers)) if numbers else range(0)
    return number(params, stored, compute)


def _group(groups: list[Group], mesh: Mesh, dtype: torch.dtype, shards: Any, stored: Any, compute: Any) -> int:
    names = tuple(name for name, _ in trees.named(stored))
    trained = tuple(x.requires_grad for x in trees.leaves(shards))
    buffers = _buffers(names, tuple(trees.leaves(stored)), tuple(trees.leaves(compute)), trained)
    groups.append(Group(shards, buffers, mesh, dtype))
    return len(groups) - 1


def _view(tree: Any, schedule: GatherSchedule) -> Any:
    if isinstance(tree, dict):
        return Weights(tree, schedule)
    if isinstance(tree, range):
        return Layers(schedule, tree)
    return schedule.weights(tree, schedule.after(tree))[0]


class Weights(Mapping):
    """A dict of weights that are gathered when they are looked at, each time anew."""

    def __init__(self, parts: dict[str, Any], schedule: GatherSchedule) -> None:
        self.parts, self.schedule = parts, schedule

    def __getitem__(self, name: str) -> Any:
        return _view(self.parts[name], self.schedule)

    def __contains__(self, name: object) -> bool:
        return name in self.parts

    def __iter__(self) -> Iterator[str]:
        return iter(self.parts)

    def __len__(self) -> int:
        return len(self.parts)


class Layers:
    """A sequence of layers; iterating gathers one after the other, and the backward pass gathers them again.

    Attributes:
      numbers: of its groups in the schedule.
      at: the layer that forward or backward pass is at, and its gathered buffers.
    """

    def __init__(self, schedule: GatherSchedule, numbers: range) -> None:
        self.schedule, self.numbers = schedule, numbers
        self.at: tuple[int, list[Tensor]] | None = None

    def __len__(self) -> int:
        return len(self.numbers)

    def __iter__(self) -> Iterator[trees.Tree]:
        for i in self.numbers:
            self.at = None  # the weights of the layer before go before this one's come
            weights, buffers = self.schedule.weights(i, i + 1 if i + 1 in self.numbers else self.schedule.after(i))
            self.at = i, buffers
            del buffers
            yield weights
            del weights

    def note(self, x: Tensor) -> Any:
        """Saved form of a tensor for autograd: a note if it is a part of this layer's weights."""
        if self.at is not None:
            for bucket, buffer in enumerate(self.at[1]):
                if _same_memory(x, buffer):
                    return Saved(self.at[0], bucket, x.shape, x.stride(), int(x.storage_offset()))
        return x

    def remember(self, kept: Any) -> Tensor:
        """The tensor of a note; its layer is gathered if the backward pass has just come to it."""
        if not isinstance(kept, Saved):
            return kept
        if self.at is None or self.at[0] != kept.group:
            self.at = None
            self.at = kept.group, self.schedule.land(kept.group)
        if kept.group > self.numbers[0]:
            self.schedule.start(kept.group - 1)
        return self.at[1][kept.bucket].as_strided(kept.shape, kept.stride, kept.offset)


class GatherSchedule:
    """The gathers and scatters of a tree's groups, numbered in their order of use.

    Attributes:
      groups: the shards.
      handles: of every group the trained shards to gather, as autograd sees them: their gradients have landed at the
        end.
      arriving: gathers that have begun, by group.
      looks: how often each group's weights were made.
      leaving: gradients on their way: the summed shards, and what is sent, which must stay until then.
    """

    def __init__(self, groups: list[Group]) -> None:
        self.groups = groups
        split = [
            [
                x
                for x, place in zip(trees.leaves(group.shards), group.buffers.places, strict=True)
                if place is not None and group.buffers.buckets[place.bucket].trained
            ]
            for group in groups
        ]
        self.leaving: list[tuple[Tensor, Tensor]] = []
        every = [x for group in split for x in group]
        handles = iter(_Landed.apply(self.leaving, *every) if every else ())
        self.handles = [[next(handles) for _ in group] for group in split]
        self.arriving: dict[int, list[Tensor]] = {}
        self.looks = collections.Counter[int]()

    def start(self, i: int) -> None:
        """Begin to gather a group, unless that is on its way or nothing of it is gathered."""
        if i not in self.arriving and self.groups[i].buffers.buckets:
            self.arriving[i] = start(self.groups[i])

    def land(self, i: int) -> list[Tensor]:
        """Wait for a group's gather: its buffers, in which every weight is contiguous."""
        self.start(i)
        return _spread(self.groups[i], self.arriving.pop(i))

    def after(self, i: int) -> int | None:
        """The next group that is gathered, if nobody has looked at it before."""
        j = next((j for j in range(i + 1, len(self.groups)) if self.groups[j].buffers.buckets), None)
        return j if j is not None and self.looks[j] == 0 else None

    def weights(self, i: int, following: int | None) -> tuple[trees.Tree, list[Tensor]]:
        """A group's weights as functions of its shards, and their buffers. The gather of `following` begins."""
        group = self.groups[i]
        self.looks[i] += 1
        self.start(i)
        if following is not None:
            self.start(following)
        landed: list[Tensor] = []
        if self.handles[i]:  # made in the forward pass of `_Gather`: to autograd the trained ones come from the shards
            trained = iter(_Gather.apply(self, i, landed, *self.handles[i]))
        else:
            landed, trained = self.land(i) if group.buffers.buckets else [], iter(())

        def value(name: str, x: Tensor, place: Place | None) -> Tensor:
            if place is None:
                return x.to(weight_dtype(name, group.dtype))
            bucket = group.buffers.buckets[place.bucket]
            return next(trained) if bucket.trained else _whole(landed[place.bucket], place, bucket)

        leaves = zip(trees.named(group.shards), group.buffers.places, strict=True)
        return trees.fill(group.shards, [value(name, x, place) for (name, x), place in leaves]), landed


def start(group: Group) -> list[Tensor]:
    """Begin to gather a group, bucket by bucket; the results are not there yet."""
    buffers, mesh = group.buffers, group.mesh
    flats = [torch.empty(b.elements, dtype=group.dtype, device=mesh.device) for b in buffers.buckets]
    with torch.no_grad():
        for x, place in zip(trees.leaves(group.shards), buffers.places, strict=True):
            if place is not None:
                flats[place.bucket].narrow(0, place.begin, x.numel()).view(place.shard).copy_(x)
    return [collectives.start_all_gather(flat, mesh, b.axes) for flat, b in zip(flats, buffers.buckets, strict=True)]


def _spread(group: Group, arriving: list[Tensor]) -> list[Tensor]:
    """The ranks' buffers, when they are there, as buffers in which every weight is contiguous."""
    buckets = group.buffers.buckets
    rows = [collectives.wait(x).view(b.ranks, b.elements) for x, b in zip(arriving, buckets, strict=True)]
    buffers = [x.new_empty(x.numel()) for x in rows]
    for place in filter(None, group.buffers.places):
        bucket = buckets[place.bucket]
        _grid(_whole(buffers[place.bucket], place, bucket), place).copy_(_rows(rows[place.bucket], place, bucket))
    return buffers


def _whole(buffer: Tensor, place: Place, bucket: Bucket) -> Tensor:
    """A weight in the gathered buffer."""
    return buffer.narrow(0, place.begin * bucket.ranks, math.prod(place.whole)).view(place.whole)


def _grid(whole: Tensor, place: Place) -> Tensor:
    """A view of a whole weight as [axes..., shard...]."""
    return whole.view(place.grid).permute(place.order)


def _rows(rows: Tensor, place: Place, bucket: Bucket) -> Tensor:
    """A view of a leaf's shards in the ranks' buffers [ranks, elements] as [axes..., shard...]."""
    shards = rows[:, place.begin : place.begin + math.prod(place.shard)]
    return shards.unflatten(1, place.shard).unflatten(0, bucket.sizes)


def _same_memory(x: Tensor, y: Tensor) -> bool:
    return x.untyped_storage()._cdata == y.untyped_storage()._cdata


class _Gather(torch.autograd.Function):
    """Shards to whole weights; back, the gradients begin to be summed and split in the dtype of the shards."""

    @staticmethod
    def forward(schedule, i, landed, *shards):
        buffers = schedule.groups[i].buffers
        landed.extend(schedule.land(i))
        places = _trained_places(buffers)
        return tuple(_whole(landed[place.bucket], place, buffers.buckets[place.bucket]) for place in places)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.schedule, ctx.i, ctx.dtype = inputs[0], inputs[1], inputs[3].dtype
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx, *grads):
        schedule, group = ctx.schedule, ctx.schedule.groups[ctx.i]
        buffers, mesh = group.buffers, group.mesh
        places = _trained_places(buffers)
        rows = {
            number: torch.zeros(bucket.ranks, bucket.elements, dtype=ctx.dtype, device=mesh.device)
            for number, bucket in enumerate(buffers.buckets)
            if bucket.trained
        }
        for grad, place in zip(grads, places, strict=True):
            if grad is not None:
                bucket = buffers.buckets[place.bucket]
                _rows(rows[place.bucket], place, bucket).copy_(_grid(grad.contiguous(), place))
        _land(schedule.leaving)
        for number, x in rows.items():
            axes = buffers.buckets[number].axes
            schedule.leaving.append((collectives.start_psum_scatter(x.view(-1), mesh, axes), x))
        summed = dict(zip(rows, (flat for flat, _ in schedule.leaving), strict=True))
        if schedule.looks[ctx.i] > 1:  # autograd adds what comes from each look
            _land(schedule.leaving)
        shards = [summed[p.bucket].narrow(0, p.begin, math.prod(p.shard)).view(p.shard) for p in places]
        return None, None, None, *shards


class _Landed(torch.autograd.Function):
    """The identity; back, it waits for the last scatters. Autograd reaches it when all groups have been passed."""

    @staticmethod
    def forward(leaving, *shards):
        return tuple(x.view_as(x) for x in shards)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.leaving = inputs[0]
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx, *grads):
        _land(ctx.leaving)
        return None, *grads


def _trained_places(buffers: Buffers) -> list[Place]:
    return [place for place in buffers.places if place is not None and buffers.buckets[place.bucket].trained]


def _land(leaving: list[tuple[Tensor, Tensor]]) -> None:
    for summed, _ in leaving:
        collectives.wait(summed)
    leaving.clear()


@functools.lru_cache(maxsize=256)
def _buffers(
    names: tuple[str, ...], stored: tuple[Layout, ...], compute: tuple[Layout, ...], trained: tuple[bool, ...]
) -> Buffers:
    """Buffers for leaves of these layouts: one for each distinct set of axes to gather over, trained and not."""
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
        bucket = buckets.get(key) or Bucket(axes, tuple(sizes[axis] for axis in axes), 0, learns)
        shard, whole = have.local_shape(), want.local_shape()
        grid = [part for dim, dims in enumerate(over) for part in (*dims, dim)]
        lengths = tuple(shard[part] if isinstance(part, int) else sizes[part] for part in grid)
        order = tuple(grid.index(part) for part in (*axes, *range(len(shard))))
        places.append(Place(list({**buckets, key: bucket}).index(key), bucket.elements, shard, whole, lengths, order))
        elements = bucket.elements + -(-math.prod(shard) // ALIGNMENT) * ALIGNMENT
        buckets[key] = bucket._replace(elements=elements)
    return Buffers(tuple(buckets.values()), tuple(places))
