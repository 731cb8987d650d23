"""Kinds of fields: how rows of a field are kept.

    pictures = Ragged(torch.rand(5, 3, 32, 32), torch.tensor([0, 2, 2, 5]))  # of rows of 2, 0 and 3 pictures
    FIELD_KINDS["ragged"].select(pictures, torch.tensor([2, 0]))

Whatever moves, packs, saves or replays rows asks a field's kind how, so that a further kind is one further record.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

Value = Any  # of a field: a tensor, or a record of tensors such as `Ragged`, as its kind says
EXAMPLE_NUMBERS = 2  # K of an example


class OwnedLines(NamedTuple):
    """Values that one row owns, of several ragged fields.

    Attributes:
      values: lines by field.
      digest: a number of 128 bits that tells their bytes apart.
    """

    values: Mapping[str, Tensor]
    digest: int

    @property
    def empty(self) -> bool:
        """True if there are none."""
        return not any(map(len, self.values.values()))


def owned_lines(values: Mapping[str, Tensor]) -> OwnedLines:
    """Lines of one row, by field, with their digest."""
    digest = hashlib.blake2b(digest_size=16)
    for name in sorted(values):
        digest.update(f"{name} {tuple(values[name].shape)} {values[name].dtype}".encode())
        digest.update(values[name].contiguous().cpu().numpy().tobytes())
    return OwnedLines(values, int.from_bytes(digest.digest(), "little"))


def joined_lines(parts: Sequence[OwnedLines | None]) -> OwnedLines | None:
    """Lines of several parts of one row, end to end; None: no part has any."""
    given = [part for part in parts if part is not None and not part.empty]
    if len(given) < 2:
        return given[0] if given else None
    return owned_lines({name: torch.cat([part.values[name] for part in given]) for name in given[0].values})


class Ragged(NamedTuple):
    """Values owned by rows, each row as many as it has, end to end.

    Attributes:
      values: [number of all values, ...], of any dtype and trailing shape.
      offsets: [B + 1] int64; row i owns `values[offsets[i] : offsets[i + 1]]`.
    """

    values: Tensor
    offsets: Tensor


@dataclass(frozen=True)
class FieldKind:
    """Functions that keep rows of a field.

    A value is made of lines, one per token or per number that a row owns: rows are moved and saved as the lines of
    each row, end to end.

    Attributes:
      name: of the kind, in declarations and in files of saved rows.
      select: (value, rows) -> the value of these rows in this order; `rows` is a slice or a tensor of numbers.
      concatenate: values -> one value of all their rows. Fields per token have the same T in all.
      beside: (value, first, second) -> rows that are each made of two, by their numbers. Fields per token come to the
        width 2 T; of a number per row the first row's is taken.
      lines: value -> [lines, ...], a view; of all rows.
      begins: value -> [b] the line at which each row begins.
      counts: (value, lengths) -> [b] lines of each row, where rows have these numbers of tokens.
      blank: (lines, counts, width) -> a value of zeros for rows of these counts; dtype, device and trailing shape are
        those of `lines`, T is `width`.
      fit: (value, width) -> the value with T = width.
      spread: (value, T) -> the value on tokens [b, T, ...], each with its row's number; None: it does not come to
        tokens.
      example: (fn, rows, tokens) -> a value for `rows` rows of `tokens` tokens, of the tensors that `fn(shape)` gives.
      everywhere: every rank has the values of all rows; otherwise those of its own rows.
      per_token: the second dim is the row's tokens, and micro-batches have the tokens [1, N, ...] end to end.
        Other kinds that are not everywhere have their rows in a micro-batch in the order of its segments.
      of_rows: it belongs to rows; otherwise to a micro-batch as a whole.
    """

    name: str
    select: Callable[[Value, Any], Value]
    concatenate: Callable[[list[Value]], Value]
    beside: Callable[[Value, Tensor, Tensor], Value]
    lines: Callable[[Value], Tensor]
    begins: Callable[[Value], np.ndarray]
    counts: Callable[[Value, np.ndarray], np.ndarray]
    blank: Callable[[Tensor, np.ndarray, int], Value]
    fit: Callable[[Value, int], Value]
    spread: Callable[[Value, int], Tensor] | None
    example: Callable[[Callable[..., Tensor], int, int], Value]
    everywhere: bool = False
    per_token: bool = False
    of_rows: bool = True

    def __reduce__(self) -> Any:
        """A kind of the table is pickled by its name, so that it is the same record afterwards."""
        if FIELD_KINDS.get(self.name) is self:
            return _kind_named, (self.name,)
        return object.__reduce_ex__(self, 2)


def _kind_named(name: str) -> FieldKind:
    return FIELD_KINDS[name]


def line_places(begins: np.ndarray, counts: np.ndarray) -> Tensor:
    """Places of the lines of some rows, end to end.

    Example: line_places([10, 0], [2, 3]) is [10, 11, 0, 1, 2].
    """
    ends = np.cumsum(counts)
    total = int(ends[-1]) if len(ends) else 0
    return torch.from_numpy(np.repeat(begins - (ends - counts), counts) + np.arange(total))


def row_lines(kind: FieldKind, value: Value, lengths: np.ndarray) -> Tensor:
    """The lines of all rows of a value, end to end, without padding.

    Args:
      lengths: [b] tokens of each row.
    """
    lines = kind.lines(value)
    return lines[line_places(kind.begins(value), kind.counts(value, lengths)).to(lines.device)]


def from_row_lines(kind: FieldKind, lines: Tensor, counts: np.ndarray, width: int) -> Value:
    """The value whose rows have these lines, end to end; the inverse of `row_lines`.

    Args:
      counts: [b] lines of each row.
      width: T of a field per token.
    """
    value = kind.blank(lines, counts, width)
    kind.lines(value)[line_places(kind.begins(value), counts).to(lines.device)] = lines
    return value


# ---- numbers per row, and what belongs to a micro-batch


def _select(x: Tensor, rows: Any) -> Tensor:
    return x[rows.to(x.device) if isinstance(rows, Tensor) else rows]


def _same(x: Value, *_: object) -> Value:
    return x


def _one_line_each(x: Tensor) -> np.ndarray:
    return np.arange(len(x))


def _one_each(x: Tensor, lengths: np.ndarray) -> np.ndarray:
    return np.ones(len(x), dtype=np.int64)


def _blank_rows(lines: Tensor, counts: np.ndarray, width: int) -> Tensor:
    return lines.new_zeros(len(counts), *lines.shape[1:])


def _spread_rows(trailing: int) -> Callable[[Tensor, int], Tensor]:
    def spread(x: Tensor, tokens: int) -> Tensor:
        if x.dim() > 1 + trailing:  # it is on tokens already
            return x
        return x[:, None].expand(len(x), tokens, *x.shape[1:])

    return spread


def _row_kind(name: str, *trailing: int) -> FieldKind:
    return FieldKind(
        name,
        select=_select,
        concatenate=torch.cat,
        beside=lambda x, first, second: x[first],
        lines=_same,
        begins=_one_line_each,
        counts=_one_each,
        blank=_blank_rows,
        fit=_same,
        spread=_spread_rows(len(trailing)),
        example=lambda fn, rows, tokens: fn((rows, *trailing)),
        everywhere=True,
    )


# ---- numbers per token


def _fit_tokens(x: Tensor, width: int) -> Tensor:
    x = x[:, :width]
    return pad(x, (*(0, 0) * (x.ndim - 2), 0, width - x.shape[1]))


def _token_kind(name: str, *trailing: int) -> FieldKind:
    return FieldKind(
        name,
        select=_select,
        concatenate=torch.cat,
        beside=lambda x, first, second: torch.cat((x[first], x[second]), 1),
        lines=lambda x: x.flatten(0, 1),
        begins=lambda x: np.arange(x.shape[0]) * x.shape[1],
        counts=lambda x, lengths: lengths,
        blank=lambda lines, counts, width: lines.new_zeros(len(counts), width, *lines.shape[1:]),
        fit=_fit_tokens,
        spread=_same,
        example=lambda fn, rows, tokens: fn((rows, tokens, *trailing)),
        per_token=True,
    )


# ---- as many values as a row has


def _ragged_begins(x: Ragged) -> np.ndarray:
    return x.offsets[:-1].cpu().numpy()


def _ragged_offsets(counts: np.ndarray) -> Tensor:
    return torch.from_numpy(np.concatenate([[0], np.cumsum(counts)]).astype(np.int64))


def _select_ragged(x: Ragged, rows: Any) -> Ragged:
    rows = rows if isinstance(rows, slice) else rows.cpu().numpy()
    begins = _ragged_begins(x)[rows]
    counts = x.offsets.diff().cpu().numpy()[rows]
    values = x.values[line_places(begins, counts).to(x.values.device)]
    return Ragged(values, _ragged_offsets(counts).to(x.offsets.device))


def _concatenate_ragged(parts: Sequence[Ragged]) -> Ragged:
    counts = np.concatenate([part.offsets.diff().cpu().numpy() for part in parts])
    offsets = _ragged_offsets(counts).to(parts[0].offsets.device)
    return Ragged(torch.cat([part.values for part in parts]), offsets)


def _beside_ragged(x: Ragged, first: Tensor, second: Tensor) -> Ragged:
    both = _select_ragged(x, torch.stack((first, second), 1).flatten())
    return Ragged(both.values, both.offsets[::2])


def _blank_ragged(lines: Tensor, counts: np.ndarray, width: int) -> Ragged:
    values = lines.new_zeros(int(counts.sum()), *lines.shape[1:])
    return Ragged(values, _ragged_offsets(counts).to(lines.device))


def _example_ragged(fn: Callable[..., Tensor], rows: int, tokens: int) -> Ragged:
    counts = np.arange(rows) % 3  # a row may own nothing
    return Ragged(fn((int(counts.sum()),)), _ragged_offsets(counts))


FIELD_KINDS: Mapping[str, FieldKind] = {
    kind.name: kind
    for kind in (
        _row_kind("row"),  # [B]
        _row_kind("wide_row", EXAMPLE_NUMBERS),  # [B, K]
        _token_kind("token"),  # [B, T]
        _token_kind("token_k", EXAMPLE_NUMBERS),  # [B, T, K]
        FieldKind(
            "ragged",  # `Ragged`
            select=_select_ragged,
            concatenate=_concatenate_ragged,
            beside=_beside_ragged,
            lines=lambda x: x.values,
            begins=_ragged_begins,
            counts=lambda x, lengths: x.offsets.diff().cpu().numpy(),
            blank=_blank_ragged,
            fit=_same,
            spread=None,
            example=_example_ragged,
        ),
        FieldKind(
            "packing",  # of one packed row [1, N] as a whole
            select=_same,
            concatenate=torch.cat,
            beside=_same,
            lines=_same,
            begins=_one_line_each,
            counts=_one_each,
            blank=_blank_rows,
            fit=_same,
            spread=None,
            example=lambda fn, rows, tokens: fn((rows,)),
            of_rows=False,
        ),
    )
}
