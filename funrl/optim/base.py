"""The protocol of gradient transformations, that of optax: `init` and `update`, closed under `chain`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from funrl import trees


class Transformation(NamedTuple):
    """A step of an optimizer, from gradients to updates.

    Attributes:
      init: params -> state, a tree of tensors; it is part of the checkpoint.
      update: (grads, state, params) -> (updates, state), pure unless the factory says that it takes its arguments over.
    """

    init: Callable[[trees.Tree], Any]
    update: Callable[[trees.Tree, Any, trees.Tree], tuple[trees.Tree, Any]]


def chain(*steps: Transformation) -> Transformation:
    """The steps one after the other; the state is the tuple of their states."""

    def update(grads: trees.Tree, state: Any, params: trees.Tree) -> tuple[trees.Tree, Any]:
        after = []
        for step, before in zip(steps, state, strict=True):
            grads, now = step.update(grads, before, params)
            after.append(now)
        return grads, tuple(after)

    return Transformation(lambda params: tuple(step.init(params) for step in steps), update)


def stateless(fn: Callable[[trees.Tree, trees.Tree], trees.Tree]) -> Transformation:
    """A transformation `fn(grads, params) -> updates` that remembers nothing."""
    return Transformation(lambda params: (), lambda grads, state, params: (fn(grads, params), state))


def apply_updates(params: trees.Tree, updates: trees.Tree) -> trees.Tree:
    """params + updates in new tensors of the parameters' dtype; the sum is taken in the wider of the two dtypes."""
    return trees.map(lambda p, u: (p + u).to(p.dtype), params, updates)


def apply_updates_(params: trees.Tree, updates: trees.Tree) -> trees.Tree:
    """`apply_updates` in place, for parameters that nobody else holds. Returns: `params`."""
    torch._foreach_add_(trees.leaves(params), trees.leaves(updates))
    return params


def zero_count(params: trees.Tree) -> torch.Tensor:
    """A step counter of 0 beside the parameters."""
    device = next((x.device for x in trees.leaves(params)), None)
    return torch.zeros((), dtype=torch.int64, device=device)
