"""Schedules: functions of the number of updates made so far, an int (then a float comes back) or a tensor."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

Schedule = Callable[[Any], Any]


def constant(value: float) -> Schedule:
    """Always `value`."""
    return _schedule(lambda t: torch.full_like(t, value))


def linear(start: float, end: float, steps: int) -> Schedule:
    """A straight line, start + (end - start) min(t, T) / T.

    Args:
      start, end: values at update 0 and from update T on.
      steps: T, updates; 0 is `start` for ever, as in optax.
    """
    if steps <= 0:
        return constant(start)
    return _schedule(lambda t: (start - end) * (1 - t.clamp(0, steps) / steps) + end)


def cosine(peak: float, steps: int, end: float = 0.0) -> Schedule:
    """Half a cosine, end + (peak - end) (1 + cos(pi min(t, T) / T)) / 2.

    Args:
      peak, end: values at update 0 and from update T on.
      steps: T, updates, at least 1.

    Raises:
      ValueError: `steps` is below 1.

    References: Loshchilov and Hutter, 2017, https://arxiv.org/abs/1608.03983
    """
    if steps < 1:
        raise ValueError(f"cosine(steps={steps}): a decay takes at least 1 update")
    return _schedule(lambda t: end + (peak - end) * 0.5 * (1 + torch.cos(math.pi * t.clamp(max=steps) / steps)))


def join(schedules: Sequence[Schedule], boundaries: Sequence[int]) -> Schedule:
    """One schedule after the other: the next begins, at its own 0, at each boundary.

    Args:
      schedules: N of them.
      boundaries: N - 1 numbers of updates, increasing.
    """

    def joined(t: Tensor) -> Tensor:
        value = schedules[0](t)
        for schedule, boundary in zip(schedules[1:], boundaries, strict=True):
            value = torch.where(t < boundary, value, schedule(t - boundary))
        return value

    return _schedule(joined)


def warmup_constant(peak: float, warmup: int, start: float = 0.0) -> Schedule:
    """From `start` up to `peak` in `warmup` updates, then `peak`."""
    return join([linear(start, peak, warmup), constant(peak)], [warmup])


def warmup_linear(peak: float, warmup: int, steps: int, end: float = 0.0, start: float = 0.0) -> Schedule:
    """From `start` up to `peak` in `warmup` updates, then a line down to `end` at update `steps`."""
    _check_room("warmup_linear", warmup, steps)
    return join([linear(start, peak, warmup), linear(peak, end, steps - warmup)], [warmup])


def warmup_cosine(peak: float, warmup: int, steps: int, end: float = 0.0, start: float = 0.0) -> Schedule:
    """From `start` up to `peak` in `warmup` updates, then half a cosine down to `end` at update `steps`."""
    _check_room("warmup_cosine", warmup, steps)
    return join([linear(start, peak, warmup), cosine(peak, steps - warmup, end)], [warmup])


def _check_room(name: str, warmup: int, steps: int) -> None:
    if not 0 <= warmup < steps:
        raise ValueError(
            f"{name}(warmup={warmup}, steps={steps}): the warm-up is part of the steps and must end before"
        )


def _schedule(fn: Callable[[Tensor], Tensor]) -> Schedule:
    """In float64, where 0.999 ** 10000 and the like keep their digits; a tensor's schedule never leaves its device."""

    def schedule(step: Any) -> Any:
        if isinstance(step, Tensor):
            return fn(step.to(torch.float64))
        return float(fn(torch.tensor(float(step), dtype=torch.float64)))

    return schedule
