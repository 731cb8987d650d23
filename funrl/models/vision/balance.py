"""A tower whose work the ranks of a mesh share: each computes some of the pictures that all have in a micro-batch.

The host assigns pictures to ranks from the sizes of all of them, the same on every rank. Where ranks have other rows,
patches go to the ranks that compute them, and hidden states come back. Ranks that have the same rows have their patches
too, so they exchange hidden states only. Gradients of hidden states take the same ways back.
"""

from __future__ import annotations

import math

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from funrl import trees
from funrl.kinds import line_places
from funrl.mesh.collectives import all_gather, gather_replicated, ragged_all_to_all
from funrl.mesh.mesh import Mesh
from funrl.models.model import Adapt
from funrl.models.vision.config import TowerConfig
from funrl.models.vision.grids import Grid, picture_patches, picture_tokens, picture_work, smallest_grid
from funrl.models.vision.inputs import AssignedPictures, Pictures, grids_of, with_blanks
from funrl.models.vision.tower import apply_tower
from funrl.processes.device_memory import copy_to_device

REPLICA = ("sequence", "tensor")  # axes whose ranks have the same rows
STEP_BITS = 3  # a rank's patches are a multiple of an 8th of the power of two below their number


def assign_pictures(work_Q: np.ndarray, owner_Q: np.ndarray, shape: tuple[int, int]) -> np.ndarray:
    """Assign pictures to ranks such that no rank has more work than the mean and one picture.

    The largest picture is first. Each stays with the ranks that have it up to the mean, and goes to the rank with the
    least work beyond it. Where the busiest rank would have no less work for it, all pictures stay.

    Args:
      work_Q: int64, of each picture.
      owner_Q: index over the row axes of the ranks that have it, ascending.
      shape: number of ranks over the row axes, and over the others.

    Returns: int64 [Q, 2], the rank of each picture by these two indices.

    Example: assign_pictures([4, 4, 2], [0, 0, 1], (2, 1)) is [[0, 0], [1, 0], [1, 0]].
    References: Graham, 1969, https://doi.org/10.1137/0117039
    """
    work_Q = np.asarray(work_Q, dtype=np.int64)
    total = int(work_Q.sum())
    staying, moving = (_largest_first(work_Q, owner_Q, shape, most) for most in (total, -(-total // math.prod(shape))))
    return staying[0] if staying[1] <= moving[1] else moving[0]


def _largest_first(
    work_Q: np.ndarray, owner_Q: np.ndarray, shape: tuple[int, int], most: int
) -> tuple[np.ndarray, int]:
    """Ranks of pictures as in `assign_pictures`, which stay up to the work `most`, and the work of the busiest one."""
    loads = np.zeros(shape, dtype=np.int64)
    to_Q2 = np.zeros((len(work_Q), 2), dtype=np.int64)
    ordinal_Q = np.arange(len(owner_Q)) - np.searchsorted(owner_Q, owner_Q)  # so that equal ones fill all homes first
    for number in np.lexsort((ordinal_Q, -work_Q)).tolist():
        row = int(owner_Q[number])
        replica = int(loads[row].argmin())
        least = int(loads[row, replica])
        if least + work_Q[number] > most and least > loads.min():
            row, replica = divmod(int(loads.argmin()), shape[1])
        loads[row, replica] += work_Q[number]
        to_Q2[number] = row, replica
    return to_Q2, int(loads.max())


def assigned_pictures(tower: TowerConfig, sizes_Q2: np.ndarray, owner_Q: np.ndarray, mesh: Mesh) -> AssignedPictures:
    """`Balance.assign` of a model with a tower."""
    work = [picture_work((height, width), tower) for height, width in sizes_Q2.tolist()]
    shape = mesh.size(mesh.row_axes), mesh.size(REPLICA)
    to_Q2 = assign_pictures(np.array(work, dtype=np.int64), owner_Q, shape)
    row = int(mesh.index(mesh.row_axes))
    own_Q = owner_Q == row
    here_Q = (to_Q2 == (row, int(mesh.index(REPLICA)))).all(1)
    values = (to_Q2[own_Q], owner_Q[here_Q], sizes_Q2[here_Q])
    return AssignedPictures(*(torch.from_numpy(np.asarray(x, dtype=np.int64)) for x in values))


def padded_units(units: int) -> int:
    """A number of smallest pictures, rounded up to one of few numbers: by at most an 8th, and to 1 at least."""
    step = 1 << max(units.bit_length() - 1 - STEP_BITS, 0)
    return max(1, -(-units // step) * step)


def apply_balanced_tower(
    tower: TowerConfig, params: trees.Tree, pictures: Pictures, mesh: Mesh, adapt: Adapt | None = None
) -> Tensor:
    """`apply_tower` of this rank's pictures, each computed by the rank that it is assigned to. Collective.

    Args:
      tower, params, adapt: as in `apply_tower`; the gradient of weights is that of the pictures that a rank computes.
      pictures: with assigned ranks; there may be none.
      mesh: of the ranks.

    Returns: [1 + L, M, D]; where there are no pictures, one hidden state that is no token's.
    """
    assigned = pictures.assigned
    assert assigned is not None
    to_Q2 = assigned.to_Q2.numpy()
    source_S = assigned.source_S.numpy()
    computed = grids_of(assigned.grids_S2)
    ranks = mesh.size(mesh.row_axes)
    # Each of the ranks that have a picture sends it along the row axes alone: to the rank of its own index over others.
    sent = np.flatnonzero(to_Q2[:, 1] == int(mesh.index(REPLICA)))
    sent = sent[np.argsort(to_Q2[sent, 0], kind="stable")]
    patches_Q, tokens_Q = _counts(pictures.grids, tower)
    patches_S, tokens_S = _counts(computed, tower)
    lines = line_places((np.cumsum(patches_Q) - patches_Q)[sent], patches_Q[sent])
    patches_PCHW = ragged_all_to_all(
        pictures.patches_PCHW[copy_to_device(lines, pictures.patches_PCHW.device)],
        _totals(to_Q2[sent, 0], patches_Q[sent], ranks),
        _totals(source_S, patches_S, ranks),
        mesh,
        mesh.row_axes,
    )
    units = int(patches_S.sum()) // picture_patches(smallest_grid(tower), tower)
    share = with_blanks(tower, Pictures(patches_PCHW, computed), padded_units(units) - units)
    hidden_LMD = apply_tower(tower, params, share, adapt)
    hidden_MLD = ragged_all_to_all(
        hidden_LMD[:, : int(tokens_S.sum())].transpose(0, 1),
        _totals(source_S, tokens_S, ranks),
        _totals(to_Q2[sent, 0], tokens_Q[sent], ranks),
        mesh,
        mesh.row_axes,
    )
    return _gather_replicas(hidden_MLD, to_Q2, tokens_Q, mesh).transpose(0, 1)


def _counts(grids: tuple[Grid, ...], tower: TowerConfig) -> tuple[np.ndarray, np.ndarray]:
    """Patches and tokens of each picture."""
    pairs = [(picture_patches(grid, tower), picture_tokens(grid, tower)) for grid in grids]
    patches, tokens = np.array(pairs, dtype=np.int64).reshape(-1, 2).T
    return patches, tokens


def _totals(ranks_Q: np.ndarray, counts_Q: np.ndarray, ranks: int) -> list[int]:
    totals = np.zeros(ranks, dtype=np.int64)
    np.add.at(totals, ranks_Q, counts_Q)
    return totals.tolist()


def _gather_replicas(hidden_MLD: Tensor, to_Q2: np.ndarray, tokens_Q: np.ndarray, mesh: Mesh) -> Tensor:
    """Hidden states of all tokens of this rank's pictures; ranks of its own index computed this rank's part.

    Args:
      hidden_MLD: in the order of the ranks that computed them, and then of the pictures.
      to_Q2: as of `AssignedPictures`.
      tokens_Q: of each picture.
      mesh: of the ranks.

    Returns: [M, 1 + L, D] in the order of the pictures; one hidden state where there are none.
    """
    shares = _totals(to_Q2[:, 1], tokens_Q, mesh.size(REPLICA))
    most = max(1, *shares)
    hidden_MLD = F.pad(hidden_MLD, (0, 0, 0, 0, 0, most - len(hidden_MLD)))
    # Tensor ranks have the same gradient of hidden states; those of `sequence` have that of their own tokens.
    hidden_MLD = all_gather(gather_replicated(hidden_MLD, mesh, "tensor"), mesh, "sequence")
    order = np.lexsort((to_Q2[:, 0], to_Q2[:, 1]))
    ends = np.cumsum(tokens_Q[order])
    before = np.cumsum(shares) - shares  # tokens of the ranks before
    begins_Q = np.zeros_like(tokens_Q)
    begins_Q[order] = ends - tokens_Q[order] + (most * np.arange(len(shares)) - before)[to_Q2[order, 1]]
    places = line_places(begins_Q, tokens_Q) if len(tokens_Q) else torch.zeros(1, dtype=torch.int64)
    return hidden_MLD.index_select(0, copy_to_device(places, hidden_MLD.device))
