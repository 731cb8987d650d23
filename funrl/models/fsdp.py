"""Fully sharded weights: a layer's shards are put together right before it computes, and let go right after.

`gathered` gives a tree to compute with that looks like the whole one. Looking at a part of it gathers that part: all
shards of a layer in one collective, cast to the dtype to compute in before they are sent. The next layer's gather is
on its way while a layer computes. The backward pass does not find the whole weights in memory either: what autograd
saves of them is a note of where they lay, and they are gathered again, in the other direction and again one layer
ahead. A layer's gradients are summed and split over the ranks in the dtype of the shards, so they arrive as shards.

    forward    gather 0 | compute 0, gather 1 | compute 1, gather 2 | ...
    backward   ... | gather 1, back through 2, scatter 2 | gather 0, back through 1, scatter 1 | ...
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from funrl import trees
from funrl.mesh import collectives
from funrl.mesh.mesh import AXES, Mesh, MeshError
from funrl.mesh.rules import ROWS, Layout

ALIGNMENT = 64  # elements: every weight begins where a kernel likes it to


class Place(NamedTuple):
    """Where one split leaf lies in the buffers of its group.

    Attributes:
      dim: the one that is split.
      shard, whole: the shapes of this rank's part and of all parts together.
      begin: its first element in a rank's buffer; in the whole buffer it is `ranks` times that.
    """

    dim: int
    shard: tuple[int, ...]
    whole: tuple[int, ...]
    begin: int


class Packing(NamedTuple):
    """How the leaves of a group lie in one buffer.

    Attributes:
      places: of each leaf; None where it is not split, and not in the buffer.
      over: the mesh axes that split them.
      ranks: how many parts that makes.
      elements: of one rank's buffer.
    """

    places: tuple[Place | None, ...]
    over: tuple[str, ...]
    ranks: int
    elements: int


class Group(NamedTuple):
    """Leaves that are gathered together, such as a layer's. `dtype` is that to compute in."""

    shards: trees.Tree
    packing: Packing
    mesh: Mesh
    dtype: torch.dtype


class Saved(NamedTuple):
    """What autograd keeps of a whole weight: where it lies in its layer's buffer."""

    layer: int
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int


def gathered(params: trees.Tree, layouts: trees.Tree, mesh: Mesh, dtype: torch.dtype) -> trees.Tree:
    """The weights to compute with, in `dtype`: to the model they look whole over the axes of the batch's rows.

    A tree that those axes do not split is cast and nothing else. Otherwise the result gathers when it is looked at:
    `tree[name]` one leaf or group, iterating over a tuple of layers one layer after the other. Each look gathers again.

    Args:
      params: this rank's shards; gradients reach them summed over the axes that split them.
      layouts: of the same structure; None: all weights are whole.
      mesh: the train mesh.
      dtype: floating point, of the results and of what is sent; gradients are reduced in the dtype of `params`.
    """
    if layouts is None or not any(_over(layout) for layout in trees.leaves(layouts)):
        return trees.cast(params, dtype)
    return _view(params, layouts, mesh, dtype)


def _view(params: Any, layouts: Any, mesh: Mesh, dtype: torch.dtype) -> Any:
    if isinstance(params, tuple):
        return Layers([_group(p, lay, mesh, dtype) for p, lay in zip(params, layouts, strict=True)])
    if isinstance(params, dict) and not all(isinstance(x, Tensor) for x in params.values()):
        return Weights(params, layouts, mesh, dtype)
    group = _group(params, layouts, mesh, dtype)
    return _assemble(group, _Pending(start(group)))


def regathering(layers: Any) -> contextlib.AbstractContextManager:
    """Inside, what autograd saves of `layers` is a note, where they are gathered at all."""
    if isinstance(layers, Layers) and torch.is_grad_enabled():
        return torch.autograd.graph.saved_tensors_hooks(layers.note, layers.remember)
    return contextlib.nullcontext()


