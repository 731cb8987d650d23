"""Masks, and sums over tokens: of rows, of sequences, of all rows of a step."""

from __future__ import annotations

import torch
from torch import Tensor

from funrl.batch import Batch, map_fields, schema_of, with_rows_spread

PLACES = ("tokens", "mask", "positions", "segments", "unit")  # fields that describe the layout, outside the mask too


def where_masked(x_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """x on the mask and exactly 0 elsewhere; no gradient flows elsewhere either."""
    return torch.where(mask_BT, x_BT, x_BT.new_zeros(()))


def rounding(x: Tensor) -> Tensor:
    """Bound of the rounding error in a model's outputs x if sums are taken in another order, elementwise."""
    return 4 * torch.finfo(x.dtype).eps * (1 + x.detach().abs())


def clean(batch: Batch) -> Batch:
    """The batch as terms see it: all fields per token, 0 outside the mask, detached except fields of the step.

    A field per row, such as the score, has its row's value on every token; see `with_rows_spread`.

    Raises:
      ValueError: a field is not per token, such as advantages of a chain without `to_tokens`.
    """
    mask_BT = batch.mask
    schema = schema_of(batch)

    def cleaned(name: str, x: Tensor) -> Tensor:
        if name in PLACES or schema[name].kind.spread is None:
            return x
        if x.shape[:2] != mask_BT.shape:
            raise ValueError(f"batch.{name} is {list(x.shape)} and not [B, T]: add to_tokens() to the chain")
        x = where_masked(x, mask_BT if x.dim() == 2 else mask_BT[..., None])
        return x if schema[name].writer == "step" else x.detach()

    return map_fields(cleaned, with_rows_spread(batch))


def total(x_BT: Tensor, mask_BT: Tensor, batch: Batch) -> Tensor:
    """The sum of x over the mask and all rows of the step, in float64: row by row, then in the order of the rows.

    All advantage pieces sum over tokens with it; its bits do not depend on padding, threads or mesh.
    """
    return in_order(batch.across.rows.sums(where_masked(x_BT, mask_BT)))


def in_order(x_B: Tensor) -> Tensor:
    """The sum of values per row, added one after the other in the order of the rows."""
    return torch.nn.functional.pad(x_B, (1, 0)).cumsum(0)[-1]


def sequence_sums(x_BT: Tensor, mask_BT: Tensor, segments_BT: Tensor | None = None) -> Tensor:
    """The sum of x over the masked tokens of each sequence.

    Args:
      segments_BT: which sequence of a packed row a token belongs to, 1 to T; None: a row is one sequence.
    Returns: [B, 1] where a row is one sequence, [B, T + 1] where rows are packed, indexed by segment.
    """
    kept_BT = where_masked(x_BT, mask_BT)
    if segments_BT is None:
        return kept_BT.sum(1, keepdim=True)
    return kept_BT.new_zeros(kept_BT.shape[0], kept_BT.shape[1] + 1).scatter_add(1, segments_BT.long(), kept_BT)


def to_own_tokens(x_BS: Tensor, mask_BT: Tensor, segments_BT: Tensor | None = None) -> Tensor:
    """Give every masked token the value of its own sequence: from the shape of `sequence_sums` to [B, T]."""
    x_BT = x_BS.expand(mask_BT.shape) if segments_BT is None else x_BS.gather(1, segments_BT.long())
    return where_masked(x_BT, mask_BT)


def sums_by_sequence(x_BT: Tensor, mask_BT: Tensor, batch: Batch) -> Tensor:
    """The sum of x over the masked tokens of each sequence; all rows of an agent's episode are one sequence.

    Returns: a table like that of `sequence_sums`, for `on_tokens_of_sequence`. Where rows are not packed, an episode
      has its sum at its first row, and 0 at the others.
    """
    segments_BT = batch.get("segments")
    unit_BT = batch.get("unit")
    if unit_BT is None:
        return sequence_sums(x_BT, mask_BT, segments_BT)
    if segments_BT is not None:
        return sequence_sums(x_BT, mask_BT, unit_BT)
    sums_B1 = sequence_sums(x_BT, mask_BT)
    return torch.zeros_like(sums_B1).index_add(0, _first_rows(unit_BT), sums_B1)


def on_tokens_of_sequence(table_BS: Tensor, mask_BT: Tensor, batch: Batch) -> Tensor:
    """Give every masked token the value of its sequence: from the table of `sums_by_sequence` to [B, T]."""
    segments_BT = batch.get("segments")
    unit_BT = batch.get("unit")
    if unit_BT is None:
        return to_own_tokens(table_BS, mask_BT, segments_BT)
    if segments_BT is not None:
        return to_own_tokens(table_BS, mask_BT, unit_BT)
    return to_own_tokens(table_BS[_first_rows(unit_BT)], mask_BT)


def _first_rows(unit: Tensor) -> Tensor:
    """[B] the first row of each row's unit; units are [B] or on tokens [B, T]."""
    return first_of_equal(unit if unit.dim() == 1 else unit[:, 0])


def first_of_equal(x_B: Tensor) -> Tensor:
    """[B] int64, the place of the first number that equals each; nothing leaves the device.

    Example: first_of_equal([7, 3, 7]) is [0, 1, 0].
    """
    return (x_B[:, None] == x_B).to(torch.uint8).argmax(1)


def row_or_episode_sums(x_BT: Tensor, mask_BT: Tensor, batch: Batch) -> Tensor:
    """The sum of x over the masked tokens of each row, or of all rows of its agent's episode, for pieces of a chain.

    Returns: [b, 1], a number for each of a rank's rows.
    """
    sums_b1 = sequence_sums(x_BT, mask_BT)
    across = batch.across
    if across.by_row is None:
        return sums_b1
    return across.own(across.sums(sums_b1))[:, None].to(sums_b1.dtype)
