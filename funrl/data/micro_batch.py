"""Concatenate rows of a rank into a micro-batch, and scatter its results back to the rows."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from funrl.processes.device_memory import copy_to_device


class Slots(NamedTuple):
    """Source of each token of a packed micro-batch [1, N]. S is the fixed maximum of segments.

    Attributes:
      source: [N] int64, index into the flattened rows [b * T]; 0 at padding.
      used: [1, N] bool, false at padding.
      positions: [1, N] int32, 0 at the first token of each row and at padding.
      segments: [1, N] int32, 1 for the first row, 2 for the next, ..., 0 at padding.
      offsets: [S + 1] int32, start and end of the segments, as `varlen_attention` takes them.
      total: number of tokens that are not padding; they come first.
      longest: length of the longest row, rounded up to a power of two or N, so that few values occur.
    """

    source: Tensor
    used: Tensor
    positions: Tensor
    segments: Tensor
    offsets: Tensor
    total: int
    longest: int

    def to(self, device: torch.device) -> Slots:
        """The same on a device."""
        return self._make(copy_to_device(x, device) if isinstance(x, Tensor) else x for x in self)


def shortest_first(lengths: np.ndarray, offsets: np.ndarray, *groups: np.ndarray) -> np.ndarray:
    """Order of rows in their micro-batch: by length, so that neighbours of one length share a call of CPU attention.

    Args:
      lengths: [rows] tokens of each row.
      offsets: [rows] by which rows of one length are in order: `Packing.start`, or numbers in its order.
      groups: [rows] each, keys that come before the length, the main one last; none if it is one micro-batch.

    Example:
      >>> shortest_first(np.array([3, 2, 3]), np.array([5, 3, 0])).tolist()
      [1, 2, 0]
    """
    return np.lexsort((offsets, lengths, *groups))


def slots(lengths: np.ndarray, rows: np.ndarray, width: int, size: int, max_segments: int) -> Slots:
    """Slots of some rows, end to end in the given order.

    Args:
      lengths: [b] tokens of this rank's rows.
      rows: indices of some of them, as in `Packing.own` but local to this rank.
      width: T of the rows' fields [b, T].
      size: N, at least the sum of the rows' lengths.
      max_segments: S, at least the number of rows.

    Raises:
      ValueError: there are more rows or tokens than fit.

    Example: slots([2, 3], [1, 0], 4, 6, 2).source is [4, 5, 6, 0, 1, 0], .offsets is [0, 3, 5].
    """
    rows = np.asarray(rows, dtype=np.int64)
    own = np.asarray(lengths, dtype=np.int64)[rows]
    total = int(own.sum())
    if len(rows) > max_segments or total > size:
        raise ValueError(f"{len(rows)} rows of {total} tokens do not fit in {max_segments} segments of {size} tokens")
    ends = np.cumsum(own)
    positions = np.zeros(size, dtype=np.int32)
    positions[:total] = np.arange(total) - np.repeat(ends - own, own)
    source = np.zeros(size, dtype=np.int64)
    segments = np.zeros(size, dtype=np.int32)
    source[:total] = np.repeat(rows * width, own) + positions[:total]
    segments[:total] = np.repeat(np.arange(1, len(rows) + 1), own)
    offsets = np.full(max_segments + 1, total, dtype=np.int32)
    offsets[0] = 0
    offsets[1 : len(rows) + 1] = ends
    longest = min(size, 1 << max(int(own.max(initial=1)) - 1, 0).bit_length())
    segments_1N = torch.from_numpy(segments).unsqueeze(0)
    return Slots(
        torch.from_numpy(source),
        used=segments_1N > 0,
        positions=torch.from_numpy(positions).unsqueeze(0),
        segments=segments_1N,
        offsets=torch.from_numpy(offsets),
        total=total,
        longest=longest,
    )


def pack_tokens(x_bT: Tensor, at: Slots, fill: float = 0) -> Tensor:
    """A field [b, T, ...] of a rank's rows as [1, N, ...]; `fill` at padding."""
    x_1N = x_bT.flatten(0, 1)[at.source].unsqueeze(0)
    return torch.where(at.used.view(1, -1, *(1,) * (x_bT.ndim - 2)), x_1N, fill)


def unpack_tokens(x_1N: Tensor, at: Slots, into_bT: Tensor) -> Tensor:
    """Write the tokens of a micro-batch to their places in `into_bT` [b, T, ...], in place."""
    into_bT.view(-1, *into_bT.shape[2:])[at.source[: at.total]] = x_1N[0, : at.total].to(into_bT.dtype)
    return into_bT
