"""AdamW in place on trees that the caller gives up: few kernels, little memory, the numbers of `adamw`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from funrl import trees
from funrl.optim.adam import AdamState, correction
from funrl.optim.base import Transformation, stateful
from funrl.optim.recipes import adamw
from funrl.optim.scaling import Mask, ScheduleState, mask_of
from funrl.optim.schedules import Schedule

GROUP = 2**26  # elements that share one temporary


def fused_adamw(
    learning_rate: float | Schedule,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    mask: Mask = None,
    mu_dtype: torch.dtype | None = None,
) -> Transformation:
    """`adamw` in place: the same numbers and the same state, one kernel for many leaves.

    `update` takes over the state, and the gradients, whose memory becomes the updates; gradients of a lower dtype
    than the moments are copied first. Its own memory is one temporary of about 64 million elements, or of the largest
    leaf if that is larger. With `apply_updates_` the parameters are donated as well.

    Args: those of `adamw`.
    """
    init = adamw(learning_rate, b1, b2, eps=eps, weight_decay=weight_decay, mask=mask, mu_dtype=mu_dtype).init

    def update(grads: trees.Tree, state: Any, params: trees.Tree) -> tuple[trees.Tree, Any]:
        adam: AdamState = state["adam"]
        count = adam.count + 1
        c1 = correction(b1, count)
        c2 = correction(b2, count)
        timer = state["learning_rate"]
        rate = learning_rate
        if callable(rate):
            rate = rate(timer.count)
            timer = ScheduleState(timer.count + 1)
        wide = trees.map(lambda group, v: group.to(v.dtype), grads, adam.nu)
        columns = [trees.leaves(tree) for tree in (wide, adam.mu, adam.nu, params, mask_of(mask, params))]
        for group, mu, nu, p, on in _groups(columns):
            mean = [m.to(v.dtype) for m, v in zip(mu, nu, strict=True)]
            torch._foreach_mul_(mean, b1)
            torch._foreach_add_(mean, group, alpha=1 - b1)
            torch._foreach_mul_(nu, b2)
            torch._foreach_addcmul_(nu, group, group, value=1 - b2)
            root = torch._foreach_div(nu, c2)
            torch._foreach_sqrt_(root)
            torch._foreach_add_(root, eps)
            torch._foreach_copy_(group, mean)
            torch._foreach_copy_(mu, mean)
            torch._foreach_div_(group, c1)
            torch._foreach_div_(group, root)
            decayed = [i for i, yes in enumerate(on) if yes]
            if weight_decay and decayed:
                torch._foreach_add_([group[i] for i in decayed], [p[i] for i in decayed], alpha=weight_decay)
            torch._foreach_mul_(group, -rate)
        return wide, state | {"adam": AdamState(count, adam.mu, adam.nu), "learning_rate": timer}

    return stateful("adamw", init, update)


def _groups(columns: Sequence[list]) -> Iterator[list[list]]:
    """The rows of the columns, the first of which are tensors, in runs of at most `GROUP` elements and one row."""
    rows = []
    size = 0
    for row in zip(*columns, strict=True):
        if rows and size + row[0].numel() > GROUP:
            yield [list(column) for column in zip(*rows, strict=True)]
            rows = []
            size = 0
        rows.append(row)
        size += row[0].numel()
    if rows:
        yield [list(column) for column in zip(*rows, strict=True)]
