"""Sharded weights: a layer's shards are gathered right before it computes, and its whole weights go right after.

What is gathered is the difference of two layouts: how a parameter is stored, and how its layer computes with it.
`gathered` gives a tree to compute with. Looking at a part of it gathers that part: all shards of a layer that are split
over the same axes in one group of collectives, cast to the dtype to compute in before they are sent. A large weight
whose outermost dim is split is gathered into place; any other is copied once when it has arrived. The parts of a tree
are used in the order of its names, so while one computes the gather of the next is on its way: `embed`, the layers,
`unembed`. The backward pass does not find the whole weights in memory either: autograd saves a note of which part of
which layer each was, and they are gathered again, in the other direction and again one layer ahead. A layer's gradients
are summed and split over the same axes while the layer before it computes, in the dtype of the shards or a chosen one.

    forward    gather 0 | compute 0, gather 1 | compute 1, gather 2 | ...
    backward   ... | back through 2, gather 1 | back through 1, gather 0, scatter 2 | back through 0, scatter 1 | ...

At any time at most two groups are whole, the one that computes and the next, and the gradients of at most one are on
their way. A group is a layer, or `embed`, or `unembed`; over many ranks it is as many layers as fill a message.
"""

from __future__ import annotations

import collections
import contextlib
import functools
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from funrl import trees
from funrl.autograd import AutogradFunction
from funrl.mesh.mesh import Mesh
from funrl.mesh.message_sizes import message_bytes
from funrl.models.filled import filled
from funrl.models.gather_buffers import (
    BufferPlace,
    GatherDtypes,
    Group,
    Scatter,
    buffers_of,
    land_gather,
    land_scatters,
    layers_together,
    least_elements,
    start_gather,
    start_scatter,
    whole_of,
)
from funrl.models.weight_dtypes import cast_weight, cast_weights, weight_dtype


class GatheredGroup(NamedTuple):
    """A group whose weights are there.

    Attributes:
      group: its number.
      buffers: one for each bucket.
      buckets: the number of the bucket by the address of its buffer's storage.
    """

    group: int
    buffers: list[Tensor]
    buckets: dict[int, int]


class SavedWeight(NamedTuple):
    """Note that autograd keeps of a gathered weight: its part, buffer and group."""

    group: int
    bucket: int
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int


class LayerGroups(NamedTuple):
    """Groups of a tuple of layers: their numbers, and how many layers there are."""

    numbers: range
    layers: int


def gathered(
    params: trees.Tree,
    stored: trees.Tree,
    compute: trees.Tree,
    mesh: Mesh,
    dtypes: GatherDtypes,
    last: str | None = None,
) -> trees.Tree:
    """Weights to compute with: a model sees them in the layouts `compute`.

    A tree whose two layouts are the same is cast and nothing else. Otherwise the result gathers when it is looked at:
    `tree[name]` one leaf or group, iterating over a tuple of layers one layer after the other. Each look gathers again.

    Args:
      params: this rank's shards; gradients reach them summed over the axes that are gathered, and over no others. Those
        that require none are gathered and nothing else: nothing is computed, kept or sent for a gradient of theirs.
      stored, compute: layouts of the same structure, of the shards and of the result, whose shorter parts are filled.
      mesh: the mesh of both.
      dtypes: of the results, and of the sums of gradients, which arrive in the dtype of `params`.
      last: name of the part that is looked at once more behind all others, such as an embedding that is the unembedding
        too: it is gathered again while what stands before computes.

    Raises:
      MeshError: a leaf cannot be gathered from one layout to the other.
    """
    if all(have == want for have, want in zip(trees.leaves(stored), trees.leaves(compute), strict=True)):
        return filled(cast_weights(params, dtypes.compute), compute)
    groups: list[Group] = []
    number = functools.partial(_group, groups, mesh, dtypes)
    tree = _numbered(params, stored, compute, number=number, itemsize=dtypes.compute.itemsize)
    again = None if last is None or not isinstance(tree, dict) else tree.get(last)
    return _view(tree, GatherSchedule(groups, again if isinstance(again, int) else None))


def regathering(layers: object) -> contextlib.AbstractContextManager:
    """Inside, autograd saves a note instead of the weights of `layers`, if they are gathered at all."""
    if isinstance(layers, Layers) and torch.is_grad_enabled():
        return torch.autograd.graph.saved_tensors_hooks(layers.note, layers.remember)
    return contextlib.nullcontext()


