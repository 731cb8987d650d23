"""Rows as a role sees them whose prompts are others than the policy's, such as a teacher that knows the answer.

tokens of a row          [prompt, completion]
`teacher_prompt` of it   [demonstration, prompt]
what the teacher scores  [demonstration, prompt, completion]
what it writes           numbers of the completion's tokens, at their places in the row
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from funrl.batch import Batch
from funrl.kinds import Ragged
from funrl.trainer.steps.step_rows import Rows, rows_of

PADDED_TO = 8  # of the tokens of a row, as of other rows


class ContextRows(NamedTuple):
    """Rows with other prompts.

    Attributes:
      rows: with tokens, mask and length alone, on the ranks of the rows that they are made of.
      place_bT: of each token of these its place in its new row.
      kept_bT: bool, tokens that the new row has too: a row's first sampled token and all after it.
    """

    rows: Rows
    place_bT: Tensor
    kept_bT: Tensor

    def back(self, x: Tensor) -> Tensor:
        """Numbers of the new rows' tokens [b, T', ...] at the tokens of the rows before [b, T, ...]; 0 elsewhere."""
        row_b1 = torch.arange(len(x), device=x.device)[:, None]
        moved = x[row_b1, self.place_bT]
        kept = self.kept_bT.view(*self.kept_bT.shape, *(1,) * (x.dim() - 2))
        return torch.where(kept, moved, moved.new_zeros(()))


def with_context(rows: Rows, field: str) -> ContextRows:
    """Rows with other prompts. Collective over the mesh of the rows.

    Args:
      rows: each begins with its prompt; everything from its first sampled token on is kept.
      field: ragged, the token ids of each row's other prompt; a row that owns none keeps its prompt.
    """
    batch = rows.batch
    prompts: Ragged = getattr(batch, field)
    device = batch.tokens.device
    offsets = prompts.offsets.to(device)
    values = prompts.values.to(device, batch.tokens.dtype)
    mask_bT = batch.mask.to(device)
    T = mask_bT.shape[1]
    length_b = batch.across.own(batch.length.to(device))
    first_b = torch.where(mask_bT.any(1), mask_bT.int().argmax(1), length_b)
    own_b = offsets.diff()
    begin_b = torch.where(own_b > 0, own_b, first_b)
    new_length_b = begin_b + length_b - first_b
    width = math.ceil(max(int(new_length_b.max()) if len(new_length_b) else 1, 1) / PADDED_TO) * PADDED_TO

    place_W = torch.arange(width, device=device)
    source_bW = place_W - begin_b[:, None] + first_b[:, None]  # in the row, of a token after the prompt
    after_bW = (place_W >= begin_b[:, None]) & (place_W < new_length_b[:, None])
    given_bW = (place_W < begin_b[:, None]) & (own_b[:, None] > 0)
    tokens_bW = batch.tokens.gather(1, torch.where(after_bW, source_bW, place_W.expand_as(source_bW)).clamp(0, T - 1))
    line_bW = (offsets[:-1, None] + place_W).clamp(max=max(len(values) - 1, 0))
    if len(values):
        tokens_bW = torch.where(given_bW, values[line_bW], tokens_bW)
    masks_bW = after_bW & mask_bT.gather(1, source_bW.clamp(0, T - 1))
    new_length_B = batch.across.sums(new_length_b[:, None]).long()
    shown = Batch(tokens=tokens_bW, mask=masks_bW, length=new_length_B.to(batch.length.device))

    place_T = torch.arange(T, device=device)
    kept_bT = (place_T >= first_b[:, None]) & (place_T < length_b[:, None])
    place_bT = torch.where(kept_bT, place_T - first_b[:, None] + begin_b[:, None], 0)
    return ContextRows(rows_of(shown, rows.owner, rows.mesh), place_bT, kept_bT)
