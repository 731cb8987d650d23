"""Inputs of a model that sees pictures: their patches, the places of their tokens and the positions of all tokens.

A row's pictures are two ragged fields. Where a batch has them, each of its rows' placeholders stand for the tokens of
its pictures, in order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from funrl.batch import Batch, schema_of
from funrl.kinds import OwnedLines, owned_lines
from funrl.models.errors import ModelError
from funrl.models.model import Inputs
from funrl.models.vision.config import CHANNELS, TowerConfig
from funrl.models.vision.grids import Grid, picture_patches, picture_tokens, smallest_grid, token_places

# ragged fields of rows: patches [3, side, side] of their pictures, 0 to 255, and height and width of each, see `grids`
PATCHES = "patches"
GRIDS = "grids"


class Pictures(NamedTuple):
    """Pictures of the rows of a forward pass, end to end.

    Attributes:
      patches_PCHW: uint8 [P, 3, patch, patch].
      grids: of each picture.
    """

    patches_PCHW: Tensor
    grids: tuple[Grid, ...]


def picture_inputs(tower: TowerConfig, batch: Batch, inputs: Inputs) -> Inputs:
    """Add the pictures of a batch to its inputs, if it declares such.

    Where no row has one, there is a smallest one of black patches that no token stands for: a rank takes part in all
    collectives of the tower.

    Raises:
      ModelError: the placeholders of the rows are not those of their pictures.
    """
    if PATCHES not in schema_of(batch) or batch.get(PATCHES) is None:
        return inputs
    grids = grids_of(batch.get(GRIDS).values)
    patches_PCHW = batch.get(PATCHES).values
    if grids:
        return with_pictures(tower, inputs, Pictures(patches_PCHW, grids))
    grid = smallest_grid(tower)
    black_PCHW = patches_PCHW.new_zeros(picture_patches(grid, tower), CHANNELS, tower.patch, tower.patch)
    pictures = Pictures(black_PCHW, (grid,))
    return inputs._replace(pictures=pictures, inserted_at=torch.full_like(inputs.tokens, -1))


def with_pictures(tower: TowerConfig, inputs: Inputs, pictures: Pictures) -> Inputs:
    """Inputs with pictures, at least one, which are those of the placeholders of all rows in order.

    Raises:
      ModelError: as `place_tokens`; or a picture has not the side that all have.
    """
    side = tower.layout.side
    wrong = [grid for grid in pictures.grids if side is not None and grid != (side, side)]
    if wrong:
        raise ModelError(f"a picture has {wrong[0][0]} x {wrong[0][1]} patches; the tower takes {side} x {side}")
    at_BT, positions_BT3 = place_tokens(tower, inputs, pictures.grids)
    return inputs._replace(
        pictures=pictures,
        inserted_at=at_BT,
        axial_positions=positions_BT3,
        mutual_RM=picture_places(at_BT, len(pictures.grids), pictures.grids[0], tower),
    )


def picture_places(at_BT: Tensor, count: int, grid: Grid, tower: TowerConfig) -> Tensor | None:
    """Places [R, M] of the tokens of pictures in rows that stand end to end; None: they do not see one another.

    Args:
      at_BT: of `place_tokens`.
      count: R.
      grid: of every picture.
      tower: of the model.
    """
    if not tower.layout.mutual:
        return None
    tokens = picture_tokens(grid, tower)
    at_N = at_BT.flatten()
    numbers_N = torch.arange(len(at_N), device=at_N.device)
    # Text goes to a place behind the last one.
    places = numbers_N.new_zeros(count * tokens + 1).scatter(0, at_N.where(at_N >= 0, count * tokens), numbers_N)
    return places[:-1].view(count, tokens)


def whole_pictures(tower: TowerConfig, tokens: Sequence[int]) -> list[tuple[int, int]]:
    """Begin and end of the tokens of each picture of a prompt; all are of one size."""
    count = picture_tokens((tower.layout.square, tower.layout.square), tower)
    places = [place for place, token in enumerate(tokens) if token == tower.placeholder]
    return [(first, first + count) for first in places[::count]]


def grids_of(sizes_P2: Tensor) -> tuple[Grid, ...]:
    """Grid of each picture as numbers of the host."""
    return tuple((int(height), int(width)) for height, width in sizes_P2.tolist())


def collapsed(tower: TowerConfig, tokens: Sequence[int], grids: Sequence[Grid]) -> list[int]:
    """Token ids with one placeholder for each picture."""
    ids: list[int] = []
    sizes = iter([picture_tokens(grid, tower) for grid in grids])
    skipped = 0
    for token in tokens:
        if skipped:
            skipped -= 1
            continue
        ids.append(token)
        if token == tower.placeholder:
            skipped = next(sizes) - 1
    return ids


def split_pictures(tower: TowerConfig, values: Mapping[str, Tensor]) -> list[Mapping[str, Tensor]]:
    """Patches and grid of each picture by itself."""
    sizes_P2 = values[GRIDS]
    patches = values[PATCHES].split([picture_patches(grid, tower) for grid in grids_of(sizes_P2)])
    return [{PATCHES: x, GRIDS: size} for x, size in zip(patches, sizes_P2.unsqueeze(1), strict=True)]


def single_pictures(tower: TowerConfig, values: Mapping[str, Tensor]) -> list[OwnedLines]:
    """Each picture by itself, with its digest."""
    return [owned_lines(lines) for lines in split_pictures(tower, values)]


def token_contents(tower: TowerConfig, tokens: Sequence[int], owned: OwnedLines) -> list[int]:
    """Token ids, with a negative number at each placeholder, which the pixels of its picture make."""
    numbers: list[int] = []
    for picture in single_pictures(tower, owned.values):
        (grid,) = grids_of(picture.values[GRIDS])
        numbers += [-1 - picture.digest] * picture_tokens(grid, tower)
    left = iter(numbers)
    return [next(left) if token == tower.placeholder else token for token in tokens]


def check_placeholders(tower: TowerConfig, tokens: Sequence[int], owned: OwnedLines | None) -> None:
    """Raise ModelError where the placeholders of a row are not those of its pictures; nothing waits for a device."""
    grids = () if owned is None else grids_of(owned.values[GRIDS])
    count = sum(token == tower.placeholder for token in tokens)
    stood_for = sum(picture_tokens(grid, tower) for grid in grids)
    if count != stood_for:
        raise ModelError(f"a row with {count} placeholders of pictures has pictures of {stood_for} tokens")


def place_tokens(tower: TowerConfig, inputs: Inputs, grids: tuple[Grid, ...]) -> tuple[Tensor, Tensor]:
    """Match tokens to the tokens of the pictures, and give each its three positions.

    Text has the same position three times. The tokens of a picture share the first one; the second counts their rows
    and the third their columns. What follows a picture begins behind the largest of its positions.

    Args:
      tower: of the model.
      inputs: tokens [B, T], and their positions from 0 in each sequence.
      grids: of the pictures of all rows, in order.

    Returns: [B, T] int64, the token of the pictures, -1 at text; [B, T, 3] int64.

    Raises:
      ModelError: there are other placeholders than these pictures have. On a GPU the host does not look.
    """
    tokens_BT = inputs.tokens
    device = tokens_BT.device
    number_M, places_M2, shrink_M = (torch.from_numpy(x).to(device) for x in token_places(grids, tower))
    is_picture_N = (tokens_BT == tower.placeholder).flatten()
    if device.type == "cpu" and (count := int(is_picture_N.sum())) != len(number_M):
        raise ModelError(f"rows with {count} placeholders of pictures have pictures of {len(number_M)} tokens")
    at_N = torch.where(is_picture_N, is_picture_N.cumsum(0) - 1, -1)
    of_picture_N = at_N.clamp(0, len(number_M) - 1)
    positions_BT = inputs.positions
    if positions_BT is None:
        positions_BT = torch.arange(tokens_BT.shape[1], device=device)
    positions_N = positions_BT.expand_as(tokens_BT).flatten()
    begins_N = (torch.arange(len(at_N), device=device) - positions_N).clamp(0, len(at_N) - 1)
    shrink_N = torch.where(is_picture_N, shrink_M[of_picture_N], 0)
    before_N = shrink_N.cumsum(0) - shrink_N
    text_N = positions_N - (before_N - before_N[begins_N])
    first_N = text_N - number_M[of_picture_N]
    inside_N2 = first_N.unsqueeze(-1) + places_M2[of_picture_N]
    picture_N3 = torch.cat([first_N.unsqueeze(-1), inside_N2], 1)
    positions_N3 = torch.where(is_picture_N.unsqueeze(-1), picture_N3, text_N.unsqueeze(-1))
    return at_N.view(tokens_BT.shape), positions_N3.view(*tokens_BT.shape, 3)