class Weights(Mapping):
    """A dict of shards whose parts are gathered when they are looked at, each time anew."""

    def __init__(self, params: Mapping, layouts: Mapping, mesh: Mesh, dtype: torch.dtype) -> None:
        self.params, self.layouts, self.mesh, self.dtype = params, layouts, mesh, dtype

    def __getitem__(self, name: str) -> Any:
        return _view(self.params[name], self.layouts[name], self.mesh, self.dtype)

    def __contains__(self, name: object) -> bool:
        return name in self.params

    def __iter__(self) -> Iterator[str]:
        return iter(self.params)

    def __len__(self) -> int:
        return len(self.params)


class Layers:
    """A sequence of layers; iterating gathers one after the other and begins the next one's gather before it is needed.

    Attributes:
      groups: the shards.
      now: number and buffer of the layer that the model computes; the last one's stays for the backward pass.
      behind, ahead: in the backward pass, the buffer of the layer that it is at, and the gather of the one before.
    """

    def __init__(self, groups: Sequence[Group]) -> None:
        self.groups = groups
        self.now: tuple[int, Tensor] | None = None
        self.behind: dict[int, Tensor] = {}
        self.ahead: dict[int, Tensor] = {}

    def __len__(self) -> int:
        return len(self.groups)

    def __iter__(self) -> Iterator[trees.Tree]:
        following: Tensor | None = start(self.groups[0])
        for i, group in enumerate(self.groups):
            self.now = None  # the weights of the layer before go before this one's come
            assert following is not None
            pending = _Pending(following)
            following = start(self.groups[i + 1]) if i + 1 < len(self.groups) else None
            weights = _assemble(group, pending)
            assert pending.whole is not None
            self.now = (i, pending.whole)
            del pending
            yield weights
            del weights

    def note(self, x: Tensor) -> Any:
        """What autograd keeps of a tensor that it wants to save."""
        if self.now is None or x.untyped_storage()._cdata != self.now[1].untyped_storage()._cdata:
            return x
        return Saved(self.now[0], x.shape, x.stride(), int(x.storage_offset()))

    def remember(self, kept: Any) -> Tensor:
        """The tensor again."""
        if not isinstance(kept, Saved):
            return kept
        return self._again(kept.layer).as_strided(kept.shape, kept.stride, kept.offset)

    def _again(self, i: int) -> Tensor:
        if i not in self.behind:
            now, self.now, self.behind = self.now, None, {}
            if now is not None and now[0] == i:  # the last layer, with which the forward pass ended
                whole = now[1]
            else:
                whole = _spread(self.groups[i], self.ahead.pop(i) if i in self.ahead else start(self.groups[i]))
            self.ahead = {i - 1: start(self.groups[i - 1])} if i > 0 else {}
            self.behind = {i: whole}
        return self.behind[i]


def start(group: Group) -> Tensor:
    """Begins to gather a group; what it returns is not there yet."""
    packing, mesh = group.packing, group.mesh
    flat = torch.empty(packing.elements, dtype=group.dtype, device=mesh.device)
    with torch.no_grad():
        for x, place in zip(trees.leaves(group.shards), packing.places, strict=True):
            if place is not None:
                _part(flat, place, 1).view(place.shard).copy_(x)
    return collectives.start_all_gather(flat, mesh, packing.over)


class _Pending:
    """A gather on its way. It is no tensor to autograd, for which the shards are what the weights are made of."""

    def __init__(self, gathering: Tensor) -> None:
        self.gathering: Tensor | None = gathering
        self.whole: Tensor | None = None

    def land(self, group: Group) -> Tensor:
        assert self.gathering is not None
        self.whole, self.gathering = _spread(group, self.gathering), None
        return self.whole


def _assemble(group: Group, pending: _Pending) -> trees.Tree:
    """The group's weights, as functions of its shards."""
    leaves = trees.leaves(group.shards)
    split = [x for x, place in zip(leaves, group.packing.places, strict=True) if place is not None]
    whole = iter(_Gather.apply(group._replace(shards=None), pending, *split) if split else ())
    values = [
        x.to(group.dtype) if place is None else next(whole)
        for x, place in zip(leaves, group.packing.places, strict=True)
    ]
    return trees.fill(group.shards, values)


