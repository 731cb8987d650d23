"""Sums over the rows of a prompt's group. Group numbers, group sizes and the order of rows are arbitrary."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Groups(NamedTuple):
    """Rows sorted into groups.

    Attributes:
      index: [B] int64, the row's group, 0 to count - 1.
      size: [B] int64, number of rows in the row's group.
      count: the number of groups.
    """

    index: Tensor
    size: Tensor
    count: int


def groups_of(group_B: Tensor) -> Groups:
    """Number the groups densely."""
    numbers, index_B, sizes = torch.unique(group_B, return_inverse=True, return_counts=True)
    return Groups(index_B, sizes[index_B], numbers.numel())


def group_sum(x: Tensor, groups: Groups) -> Tensor:
    """The sum of x [B, ...] over the rows of each row's group, given back to every row [B, ...]."""
    return x.new_zeros(groups.count, *x.shape[1:]).index_add_(0, groups.index, x)[groups.index]


def group_min(x: Tensor, groups: Groups) -> Tensor:
    """The smallest x [B, ...] of each row's group, given back to every row."""
    index = groups.index.reshape(-1, *[1] * (x.dim() - 1)).expand_as(x)
    least = x.new_full((groups.count, *x.shape[1:]), torch.inf).scatter_reduce_(0, index, x, "amin")
    return least[groups.index]


def group_max(x: Tensor, groups: Groups) -> Tensor:
    """The largest x [B, ...] of each row's group, given back to every row."""
    return -group_min(-x, groups)


def group_mean(x_B: Tensor, groups: Groups, weight_B: Tensor | None = None) -> Tensor:
    """The mean of each row's group, weighted if weights are given; the mean of equal numbers is exactly that number.

    The minimum is subtracted before the sum and added back after it. Seven times 0.1 in float32 then has a mean of 0.1,
    without a rounding error that division by a small standard deviation would amplify.
    """
    unit_B = power_of_two(group_max(x_B.abs(), groups))
    x_B = x_B / unit_B
    least_B = group_min(x_B, groups)
    weight_B = torch.ones_like(x_B) if weight_B is None else weight_B
    total_B = group_sum(weight_B, groups)
    mean_B = group_sum((x_B - least_B) * weight_B, groups) / torch.where(total_B > 0, total_B, 1)
    return (least_B + mean_B) * unit_B


def group_std(x_B: Tensor, groups: Groups) -> Tensor:
    """The standard deviation of each row's group (denominator n - 1); exactly 0 for one row and for equal numbers.

    It is a constant of derivatives: see `reward_parts`.
    """
    x_B = x_B.detach()
    centred_B = x_B - group_mean(x_B, groups)
    unit_B = power_of_two(group_max(centred_B.abs(), groups))
    squares_B = group_sum((centred_B / unit_B).square(), groups)
    return (squares_B / (groups.size - 1).clamp_min(1)).sqrt() * unit_B


def power_of_two(x: Tensor) -> Tensor:
    """The largest power of two up to each x > 0, elementwise; 1 where x is 0, infinite or NaN.

    Numbers divided by it can be summed and squared without overflow (in float32, squares overflow above 1.8e19), and
    the division leaves their mantissas unchanged.
    """
    mantissa = torch.frexp(x).mantissa  # x = mantissa 2^n, mantissa in [1/2, 1)
    return torch.where((x > 0) & x.isfinite(), x / (2 * mantissa), torch.ones_like(x))
