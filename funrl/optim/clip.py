"""The global norm of a tree that is sharded over a mesh, and clipping by it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from funrl import trees
from funrl.mesh import collectives
from funrl.mesh.mesh import AXES, Mesh, single
from funrl.optim.base import Transformation, scale_


def global_norm(tree: trees.Tree, layouts: trees.Tree = None, mesh: Mesh | None = None) -> Tensor:
    """The Euclidean norm of all leaves together, the same on every rank: sqrt(sum of x^2).

    Args:
      tree: this rank's shards.
      layouts: the layout of each leaf on the mesh; None: every leaf is whole on every rank.
      mesh: the mesh; None: one device.

    Returns: a scalar, in float32 or the widest wider dtype of the leaves.
    """
    dtype = _sum_dtype(tree)
    squares = [torch.linalg.vector_norm(x, dtype=dtype).square() for x in trees.leaves(tree)]
    return _sum_over_shards(squares, layouts, mesh or single()).sqrt()


def global_dot(tree: trees.Tree, other: trees.Tree, layouts: trees.Tree = None, mesh: Mesh | None = None) -> Tensor:
    """The inner product of two trees of one structure, the same on every rank; arguments and dtype as `global_norm`."""
    dtype = _sum_dtype(tree)
    pairs = zip(trees.leaves(tree), trees.leaves(other), strict=True)
    products = [(x.to(dtype) * y.to(dtype)).sum() for x, y in pairs]
    return _sum_over_shards(products, layouts, mesh or single())


def _sum_dtype(tree: trees.Tree) -> torch.dtype:
    """Float32, or the widest wider dtype of the leaves."""
    dtype = torch.float32
    for x in trees.leaves(tree):
        dtype = torch.promote_types(dtype, x.dtype)
    return dtype


def _sum_over_shards(values: Sequence[Tensor], layouts: trees.Tree, mesh: Mesh) -> Tensor:
    """The sum over all leaves of a number of each leaf's shard; `layouts` and `mesh` as in `global_norm`."""
    if not values:
        return torch.zeros((), device=mesh.device)
    if layouts is None:
        return torch.stack(list(values)).sum()
    # The sum is over the axes that split some leaf. Ranks of it that hold copies of a leaf each give an equal part of
    # its number, so that the sum counts it once.
    splits = [layout.axes for layout in trees.leaves(layouts)]
    over = tuple(a for a in AXES if any(a in axes for axes in splits))
    copies = [mesh.size(over) // mesh.size(axes) for axes in splits]
    mine = torch.stack([s / n for s, n in zip(values, copies, strict=True)]).sum()
    return collectives.psum(mine, mesh, over)


def clip_by_global_norm(
    max_norm: float, norm_of: Callable[[trees.Tree], Tensor] = global_norm, in_place: bool = False
) -> Transformation:
    """Scale the gradients down together to a global norm of at most `max_norm`: g min(1, max_norm / |g|).

    Args:
      max_norm: in units of the gradient's norm.
      norm_of: tree -> scalar, for an `update` that is not given the norm; over a mesh
        `functools.partial(global_norm, layouts=..., mesh=...)`.
      in_place: `update` takes over the gradients, whose memory becomes the updates.

    A trainer that takes the norm itself, for a metric and to look whether it is finite, hands it over:

        norm = global_norm(grads, layouts, mesh)
        updates, state = optimizer.update(grads, state, params, norm=norm)

    References: Pascanu et al., 2013, https://arxiv.org/abs/1211.5063
    Warning: as in optax; torch.nn.utils.clip_grad_norm_ divides by |g| + 1e-6 instead.
    """

    def update(
        grads: trees.Tree, state: object, params: trees.Tree, *, norm: Tensor | None = None
    ) -> tuple[trees.Tree, trees.Tree]:
        scalar = factor(grads, norm)
        if in_place:
            return scale_(grads, scalar), state
        return trees.map(lambda grad: grad * scalar.to(grad.dtype), grads), state

    def factor(grads: trees.Tree, norm: Tensor | None) -> Tensor:
        size = norm_of(grads) if norm is None else norm
        return torch.where(size < max_norm, torch.ones_like(size), max_norm / size)

    return Transformation("clip_by_global_norm", lambda params: (), update, factor=factor if in_place else None)
