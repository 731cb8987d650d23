"""Which rows of a batch a rank computes, and in which forward passes: packed end to end, with few sizes."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from funrl import trees
from funrl.batch import Batch, as_dict, select, token_fields
from funrl.compiled_kernels.varlen_attention import segment_offsets
from funrl.data.micro_batch import Slots, pack_tokens, slots
from funrl.data.packing import RowCost, pack, packed_sizes
from funrl.mesh.mesh import Mesh
from funrl.models import Placed
from funrl.seeds import derived_seed

MULTIPLE = 8  # sizes of micro-batches are multiples of it
PARTS_OF_A_ROW = 2  # sequences of a row, at most: a preference has two


class MicroBatch(NamedTuple):
    """Rows of one forward pass.

    Attributes:
      rows: numbers of the rows, in the order of their tokens; none where this rank only keeps pace with others.
      at: where each token is from.
      batch: the per-token fields of the rows, [1, N, ...]; the mask is false at padding.
    """

    rows: Tensor
    at: Slots
    batch: Batch


def mini_batches(batch: Batch, count: int, seed: int, step: int, epoch: int) -> list[Batch]:
    """All rows in a random order, in `count` parts of about the same size; the same on every mesh."""
    generator = torch.Generator().manual_seed(derived_seed(seed, step, epoch))
    order = torch.randperm(len(batch.tokens), generator=generator).to(batch.tokens.device)
    parts = order.tensor_split(count)
    return [select(batch, rows) for rows in parts if len(rows)]  # a filter may leave fewer rows than parts


def own_micro_batches(
    batch: Batch,
    mesh: Mesh,
    token_budget: int,
    cost: RowCost = RowCost(),  # noqa: B008  (immutable)
) -> Iterator[MicroBatch]:
    """The micro-batches of this data rank, each made when it is asked for; micro-batch i takes all ranks about equally
    long.

    Every data rank gets the same number of them, because a forward pass may hold collectives over data. One without
    rows is padding, and has no influence on any loss.

    Args:
      batch: all rows; the same on every rank.
      token_budget: tokens of a forward pass; a longer row raises it.
      cost: how the work of a row grows with its length.
    """
    lengths = batch.length.cpu().numpy()
    sizes = packed_sizes(token_budget, int(lengths.max()), MULTIPLE)
    most = sizes[-1] // MULTIPLE + MULTIPLE
    packing = pack(lengths, mesh.size(mesh.row_axes), sizes, max(most, 1), cost=cost)
    for rows, size in packing.own(int(mesh.index(mesh.row_axes))):
        yield micro_batch(batch, lengths, rows, size, most)


@functools.lru_cache(maxsize=64)
def row_cost(placed: Placed) -> RowCost:
    """How the work of a row grows with its length in a model."""
    config = placed.model.config
    windows = set(config.windows or (None,))
    return RowCost(
        config.attention_cost(trees.count(placed.model.shapes)), windows.pop() if len(windows) == 1 else None
    )


def micro_batch(batch: Batch, lengths: np.ndarray, rows: np.ndarray, size: int, max_rows: int) -> MicroBatch:
    """Some rows end to end in [1, `size`], in the given order.

    Args:
      lengths: [B] tokens of each row.
      rows: numbers of the rows, at most `max_rows`, which fixes the shape of `offsets`.
    """
    device, fields = batch.tokens.device, as_dict(batch)
    at = slots(lengths, rows, batch.tokens.shape[1], size, max_rows).to(device)
    packed = {n: pack_tokens(x, at, False if x.dtype == torch.bool else 0) for n, x in fields.items() if n in PER_TOKEN}
    inner = packed.get("segments")
    if inner is None:
        segments, offsets = at.segments, at.offsets
    else:  # the row's own sequences, numbered on from row to row
        segments = torch.where(at.used, inner + PARTS_OF_A_ROW * (at.segments - 1), 0)
        offsets = segment_offsets(segments, PARTS_OF_A_ROW * max_rows)
    positions = packed.get("positions", at.positions)
    packed |= {"positions": positions, "segments": segments, "offsets": offsets}
    return MicroBatch(torch.from_numpy(rows).to(device), at, Batch(**packed))


PER_TOKEN = frozenset(token_fields())
