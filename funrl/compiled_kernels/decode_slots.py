"""State of the sequences of a decoding pass, as kernels and operators take it, and constants that both share."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

# Rows of `SlotState.numbers_CS`. Stop tokens follow, padded with -1.
LENGTH, PROMPT, LIMIT, SEED, GROUP, ENDED, ADAPTER, CELL, STOP = range(9)
SMALLEST_SCALE = 2.0**-126  # scale of a row that is rounded to 8 bits: the smallest normal float32
SPLIT_TILE = 64  # outputs of a program of a split product
VOCAB_BLOCK = 256  # tokens of a block, whose weights are summed before the token is searched within it


class SlotState(NamedTuple):
    """State of the sequences by slot; see `decode_state.DecodeState`."""

    tokens_S: Tensor
    numbers_CS: Tensor
    table_SP: Tensor


class PassForm(NamedTuple):
    """Constants of a pass.

    Attributes:
      page: tokens of a page.
      pages: bound on the pages of a sequence that attention reads.
      spare: page that ended sequences write to.
    """

    page: int
    pages: int
    spare: int
