"""Sums of whole trees over mesh axes, many leaves in one collective; and ranges of rows by rank."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from funrl import trees
from funrl.mesh import collectives
from funrl.mesh.mesh import Axes, Mesh
from funrl.mesh.message_sizes import message_bytes
from funrl.mesh.rules import Layout, rest_axes

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
    layouts = trees.leaves(stored)
    rest = rest_axes(stored, compute, mesh, partial=partial)
    of_rows = tuple(axis for axis in mesh.row_axes if mesh.sizes[axis] > 1)
    for axes in sorted({*rest, of_rows}):
        which = [i for i, over in enumerate(rest) if over == axes]
        with_extra = extra if axes == of_rows else ()
        level = [_level(leaves[i], layouts[i]) for i in which]
        summed, with_extra = psum_tree((level, with_extra), mesh, axes)
        for i, x in zip(which, summed, strict=True):
            leaves[i] = x if x.shape == leaves[i].shape else x[: leaves[i].numel()].view(leaves[i].shape)
        if axes == of_rows:
            extra = with_extra
    return trees.fill(grads, leaves), extra


def _level(x: Tensor, layout: Layout) -> Tensor:
    """A gradient; flat and with 0s behind it where other ranks have more of it.

    A sum's order depends on its place in a bucket. So what is equal on some ranks stays equal, bit for bit.
    """
    longest = layout.local_shape()
    return x if tuple(x.shape) == longest else F.pad(x.reshape(-1), (0, math.prod(longest) - x.numel()))


def _buckets(values: Sequence[Tensor], dtype: torch.dtype, most: int) -> Iterator[list[int]]:
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
