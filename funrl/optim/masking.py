"""Transformations of some of the leaves: one for each kind of parameter, or one under a mask."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import optree
from torch import Tensor

from funrl import trees
from funrl.optim.base import Transformation, apply_updates_, scale_
from funrl.optim.scaling import Mask, mask_of

Labels = trees.Tree | Callable[[trees.Tree], trees.Tree]


def partition(transformations: Mapping[str, Transformation], labels: Labels, name: str = "partition") -> Transformation:
    """Every leaf by the transformation that its label names.

    A transformation sees trees in which the leaves of others are None, an empty tree, so that the leaves that are left
    keep their names. The state is a dict of the transformations' states by label.

    Args:
      transformations: by label; a label without leaves is allowed.
      labels: a tree like the parameters whose leaves are labels, or a function params -> such a tree.

    Raises:
      ValueError: a leaf whose label is not one of `transformations`, when the optimizer begins.
    """

    def parts(tree: trees.Tree, marks: trees.Tree) -> dict[str, trees.Tree]:
        return {label: _part(tree, trees.map(lambda mark, k=label: mark == k, marks)) for label in transformations}

    def init(params: trees.Tree) -> trees.Tree:
        marks = labels(params) if callable(labels) else labels
        for leaf, label in trees.named(marks):
            if label not in transformations:
                raise ValueError(f"{leaf} has the label {label!r}; there are {sorted(transformations)}")
        return {label: transformations[label].init(part) for label, part in parts(params, marks).items()}

    def update(
        grads: trees.Tree, state: trees.Tree, params: trees.Tree, *, norm: Tensor | None = None
    ) -> tuple[trees.Tree, trees.Tree]:
        marks = labels(params) if callable(labels) else labels
        theirs = parts(params, marks)
        after = {}
        updates = grads
        for label, part in parts(grads, marks).items():
            updated, after[label] = transformations[label].update(part, state[label], theirs[label])
            updates = _join(updates, updated)
        return updates, after

    return Transformation(name, init, update)


def masked(inner: Transformation, mask: Mask) -> Transformation:
    """`inner` for the leaves under the mask; the others' gradients pass as they are.

    Args:
      mask: a tree of bools like the parameters, or a function params -> such a tree; None: all leaves.
    """

    def init(params: trees.Tree) -> trees.Tree:
        return inner.init(_part(params, mask_of(mask, params)))

    def update(
        grads: trees.Tree, state: object, params: trees.Tree, *, norm: Tensor | None = None
    ) -> tuple[trees.Tree, trees.Tree]:
        chosen = mask_of(mask, params)
        updates, state = inner.update(_part(grads, chosen), state, _part(params, chosen))
        return _join(grads, updates), state

    learn_in_place = inner.in_place
    if learn_in_place is None or inner.factor is not None:
        return Transformation(inner.name, init, update)

    def in_place(grads: trees.Tree, state: object, params: trees.Tree, factor: Tensor | None) -> object:
        chosen = mask_of(mask, params)
        others = trees.map(lambda on: not on, chosen)
        passed = _part(grads, others)
        if trees.leaves(passed):
            apply_updates_(_part(params, others), passed if factor is None else scale_(passed, factor))
        return learn_in_place(_part(grads, chosen), state, _part(params, chosen), factor)

    return Transformation(inner.name, init, update, in_place=in_place)


def _part(tree: trees.Tree, chosen: trees.Tree) -> trees.Tree:
    """The tree with None in place of the leaves that are not chosen."""
    return trees.map(lambda x, on: x if on else None, tree, chosen)


def _join(tree: trees.Tree, part: trees.Tree) -> trees.Tree:
    """The tree with the leaves of a part of it in place of its own."""
    return optree.tree_map(lambda x, new: x if new is None else new, tree, part, none_is_leaf=True)
