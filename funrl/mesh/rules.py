"""Tables of rules, which split a tensor's logical axes over mesh axes, and the layouts that they give.

A parameter tree has beside it a tree of logical axes, such as `("vocab", "embed")`. A rule table sends each logical
axis to a mesh axis, to several (outermost first), or to None. The three together give a tree of `Layout`s.

| table | says where a parameter is |
|---|---|
| `STORED` | between steps; its gradient and its optimizer's state are there too |
| `COMPUTE` | while its layer runs; what `STORED` splits beyond it is gathered before the layer |
| `GENERATE` | in the engine |
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from funrl import trees
from funrl.mesh import mesh as meshes
from funrl.mesh.mesh import AXES, Mesh, MeshError

Rule = str | tuple[str, ...] | None
Rules = Mapping[str, Rule]


class IfDivides(str):
    """A mesh axis to split over where the size divides, and to replicate over where it does not."""


class Uneven(str):
    """A mesh axis to split over whatever the size is: the last parts are shorter, or empty."""


class Outermost(Uneven):
    """A mesh axis that splits the outermost dim that it divides; where that is none before the rule's, as `Uneven`."""


class Leading(Outermost):
    """A mesh axis that splits the outermost dims together; where it does not divide them, as `Outermost`.

    Each of these dims is split into single rows before the next is split, so that one axis may split several: 64 ranks
    split 4 heads of 128 numbers into 4 and 16 parts. Such parts need no rearranging when they are gathered: one after
    the other they are the whole.
    """


class Fillable(str):
    """A mesh axis to split over any size that is not below its own: the last parts are shorter, or empty.

    They are stored, summed and saved as they are, and filled with 0s to the length of the others while a layer
    computes; see `models.filled`.
    """


class FillableRows(Fillable):
    """The same where no part is empty."""


# Parameters: vocab [V], embed [D], heads [H], kv_heads [K], head [N], mlp [F], experts and router [E], rank of adapters
# [R]; norms are ("norm",). "state_heads" are of two kinds that belong together, as in a gated delta net. What latent
# attention makes of hidden states is "latent", "embed" as an in dim.
COMPUTE: Rules = {
    "vocab": FillableRows("tensor"),
    "heads": Fillable("tensor"),
    "kv_heads": IfDivides("tensor"),
    "state_heads": "tensor",
    "mlp": Fillable("tensor"),
    "experts": Fillable("expert"),
    "router": None,
    "embed": None,
    "expert_embed": None,
    "head": None,
    "latent": None,
    "norm": None,
    "value": None,
    "rank": None,
}
STORED: Rules = dict(COMPUTE)
# Where the residual stream is split over `tensor`: axes of weights that work on a rank's part of the tokens there, and
# what their gradients are to be summed over because of it. All others see every token.
SPLIT_RESIDUAL: Rules = {"latent": "tensor", "norm": "tensor", "router": "tensor", "value": "tensor"}
GENERATE: Rules = dict(COMPUTE)  # ranks of `expert` generate other rows, and send tokens to each other's experts
WHOLE_EXPERTS: Rules = {**GENERATE, "experts": None}  # each of them with all experts


def fully_sharded(rules: Rules, over: str | tuple[str, ...] = "data", kind: type[Uneven] = Leading) -> Rules:
    """The table with every tensor that has a dim `embed` split over `over` too: all matrices, no norms and biases.

    The outermost dims that divide are split. Where none before `embed` does, `embed` is, and need not divide: parts are
    ceiling chunks, so the last ranks have less, or nothing.

    Every matrix has exactly one dim `embed`, or `expert_embed` if it has a dim `experts`; the latter is split over
    those of the axes that do not split `experts`. Of the two factors of an adapter one has it, and the other is small.

    Args:
      rules: how parameters are stored, such as `STORED`.
      over: some of `Mesh.token_axes`. Leaving out one of them shards inside a group and replicates across groups.
      kind: which dims are split. `Outermost`: one dim of each tensor. `Uneven`: always `embed` itself; a weight and its
        adapters are then split along the same dims, so that a rank merges its own parts of them.
    """
    axes = tuple(map(kind, _tuple(over)))
    taken = _tuple(rules["experts"])
    return {**rules, "embed": axes, "expert_embed": tuple(axis for axis in axes if axis not in taken)}


class AxisPart(NamedTuple):
    """Part of a mesh axis that splits a dim: a rank at position p on the axis has the part (p // inner) % size.

    Attributes:
      axis: of the mesh.
      size: number of parts.
      inner: number of parts into which the axis splits later dims; 1: it splits none.
    """

    axis: str
    size: int
    inner: int


