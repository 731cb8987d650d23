"""Exchange between a rank's own rows and all rows of a step, and sums of rows that have the same bits on every mesh."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

BLOCK = 256  # tokens, of the blocks in which a row is summed
CACHED = 1 << 17  # numbers that are copied to float64 at once: they stay in a core's cache


class Across(NamedTuple):
    """Exchange between a rank's own rows b and all rows B of a step. At a Python prompt all rows are its own.

    Attributes:
      sums: x [b, T] -> [B] float64, the sum of each row; see `row_sums`.
      own: x [B, ...] -> [b, ...], the numbers of one's own rows.
      kth_largest: (x [b, T], k) -> the k-th largest number of all rows, k an integer tensor from 1.
      by_row: where the rows B are units of several rows each, the exchange with single rows; None: a unit is a row.
    """

    sums: Callable[[Tensor], Tensor]
    own: Callable[[Tensor], Tensor]
    kth_largest: Callable[[Tensor, Tensor], Tensor]
    by_row: Across | None = None

    @property
    def rows(self) -> Across:
        """The exchange with single rows, for what compares tokens and not outcomes."""
        return self if self.by_row is None else self.by_row


def row_sums(x_BT: Tensor) -> Tensor:
    """The sum of each row in float64, in fixed blocks of 256 tokens: the bits depend on neither padding nor threads.

    Returns: [B] float64.
    """
    if not x_BT.is_floating_point():  # whole numbers: exact in any order
        return x_BT.sum(1, dtype=torch.int64).to(torch.float64)
    if not len(x_BT):
        return x_BT.new_zeros(0, dtype=torch.float64)
    at_once = max(1, CACHED // max(x_BT.shape[1], 1))
    return torch.cat([_block_sums(rows) for rows in x_BT.split(at_once)])


def _block_sums(x_BT: Tensor) -> Tensor:
    x_BT = x_BT.to(torch.float64)
    blocks = -(-x_BT.shape[1] // BLOCK)
    sums_BN = pad(x_BT, (0, blocks * BLOCK - x_BT.shape[1])).reshape(len(x_BT), blocks, BLOCK).sum(2)
    total_B = x_BT.new_zeros(len(x_BT))
    for sum_B in sums_BN.unbind(1):
        total_B = total_B + sum_B
    return total_B


def _own(x_B: Tensor) -> Tensor:
    return x_B


def _kth_largest(x_BT: Tensor, k: Tensor) -> Tensor:
    return x_BT.flatten().sort(descending=True).values.take((k - 1).clamp(0, x_BT.numel() - 1))


ALONE = Across(row_sums, _own, _kth_largest)
