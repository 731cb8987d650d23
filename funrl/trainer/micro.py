"""Assignment of a batch's rows to ranks and forward passes: packed end to end, with few sizes."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from funrl import trees
from funrl.batch import Batch, as_dict, token_fields
from funrl.compiled_kernels.varlen_attention import segment_offsets
from funrl.data.micro_batch import Slots, pack_tokens, slots
from funrl.data.packing import Packing, RowCost, pack, packed_sizes
from funrl.mesh.mesh import SINGLE, Mesh
from funrl.models import Placed
from funrl.seeds import derived_seed
from funrl.trainer.settings import TOKEN_MULTIPLE as MULTIPLE
from funrl.trainer.step_rows import Rows

BUDGET_PARTS = 16  # of the token budget: sizes of micro-batches that learn are multiples of it
SCORE_PARTS = 64  # of the larger budget of those that do not: a part is as large
PARTS_OF_A_ROW = 2  # sequences of a row, at most: a preference has two


class MicroBatch(NamedTuple):
    """Rows of one forward pass.

    Attributes:
      rows: places of the rows among this rank's own, in the order of their tokens; none where it only keeps pace.
      at: where each token is from.
      batch: the per-token fields of the rows, [1, N, ...]; the mask is false at padding.
    """

    rows: Tensor
    at: Slots
    batch: Batch


class Epoch(NamedTuple):
    """One pass over the rows of a step.

    Attributes:
      parts: numbers of the rows of each mini-batch.
      packings: of each mini-batch, by places in its numbers.
      to: [B] the rank that trains each row.
    """

    parts: list[np.ndarray]
    packings: list[Packing]
    to: np.ndarray


def mini_batches(rows: int, count: int, seed: int, step: int, epoch: int) -> list[np.ndarray]:
    """Numbers of all rows in a random order, in `count` parts of about the same size; the same on every mesh."""
    generator = torch.Generator().manual_seed(derived_seed(seed, step, epoch))
    order = torch.randperm(rows, generator=generator)
    return [part.numpy() for part in order.tensor_split(count) if len(part)]  # a filter may leave fewer rows than parts


def plan_epoch(
    lengths: np.ndarray,
    ranks: int,
    count: int,
    seed: int,
    step: int,
    epoch: int,
    token_budget: int,
    cost: RowCost,
    split: int = 1,
) -> Epoch:
    """Mini-batches of a pass, and the rank and micro-batch of every row; every rank computes the same.

    The last plan is remembered: rows settle by the plan of the first pass, which the update then asks for again.

    Args:
      lengths: [B] tokens of each row.
      ranks: how many share the rows.
      count, seed, step, epoch: as in `mini_batches`.
      token_budget: tokens of a rank in a forward pass; a longer row raises it.
      cost: how the work of a row grows with its length.
      split: ranks that share the tokens of a forward pass.
    """
    bits = np.asarray(lengths, dtype=np.int64).tobytes()
    return _plan_epoch(bits, ranks, count, seed, step, epoch, token_budget, cost, split)


@functools.lru_cache(maxsize=1)
def _plan_epoch(
    bits: bytes, ranks: int, count: int, seed: int, step: int, epoch: int, token_budget: int, cost: RowCost, split: int
) -> Epoch:
    lengths = np.frombuffer(bits, dtype=np.int64)
    parts = mini_batches(len(lengths), count, seed, step, epoch)
    sizes, most = sizes_of(lengths, token_budget, split)
    packings, to = [], np.zeros(len(lengths), dtype=np.int64)
    for part in parts:
        packings.append(pack(lengths[part], ranks, sizes, most, cost=cost))
        to[part] = packings[-1].rank
    return Epoch(parts, packings, to)


def ranks_of_groups(lengths: np.ndarray, group: np.ndarray, ranks: int, token_budget: int, cost: RowCost) -> np.ndarray:
    """[B] a rank for each row such that those of one group are together, and the ranks have about equal work."""
    totals = np.bincount(np.unique(group, return_inverse=True)[1], lengths)
    sizes, _ = sizes_of(totals, token_budget)
    return pack(lengths, ranks, sizes, len(lengths), example=group, cost=cost).rank


def pack_in_place(
    lengths: np.ndarray, owner: np.ndarray, ranks: int, token_budget: int, cost: RowCost, split: int = 1
) -> Packing:
    """Micro-batches of rows that stay on their ranks, for passes that learn nothing."""
    sizes, most = sizes_of(lengths, token_budget, split, SCORE_PARTS)
    return pack(lengths, ranks, sizes, most, cost=cost, owner=owner)


def own_micro_batches(
    rows: Rows,
    token_budget: int,
    cost: RowCost = RowCost(),  # noqa: B008  (immutable)
    mask: str = "mask",
) -> Iterator[MicroBatch]:
    """The micro-batches of all rows on the ranks that have them, for passes that learn nothing; each made when it is
    asked for.

    Every data rank gets the same number of them, because a forward pass may hold collectives over data. One without
    rows is padding, and has no influence on any loss.

    Args:
      token_budget: tokens of a rank in a forward pass; a longer row raises it.
      cost: how the work of a row grows with its length.
      mask: field that becomes the mask.
    """
    ranks, split = rows.mesh.size(rows.mesh.row_axes), token_ranks(rows.mesh)
    packing = pack_in_place(rows.lengths, rows.owner, ranks, token_budget, cost, split)
    yield from packed(rows, packing, None, sizes_of(rows.lengths, token_budget, split, SCORE_PARTS)[1], mask)


def packed(
    rows: Rows, packing: Packing, part: np.ndarray | None, max_rows: int, mask: str = "mask"
) -> Iterator[MicroBatch]:
    """This rank's micro-batches of a packing.

    Args:
      part: numbers of the rows that the packing is of; None: all.
    """
    lengths, own = rows.lengths, rows.own
    host_mask = getattr(rows.batch, mask).cpu()  # once for all: no micro-batch waits for the device
    # Ranks of `expert` exchange the tokens of a micro-batch: it has one size on all of them.
    alike = packing.size.max(1).tolist() if rows.mesh.size("expert") > 1 else packing.size[:, rows.index].tolist()
    for (places, _), size in zip(packing.own(rows.index), alike, strict=True):
        numbers = places if part is None else part[places]
        places = np.searchsorted(own, numbers)
        yield micro_batch(rows.batch, lengths[own], places, size, max_rows, host_mask, rows.mesh)


def token_ranks(mesh: Mesh) -> int:
    """Ranks of a mesh that share the tokens of a forward pass."""
    return mesh.size(mesh.token_axes) // mesh.size(mesh.row_axes)


def sizes_of(
    lengths: np.ndarray, token_budget: int, split: int = 1, parts: int = BUDGET_PARTS
) -> tuple[tuple[int, ...], int]:
    """Sizes of micro-batches, by parts of the token budget, and how many rows one has at most.

    Args:
      lengths: tokens of each row.
      token_budget: tokens of one rank.
      split: ranks that share a micro-batch's tokens, equally.
    """
    sizes = packed_sizes(token_budget * split, int(lengths.max(initial=1)), MULTIPLE * split, parts)
    return sizes, sizes[-1] // MULTIPLE + MULTIPLE


@functools.lru_cache(maxsize=64)
def row_cost(placed: Placed) -> RowCost:
    """The growth of a row's work with its length in a model."""
    config = placed.model.config
    windows = set(config.windows or (None,))
    return RowCost(
        config.attention_cost(trees.count(placed.model.shapes)), windows.pop() if len(windows) == 1 else None
    )


