"""Ingredients that multiply or shift updates: a factor, a schedule, momentum, decayed weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from funrl import trees
from funrl.optim.base import Transformation, accumulator_dtype, stateful, stateless, zero_count
from funrl.optim.schedules import Schedule

Mask = trees.Tree | Callable[[trees.Tree], trees.Tree] | None


class ScheduleState(NamedTuple):
    """Updates made so far, int64."""

    count: Tensor


class TraceState(NamedTuple):
    """The decaying sum of gradients, a tree like the parameters."""

    trace: trees.Tree


def scale(factor: float) -> Transformation:
    """`factor` times the update."""
    return stateless("scale", lambda grads, params: trees.map(lambda g: factor * g, grads))


def scale_by_schedule(schedule: Schedule) -> Transformation:
    """`schedule(t)` times the update, t being the number of updates made before this one."""

    def update(grads: trees.Tree, state: ScheduleState, params: trees.Tree) -> tuple[trees.Tree, ScheduleState]:
        factor = schedule(state.count)
        return trees.map(lambda g: factor * g, grads), ScheduleState(state.count + 1)

    return stateful("schedule", lambda params: ScheduleState(zero_count(params)), update)


def scale_by_learning_rate(learning_rate: float | Schedule) -> Transformation:
    """The step down the gradient: minus the learning rate, a number or a schedule, times the update."""
    if callable(learning_rate):
        step = scale_by_schedule(lambda count: -learning_rate(count))
    else:
        step = scale(-learning_rate)
    return step._replace(name="learning_rate")


def trace(decay: float, nesterov: bool = False) -> Transformation:
    """Momentum: m <- g + decay m; the update is m, or with `nesterov` g + decay m.

    References: Sutskever et al., 2013, http://proceedings.mlr.press/v28/sutskever13.html
    Warning: the sum is not an average: there is no factor 1 - decay (as in optax and torch.optim.SGD). It is kept in
      float32 at least; optax keeps it in the parameter's dtype.
    """

    def init(params: trees.Tree) -> TraceState:
        return TraceState(trees.map(lambda p: torch.zeros_like(p, dtype=accumulator_dtype(p)), params))

    def update(grads: trees.Tree, state: TraceState, params: trees.Tree) -> tuple[trees.Tree, TraceState]:
        moment = trees.map(lambda g, m: g + decay * m, grads, state.trace)
        updates = trees.map(lambda g, m: g + decay * m, grads, moment) if nesterov else moment
        return updates, TraceState(moment)

    return stateful("momentum", init, update)


def add_decayed_weights(weight_decay: float, mask: Mask = None) -> Transformation:
    """Add `weight_decay` times the weight to the update.

    Args:
      weight_decay: per update, in units of the learning rate that follows.
      mask: which leaves decay: a tree of bools, or a function params -> such a tree; None: all.
    """

    def decayed(grads: trees.Tree, params: trees.Tree) -> trees.Tree:
        chosen = mask_of(mask, params)
        return trees.map(lambda g, p, on: g + weight_decay * p if on else g, grads, params, chosen)

    return stateless("decayed_weights", decayed)


def matrices(params: trees.Tree) -> trees.Tree:
    """The mask of the weights that are usually decayed: matrices, and no norm and no bias."""
    return trees.map_named(lambda name, x: x.ndim >= 2 and not name.endswith("bias"), params)


def mask_of(mask: Mask, params: trees.Tree) -> trees.Tree:
    """The tree of bools that `mask` stands for."""
    if mask is None:
        return trees.map(lambda x: True, params)
    return mask(params) if callable(mask) else mask