def _numbered(params: trees.Tree, stored: trees.Tree, compute: trees.Tree, number: Any, itemsize: int) -> Any:
    """The tree with the number of its group in place of each group: a leaf, some layers, or a dict of leaves."""
    if isinstance(params, dict) and not all(isinstance(x, Tensor) for x in params.values()):
        return {
            name: _numbered(params[name], stored[name], compute[name], number=number, itemsize=itemsize)
            for name in sorted(params)
        }
    if isinstance(params, tuple):
        count = layers_of_group(stored, compute, itemsize)
        runs = [slice(low, low + count) for low in range(0, len(params), count)]
        numbers = [number(*(tree[run] for tree in (params, stored, compute))) for run in runs]
        first = numbers[0] if numbers else 0
        return LayerGroups(range(first, first + len(numbers)), len(params))
    return number(params, stored, compute)


def layers_of_group(stored: trees.Tree, compute: trees.Tree, itemsize: int) -> int:
    """Number of layers that are gathered together; every layer by itself where a message of it is large.

    Args:
      stored, compute: layouts of a tuple of layers.
      itemsize: bytes of a number that is sent.
    """
    pairs = [(trees.leaves(have), trees.leaves(want)) for have, want in zip(stored, compute, strict=True)]
    if not any(have and message_bytes(have[0].world, 0) for have, _ in pairs):
        return 1
    kinds = dict.fromkeys((tuple(have), tuple(want)) for have, want in pairs)
    plans = [
        buffers_of(("a weight of a layer",) * len(have), have, want, (True,) * len(have), least_elements())
        for have, want in kinds
    ]
    return min(layers_together(buffers, itemsize) for buffers in plans)


def _group(
    groups: list[Group], mesh: Mesh, dtypes: GatherDtypes, shards: object, stored: object, compute: object
) -> int:
    names = tuple(name for name, _ in trees.named(stored))
    trained = tuple(x.requires_grad for x in trees.leaves(shards))
    leaves = tuple(trees.leaves(stored)), tuple(trees.leaves(compute))
    buffers = buffers_of(names, *leaves, trained, least_elements())
    groups.append(Group(filled(shards, compute, buffers.places), buffers, mesh, dtypes=dtypes))
    return len(groups) - 1


def _view(tree: trees.Tree, schedule: GatherSchedule) -> Any:
    if isinstance(tree, dict):
        return Weights(tree, schedule)
    if isinstance(tree, LayerGroups):
        return Layers(schedule, tree)
    return schedule.weights(tree, schedule.after(tree))[0]


class Weights(Mapping):
    """A dict of weights that are gathered when they are looked at, each time anew."""

    def __init__(self, parts: dict[str, trees.Tree], schedule: GatherSchedule) -> None:
        self.parts = parts
        self.schedule = schedule

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
      at: the group that forward or backward pass is at.
    """

    def __init__(self, schedule: GatherSchedule, groups: LayerGroups) -> None:
        self.schedule = schedule
        self.numbers = groups.numbers
        self.count = groups.layers
        self.at: GatheredGroup | None = None

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[trees.Tree]:
        for i in self.numbers:
            self.at = None  # the weights of the layers before go before these come
            weights, buffers = self.schedule.weights(i, i + 1 if i + 1 in self.numbers else self.schedule.after(i))
            self.at = _landed(i, buffers)
            layers = collections.deque(weights)
            del buffers, weights
            while layers:
                yield layers.popleft()

    def note(self, x: Tensor) -> Any:
        """Saved form of a tensor for autograd: a note if it is a part of this layer's weights."""
        bucket = None if self.at is None else self.at.buckets.get(x.untyped_storage()._cdata)
        if self.at is None or bucket is None:
            return x
        return SavedWeight(self.at.group, bucket, x.shape, stride=x.stride(), offset=int(x.storage_offset()))

    def remember(self, kept: Any) -> Tensor:
        """The tensor of a note; its layer is gathered if the backward pass has just come to it."""
        if not isinstance(kept, SavedWeight):
            return kept
        if self.at is None or self.at.group != kept.group:
            self.at = None
            self.at = _landed(kept.group, self.schedule.land(kept.group))
        if kept.group > self.numbers[0]:
            self.schedule.start(kept.group - 1)
        return self.at.buffers[kept.bucket].as_strided(kept.shape, kept.stride, kept.offset)


