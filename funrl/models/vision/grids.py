"""Index tensors that follow from the sizes of pictures alone; they are computed on the host.

A grid is the (height, width) of a picture in patches. Patches stand in blocks of `merge`^2, which become one token:
block by block along the rows of blocks, and within a block row by row.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from funrl.models.vision.config import TowerConfig

Grid = tuple[int, int]


class TowerIndices(NamedTuple):
    """Places of patches in a tower.

    Attributes:
      order_P: the patches in the order of their windows.
      places_P2: row and column of each patch in its picture, in that order.
      windows: patches of each window, in that order.
      pictures: patches of each picture.
      back_M: for each token its place among those in the order of windows.
    """

    order_P: np.ndarray
    places_P2: np.ndarray
    windows: np.ndarray
    pictures: np.ndarray
    back_M: np.ndarray


class TokenPlaces(NamedTuple):
    """Places of the tokens of some pictures, end to end.

    Attributes:
      number_M: of the token in its picture.
      places_M2: its row and column.
      shrink_M: positions that the last token of a picture is ahead of its number of tokens; else 0.
    """

    number_M: np.ndarray
    places_M2: np.ndarray
    shrink_M: np.ndarray


def picture_tokens(grid: Grid, merge: int) -> int:
    """Number of tokens that a picture takes."""
    return grid[0] * grid[1] // merge**2


@functools.lru_cache(maxsize=1024)
def _indices_of(grid: Grid, merge: int, window_tokens: int) -> TowerIndices:
    height, width = (side // merge for side in grid)
    row_M, column_M = np.divmod(np.arange(height * width), width)
    of_row_M = row_M // window_tokens
    of_column_M = column_M // window_tokens
    order_M = np.lexsort((column_M, row_M, of_column_M, of_row_M))
    window_M = of_row_M * width + of_column_M
    windows = np.unique(window_M, return_counts=True)[1] * merge**2
    inside_row, inside_column = np.divmod(np.arange(merge**2), merge)
    rows = row_M[order_M, None] * merge + inside_row
    columns = column_M[order_M, None] * merge + inside_column
    order_P = (order_M[:, None] * merge**2 + np.arange(merge**2)).ravel()
    places_P2 = np.stack([rows.ravel(), columns.ravel()], 1)
    return TowerIndices(order_P, places_P2, windows, np.array([len(order_P)]), np.argsort(order_M))


def tower_indices(grids: Iterable[Grid], tower: TowerConfig) -> TowerIndices:
    """Indices of pictures that stand end to end; at least one."""
    parts = [_indices_of(grid, tower.merge, tower.window_tokens) for grid in grids]
    patches = np.cumsum([0, *(len(part.order_P) for part in parts)])
    shifted = [
        part._replace(order_P=part.order_P + begin, back_M=part.back_M + begin // tower.merge**2)
        for part, begin in zip(parts, patches[:-1], strict=True)
    ]
    return TowerIndices(*map(np.concatenate, zip(*shifted, strict=True)))


@functools.lru_cache(maxsize=1024)
def _token_places_of(grid: Grid, merge: int) -> TokenPlaces:
    height, width = (side // merge for side in grid)
    number_M = np.arange(height * width)
    shrink_M = np.zeros(height * width, dtype=np.int64)
    shrink_M[-1] = height * width - max(height, width)
    return TokenPlaces(number_M, np.stack(np.divmod(number_M, width), 1), shrink_M)


def token_places(grids: Iterable[Grid], merge: int) -> TokenPlaces:
    """Places of the tokens of pictures that stand end to end; at least one."""
    return TokenPlaces(*map(np.concatenate, zip(*(_token_places_of(grid, merge) for grid in grids), strict=True)))


@functools.lru_cache(maxsize=1024)
def _table_shares_of(grid: Grid, tower: TowerConfig) -> tuple[np.ndarray, np.ndarray]:
    places_P2 = _indices_of(grid, tower.merge, tower.window_tokens).places_P2
    side = tower.form.table
    entries_PA2: list[np.ndarray] = []
    shares_PA2: list[np.ndarray] = []
    for axis, length in enumerate(grid):
        place_P = np.linspace(0, side - 1, length)[places_P2[:, axis]]
        first_P = np.minimum(place_P.astype(np.int64), max(side - 2, 0))
        entries_PA2.append(np.stack([first_P, np.minimum(first_P + 1, side - 1)], 1))
        shares_PA2.append(np.stack([first_P + 1 - place_P, place_P - first_P], 1))
    entries_P4 = (entries_PA2[0][:, :, None] * side + entries_PA2[1][:, None]).reshape(-1, 4)
    return entries_P4, (shares_PA2[0][:, :, None] * shares_PA2[1][:, None]).reshape(-1, 4)


def table_shares(grids: Iterable[Grid], tower: TowerConfig) -> tuple[np.ndarray, np.ndarray]:
    """Entries of the table of positions between which each patch is, and the share of each.

    The corners of the table are those of a picture.

    Args:
      grids: of pictures that stand end to end; at least one.
      tower: with a table.

    Returns: int64 and float64 [P, 4], of the patches in the order of their windows.
    """
    entries, shares = zip(*(_table_shares_of(grid, tower) for grid in grids), strict=True)
    return np.concatenate(entries), np.concatenate(shares)
