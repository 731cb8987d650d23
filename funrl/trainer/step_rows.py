"""Rows on their ranks: what every rank knows of all rows, and the tokens of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from funrl.batch import FIELDS, Batch, as_dict, map_fields, narrowed, with_across
from funrl.mesh.mesh import Mesh, single
from funrl.mesh.rows import across, hand_over, move_rows


class Rows(NamedTuple):
    """Rows of a step, numbered 0 to B - 1.

    Attributes:
      batch: fields of kind "row" have all rows [B], alike on every rank; the others have this rank's own rows [b, T],
        in the order of their numbers, whole numbers in `TOKEN_INT`. Ranks that differ in other axes than those of rows
        hold the same.
      owner: [B] the rank that has each row, by its index over the row axes of `mesh`.
      mesh: whose ranks hold the rows.
    """

    batch: Batch
    owner: np.ndarray
    mesh: Mesh

    @property
    def lengths(self) -> np.ndarray:
        """[B] tokens of each row."""
        return self.batch.length.cpu().numpy()

    @property
    def index(self) -> int:
        """This rank's index over the row axes."""
        return int(self.mesh.index(self.mesh.row_axes))

    @property
    def own(self) -> np.ndarray:
        """Numbers of this rank's rows, ascending."""
        return np.flatnonzero(self.owner == self.index)

    def local(self, numbers: np.ndarray) -> np.ndarray:
        """Places among this rank's rows of some of them, by their numbers."""
        return np.searchsorted(self.own, numbers)

    def with_fields(self, **fields: Tensor | None) -> Rows:
        return self._replace(batch=narrowed(self.batch._replace(**fields)))


def rows_of(batch: Batch, owner: np.ndarray | None = None, mesh: Mesh | None = None) -> Rows:
    """Rows of a batch, by default all of them this rank's own; its sums go over all ranks' rows."""
    mesh = mesh or single()
    owner = np.zeros(len(batch.tokens), dtype=np.int64) if owner is None else owner
    return Rows(with_across(narrowed(batch), across(owner, mesh, mesh.row_axes)), owner, mesh)


def split_rows(batch: Batch, owner: np.ndarray, mesh: Mesh) -> Rows:
    """The rows of a batch that every rank has whole, each rank keeping its own."""
    own = torch.from_numpy(np.flatnonzero(owner == int(mesh.index(mesh.row_axes)))).to(batch.tokens.device)
    return rows_of(map_fields(lambda name, x: x if _is_row(name) else x[own], batch), owner, mesh)


def take(rows: Rows, numbers: np.ndarray) -> Rows:
    """Some rows, in the given order; one may come several times. They stay on their ranks."""
    owner = rows.owner[numbers]
    at = torch.from_numpy(np.asarray(numbers))
    here = torch.from_numpy(rows.local(numbers[owner == rows.index]))
    made = map_fields(lambda name, x: x[(at if _is_row(name) else here).to(x.device)], rows.batch)
    return rows_of(made, owner, rows.mesh)


def join_rows(parts: Sequence[Rows]) -> Rows:
    """The rows of all parts, one part after the other, on one mesh."""
    if len(parts) == 1:
        return parts[0]
    fields = [as_dict(part.batch) for part in parts]
    width = max(part.batch.tokens.shape[1] for part in parts)

    def joined(name: str) -> Tensor:
        if _is_row(name):
            return torch.cat([one[name] for one in fields])
        return torch.cat([_widened(one[name], width) for one in fields])

    batch = Batch(**{name: joined(name) for name in fields[0]})
    return rows_of(batch, np.concatenate([part.owner for part in parts]), parts[0].mesh)


def moved(rows: Rows, to: np.ndarray, mesh: Mesh) -> Rows:
    """The rows on the ranks that `to` [B] names by their index over the row axes of a mesh, over the same processes."""
    same = rows.mesh.sizes == mesh.sizes
    if same and np.array_equal(rows.owner, to):
        return rows
    fields = as_dict(rows.batch)
    tokens = {name: x for name, x in fields.items() if not _is_row(name)}
    if same:
        found = move_rows(tokens, rows.lengths, rows.owner, to, mesh, mesh.row_axes)
    else:
        found = hand_over(tokens, rows.lengths, rows.owner, rows.mesh, to, mesh)
    return rows_of(Batch(**{**fields, **found.fields}), to, mesh)


def widened(rows: Rows, multiple: int = 8) -> Rows:
    """The rows in the width of the longest row of all ranks, rounded up."""
    width = -(-int(rows.lengths.max(initial=1)) // multiple) * multiple

    def fitted(name: str, x: Tensor) -> Tensor:
        return x if _is_row(name) else _widened(x[:, :width], width)

    return rows._replace(batch=map_fields(fitted, rows.batch))


def on_cpu(rows: Rows) -> Rows:
    """The rows where every sum has one order. A GPU may add in another order on every rank, and ranks that differ in a
    last bit may keep other rows."""
    return mapped(rows, lambda x: x.cpu())


def mapped(rows: Rows, fn: Callable[[Tensor], Tensor]) -> Rows:
    """The rows with `fn` of every field."""
    return rows._replace(batch=map_fields(lambda _, x: fn(x), rows.batch))


def own_batch(rows: Rows, numbers: np.ndarray) -> Batch:
    """Some of this rank's rows as a batch of their own, in the given order."""
    at, here = torch.from_numpy(np.asarray(numbers)), torch.from_numpy(rows.local(numbers))
    fields: dict[str, Any] = as_dict(rows.batch)
    return Batch(**{name: x[(at if _is_row(name) else here).to(x.device)] for name, x in fields.items()})


def _is_row(name: str) -> bool:
    return FIELDS[name].kind == "row"


def _widened(x_bT: Tensor, width: int) -> Tensor:
    return pad(x_bT, (*(0, 0) * (x_bT.ndim - 2), 0, width - x_bT.shape[1]))
