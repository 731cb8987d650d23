"""Adam's scaling of gradients."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from funrl import trees
from funrl.optim.base import Transformation, accumulator_dtype, stateful, zero_count


class AdamState(NamedTuple):
    """Updates made so far, and the decaying means of the gradient and of its square."""

    count: Tensor
    mu: trees.Tree
    nu: trees.Tree


def scale_by_adam(
    b1: float = 0.9, b2: float = 0.999, eps: float = 1e-8, mu_dtype: torch.dtype | None = None
) -> Transformation:
    """The gradient's mean over the root of its mean square, both corrected for their start at 0.

        mu <- b1 mu + (1 - b1) g,   nu <- b2 nu + (1 - b2) g^2
        update = mu / (1 - b1^t) / (sqrt(nu / (1 - b2^t)) + eps)

    Args:
      b1, b2: decay of the means.
      eps: added to the root, in units of the gradient.
      mu_dtype: of mu; None: as nu, the parameter's dtype and at least float32.

    References: Kingma and Ba, 2015, https://arxiv.org/abs/1412.6980
    Warning: optax keeps nu in the parameter's dtype; in bfloat16 it stands still, because 0.999 rounds to 1.
    """

    def init(params: trees.Tree) -> AdamState:
        nu = trees.map(lambda p: torch.zeros_like(p, dtype=accumulator_dtype(p)), params)
        mu = trees.map(lambda v: torch.zeros_like(v, dtype=mu_dtype or v.dtype), nu)
        return AdamState(zero_count(params), mu, nu)

    def update(grads: trees.Tree, state: AdamState, params: trees.Tree) -> tuple[trees.Tree, AdamState]:
        grads = trees.map(lambda g, v: g.to(v.dtype), grads, state.nu)
        mu = trees.map(lambda g, m: b1 * m.to(g.dtype) + (1 - b1) * g, grads, state.mu)
        nu = trees.map(lambda g, v: b2 * v + (1 - b2) * g * g, grads, state.nu)
        count = state.count + 1
        c1 = correction(b1, count)
        c2 = correction(b2, count)
        updates = trees.map(lambda m, v: (m / c1) / ((v / c2).sqrt() + eps), mu, nu)
        mu = trees.map(lambda new, old: new.to(old.dtype), mu, state.mu)
        return updates, AdamState(count, mu, nu)

    return stateful("adam", init, update)


def correction(decay: float, count: Tensor) -> Tensor:
    """1 - decay^t in float64: what a mean that started at 0 has seen by update t, a scalar on the device of `count`."""
    return 1 - decay ** count.to(torch.float64)
