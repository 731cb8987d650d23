"""Pictures that a tower sees as tiles of one size, beside an overview: how a picture of some size is cut.

A picture is scaled with its proportions into the best of some canvases, what it leaves free is black, and the canvas is
cut into tiles. The overview is all of it, squashed to one tile. States of patches that are all black are left out, and
a grid of more states than a bound is interpolated to fewer.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from funrl.models.errors import ModelError

Size = tuple[int, int]  # height and width
NO_TILES: Size = (0, 0)  # size of a picture that is its overview alone
NEWLINE = -1  # entry of a token that has the state of the ends of lines
_LEAST_RATIO = 1.1  # of sides, from which a grid of states is interpolated


class Canvas(NamedTuple):
    """The place of the pixels of a picture on its canvas.

    Attributes:
      tiles: rows and columns of tiles.
      size: of the scaled picture, in pixels.
      begin: pixels above it and on its left.
    """

    tiles: Size
    size: Size
    begin: Size


class TokenStates(NamedTuple):
    """States that the tokens of a picture are made of.

    Attributes:
      entries_M4: numbers of states of its tiles, end to end; `NEWLINE`.
      shares_M4: of each in the token.
    """

    entries_M4: np.ndarray
    shares_M4: np.ndarray


@dataclass(frozen=True)
class Tiles:
    """Tiles of pictures.

    Attributes:
      pixels: of a side of a tile; its patches leave out the last ones where they fill none.
      states: of a side of a tile, behind the tower.
      canvases: heights and widths that a picture may be scaled into, in tiles.
      most: tiles whose states make the most tokens of a picture, about.
    """

    pixels: int
    states: int
    canvases: tuple[Size, ...]
    most: int

    def __post_init__(self) -> None:
        if not self.canvases or any(min(canvas) < 1 for canvas in self.canvases) or self.most < 1:
            raise ModelError(f"tiles are {self.canvases} and at most {self.most}; there must be some, from 1 on")

    def count(self, size: Size) -> int:
        """Number of tiles of a picture, with its overview."""
        return 1 if size == NO_TILES else 1 + math.prod(canvas_of(size, self).tiles)

    def tokens(self, size: Size) -> int:
        """Number of tokens of a picture."""
        return _tokens_of(size, self)


@functools.lru_cache(maxsize=1024)
def canvas_of(size: Size, tiles: Tiles) -> Canvas:
    """The canvas on which most pixels of a picture are kept, and among such the one that is least black.

    Args:
      size: of the picture, in pixels.
      tiles: with the canvases.
    """
    sides = [(rows * tiles.pixels, columns * tiles.pixels) for rows, columns in tiles.canvases]

    def kept(number: int) -> tuple[int, int]:
        height, width = size
        canvas = sides[number]
        scale = min(canvas[1] / width, canvas[0] / height)
        pixels = min(int(width * scale) * int(height * scale), width * height)
        return pixels, pixels - math.prod(canvas)

    best = max(range(len(sides)), key=kept)  # the first of equals
    scaled = scaled_size(size, sides[best])
    begin = ((sides[best][0] - scaled[0]) // 2, (sides[best][1] - scaled[1]) // 2)
    return Canvas(tiles.canvases[best], scaled, begin)


def scaled_size(size: Size, canvas: Size) -> Size:
    """Height and width of a picture in its proportions, as large as a canvas has room for."""
    height, width = size
    most_height, most_width = canvas
    by_width = most_width / width
    by_height = most_height / height
    if by_width < by_height:
        return min(math.ceil(height * by_width), most_height), most_width
    return most_height, min(math.ceil(width * by_height), most_width)


@functools.lru_cache(maxsize=65536)
def _tokens_of(size: Size, tiles: Tiles) -> int:
    return len(token_states(size, tiles).entries_M4)


@functools.lru_cache(maxsize=64)  # half a megabyte each
def token_states(size: Size, tiles: Tiles) -> TokenStates:
    """States that the tokens of a picture are made of: those of the overview, then row by row those of all tiles.

    Each row of these ends with a newline, and so does an overview alone.
    """
    side = tiles.states
    overview_M4 = _alone(np.arange(side**2))
    if size == NO_TILES:
        entries_M4 = np.concatenate([overview_M4, _alone(np.array([NEWLINE]))])
        return TokenStates(entries_M4, _first_only(len(entries_M4)))
    rows, columns = canvas_of(size, tiles).tiles
    tile_HW, inside_HW = _grid_of_tiles(rows, columns, side)
    numbers_HW = _without_black((1 + tile_HW) * side**2 + inside_HW, size)
    height, width = numbers_HW.shape
    ratio = math.sqrt(height * width / (tiles.most * side**2))
    if ratio > _LEAST_RATIO:
        entries_HW4, shares_HW4 = _interpolated(numbers_HW, (max(1, int(height // ratio)), max(1, int(width // ratio))))
    else:
        entries_HW4 = _alone(numbers_HW)
        shares_HW4 = _first_only(height, width)
    lines = (len(entries_HW4), 1)
    entries_HW4 = np.concatenate([entries_HW4, _alone(np.full(lines, NEWLINE))], 1)
    shares_HW4 = np.concatenate([shares_HW4, _first_only(*lines)], 1)
    return TokenStates(
        np.concatenate([overview_M4, entries_HW4.reshape(-1, 4)]),
        np.concatenate([_first_only(len(overview_M4)), shares_HW4.reshape(-1, 4)]),
    )


def _alone(numbers: np.ndarray) -> np.ndarray:
    return np.repeat(numbers[..., None], 4, -1)


def _first_only(*shape: int) -> np.ndarray:
    return np.broadcast_to([1.0, 0.0, 0.0, 0.0], (*shape, 4))


def _grid_of_tiles(rows: int, columns: int, side: int) -> tuple[np.ndarray, np.ndarray]:
    """For each state of a canvas the number of its tile, and its own in that tile."""
    row_H1 = np.arange(rows * side)[:, None]
    column_W = np.arange(columns * side)
    return row_H1 // side * columns + column_W // side, row_H1 % side * side + column_W % side


def _without_black(numbers_HW: np.ndarray, size: Size) -> np.ndarray:
    """The states of a canvas, less as many at two opposite sides as the picture leaves free there."""
    height, width = numbers_HW.shape
    if size[1] / size[0] > width / height:
        free = (height - int(round(size[0] * (width / size[1]), 7))) // 2
        return numbers_HW[free : height - free]
    free = (width - int(round(size[1] * (height / size[0]), 7))) // 2
    return numbers_HW[:, free : width - free]


def _interpolated(numbers_HW: np.ndarray, size: Size) -> tuple[np.ndarray, np.ndarray]:
    """Entries and shares of a grid of another size, bilinear between the centres of states."""
    (rows, row_shares), (columns, column_shares) = (
        _neighbours(old, new) for old, new in zip(numbers_HW.shape, size, strict=True)
    )
    entries = numbers_HW[rows[:, None, :, None], columns[None, :, None, :]]
    shares = row_shares[:, None, :, None] * column_shares[None, :, None, :]
    return entries.reshape(*size, 4), shares.reshape(*size, 4)


def _neighbours(old: int, new: int) -> tuple[np.ndarray, np.ndarray]:
    """The two places among `old` around each of `new`, and their shares."""
    place = np.maximum((np.arange(new) + 0.5) * (old / new) - 0.5, 0)
    first = place.astype(np.int64)
    share = place - first
    return np.stack([first, np.minimum(first + 1, old - 1)], 1), np.stack([1 - share, share], 1)
