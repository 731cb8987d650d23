"""Index tensors that follow from the sizes of pictures alone; they are computed on the host.

A grid is the (height, width) of a picture in patches. Patches stand in blocks of `merge`^2, which become one token:
block by block along the rows of blocks, and within a block row by row. Where a tower sees tiles, the grid of a picture
is its height and width in pixels before it was cut, and its patches are those of its tiles, end to end.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from funrl.models.vision.config import TowerConfig
from funrl.models.vision.tiles import NO_TILES, token_states

Grid = tuple[int, int]


class TowerIndices(NamedTuple):
    """Places of patches in a tower.

    Attributes:
      order_P: the patches in the order of their windows.
      places_P2: row and column of each patch in its picture, in that order.
      windows: patches of each window, in that order.
      pictures: patches of each picture, or tile.
      back_M: for each block its place among those in the order of windows.
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


def picture_tokens(grid: Grid, tower: TowerConfig) -> int:
    """Number of tokens that a picture takes."""
    tiles = tower.layout.tiles
    return picture_patches(grid, tower) // tower.merge**2 if tiles is None else tiles.tokens(grid)


def picture_patches(grid: Grid, tower: TowerConfig) -> int:
    """Number of patches that a picture is cut into."""
    return sum(height * width for height, width in seen_grids(grid, tower))


def seen_grids(grid: Grid, tower: TowerConfig) -> list[Grid]:
    """Height and width in patches of each part of a picture that its patches see: all of it, or its tiles."""
    tiles = tower.layout.tiles
    side = 0 if tiles is None else tiles.states * tower.merge
    return [grid] if tiles is None else [(side, side)] * tiles.count(grid)


def smallest_grid(tower: TowerConfig) -> Grid:
    """The grid of the smallest picture."""
    return (tower.merge, tower.merge) if tower.layout.tiles is None else NO_TILES


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
    seen = [part for grid in grids for part in seen_grids(grid, tower)]
    parts = [_indices_of(part, tower.merge, tower.window_tokens) for part in seen]
    patches = np.cumsum([0, *(len(part.order_P) for part in parts)])
    shifted = [
        part._replace(order_P=part.order_P + begin, back_M=part.back_M + begin // tower.merge**2)
        for part, begin in zip(parts, patches[:-1], strict=True)
    ]
    return TowerIndices(*map(np.concatenate, zip(*shifted, strict=True)))


@functools.lru_cache(maxsize=256)
def _token_places_of(grid: Grid, tower: TowerConfig) -> TokenPlaces:
    number_M = np.arange(picture_tokens(grid, tower))
    if tower.layout.tiles is not None:  # its tokens follow one another like those of a text
        return TokenPlaces(number_M, np.stack([number_M] * 2, 1), np.zeros_like(number_M))
    height, width = (side // tower.merge for side in grid)
    shrink_M = np.zeros(height * width, dtype=np.int64)
    shrink_M[-1] = height * width - max(height, width)
    return TokenPlaces(number_M, np.stack(np.divmod(number_M, width), 1), shrink_M)


def token_places(grids: Iterable[Grid], tower: TowerConfig) -> TokenPlaces:
    """Places of the tokens of pictures that stand end to end; at least one."""
    return TokenPlaces(*map(np.concatenate, zip(*(_token_places_of(grid, tower) for grid in grids), strict=True)))


def arranged_states(grids: Iterable[Grid], tower: TowerConfig) -> tuple[np.ndarray, np.ndarray]:
    """States of blocks that the tokens of pictures are made of, which stand end to end, and their shares.

    Args:
      grids: of the pictures; at least one.
      tower: with tiles.

    Returns: int64 and float64 [M, 4]; a negative entry is the newline.
    """
    tiles = tower.layout.tiling
    entries: list[np.ndarray] = []
    shares: list[np.ndarray] = []
    begin = 0
    for grid in grids:
        entries_M4, shares_M4 = token_states(grid, tiles)
        entries.append(np.where(entries_M4 < 0, entries_M4, entries_M4 + begin))
        shares.append(shares_M4)
        begin += tiles.count(grid) * tiles.states**2
    return np.concatenate(entries), np.concatenate(shares)


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
    parts = [part for grid in grids for part in seen_grids(grid, tower)]
    entries, shares = zip(*(_table_shares_of(part, tower) for part in parts), strict=True)
    return np.concatenate(entries), np.concatenate(shares)
