"""Which mesh axis each logical axis of a tensor is split over: two tables, one to train and one to generate.

A parameter tree has beside it a tree of logical axes, such as `("vocab", "embed")`. A rule table sends each logical
axis to a mesh axis, to several (outermost first), or to None. The three together give a tree of `Layout`s.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from funrl import trees
from funrl.mesh import mesh as meshes
from funrl.mesh.mesh import AXES, Mesh, MeshError

Rule = str | tuple[str, ...] | None
Rules = Mapping[str, Rule]


class IfDivides(str):
    """A mesh axis to split over where the size divides, and to replicate over where it does not."""


# Parameters: vocab [V], embed [D], heads [H], kv_heads [K], head [N], mlp [F], layers' norms are ("embed_norm",).
TRAIN: Rules = {
    "vocab": "tensor",
    "heads": "tensor",
    "kv_heads": IfDivides("tensor"),
    "mlp": "tensor",
    "embed": None,
    "head": None,
    "norm": None,
    "value": None,
}
GENERATE: Rules = dict(TRAIN)
ROWS = ("data", "expert")  # the mesh axes that the rows of a batch are split over


def fully_sharded(rules: Rules, over: str | tuple[str, ...] = "data") -> Rules:
    """The table with `embed` split over `over` too: all weights are then split over it, norms and biases are not.

    Every matrix has exactly one dim `embed`, so this is the choice of one dim for each of them.

    Args:
      over: some of `ROWS`. Leaving out one of them shards inside a group and replicates across groups.
    """
    return {**rules, "embed": over}


@dataclass(frozen=True)
class Layout:
    """How one tensor lies on the mesh: the only sharding metadata there is.

    Attributes:
      shape: the whole tensor's shape.
      spec: for each dim the mesh axes that split it, outermost first; () is not split.
      sizes: the sizes of the mesh axes, in the order of `AXES`.
    """

    shape: tuple[int, ...]
    spec: tuple[tuple[str, ...], ...]
    sizes: tuple[int, ...]

    def box(self, rank: int) -> tuple[tuple[int, int], ...]:
        """The half-open interval that `rank` holds in each dim. Parts are nested ceiling chunks, as in torch.chunk."""
        sizes = dict(zip(AXES, self.sizes, strict=True))
        at = meshes.coordinates(sizes, rank)
        box = []
        for length, axes in zip(self.shape, self.spec, strict=True):
            low, high = 0, length
            for axis in axes:
                step = -(-(high - low) // sizes[axis])
                low, high = min(low + step * at[axis], high), min(low + step * (at[axis] + 1), high)
            box.append((low, high))
        return tuple(box)

    def local_shape(self, rank: int = 0) -> tuple[int, ...]:
        return tuple(high - low for low, high in self.box(rank))

    @property
    def axes(self) -> tuple[str, ...]:
        """The mesh axes that split this tensor."""
        return tuple(a for axes in self.spec for a in axes)

    @property
    def world(self) -> int:
        return math.prod(self.sizes)


def layout(
    name: str, shape: tuple[int, ...], logical: tuple[str, ...], rules: Rules, sizes: Mapping[str, int]
) -> Layout:
    """The layout of one tensor.

    Args:
      name: what an error calls the tensor.
      shape: of the whole tensor.
      logical: one logical axis per dim.
      rules: logical axis -> mesh axes.
      sizes: size of each mesh axis.

    Raises:
      MeshError: a logical axis without a rule, a mesh axis used twice, or a size that does not divide.
    """
    if len(logical) != len(shape):
        raise MeshError(f"{name}: shape {tuple(shape)} has {len(shape)} dims but its logical axes are {logical}")
    spec = []
    for length, axis in zip(shape, logical, strict=True):
        if axis not in rules:
            raise MeshError(f"{name}: logical axis {axis!r} has no rule; the table knows {sorted(rules)}")
        rule = rules[axis]
        over = () if rule is None else (rule,) if isinstance(rule, str) else tuple(rule)
        unknown = [a for a in over if a not in AXES]
        if unknown:
            raise MeshError(f"{name}: the rule for {axis!r} names mesh axis {unknown[0]!r}; there are {list(AXES)}")
        parts = math.prod(sizes[a] for a in over)
        if length % parts and isinstance(rule, IfDivides):
            over, parts = (), 1
        if length % parts:
            shorts = {v: k for k, v in meshes.SHORT.items()}
            over = tuple(a for a in over if sizes[a] > 1)
            mesh = ",".join(f"{shorts[a]}{sizes[a]}" for a in over)
            raise MeshError(
                f"{name}: {axis} has size {length}, which does not divide over {mesh} ({parts} parts); "
                f"choose a size for {'/'.join(shorts[a] for a in over)} that divides {length}"
            )
        spec.append(tuple(str(a) for a in over if sizes[a] > 1))
    used = [a for axes in spec for a in axes]
    twice = sorted({a for a in used if used.count(a) > 1})
    if twice:
        raise MeshError(
            f"{name}: mesh axis {twice[0]!r} would split two dims of {tuple(shape)} {logical}; change a rule"
        )
    return Layout(tuple(shape), tuple(spec), tuple(sizes[a] for a in AXES))


def layouts(shapes: trees.Tree, axes: trees.Tree, rules: Rules, sizes: Mapping[str, int]) -> trees.Tree:
    """The layout of every leaf. `shapes` is a tree of tensors (their whole shapes count), `axes` of logical axes."""
    return trees.map_named(lambda name, x, logical: layout(name, tuple(x.shape), logical, rules, sizes), shapes, axes)


def shard(tree: trees.Tree, layout_tree: trees.Tree, mesh: Mesh) -> trees.Tree:
    """This rank's part of every leaf of a tree that is whole on every rank. Parts own their memory."""

    def part(x: Tensor, lay: Layout) -> Tensor:
        where = tuple(slice(low, high) for low, high in lay.box(mesh.rank))
        return x[where].clone().contiguous() if lay.axes else x

    return trees.map(part, tree, layout_tree)
