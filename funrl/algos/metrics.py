"""Metrics: means, maxima and sums that are merged over micro-batches and ranks."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from funrl.algos.masks import total, where_masked
from funrl.batch import Batch


class PieceError(ValueError):
    """A piece of the wrong kind for its place, or one that returned a wrong result."""


class Mean(NamedTuple):
    """A mean that is not yet divided. `a + b` is the mean over the union of both sets.

    A denominator of 0 counts as 1: the mean is then a plain sum, or a mean of nothing.
    """

    num: Tensor
    den: Tensor

    def __add__(self, other: Mean) -> Mean:  # type: ignore[override]
        return Mean(self.num + other.num, self.den + other.den)

    def over(self, den: Tensor) -> Tensor:
        """num / den, with the denominator of the whole that this is a part of."""
        return divide(self.num, den)

    @property
    def value(self) -> Tensor:
        """num / den."""
        return self.over(self.den)


class Max(NamedTuple):
    """The maximum of the merged values."""

    value: Tensor


class Sum(NamedTuple):
    """The sum of the merged values."""

    value: Tensor


class EffectiveShare(NamedTuple):
    """Effective sample size of importance weights w, as a share of the samples: (sum w)^2 / (n sum w^2), at most 1.

    Attributes:
      total, squares, count: sum w, sum w^2 and n, which are added over micro-batches and ranks.

    Example:
      >>> EffectiveShare(torch.tensor(4.0), torch.tensor(8.0), torch.tensor(4.0)).value.item()
      0.5

    References: Kong, 1992.
    """

    total: Tensor
    squares: Tensor
    count: Tensor

    @property
    def value(self) -> Tensor:
        """The share; 0 where there is no weight."""
        return divide(self.total.square(), self.count * self.squares)


Metric = Mean | Max | Sum | EffectiveShare


def divide(num: Tensor, den: Tensor) -> Tensor:
    """num / den in the dtype of num, where a den of 0 counts as 1."""
    return num / torch.where(den == 0, torch.ones_like(den), den).to(num.dtype)


def merge(a: Any, b: Any) -> Any:
    """Merge two metrics of one kind, taken over different tokens.

    Raises:
      PieceError: their kinds differ.
    """
    if type(a) is not type(b):
        raise PieceError(f"a {type(a).__name__} and a {type(b).__name__} cannot be merged into one metric")
    if isinstance(a, Mean):
        return a + b
    if isinstance(a, EffectiveShare):
        return EffectiveShare(*map(torch.add, a, b))
    return Max(torch.maximum(a.value, b.value)) if isinstance(a, Max) else Sum(a.value + b.value)


def token_mean_of(x_BT: Tensor, mask_BT: Tensor) -> Mean:
    """The mean of x over the tokens of the mask; values outside the mask may be NaN."""
    return Mean(where_masked(x_BT, mask_BT).sum(), mask_BT.count_nonzero().to(x_BT.dtype))


def mean_over_tokens(x_BT: Tensor, mask_BT: Tensor, batch: Batch) -> Mean:
    """The mean of x over the mask and all rows of the step, in the dtype of x; see `total`."""
    count = total(mask_BT, mask_BT, batch)
    return Mean(total(x_BT, mask_BT, batch).to(x_BT.dtype), count.to(x_BT.dtype))


def value_of(nums: tuple[Tensor, ...], dens: tuple[Tensor, ...]) -> Tensor:
    """sum_i num_i / den_i, where a den of 0 counts as 1."""
    total = divide(nums[0], dens[0])
    for num, den in zip(nums[1:], dens[1:], strict=True):
        total = total + divide(num, den)
    return total
