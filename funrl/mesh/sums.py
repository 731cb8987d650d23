"""Sums of whole trees over mesh axes, many leaves in one collective; and ranges of rows by rank."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from funrl import trees
from funrl.mesh import collectives
from funrl.mesh.mesh import Axes, Mesh
from funrl.mesh.message_sizes import message_bytes
from funrl.mesh.rules import rest_axes

SUM_BYTES = 128 << 20  # summed in one collective of few ranks; a larger leaf goes alone


def psum_tree(tree: trees.Tree, mesh: Mesh, axes: Axes) -> trees.Tree:
    """Sum every leaf over `axes`, many in one collective: latency counts once, not once a leaf."""
    if mesh.size(axes) == 1:
        return tree
    values = trees.leaves(tree)
    summed: list[Tensor] = list(values)
    most = message_bytes(mesh.size(axes), SUM_BYTES)
    for dtype in sorted({v.dtype for v in values}, key=str):
        for which in _buckets(values, dtype, most):
            bucket = torch.cat([values[i].reshape(-1) for i in which])
            parts = collectives.psum(bucket, mesh, axes).split([values[i].numel() for i in which])
            for i, part in zip(which, parts, strict=True):
                summed[i] = part.view(values[i].shape)
    return trees.fill(tree, summed)


def sum_rest(
    grads: trees.Tree,
    extra: trees.Tree,
    stored: trees.Tree,
    compute: trees.Tree,
    mesh: Mesh,
    partial: trees.Tree | None = None,
) -> tuple[trees.Tree, trees.Tree]:
    """Sum gradients over the axes that the scatters of gathered layers have left: `rules.rest_axes`. Once a step.

    Args:
      grads: of this rank's tokens; leaves that are gathered are summed over the axes of their gather already.
      extra: tensors to sum over the `row_axes`, such as metrics; in a collective of the gradients where that fits.
      stored, compute: layouts of the leaves between steps and while their layer runs.
      partial: as in `rules.rest_axes`.

    Returns: the gradients, equal on all ranks that store the same part; and `extra`, equal on all ranks of row_axes.
    """
    leaves = trees.leaves(grads)
    sums = RestSums(stored, rest_axes(stored, compute, mesh, partial=partial), [x.dtype for x in leaves], mesh)
    sums.begin(extra)
    for i, x in enumerate(leaves):
        sums.add(i, x)
    summed, extra = sums.finish()
    return trees.fill(grads, summed), extra


class _Bucket(NamedTuple):
    """Leaves that are summed over the same axes in one collective: numbers of gradients, then of further tensors."""

    axes: tuple[str, ...]
    leaves: tuple[int, ...]


class _Part(NamedTuple):
    """Size of a leaf in a bucket."""

    dtype: torch.dtype
    nbytes: int


class _Place(NamedTuple):
    """Elements of a leaf in its bucket, and its shape, which may have fewer."""

    elements: int
    shape: torch.Size


class RestSums:
    """Sums of gradients over `rules.rest_axes`, which begin bucket by bucket as the gradients arrive.

    A bucket is sent when its gradients and the buckets before it are there: in one order on all ranks. That is the
    order in which a backward pass reaches them. A tree has its leaves in the order of use, so the last bucket is first,
    except for leaves that are used earlier than their place in the tree says.

    Args:
      stored: layouts of the gradients.
      rest: for each leaf the axes to sum it over.
      dtypes: of the gradients.
      mesh: of the layouts.
      late: numbers of leaves whose gradients are the last; their buckets come after all others.

    Example: sums.begin(metrics); sums.add(i, gradient) for each leaf; gradients, metrics = sums.finish().
    """

    def __init__(
        self,
        stored: trees.Tree,
        rest: Sequence[tuple[str, ...]],
        dtypes: Sequence[torch.dtype],
        mesh: Mesh,
        late: Collection[int] = (),
    ) -> None:
        self.layouts = trees.leaves(stored)
        self.rest = rest
        self.dtypes = dtypes
        self.mesh = mesh
        self.late = frozenset(late)
        self.extra: trees.Tree = ()
        self.values: dict[int, Tensor] = {}
        self.places: dict[int, _Place] = {}
        self.buckets: list[_Bucket] = []
        self.sent: list[Tensor] = []

    def begin(self, extra: trees.Tree) -> None:
        """Lay out the buckets, with further tensors to sum over the `row_axes`; before the first gradient is added."""
        self.extra = extra
        parts = [
            _Part(dtype, dtype.itemsize * math.prod(layout.local_shape()))
            for dtype, layout in zip(self.dtypes, self.layouts, strict=True)
        ]
        further = trees.leaves(extra)
        of_rows = tuple(axis for axis in self.mesh.row_axes if self.mesh.sizes[axis] > 1)
        rest = [*self.rest, *[of_rows] * len(further)]
        parts += [_Part(x.dtype, x.nbytes) for x in further]
        for axes in set(rest) - {()}:
            which = [i for i, over in enumerate(rest) if over == axes]
            most = message_bytes(self.mesh.size(axes), SUM_BYTES)
            for dtype in {parts[i].dtype for i in which}:
                together = _buckets([parts[i] for i in which], dtype, most)
                self.buckets += [_Bucket(axes, tuple(which[i] for i in bucket)) for bucket in together]
        self.buckets.sort(key=lambda bucket: (self.late.isdisjoint(bucket.leaves), bucket.leaves[0]), reverse=True)
        for i, x in enumerate(further, len(self.layouts)):
            self._add(i, x, x.shape)

    def add(self, i: int, gradient: Tensor) -> None:
        """Add the gradient of the leaf of a number. Sums begin of all buckets that are complete."""
        room = math.prod(self.layouts[i].local_shape()) if self.rest[i] else gradient.numel()
        # A sum's order depends on its place in a bucket: with 0s after it what is equal on some ranks stays so.
        padded = gradient if room == gradient.numel() else F.pad(gradient.reshape(-1), (0, room - gradient.numel()))
        self._add(i, padded, gradient.shape)

    def _add(self, i: int, value: Tensor, shape: torch.Size) -> None:
        self.values[i] = value
        self.places[i] = _Place(value.numel(), shape)
        while len(self.sent) < len(self.buckets):
            bucket = self.buckets[len(self.sent)]
            if any(leaf not in self.values for leaf in bucket.leaves):
                return
            flat = torch.cat([self.values.pop(leaf).detach().reshape(-1) for leaf in bucket.leaves])
            self.sent.append(collectives.start_psum(flat, self.mesh, bucket.axes))

    def finish(self) -> tuple[list[Tensor], trees.Tree]:
        """The sums of all gradients, and of the further tensors."""
        summed = self.values
        for bucket, flat in zip(self.buckets, self.sent, strict=True):
            places = [self.places[leaf] for leaf in bucket.leaves]
            parts = collectives.wait(flat).split([place.elements for place in places])
            for leaf, place, part in zip(bucket.leaves, places, parts, strict=True):
                summed[leaf] = part[: place.shape.numel()].view(place.shape)
        count = len(self.layouts)
        every = [summed[i] for i in sorted(summed)]
        return every[:count], trees.fill(self.extra, every[count:])


def _buckets(values: Sequence[Tensor | _Part], dtype: torch.dtype, most: int) -> Iterator[list[int]]:
    """Indices of the values of a dtype, in runs of at most `most` bytes."""
    bucket: list[int] = []
    room = most
    for i, value in enumerate(values):
        if value.dtype == dtype:
            if bucket and value.nbytes > max(room, 0):
                yield bucket
                bucket = []
                room = most
            bucket.append(i)
            room -= value.nbytes
    if bucket:
        yield bucket


def own_range(count: int, mesh: Mesh, axes: Axes) -> range:
    """This rank's contiguous share of `count` things over `axes`; shares differ by at most one."""
    parts = mesh.size(axes)
    index = mesh.index(axes)
    return range(count * index // parts, count * (index + 1) // parts)