@dataclass(frozen=True)
class Layout:
    """Layout of one tensor over a mesh: the only sharding metadata there is.

    Attributes:
      shape: the whole tensor's shape.
      spec: for each dim the mesh axes that split it, outermost first; () is not split. An axis of several dims splits
        them together: all but its last one into single rows.
      sizes: the sizes of the mesh axes, in the order of `AXES`.
    """

    shape: tuple[int, ...]
    spec: tuple[tuple[str, ...], ...]
    sizes: tuple[int, ...]

    def box(self, rank: int) -> tuple[tuple[int, int], ...]:
        """The half-open interval that `rank` holds in each dim.

        Parts are the ceiling chunks of all axes of the dim together, as in torch.chunk: equal but for the last ones,
        which are shorter or empty. Rank 0 has one of the longest.
        """
        position = meshes.coordinates(dict(zip(AXES, self.sizes, strict=True)), rank)
        box = []
        for length, splits in zip(self.shape, self.splits, strict=True):
            number = 0
            parts = 1
            for axis, size, inner in splits:
                number = number * size + position[axis] // inner % size
                parts = parts * size
            step = -(-length // parts)
            box.append((min(step * number, length), min(step * (number + 1), length)))
        return tuple(box)

    def local_shape(self, rank: int = 0) -> tuple[int, ...]:
        """The shape of a rank's part; that of rank 0 is the largest."""
        return tuple(high - low for low, high in self.box(rank))

    @property
    def axes(self) -> tuple[str, ...]:
        """The mesh axes that split this tensor."""
        return tuple(dict.fromkeys(a for axes in self.spec for a in axes))

    @property
    def splits(self) -> tuple[tuple[AxisPart, ...], ...]:
        """For each dim the parts of mesh axes that split it, outermost first.

        Raises:
          MeshError: an axis of several dims does not split all but the last into single rows.
        """
        sizes = dict(zip(AXES, self.sizes, strict=True))
        splits = []
        for dim, (length, axes) in enumerate(zip(self.shape, self.spec, strict=True)):
            own = []
            for axis in axes:
                goes_on = any(axis in later for later in self.spec[dim + 1 :])
                size = length if goes_on else sizes[axis]
                if goes_on and (not size or sizes[axis] % size):
                    raise MeshError(f"{axis} splits several dims of {self.shape} by {self.spec}, and not into rows")
                length //= size
                sizes[axis] //= size
                own.append(AxisPart(axis, size, sizes[axis]))
            splits.append(tuple(own))
        return tuple(splits)

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
      MeshError: a logical axis without a rule, a mesh axis used twice, or a size that does not divide and has to.
    """
    if len(logical) != len(shape):
        raise MeshError(f"{name}: shape {tuple(shape)} has {len(shape)} dims but its logical axes are {logical}")
    spec: list[tuple[str, ...]] = []
    used: list[str] = []
    for length, axis in zip(shape, logical, strict=True):
        if axis not in rules:
            raise MeshError(f"{name}: logical axis {axis!r} has no rule; the table knows {sorted(rules)}")
        rule = rules[axis]
        over = _tuple(rule)
        unknown = [a for a in over if a not in AXES]
        if unknown:
            raise MeshError(f"{name}: the rule for {axis!r} names mesh axis {unknown[0]!r}; there are {list(AXES)}")
        parts = math.prod(sizes[a] for a in over)
        if length % parts and isinstance(rule, IfDivides):
            over = ()
            parts = 1
        if length % parts and not (_fills(rule, length, parts) or (over and all(isinstance(a, Uneven) for a in over))):
            shorts = {v: k for k, v in meshes.SHORT.items()}
            over = tuple(a for a in over if sizes[a] > 1)
            mesh = ",".join(f"{shorts[a]}{sizes[a]}" for a in over)
            raise MeshError(
                f"{name}: {axis} has size {length}, which does not divide over {mesh} ({parts} parts); "
                f"choose a size for {'/'.join(shorts[a] for a in over)} that divides {length}"
            )
        names = tuple(str(a) for a in over if sizes[a] > 1)
        used += names
        if names and all(isinstance(a, Outermost) for a in over):
            joint = all(isinstance(a, Leading) for a in over)
            spec = _outermost(shape, [*spec, ()], names, sizes=sizes, joint=joint)
        else:
            spec.append(names)
    twice = sorted({a for a in used if used.count(a) > 1})
    if twice:
        raise MeshError(
            f"{name}: mesh axis {twice[0]!r} would split two dims of {tuple(shape)} {logical}; change a rule"
        )
    return Layout(tuple(shape), tuple(spec), tuple(sizes[a] for a in AXES))


def _outermost(
    shape: tuple[int, ...], spec: list[tuple[str, ...]], over: tuple[str, ...], sizes: Mapping[str, int], joint: bool
) -> list[tuple[str, ...]]:
    """The axes of each dim up to the last of `spec`, with those of a rule of `Outermost` axes for that dim.

    Args:
      joint: whether they may split several dims, as `Leading`.
    """
    parts = math.prod(sizes[a] for a in over)
    held = [math.prod(sizes[a] for a in axes) for axes in spec]
    added = _split_jointly([divmod(n, m) for n, m in zip(shape, held, strict=False)], over, sizes) if joint else None
    if added is None:
        place = next((i for i in range(len(spec)) if shape[i] % (held[i] * parts) == 0), len(spec) - 1)
        added = [over if i == place else () for i in range(len(spec))]
    return [axes + more for axes, more in zip(spec, added, strict=True)]


def _split_jointly(
    local: list[tuple[int, int]], over: tuple[str, ...], sizes: Mapping[str, int]
) -> list[tuple[str, ...]] | None:
    """For each dim the axes that split dims together, each into single rows before the next; None: they do not divide.

    Args:
      local: length of each dim on a rank so far, and what is left over where it is not the same on all of them.
    """
    spec: list[tuple[str, ...]] = [()] * len(local)
    dim = 0
    rows, uneven = local[0]
    for axis in over:
        left = sizes[axis]
        while left > 1:
            while rows == 1 and not uneven and dim < len(local) - 1:
                dim += 1
                rows, uneven = local[dim]
            taken = math.gcd(left, rows)
            if uneven or taken == 1 or taken not in (left, rows):
                return None
            spec[dim] += (axis,)
            rows //= taken
            left //= taken
    return spec


def whole_layout(shape: Sequence[int], mesh: Mesh) -> Layout:
    """The layout of a tensor that is whole on every rank of a mesh."""
    return Layout(tuple(shape), ((),) * len(shape), tuple(mesh.sizes[axis] for axis in AXES))


def layouts(shapes: trees.Tree, axes: trees.Tree, rules: Rules, sizes: Mapping[str, int]) -> trees.Tree:
    """The layout of every leaf. `shapes` is a tree of tensors (their whole shapes count), `axes` of logical axes."""
    return trees.map_named(lambda name, x, logical: layout(name, tuple(x.shape), logical, rules, sizes), shapes, axes)


def shard(tree: trees.Tree, layout_tree: trees.Tree, mesh: Mesh) -> trees.Tree:
    """This rank's part of every leaf of a tree that is whole on every rank. Parts own their memory."""

    def part(x: Tensor, layout: Layout) -> Tensor:
        where = tuple(slice(low, high) for low, high in layout.box(mesh.rank))
        return x[where].clone().contiguous() if layout.axes else x

    return trees.map(part, tree, layout_tree)


def gather_axes(name: str, stored: Layout, compute: Layout) -> tuple[tuple[str, ...], ...]:
    """For each dim the mesh axes to gather over before a layer runs: those of `stored` that `compute` does not have.

    Raises:
      MeshError: `compute` splits a dim otherwise than `stored` begins to, or `stored` splits further one whose parts
        are not equal; `name` is what the error calls the tensor.
    """
    axes = []
    for dim, (have, want) in enumerate(zip(stored.spec, compute.spec, strict=True)):
        if have[: len(want)] != want:
            raise MeshError(
                f"{name}: dim {dim} of {stored.shape} is stored over {have} and computed over {want}, which must be "
                "the first of those axes: what follows them is gathered"
            )
        if want and have != want and stored.shape[dim] % math.prod(split.size for split in stored.splits[dim]):
            raise MeshError(
                f"{name}: dim {dim} of {stored.shape} does not divide over {have}, of which {want} split it while it "
                "computes; choose sizes that divide it"
            )
        axes.append(have[len(want) :])
    return tuple(axes)


def partial_axes(shapes: trees.Tree, axes: trees.Tree, rules: Rules) -> trees.Tree:
    """For each leaf the mesh axes, besides those of tokens, whose ranks have parts of its gradient: a frozenset.

    Args:
      shapes, axes: as in `layouts`.
      rules: such as `SPLIT_RESIDUAL`; a logical axis that is not in it has no such axes.
    """
    return trees.map(lambda _, logical: frozenset(a for name in logical for a in _tuple(rules.get(name))), shapes, axes)


def rest_axes(
    stored: trees.Tree, compute: trees.Tree, mesh: Mesh, partial: trees.Tree | None = None
) -> list[tuple[str, ...]]:
    """For each leaf the axes to sum its gradient over once a step, in the order of `trees.leaves`.

    A gradient is summed over the axes that split the batch's tokens, except axes that split the leaf while it
    computes: these ranks have other parts of it. What is gathered before a layer is summed by the scatter after it.

    Args:
      partial: further axes, of `partial_axes`; None: no leaf has any.
    """
    pairs = list(zip(trees.leaves(stored), trees.leaves(compute), strict=True))
    more = [frozenset()] * len(pairs) if partial is None else trees.leaves(partial)

    def rest(stored: Layout, compute: Layout, partial: frozenset[str]) -> tuple[str, ...]:
        done = (*stored.axes, *compute.axes)
        over = partial.union(mesh.token_axes)
        return tuple(axis for axis in AXES if axis in over and mesh.sizes[axis] > 1 and axis not in done)

    return [rest(*pair, axes) for pair, axes in zip(pairs, more, strict=True)]


def _fills(rule: Rule, length: int, parts: int) -> bool:
    """True if a rule lets a size be split that does not divide."""
    if isinstance(rule, FillableRows):
        return (parts - 1) * -(-length // parts) < length
    return isinstance(rule, Fillable) and length >= parts


def _tuple(rule: Rule) -> tuple[str, ...]:
    return () if rule is None else (rule,) if isinstance(rule, str) else tuple(rule)
