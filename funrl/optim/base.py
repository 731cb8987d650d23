"""The protocol of gradient transformations, that of optax: `init` and `update`, closed under `chain`."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from funrl import trees


class Update(Protocol):
    """(grads, state, params) -> (updates, state).

    `norm` is the global norm of `grads` over the mesh where the caller has taken it already: what needs it does not
    take it again.
    """

    def __call__(
        self, grads: trees.Tree, state: trees.Tree, params: trees.Tree, *, norm: Tensor | None = None
    ) -> tuple[trees.Tree, trees.Tree]: ...


# (grads, state, params, factor) -> state: gradients times `factor`, unless that is None, then `update`, then
# `apply_updates_`; gradients, state and parameters are donated.
InPlace = Callable[[trees.Tree, trees.Tree, trees.Tree, Tensor | None], trees.Tree]


class Transformation(NamedTuple):
    """A step of an optimizer, from gradients to updates.

    Attributes:
      name: the key of its state in the state of a `chain`.
      init: params -> state, a tree of tensors; it is part of the checkpoint.
      update: pure unless the factory says that it takes its arguments over.
      factor: (grads, norm) -> the scalar that `update` multiplies gradients with in place, if it does nothing before.
      in_place: what follows the factor, in fewer passes over memory than `update` and `apply_updates_`; None: it has no
        such way, and does nothing after the factor, where it has one.
    """

    name: str
    init: Callable[[trees.Tree], trees.Tree]
    update: Update
    factor: Callable[[trees.Tree, Tensor | None], Tensor] | None = None
    in_place: InPlace | None = None


def chain(*steps: Transformation, name: str = "chain") -> Transformation:
    """The steps one after the other.

    The state is a dict of the steps' states by their names; the second of one name has "_2" after it, the third "_3".
    A `norm` that the caller has taken goes to the first step, whose gradients it belongs to.
    """
    keys: list[str] = []
    for step in steps:
        names = (f"{step.name}_{n}" if n > 1 else step.name for n in itertools.count(1))
        keys.append(next(key for key in names if key not in keys))

    def init(params: trees.Tree) -> trees.Tree:
        return {key: step.init(params) for key, step in zip(keys, steps, strict=True)}

    def update(
        grads: trees.Tree, state: trees.Tree, params: trees.Tree, *, norm: Tensor | None = None
    ) -> tuple[trees.Tree, trees.Tree]:
        after = {}
        for key, step in zip(keys, steps, strict=True):
            grads, after[key] = step.update(grads, state[key], params, norm=norm)
            norm = None
        return grads, after

    if len(steps) != 2 or steps[0].factor is None or steps[0].in_place or steps[1].factor or not steps[1].in_place:
        return Transformation(name, init, update)
    last = steps[1].in_place

    def in_place(grads: trees.Tree, state: trees.Tree, params: trees.Tree, factor: Tensor | None) -> trees.Tree:
        return state | {keys[1]: last(grads, state[keys[1]], params, factor)}

    return Transformation(name, init, update, steps[0].factor, in_place)


def stateful(
    name: str,
    init: Callable[[trees.Tree], object],
    fn: Callable[[trees.Tree, trees.Tree, trees.Tree], tuple[trees.Tree, object]],
) -> Transformation:
    """A transformation `fn(grads, state, params) -> (updates, state)` that has no use for the global norm."""

    def update(
        grads: trees.Tree, state: object, params: trees.Tree, *, norm: Tensor | None = None
    ) -> tuple[trees.Tree, trees.Tree]:
        return fn(grads, state, params)

    return Transformation(name, init, update)


def stateless(name: str, fn: Callable[[trees.Tree, trees.Tree], trees.Tree]) -> Transformation:
    """A transformation `fn(grads, params) -> updates` that remembers nothing."""
    return stateful(name, lambda params: (), lambda grads, state, params: (fn(grads, params), state))


def apply_updates(params: trees.Tree, updates: trees.Tree) -> trees.Tree:
    """params + updates in new tensors of the parameters' dtype; the sum is taken in the wider of the two dtypes."""
    return trees.map(lambda p, u: (p + u).to(p.dtype), params, updates)


def apply_updates_(params: trees.Tree, updates: trees.Tree) -> trees.Tree:
    """`apply_updates` in place, for parameters that nobody else holds. Returns: `params`."""
    torch._foreach_add_(trees.leaves(params), trees.leaves(updates))
    return params


def scale_(grads: trees.Tree, factor: Tensor) -> trees.Tree:
    """Gradients times a scalar, in place. Returns: `grads`."""
    return trees.map(lambda grad: grad.mul_(factor.to(grad.dtype)), grads)


def step_(
    optimizer: Transformation,
    grads: trees.Tree,
    state: trees.Tree,
    params: trees.Tree,
    norm: Tensor | None = None,
) -> tuple[trees.Tree, trees.Tree]:
    """One step of an optimizer in place: all arguments are donated.

    Args:
      norm: global norm of the gradients; None: an optimizer that needs it takes it.

    Returns: parameters and state after it.
    """
    if optimizer.in_place is not None:
        factor = None if optimizer.factor is None else optimizer.factor(grads, norm)
        return params, optimizer.in_place(grads, state, params, factor)
    updates, state = optimizer.update(grads, state, params, norm=norm)
    return apply_updates_(params, updates), state


def within(
    optimizer: Transformation, context: Callable[[trees.Tree], contextlib.AbstractContextManager[object]]
) -> Transformation:
    """The same optimizer, each step of which, in place or not, runs inside `context(grads)`."""

    def inside(step: Callable[..., trees.Tree]) -> Callable[..., trees.Tree]:
        def run(grads: trees.Tree, *args: trees.Tree, **kwargs: Tensor | None) -> trees.Tree:
            with context(grads):
                return step(grads, *args, **kwargs)

        return run

    in_place = None if optimizer.in_place is None else inside(optimizer.in_place)
    return optimizer._replace(update=inside(optimizer.update), in_place=in_place)


def zero_count(params: trees.Tree) -> Tensor:
    """A step counter of 0 beside the parameters."""
    device = next((x.device for x in trees.leaves(params)), None)
    return torch.zeros((), dtype=torch.int64, device=device)


def accumulator_dtype(x: Tensor) -> torch.dtype:
    """The dtype in which many of x are added up: its own, at least float32."""
    return torch.promote_types(x.dtype, torch.float32)
