"""Trees of tensors: nested dicts, tuples and NamedTuples whose leaves are tensors. None is an empty tree.

Every leaf has a name, the path to it, made of dict keys, names of fields and positions in tuples:
`named({"layers": ({"norm": x},)})` is `[("layers/0/norm", x)]`, and `named(AdamState(count, mu={"w": x}, nu=...))` has
`("mu/w", x)`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable
from typing import Any

import optree
import torch
from torch import Tensor

Tree = Any
NAMESPACE = "funrl"  # of node types that `register_node` adds


def register_node(kind: type, flatten: Callable, unflatten: Callable) -> None:
    """Make a class an inner node of trees.

    Args:
      flatten: node -> (children, what is needed to unflatten, the children's names).
      unflatten: (what is needed, children) -> node.
    """
    optree.register_pytree_node(kind, flatten, unflatten, namespace=NAMESPACE)


def map(fn: Callable, tree: Tree, *rest: Tree) -> Tree:
    """Apply `fn` leaf by leaf. Trees after the first may be deeper: then `fn` gets their subtrees."""
    return optree.tree_map(fn, tree, *rest, namespace=NAMESPACE)


def leaves(tree: Tree) -> list:
    """The leaves in the tree's own order (dict keys sorted)."""
    return optree.tree_leaves(tree, namespace=NAMESPACE)


def flatten(tree: Tree) -> tuple[list, optree.PyTreeSpec]:
    """The leaves in the tree's own order, and its structure."""
    return optree.tree_flatten(tree, namespace=NAMESPACE)


def names(structure: optree.PyTreeSpec) -> list[str]:
    """The names of the leaves of a tree of this structure, in the order of `leaves`."""
    return list(_names(structure) if torch.compiler.is_compiling() else _known_names(structure))


def _names(structure: optree.PyTreeSpec) -> tuple[str, ...]:
    return tuple("/".join(_step(entry) for entry in accessor) for accessor in structure.accessors())


_known_names = functools.lru_cache(maxsize=64)(_names)  # a step asks for those of its few trees again and again


def _step(entry: optree.PyTreeEntry) -> str:
    """A dict's key, a record's field or a tuple's position."""
    return str(getattr(entry, "field", entry.entry))  # a NamedTuple's entry is a position, which has a field's name


def named(tree: Tree) -> list[tuple[str, Any]]:
    """The leaves with their names, in the same order as `leaves`."""
    values, structure = flatten(tree)
    return list(zip(names(structure), values, strict=True))


def map_named(fn: Callable, tree: Tree, *rest: Tree) -> Tree:
    """Apply `fn(name, leaf, ...)` leaf by leaf. Trees after the first may be deeper, as in `map`."""
    name = iter(names(optree.tree_structure(tree, namespace=NAMESPACE)))
    return map(lambda *xs: fn(next(name), *xs), tree, *rest)


def fill(tree: Tree, values: Iterable) -> Tree:
    """A tree of the same structure whose leaves are `values`, in the order of `leaves`."""
    return optree.tree_unflatten(optree.tree_structure(tree, namespace=NAMESPACE), list(values))


def from_named(tree: Tree, values: Iterable[tuple[str, object]]) -> Tree:
    """A tree of the structure of `tree` filled by name.

    Raises:
      KeyError: a name is missing, unknown, or given twice; the message lists them.
    """
    given: dict[str, Any] = {}
    twice = []
    for name, value in values:
        if name in given:
            twice.append(name)
        given[name] = value
    names = [name for name, _ in named(tree)]
    missing = sorted(set(names) - set(given))
    unknown = sorted(set(given) - set(names))
    if missing or unknown or twice:
        raise KeyError(f"tree names do not match: missing {missing}, unknown {unknown}, given twice {twice}")
    return fill(tree, [given[name] for name in names])


def cast(tree: Tree, dtype: torch.dtype) -> Tree:
    """Floating point leaves in `dtype`; the others as they are."""
    return map(lambda x: x.to(dtype) if x.is_floating_point() else x, tree)


def to_device(tree: Tree, device: torch.device | str) -> Tree:
    """The tree with its leaves on a device."""
    return map(lambda x: x.to(device), tree)


def zeros_like(tree: Tree) -> Tree:
    """Zeros of the shapes and dtypes of a tree's leaves."""
    return map(torch.zeros_like, tree)


def clone(tree: Tree) -> Tree:
    """Detached copy of each leaf."""
    return map(lambda x: x.detach().clone(), tree)


def count(tree: Tree) -> int:
    """Number of elements in all leaves."""
    return sum(math.prod(x.shape) for x in leaves(tree))


def nbytes(tree: Tree) -> int:
    """Bytes of all leaves."""
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in leaves(tree))


def value_and_grad(
    fn: Callable[..., tuple[Tensor, object]], watch: Callable[[int, Tensor], None] | None = None
) -> Callable[..., tuple[tuple[Tensor, Any], Tree]]:
    """Reverse-mode derivative of `fn(tree, *args) -> (scalar, aux)` with respect to its first argument.

    The gradient is taken outside of whatever `fn` compiles, so activation checkpointing and per-layer
    compilation inside `fn` keep working. A leaf that `fn` does not use gets a zero gradient.

    Args:
      fn: the function.
      watch: (number of a leaf, its gradient) -> None; called during the backward pass for each leaf that has one, as
        soon as its gradient is complete.

    Returns: a function with the arguments of `fn` that gives `((scalar, aux), gradient tree)`.
    """

    def watch_leaf(i: int, grad: Tensor | None) -> None:
        if watch is not None and grad is not None:  # None: a compiled graph only reads the leaf detached
            watch(i, grad)

    def wrapped(tree: Tree, *args, **kwargs):
        primal = map(lambda x: x.detach().requires_grad_(x.is_floating_point()), tree)
        wanted = leaves(primal)
        for i, x in enumerate(wanted):
            if watch is not None and x.requires_grad:
                x.register_hook(functools.partial(watch_leaf, i))
        value, aux = fn(primal, *args, **kwargs)
        grads = torch.autograd.grad(value, wanted, allow_unused=True)
        filled = [torch.zeros_like(x) if grad is None else grad for x, grad in zip(wanted, grads, strict=True)]
        return (value.detach(), map(lambda x: x.detach() if isinstance(x, Tensor) else x, aux)), fill(tree, filled)

    return wrapped
