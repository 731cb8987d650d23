"""The layouts of an optimizer's state."""

from __future__ import annotations

import dataclasses
from typing import Any

import optree

from funrl import trees
from funrl.mesh.mesh import AXES
from funrl.mesh.rules import Layout


def layouts_of(state: trees.Tree, layouts: trees.Tree) -> trees.Tree:
    """The layout of every leaf of an optimizer's state.

    A tree inside the state that is like the parameters, as Adam's moments are, has their layouts; the parameters that
    another transformation of a `partition` holds are None in it. A scalar is whole on every rank.

    Args:
      state: what `init` or `update` of a transformation returns.
      layouts: of the parameters.

    Returns: a tree like the state, so that with `trees.named` of both a checkpoint is a walk over names.

    Raises:
      ValueError: a tensor that is neither a scalar nor in a tree like the parameters.
    """
    known = trees.leaves(layouts)
    scalar = dataclasses.replace(known[0], shape=(), spec=()) if known else Layout((), (), (1,) * len(AXES))
    like_params = optree.tree_structure(layouts, none_is_leaf=True)

    def is_like_params(node: trees.Tree) -> bool:
        return optree.tree_structure(node, none_is_leaf=True) == like_params

    def of_subtree(node: Any) -> Any:
        if getattr(node, "ndim", None) == 0:
            return scalar
        if is_like_params(node):
            return optree.tree_map(lambda x, its: None if x is None else its, node, layouts, none_is_leaf=True)
        return node

    state_layouts = optree.tree_map(of_subtree, state, is_leaf=is_like_params)
    for (name, layout), x in zip(trees.named(state_layouts), trees.leaves(state), strict=True):
        if not isinstance(layout, Layout) or len(layout.shape) != x.ndim:
            raise ValueError(
                f"{name} of the optimizer's state has shape {tuple(x.shape)}; it is neither a scalar nor in a tree "
                "like the parameters, so it has no layout"
            )
    return state_layouts
