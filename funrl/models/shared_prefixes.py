"""Tokens of a packed row that other sequences of the row begin with too: layers compute them once.

The samples of a prompt have its tokens in common. Hidden states of a token depend on the tokens before it in its
sequence alone, and on a CPU so do their bits. So layers compute equal beginnings once, attention sees the whole row,
and the results are those of the whole row. Gradients are sums over all sequences, as before, in another order.
"""

from __future__ import annotations

import itertools
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from funrl.compiled_kernels.exact.dispatch import is_plain, kernels_work

LEAST_SHARED = 1 / 32  # share of the tokens below which copies for attention cost more than they save


class SharedPrefixes(NamedTuple):
    """The distinct tokens of a packed row.

    Attributes:
      distinct_U: int64, the place of each in the row, ascending.
      number_T: int64, for each token of the row the number of its equal among them.
    """

    distinct_U: Tensor
    number_T: Tensor

    def narrow(self, x_1T: Tensor) -> Tensor:
        """The numbers [1, U, ...] of distinct tokens, of those of the row."""
        return x_1T.index_select(1, self.distinct_U)

    def spread(self, x_1U: Tensor) -> Tensor:
        """The numbers [1, T, ...] of the row, of those of its distinct tokens."""
        return x_1U.index_select(1, self.number_T)


def shared_prefixes(tokens_1T: Tensor, positions_1T: Tensor, offsets: Tensor) -> SharedPrefixes | None:
    """Find the distinct tokens of a packed row on a CPU; None: too few tokens have an equal.

    Args:
      tokens_1T: ids.
      positions_1T: of each token in its sequence.
      offsets: as in `Inputs`.
    """
    if not is_plain(tokens_1T, positions_1T, offsets) or not kernels_work():
        return None
    tokens_T = tokens_1T[0].numpy()
    positions_T = positions_1T[0].numpy()
    ends = offsets.numpy()
    first_T = first_equals(tokens_T, ends)
    distinct_U, number_T = np.unique(first_T, return_inverse=True)
    moved = (positions_T != positions_T[first_T])[: ends[-1]].any()
    if moved or len(distinct_U) > (1 - LEAST_SHARED) * len(tokens_T):
        return None
    return SharedPrefixes(torch.from_numpy(distinct_U), torch.from_numpy(number_T))


def first_equals(tokens_T: np.ndarray, offsets: np.ndarray) -> np.ndarray:
    """Place of one token for all that have equal tokens before them in their sequences.

    Args:
      tokens_T: ids.
      offsets: [S + 1] ascending, where sequences begin and end; the tokens after the last are padding.

    Returns: [T] int64; all padding has one place.

    Example: first_equals(np.array([1, 2, 3, 1, 2, 4, 0, 0]), np.array([0, 3, 6])) is [0, 1, 2, 0, 1, 5, 6, 6].
    """
    first_T = np.arange(len(tokens_T))
    first_T[offsets[-1] :] = offsets[-1]
    wide = tokens_T.astype(">u8")  # bytes of large numbers first are in the order of the numbers
    spans = [slice(begin, end) for begin, end in itertools.pairwise(offsets.tolist()) if begin < end]
    ordered = sorted(spans, key=lambda span: wide[span].tobytes())  # neighbours have the longest beginnings in common
    for before, span in itertools.pairwise(ordered):
        size = min(span.stop - span.start, before.stop - before.start)
        last = slice(before.start, before.start + size)
        own = slice(span.start, span.start + size)
        differ = np.flatnonzero(tokens_T[last] != tokens_T[own])
        common = int(differ[0]) if len(differ) else size
        first_T[span.start : span.start + common] = first_T[before.start : before.start + common]
    return first_T