def micro_batch(
    batch: Batch,
    lengths: np.ndarray,
    rows: np.ndarray,
    size: int,
    max_rows: int,
    host_mask: Tensor,
    mesh: Mesh = SINGLE,
) -> MicroBatch:
    """Some rows end to end in [1, `size`], the shortest first.

    Args:
      batch: its per-token fields are of this rank's rows.
      lengths: [b] tokens of each of these.
      rows: their places, at most `max_rows`, which fixes the shape of `offsets`.
      host_mask: [b, T] of these rows, on the host; it becomes the mask.
      mesh: whose ranks share its tokens, if it has such.
    """
    device, fields = batch.tokens.device, as_dict(batch)
    fields = {n: x for n, x in fields.items() if n in PER_TOKEN - {"mask"}}
    if not len(batch.tokens):  # a rank without rows computes padding
        fields = {n: x.new_zeros(1, 1, *x.shape[2:]) for n, x in fields.items()}
        host_mask = host_mask.new_zeros(1, 1)
    rows = rows[np.argsort(lengths[rows], kind="stable")]  # neighbours of one length share a call of CPU attention
    at = slots(lengths, rows, batch.tokens.shape[1], size, max_rows)
    mask_1N = pack_tokens(host_mask, at, False)
    own = size // token_ranks(mesh)
    trained = mask_1N[0, 1 + int(mesh.index("sequence")) * own :][:own].nonzero().squeeze(-1)
    at = at.to(device)
    laid = {n: pack_tokens(x, at, False if x.dtype == torch.bool else 0) for n, x in fields.items()}
    inner = laid.get("segments")
    if inner is None:
        segments, offsets = at.segments, at.offsets
    else:  # the row's own sequences, numbered on from row to row
        segments = torch.where(at.used, inner + PARTS_OF_A_ROW * (at.segments - 1), 0)
        offsets = segment_offsets(segments, PARTS_OF_A_ROW * max_rows)
    laid |= {"positions": laid.get("positions", at.positions), "segments": segments, "offsets": offsets}
    laid |= {name: x.to(device, non_blocking=True) for name, x in (("mask", mask_1N), ("trained", trained))}
    return MicroBatch(torch.from_numpy(rows).to(device, non_blocking=True), at, Batch(**laid))


PER_TOKEN = frozenset(token_fields())
