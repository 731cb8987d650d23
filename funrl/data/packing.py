"""Which rows go together: equal work for every data rank, few padded tokens in every forward pass."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np


def balance(lengths: Sequence[int], parts: int) -> list[list[int]]:
    """Splits rows into parts of nearly equal total length: the longest row left goes to the part that has least.

    Args:
      lengths: tokens (or any cost) of each row.
      parts: how many parts; with fewer rows than parts some stay empty.

    Returns: for each part the numbers of its rows, ascending; no total is above 4/3 of the best possible.

    Example: balance([5, 1, 4, 2], 2) is [[0, 1], [2, 3]].
    References: Graham, 1969, https://doi.org/10.1137/0117039
    """
    heap = [(0, 0, part) for part in range(parts)]  # total, rows, part: ties go to fewer rows, then to the lower part
    shares: list[list[int]] = [[] for _ in range(parts)]
    for row in _longest_first(lengths):
        total, rows, part = heap[0]
        shares[part].append(row)
        heapq.heapreplace(heap, (total + lengths[row], rows + 1, part))
    return [sorted(share) for share in shares]


def micro_batches(lengths: Sequence[int], token_budget: int, multiple: int = 1) -> list[list[int]]:
    """Splits rows into micro-batches of similar lengths, longest first.

    Args:
      lengths: tokens of each row.
      token_budget: bound on rows times width of a micro-batch; a row that is wider than it is alone.
      multiple: widths are rounded up to a multiple of this.

    Returns: the numbers of the rows of each micro-batch; every row is in exactly one.

    Example: micro_batches([5, 1, 4, 2], 8) is [[0], [2, 3], [1]].
    """
    batches: list[list[int]] = []
    width = 0
    for row in _longest_first(lengths):
        if not batches or (len(batches[-1]) + 1) * width > token_budget:
            batches.append([])
            width = _round_up(lengths[row], multiple)
        batches[-1].append(row)
    return batches


def pad_rows(rows: Sequence[Sequence[int]], pad: int, multiple: int = 1) -> np.ndarray:
    """Rows of token ids as int64 [rows, width], padded on the right; the width is a multiple of `multiple`."""
    width = _round_up(max(map(len, rows), default=0), multiple)
    out = np.full((len(rows), width), pad, dtype=np.int64)
    for to, row in zip(out, rows, strict=True):
        to[: len(row)] = row
    return out


def _longest_first(lengths: Sequence[int]) -> list[int]:
    return sorted(range(len(lengths)), key=lambda row: -lengths[row])


def _round_up(length: int, multiple: int) -> int:
    return -(-length // multiple) * multiple
