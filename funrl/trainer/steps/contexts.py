"""Rows as a role sees them that has other prompts than the policy, as a teacher that knows the answer, or other tokens.

tokens of a row          [prompt, completion]
`teacher_prompt` of it   [demonstration, prompt]
what the teacher scores  [demonstration, prompt, completion]
what it writes           numbers of the completion's tokens, at their places in the row

`teacher_tokens` of it   [prompt, completion] in tokens of another tokenizer
what it writes           sums over the tokens of each span, at the place of the span's last token
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from funrl.batch import Batch
from funrl.fields import TEACHER_PROMPT, TEACHER_TOKENS
from funrl.kinds import Ragged
from funrl.trainer.steps.step_rows import Rows, rows_of

PADDED_TO = 8  # of the tokens of a row, as of other rows


class View(Protocol):
    """Rows in another form, and the way back."""

    @property
    def rows(self) -> Rows: ...

    def back(self, x: Tensor) -> Tensor:
        """Numbers of its tokens [b, T', ...] at the tokens of the rows before [b, T, ...]; 0 elsewhere."""
        ...


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


class SpanRows(NamedTuple):
    """Rows in other tokens.

    Attributes:
      rows: with tokens, mask and length alone, on the ranks of the rows that they are made of; the mask has the tokens
        that are in a span.
      place_bT: of each of these tokens the place of its span's last token in the row before; 0 outside of the mask.
      width: tokens of the rows before.
    """

    rows: Rows
    place_bT: Tensor
    width: int

    def back(self, x: Tensor) -> Tensor:
        """Sums over spans of numbers of the new rows' tokens [b, T'], at the spans' last tokens [b, T]; 0 elsewhere."""
        spread_bT = torch.where(self.rows.batch.mask, x, 0).double()
        zero_bT = spread_bT.new_zeros(len(x), self.width)
        return zero_bT.scatter_add(1, self.place_bT, spread_bT).to(x.dtype)


def with_own_tokens(rows: Rows, field: str) -> SpanRows:
    """Rows in other tokens. Collective over the mesh of the rows.

    Args:
      rows: with the policy's tokens.
      field: ragged [n, 2], token ids and the places in the row of the last tokens of their spans, -1 where they are in
        none; a row that owns none keeps its tokens, each a span.
    """
    batch = rows.batch
    lines: Ragged = getattr(batch, field)
    device = batch.tokens.device
    offsets = lines.offsets.to(device)
    T = batch.tokens.shape[1]
    length_b = batch.across.own(batch.length.to(device))
    own_b = offsets.diff()
    new_length_b = torch.where(own_b > 0, own_b, length_b)
    width = math.ceil(max(int(new_length_b.max()) if len(new_length_b) else 1, 1) / PADDED_TO) * PADDED_TO
    at_W = torch.arange(width, device=device)
    kept_bW = (own_b == 0)[:, None] & (at_W < length_b[:, None])
    before_W = at_W.clamp(max=T - 1)
    tokens_bW = torch.where(kept_bW, batch.tokens[:, before_W], 0)
    place_bW = torch.where(kept_bW & batch.mask.to(device)[:, before_W], at_W, -1)
    row_n = torch.arange(len(own_b), device=device).repeat_interleave(own_b)
    at_n = torch.arange(len(row_n), device=device) - offsets[row_n]
    values_n2 = lines.values.to(device)
    tokens_bW[row_n, at_n] = values_n2[:, 0].to(tokens_bW.dtype)
    place_bW[row_n, at_n] = values_n2[:, 1]
    new_length_B = batch.across.sums(new_length_b[:, None]).long()
    shown = Batch(tokens=tokens_bW, mask=place_bW >= 0, length=new_length_B.to(batch.length.device))
    return SpanRows(rows_of(shown, rows.owner, rows.mesh), place_bW.clamp_min(0), T)


VIEWS: dict[str, Callable[[Rows, str], View]] = {TEACHER_PROMPT: with_context, TEACHER_TOKENS: with_own_tokens}