def _spread(group: Group, gathering: Tensor) -> Tensor:
    """The ranks' buffers, when they are there, as one in which every weight is contiguous."""
    packing = group.packing
    rows = collectives.wait(gathering).view(packing.ranks, packing.elements)
    whole = rows.new_empty(rows.numel())
    for place in packing.places:
        if place is not None:
            parts = rows[:, place.begin : place.begin + math.prod(place.shard)]
            _parts(_part(whole, place, packing.ranks), place, packing.ranks).copy_(
                parts.view(packing.ranks, *place.shard)
            )
    return whole


def _part(flat: Tensor, place: Place, ranks: int) -> Tensor:
    begin = place.begin * ranks
    return flat[begin : begin + math.prod(place.shard) * ranks]


def _parts(whole: Tensor, place: Place, ranks: int) -> Tensor:
    """A whole weight, or a flat view of it, as [ranks, *shard]."""
    return whole.view(place.whole).unflatten(place.dim, (ranks, -1)).movedim(place.dim, 0)


class _Gather(torch.autograd.Function):
    """Shards to whole weights; back, the gradients are summed and split in the dtype of the shards."""

    @staticmethod
    def forward(group, pending, *shards):
        whole = pending.land(group)
        places = [place for place in group.packing.places if place is not None]
        return tuple(_part(whole, place, group.packing.ranks).view(place.whole) for place in places)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.group, ctx.dtype = inputs[0], inputs[2].dtype

    @staticmethod
    def backward(ctx, *grads):
        packing, mesh = ctx.group.packing, ctx.group.mesh
        places = [place for place in packing.places if place is not None]
        rows = torch.zeros(packing.ranks, packing.elements, dtype=ctx.dtype, device=mesh.device)
        for grad, place in zip(grads, places, strict=True):
            if grad is not None:
                target = rows[:, place.begin : place.begin + math.prod(place.shard)]
                parts = _parts(grad.contiguous(), place, packing.ranks)
                target.unflatten(1, place.shard).copy_(parts)
        flat = collectives.psum_scatter(rows.view(-1), mesh, packing.over)
        return None, None, *(_part(flat, place, 1).view(place.shard) for place in places)


def _group(shards: trees.Tree, layouts: trees.Tree, mesh: Mesh, dtype: torch.dtype) -> Group:
    return Group(shards, _packing(tuple(trees.leaves(layouts))), mesh, dtype)


def _over(layout: Layout) -> tuple[str, ...]:
    """The axes of the batch's rows that split a leaf."""
    return tuple(axis for axis in layout.axes if axis in ROWS)


@functools.lru_cache(maxsize=256)
def _packing(layouts: tuple[Layout, ...]) -> Packing:
    """How leaves of these layouts lie in one buffer.

    Raises:
      MeshError: leaves that are split differently, or one whose dim is split further inside.
    """
    overs = {_over(layout) for layout in layouts} - {()}
    if len(overs) > 1:
        raise MeshError(f"the weights of a layer are split over {sorted(overs)}; only one of these can be gathered")
    over = overs.pop() if overs else ()
    ranks, begin, places = 1, 0, []
    for layout in layouts:
        if not _over(layout):
            places.append(None)
            continue
        dim = next(dim for dim, axes in enumerate(layout.spec) if set(axes) & set(over))
        if layout.spec[dim][-len(over) :] != over:
            raise MeshError(
                f"dim {dim} of {layout.shape} is split over {layout.spec[dim]}; {over} must come last in it"
            )
        shard = layout.local_shape()
        ranks = math.prod(size for axis, size in zip(AXES, layout.sizes, strict=True) if axis in over)
        places.append(Place(dim, shard, (*shard[:dim], shard[dim] * ranks, *shard[dim + 1 :]), begin))
        begin += -(-math.prod(shard) // ALIGNMENT) * ALIGNMENT
    return Packing(tuple(places), over, ranks, begin)