class GatherSchedule:
    """The gathers and scatters of a tree's groups, numbered in their order of use.

    Attributes:
      groups: the shards.
      handles: of every group the trained shards to gather, as autograd sees them: their gradients have landed at the
        end.
      arriving: gathers that have begun, by group.
      again: the group that is looked at once more behind the last one, if there is such.
      looks, passed: how often each group's weights were made, and their gradients were.
      leaving: gradients on their way.
    """

    def __init__(self, groups: list[Group], again: int | None = None) -> None:
        self.groups = groups
        self.again = again
        split = [
            [
                x
                for x, place in zip(trees.leaves(group.shards), group.buffers.places, strict=True)
                if place is not None and group.buffers.buckets[place.bucket].trained
            ]
            for group in groups
        ]
        self.leaving: list[Scatter] = []
        every = [x for group in split for x in group]
        handles = iter(_Landed.apply(self.leaving, *every) if every else ())
        self.handles = [[next(handles) for _ in group] for group in split]
        self.arriving: dict[int, collections.deque[Tensor]] = {}
        self.looks = collections.Counter[int]()
        self.passed = collections.Counter[int]()

    def start(self, i: int) -> None:
        """Begin to gather a group, unless that is on its way or nothing of it is gathered."""
        if i not in self.arriving and self.groups[i].buffers.buckets:
            self.arriving[i] = start_gather(self.groups[i])

    def land(self, i: int) -> list[Tensor]:
        """Wait for a group's gather: its buffers, in which every weight is contiguous."""
        self.start(i)
        return land_gather(self.groups[i], self.arriving.pop(i))

    def after(self, i: int) -> int | None:
        """The next group that is gathered, if nobody has looked at it before; behind the last the one to come again."""
        j = next((j for j in range(i + 1, len(self.groups)) if self.groups[j].buffers.buckets), None)
        if j is None:
            return self.again if self.again is not None and self.again != i and self.looks[self.again] == 1 else None
        return j if self.looks[j] == 0 else None

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
            landed = self.land(i) if group.buffers.buckets else []
            trained = iter(())

        def value(name: str, x: Tensor, place: BufferPlace | None) -> Tensor:
            if place is None:
                return cast_weight(x, weight_dtype(name, group.dtypes.compute))
            bucket = group.buffers.buckets[place.bucket]
            return next(trained) if bucket.trained else whole_of(landed[place.bucket], place, bucket)

        leaves = zip(trees.named(group.shards), group.buffers.places, strict=True)
        return trees.fill(group.shards, [value(name, x, place) for (name, x), place in leaves]), landed


def _landed(i: int, buffers: list[Tensor]) -> GatheredGroup:
    return GatheredGroup(i, buffers, {buffer.untyped_storage()._cdata: number for number, buffer in enumerate(buffers)})


class _Gather(AutogradFunction):
    """Shards to whole weights; back, the gradients begin to be summed and split."""

    @staticmethod
    def forward(schedule, i, landed, *shards):
        buffers = schedule.groups[i].buffers
        landed.extend(schedule.land(i))
        return tuple(whole_of(landed[place.bucket], place, buffers.buckets[place.bucket]) for place in buffers.trained)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.schedule = inputs[0]
        ctx.i = inputs[1]
        ctx.dtype = inputs[3].dtype
        ctx.shapes = [tuple(x.shape) for x in inputs[3:]]
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx, *grads):
        schedule = ctx.schedule
        group = schedule.groups[ctx.i]
        land_scatters(schedule.leaving)  # first: this one's takes the room of what the last one has sent
        shards = start_scatter(group, grads, ctx.shapes, dtype=ctx.dtype, leaving=schedule.leaving)
        schedule.passed[ctx.i] += 1
        if schedule.passed[ctx.i] > 1:  # autograd adds it to what has come from another look
            land_scatters(schedule.leaving)
        return None, None, None, *shards


class _Landed(AutogradFunction):
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
        land_scatters(ctx.leaving)
        return None, *(grad if grad is None else grad.contiguous() for grad in grads)
