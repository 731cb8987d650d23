"""Updates that are not made where the gradient is not finite."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from funrl import trees
from funrl.optim.base import Transformation, zero_count
from funrl.optim.clip import global_norm


class SkipState(NamedTuple):
    """Updates left out one after the other until now, those left out in all, and the state of the optimizer."""

    consecutive: Tensor
    total: Tensor
    inner: Any


def skip_nonfinite(
    inner: Transformation, max_consecutive: int, norm_of: Callable[[trees.Tree], Tensor] = global_norm
) -> Transformation:
    """`inner` where the global norm of the gradient is finite; else updates of 0, and the state stays as it is.

    The norm is the same on every rank, so all of them skip or none does.

    Args:
      inner: one that works in place has no state to go back to: then the decision is read on the host before, a
        synchronisation an update.
      max_consecutive: gradients one after the other that are left out; the next one passes even so, so that a run
        that cannot recover is seen to fail.
      norm_of: tree -> scalar, for an `update` that is not given the norm; over a mesh
        `functools.partial(global_norm, layouts=..., mesh=...)`.

    Warning: `optax.apply_if_finite` looks at the elements; here squares that overflow float32 count as not finite.
    """

    def init(params: trees.Tree) -> SkipState:
        return SkipState(zero_count(params), zero_count(params), inner.init(params))

    def update(
        grads: trees.Tree, state: SkipState, params: trees.Tree, *, norm: Tensor | None = None
    ) -> tuple[trees.Tree, SkipState]:
        size = norm_of(grads) if norm is None else norm
        finite = size.isfinite()
        consecutive = torch.where(finite, 0, state.consecutive + 1)
        counts = consecutive, state.total + ~finite
        passes = finite | (consecutive > max_consecutive)
        if inner.in_place and not passes:
            return trees.zeros_like(grads), SkipState(*counts, state.inner)
        updates, after = inner.update(grads, state.inner, params, norm=size)
        if not inner.in_place:
            updates = trees.map(lambda u: torch.where(passes, u, 0), updates)
            after = trees.map(lambda new, old: torch.where(passes, new, old), after, state.inner)
        return updates, SkipState(*counts, after)

    return Transformation("skip_nonfinite", init, update, inner.in_place)
