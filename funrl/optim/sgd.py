"""Stochastic gradient descent."""

from __future__ import annotations

from funrl.optim.base import Transformation, chain
from funrl.optim.scale import scale_by_learning_rate, trace
from funrl.optim.schedules import Schedule


def sgd(learning_rate: float | Schedule, momentum: float | None = None, nesterov: bool = False) -> Transformation:
    """Stochastic gradient descent.

    Args:
      learning_rate: a number or a schedule.
      momentum: decay of the sum of gradients; None: no momentum.
      nesterov: look one step ahead.
    """
    steps = [] if momentum is None else [trace(momentum, nesterov)]
    return chain(*steps, scale_by_learning_rate(learning_rate), name="sgd")
