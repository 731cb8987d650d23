"""Matrices made orthogonal by Newton-Schulz iterations, on a mesh each on one rank."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import optree
import torch
import torch.nn.functional as F
from torch import Tensor

from funrl import trees
from funrl.mesh import collectives
from funrl.mesh.mesh import AXES, Mesh, single
from funrl.mesh.rules import Layout
from funrl.optim.base import Transformation, accumulator_dtype, stateless

Coefficients = Sequence[tuple[float, float, float]]
JORDAN: Coefficients = ((3.4445, -4.7750, 2.0315),) * 5  # steepest at 0: singular values end in about [0.7, 1.2]
EMBED = ("embed", "expert_embed")  # logical axes of a matrix inside the model: one of its sides
SCALINGS = {
    "original": lambda rows, columns: math.sqrt(max(1, rows / columns)),
    "match_rms_adamw": lambda rows, columns: 0.2 * math.sqrt(max(rows, columns)),
    "none": lambda rows, columns: 1.0,
}


class MatrixView(NamedTuple):
    """A tensor as matrices: its first dims count a batch, the next are rows, the rest columns.

    Rows are outputs and columns inputs of a linear map. A query projection [H, N, D] has (0, 2), an [H N, D] matrix;
    an output projection [D, H, N] has (0, 1); experts [E, F, D] have (1, 1), E matrices [F, D].
    """

    batch: int
    rows: int


def matrix_view(name: str, axes: Sequence[str]) -> MatrixView:
    """The view of a weight by its logical axes: `experts` is a batch, and `embed` is one side of the matrix.

    Raises:
      ValueError: `embed` is neither the first nor the last of more than two dims.
    """
    batch = 1 if len(axes) > 2 and axes[0] == "experts" else 0
    own = axes[batch:]
    if len(own) == 2 or (len(own) > 2 and own[0] in EMBED):
        return MatrixView(batch, 1)
    if len(own) > 2 and own[-1] in EMBED:
        return MatrixView(batch, len(own) - 1)
    raise ValueError(f"{name}: the axes {axes} do not say which dims are the rows of a matrix; give a `view` that does")


def orthogonalize(
    scaling: str = "match_rms_adamw",
    coefficients: Coefficients = JORDAN,
    ns_dtype: torch.dtype | None = None,
    axes: trees.Tree = None,
    layouts: trees.Tree = None,
    mesh: Mesh | None = None,
    view: Callable[[str, Sequence[str]], MatrixView] = matrix_view,
) -> Transformation:
    """The nearest orthogonal matrix, about, in place of each matrix, times a factor of its size.

    On a mesh every matrix is made whole on one rank, which iterates, and goes back in shards: an all-to-all each way,
    in rounds of as many matrices of one shape as there are ranks, so that no rank holds more than one whole matrix and
    all work. Axes over which a matrix is replicated take part. The numbers are those of one device.

    Args:
      scaling: factor of a matrix [R, C]: "original" max(1, R / C)^0.5, by which an update changes outputs equally for
        all shapes; "match_rms_adamw" 0.2 max(R, C)^0.5, whose elements are as large as those of AdamW's updates (0.2 to
        0.4); "none".
      coefficients: (a, b, c) of each iteration x <- a x + (b x x^T + c (x x^T)^2) x.
      ns_dtype: dtype of the iterations and of what ranks exchange, torch.bfloat16 to be fast (updates are then off by
        about 3%); None: the gradient's, at least float32.
      axes: the weights' logical axes, which say how a tensor of more than two dims is a matrix; None: all have two.
      layouts: of the weights on `mesh`; None: whole on every rank.
      mesh: None: one device.
      view: (name, logical axes) -> how a tensor is a matrix.

    Raises:
      ValueError: an unknown scaling, or a tensor that is not seen to be a matrix.
    """
    if scaling not in SCALINGS:
        raise ValueError(f"scaling is {scaling!r}, there are {list(SCALINGS)}")
    logical = axes_by_name(axes)
    layout_of = dict(trees.named(layouts))
    world = mesh or single()

    def kind(name: str, x: Tensor) -> _Kind:
        if axes is None and x.ndim != 2:
            raise ValueError(
                f"{name} has shape {tuple(x.shape)}: how it is a matrix is said by its logical axes, `axes`"
            )
        its = view(name, logical[name]) if axes is not None else MatrixView(0, 1)
        return _Kind(its, tuple(x.shape), x.dtype, layout=layout_of.get(name))

    def scaled(whole: Tensor, its: MatrixView) -> Tensor:
        rows = whole.shape[its.batch : its.batch + its.rows].numel()
        x = whole.reshape(*whole.shape[: its.batch], rows, -1)
        return (newton_schulz(x, coefficients) * SCALINGS[scaling](*x.shape[-2:])).view(whole.shape)

    def update(grads: trees.Tree, params: trees.Tree) -> trees.Tree:
        named = [(name, grad.to(ns_dtype or accumulator_dtype(grad))) for name, grad in trees.named(grads)]
        kinds = [kind(name, x) for name, x in named]
        done = {}
        for own in dict.fromkeys(kinds):
            members = [(name, x) for (name, x), other in zip(named, kinds, strict=True) if other == own]
            results = _on_owners(lambda x, its=own.view: scaled(x, its), [x for _, x in members], own, mesh=world)
            done |= {name: x for (name, _), x in zip(members, results, strict=True)}
        return trees.map_named(lambda name, grad: done[name].to(accumulator_dtype(grad)), grads)

    def init(params: trees.Tree) -> tuple[()]:
        trees.map_named(kind, params)  # what is not a matrix is an error before the first update
        return ()

    return stateless("orthogonalize", update)._replace(init=init)


def newton_schulz(x: Tensor, coefficients: Coefficients = JORDAN, eps: float = 1e-7) -> Tensor:
    """Odd polynomials of the singular values: of x = U S V^T, U f(S / |S|) V^T, all of f's values near 1.

    Args:
      x: [..., R, C], each matrix for itself.
      coefficients: (a, b, c) of each iteration, f = f_n(... f_1(s)) with f_i(s) = a s + b s^3 + c s^5.
      eps: least Frobenius norm that a matrix is divided by; of 0 remains 0.
    """
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    x = x / torch.linalg.matrix_norm(x, keepdim=True).clamp_min(eps)
    for a, b, c in coefficients:
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if tall else x


class _Kind(NamedTuple):
    """Key of the tensors that are made orthogonal together; `shape` is that of the shard."""

    view: MatrixView
    shape: tuple[int, ...]
    dtype: torch.dtype
    layout: Layout | None


class _Exchange(NamedTuple):
    """An all-to-all over an axis that splits stacked shards.

    Attributes:
      axis: of the mesh.
      dim: of a stack, the innermost that the axis splits.
      outer: dims before it that the axis splits into single rows, and how many these are.
    """

    axis: str
    dim: int
    outer: tuple[tuple[int, int], ...]

    def unfold(self, x: Tensor) -> Tensor:
        """Give the outer dims the rows that have arrived in the innermost."""
        return self._reshaped(x, dict(self.outer))

    def fold(self, x: Tensor) -> Tensor:
        """Undo `unfold`."""
        return self._reshaped(x, {dim: 1 for dim, _ in self.outer})

    def _reshaped(self, x: Tensor, rows: dict[int, int]) -> Tensor:
        lengths = [-1 if dim == self.dim else rows.get(dim, n) for dim, n in enumerate(x.shape)]
        return x.reshape(lengths) if rows else x


def _exchanges(kind: _Kind) -> list[_Exchange]:
    """Exchanges that make matrices whole, of the innermost parts first."""
    exchanges = []
    splits = kind.layout.splits if kind.layout else ()
    for dim, own in reversed([*enumerate(splits)]):
        for split in reversed(own):
            if dim >= kind.view.batch and split.inner == 1:
                before = [(d + 1, part) for d, parts in enumerate(splits[:dim]) for part in parts]
                outer = tuple((d, part.size) for d, part in before if part.axis == split.axis)
                exchanges.append(_Exchange(split.axis, dim + 1, outer))
    return exchanges


def _on_owners(fn: Callable[[Tensor], Tensor], shards: Sequence[Tensor], kind: _Kind, mesh: Mesh) -> Iterator[Tensor]:
    """This rank's part of `fn` of each tensor, which is computed on one rank for all.

    A dim that counts a batch of matrices stays split, except over an axis that splits the matrices too. Where the ranks
    do not divide a dim, shards are exchanged padded to the largest, and what pads them is cut off before `fn`.

    Args:
      shards: this rank's parts of tensors of one kind.
    """
    spec = kind.layout.spec if kind.layout else ()
    exchanges = _exchanges(kind)
    parts = mesh.size(tuple(exchange.axis for exchange in exchanges))
    copies = []
    for axis in AXES:  # ranks that hold copies share the work as long as there is some
        if parts < len(shards) and not any(axis in axes for axes in spec):
            copies.append(axis)
            parts *= mesh.size(axis)
    for low in range(0, len(shards), parts):
        x = torch.stack(list(shards[low : low + parts]))
        count = len(x)
        own = tuple(x.shape[1:])
        if count < parts:
            x = torch.cat([x, x.new_zeros(parts - count, *own)])
        x = _padded(x, kind.layout.local_shape() if kind.layout else own)
        x = collectives.own_shard(x, mesh, tuple(copies))
        for exchange in exchanges:
            x = exchange.unfold(collectives.all_to_all(x, mesh, exchange.axis, split=0, concat=exchange.dim))
        together = tuple(x.shape[1:])
        matrix = (*together[: kind.view.batch], *(kind.layout.shape if kind.layout else own)[kind.view.batch :])
        x = _padded(torch.stack([fn(_cut(whole, matrix)) for whole in x.unbind(0)]), together)
        for exchange in reversed(exchanges):
            x = collectives.all_to_all(exchange.fold(x), mesh, exchange.axis, split=exchange.dim, concat=0)
        x = collectives.all_gather(x, mesh, tuple(copies))
        yield from (_cut(padded, own) for padded in x[:count].unbind(0))


def _padded(x: Tensor, shape: Sequence[int]) -> Tensor:
    """Pad [N, ...] with zeros after the last of each dim: [N, *shape]."""
    lacks = [longer - n for n, longer in zip(x.shape[1:], shape, strict=True)]
    return F.pad(x, [n for lack in reversed(lacks) for n in (0, lack)]) if any(lacks) else x


def _cut(x: Tensor, shape: Sequence[int]) -> Tensor:
    """The first of each dim."""
    return x if tuple(x.shape) == tuple(shape) else x[tuple(slice(n) for n in shape)]


def axes_by_name(axes: trees.Tree) -> dict[str, tuple[str, ...]]:
    """The logical axes of every weight."""

    def is_leaf(node: trees.Tree) -> bool:
        return isinstance(node, tuple) and len(node) > 0 and all(isinstance(axis, str) for axis in node)

    by_name, structure = optree.tree_flatten(axes, is_leaf=is_leaf)
    return dict(zip(trees.names(structure), by_name, strict=True))
