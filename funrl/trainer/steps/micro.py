"""Assignment of a batch's rows to ranks and forward passes: packed end to end, with few sizes."""

from __future__ import annotations

import functools
import math
from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from funrl.algos.masks import first_of_equal
from funrl.batch import Batch, as_dict, schema_of
from funrl.compiled_kernels.varlen_attention import SegmentBounds, bound_segments, segment_offsets
from funrl.data.packing import (
    Packing,
    RowCost,
    Slots,
    pack,
    pack_owned,
    pack_tokens,
    packed_sizes,
    shortest_first,
    slots,
)
from funrl.fields import NOT_IN_PASSES
from funrl.kinds import line_places
from funrl.mesh.mesh import SINGLE, Mesh
from funrl.models import Placed
from funrl.processes.device_memory import copy_to_device
from funrl.seeds import derived_seed
from funrl.trainer.settings.settings import TOKEN_MULTIPLE as MULTIPLE
from funrl.trainer.steps.step_rows import SINGLE_ROWS, Epoch, Rows, RowUnits, UpdatePlan, counted_by

BUDGET_PARTS = 16  # of the token budget: sizes of micro-batches that learn are multiples of it
SCORE_PARTS = 64  # of the larger budget of other roles: a part is as large
PARTS_OF_A_ROW = 4  # numbers of sequences that a row takes up: a triple has three, and pairs begin with odd ones


class MicroBatch(NamedTuple):
    """Rows of one forward pass.

    Attributes:
      rows: places of the rows among this rank's own, in the order of their tokens; none where it only keeps pace.
      at: where each token is from.
      batch: the per-token fields of the rows, [1, N, ...]; the mask is false at padding. Fields such as ragged ones
        have the rows in the order of their segments.
    """

    rows: Tensor
    at: Slots
    batch: Batch


def mini_batches(examples: int, count: int, seed: int, step: int, epoch: int) -> list[np.ndarray]:
    """Shuffle example numbers and split them into `count` parts of about equal size; the same on every mesh."""
    generator = torch.Generator().manual_seed(derived_seed(seed, step, epoch))
    order = torch.randperm(examples, generator=generator)
    return [part.numpy() for part in order.tensor_split(count) if len(part)]  # a filter may leave fewer than parts


def rows_of_examples(parts: Sequence[np.ndarray], example: np.ndarray) -> list[np.ndarray]:
    """The rows of each part's examples, in the order of the examples.

    Args:
      parts: numbers of examples, dense from 0 in the order of `example`'s values.
      example: [B] number of each row's example.
    """
    index = np.unique(example, return_inverse=True)[1]
    order = np.argsort(index, kind="stable")
    counts = np.bincount(index)
    begins = np.cumsum(counts) - counts
    return [order[line_places(begins[part], counts[part]).numpy()] for part in parts]


def plan_epoch(
    lengths: np.ndarray, mesh: Mesh, plan: UpdatePlan, number: int = 0, *, units: RowUnits = SINGLE_ROWS
) -> Epoch:
    """Divide one pass into mini-batches, and assign a rank and a micro-batch to every row; the same on every rank.

    Args:
      lengths: [B] tokens of each row.
      mesh: whose ranks share the rows.
      plan: division of the step's rows, with a cost.
      number: of the pass, from 0.
      units: what the rows belong to.
    """
    if plan.cost is None:
        raise ValueError("the plan says nothing of the cost of rows")
    example, together = units
    ranks = mesh.size(mesh.row_axes) * mesh.lanes
    examples = len(lengths) if example is None else len(np.unique(example))
    parts = mini_batches(examples, plan.minibatches, plan.seed, plan.step, number)
    if example is not None:
        parts = rows_of_examples(parts, example)
    sizes, most_rows = sizes_of(lengths, plan.token_budget, token_ranks(mesh), together=together)
    groups = [None if together is None else numbered(together[part]) for part in parts]
    packings = [
        pack(lengths[part], ranks, sizes, most_rows, group, cost=plan.cost)
        for part, group in zip(parts, groups, strict=True)
    ]
    to = np.zeros(len(lengths), dtype=np.int64)
    for part, packing in zip(parts, packings, strict=True):
        to[part] = packing.rank // mesh.lanes
    return Epoch(number, parts, packings, to, plan)


def numbered(x: np.ndarray) -> np.ndarray:
    """Number equal values in the order in which they first occur: rows that are alone keep their places.

    Example: numbered([7, 3, 7, 5]) is [0, 1, 0, 2].
    """
    _, first, index = np.unique(x, return_index=True, return_inverse=True)
    return np.argsort(np.argsort(first))[index]


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
    return pack_owned(lengths, owner, ranks, sizes, most, cost)


def own_micro_batches(
    rows: Rows,
    token_budget: int,
    cost: RowCost = RowCost(),  # noqa: B008  (immutable)
    mask: str = "mask",
    row_fields: Collection[str] = (),
) -> Iterator[MicroBatch]:
    """Yield the micro-batches of all rows on the ranks that have them, for passes that learn nothing.

    Every data rank gets the same number of them, because a forward pass may hold collectives over data. One without
    rows is padding, and has no influence on any loss.

    Args:
      token_budget: tokens of a rank in a forward pass; a longer row raises it.
      cost: how the work of a row grows with its length.
      mask: field that becomes the mask.
      row_fields: fields per row that are wanted too, as numbers per token.
    """
    ranks = rows.mesh.size(rows.mesh.row_axes)
    split = token_ranks(rows.mesh)
    sizes, most = sizes_of(rows.lengths, token_budget, split, SCORE_PARTS)
    if rows.mesh.lanes > 1:  # all rows are this process's own
        packing = pack(rows.lengths, rows.mesh.lanes, sizes, most, cost=cost)
    else:
        packing = pack_in_place(rows.lengths, rows.owner, ranks, token_budget, cost, split)
    yield from packed(rows, packing, None, most, mask, row_fields)


def packed(
    rows: Rows,
    packing: Packing,
    part: np.ndarray | None,
    max_rows: int,
    mask: str = "mask",
    row_fields: Collection[str] = (),
) -> Iterator[MicroBatch]:
    """This rank's micro-batches of a packing. Those of one number, on several devices, follow one another.

    Args:
      part: numbers of the rows that the packing is of; None: all.
      mask, row_fields: as in `own_micro_batches`.
    """
    lengths = rows.lengths
    own = rows.own
    rows = counted_by(rows, mask) if "episode_tokens" in row_fields else rows
    left_out = {name: None for name in NOT_IN_PASSES if name in schema_of(rows.batch)}
    host_mask = getattr(rows.batch, mask).cpu()  # once for all: no micro-batch waits for it
    batch = rows.batch._replace(mask=host_mask, **left_out)
    # Ranks of `expert` exchange the tokens of a micro-batch, and devices run one program: it has one size on all.
    of_one_size = rows.mesh.size("expert") > 1 or rows.mesh.lanes > 1
    sizes = packing.size.max(1) if of_one_size else packing.size[:, rows.index]
    for places, size in zip(own_places(packing, rows), sizes.repeat(rows.mesh.lanes).tolist(), strict=True):
        numbers = places if part is None else part[places]
        places = np.searchsorted(own, numbers)
        micro = micro_batch(batch, lengths[own], places, size, max_rows, rows.mesh)
        yield micro._replace(batch=micro.batch._replace(**_spread_rows(rows, micro, row_fields)))


def own_places(packing: Packing, rows: Rows) -> list[np.ndarray]:
    """Rows of each micro-batch of this rank, by their places in the packing, in the order of `packed`."""
    lanes = rows.mesh.lanes
    each = [packing.own(rows.index * lanes + lane) for lane in range(lanes)]
    return [places for micro in zip(*each, strict=True) for places, _ in micro]


def _spread_rows(rows: Rows, micro: MicroBatch, names: Collection[str]) -> dict[str, Tensor]:
    """Fields per row on the tokens of a micro-batch [1, N, ...]: each token has its row's number, padding has 0."""
    spread = {}
    for name in names:
        x_B = rows.batch.get(name)
        if x_B is not None:
            own = copy_to_device(torch.from_numpy(rows.own), x_B.device)[micro.rows.to(x_B.device)]
            x_S = 1 + first_of_equal(x_B[own]) if name == "unit" else x_B[own]  # units are numbered like segments
            table = torch.cat([x_B.new_zeros(1, *x_B.shape[1:]), x_S])  # segments are numbered from 1
            spread[name] = table[micro.at.segments.to(x_B.device).long()].to(micro.batch.mask.device)
    return spread


def token_ranks(mesh: Mesh) -> int:
    """Ranks of a mesh, or devices that a process drives, that share the tokens of a forward pass."""
    sizes = mesh.driven or mesh.sizes
    return math.prod(sizes[axis] for axis in mesh.token_axes if axis not in mesh.row_axes)


def sizes_of(
    lengths: np.ndarray,
    token_budget: int,
    split: int = 1,
    parts: int = BUDGET_PARTS,
    *,
    together: np.ndarray | None = None,
) -> tuple[tuple[int, ...], int]:
    """Sizes of micro-batches, by parts of the token budget, and how many rows one has at most.

    Args:
      lengths: tokens of each row.
      token_budget: tokens of one rank.
      split: ranks that share a micro-batch's tokens, equally.
      together: as in `RowUnits`.
    """
    longest = lengths
    if together is not None:  # and no row counts as less than the tokens that a micro-batch has room for
        longest = np.bincount(np.unique(together, return_inverse=True)[1], np.maximum(lengths, MULTIPLE))
    sizes = packed_sizes(token_budget * split, int(longest.max(initial=1)), MULTIPLE * split, parts)
    return sizes, sizes[-1] // MULTIPLE + MULTIPLE


@functools.lru_cache(maxsize=64)
def row_cost(placed: Placed) -> RowCost:
    """The growth of a row's work with its length in a model."""
    cost = placed.model.abilities.cost
    return RowCost(cost.pair_share(placed.model.parameters), cost.window)


def micro_batch(
    batch: Batch, lengths: np.ndarray, rows: np.ndarray, size: int, max_rows: int, mesh: Mesh = SINGLE
) -> MicroBatch:
    """Some rows end to end in [1, `size`], the shortest first.

    Args:
      batch: its per-token fields are of this rank's rows; the device is waited for unless its mask is on the host.
      lengths: [b] tokens of each of these.
      rows: their places, in the order of their offsets, at most `max_rows`, which fixes the shape of `offsets`.
      mesh: whose ranks share its tokens, if it has such.
    """
    device = batch.tokens.device
    host_mask = batch.mask.cpu()
    schema = schema_of(batch)
    fields = {n: x for n, x in as_dict(batch).items() if schema[n].kind.per_token and n != "mask"}
    owned = {n: x for n, x in as_dict(batch).items() if not schema[n].kind.per_token and not schema[n].kind.everywhere}
    if not len(batch.tokens):  # a rank without rows computes padding
        fields = {n: x.new_zeros(1, 1, *x.shape[2:]) for n, x in fields.items()}
        host_mask = host_mask.new_zeros(1, 1)
    rows = rows[shortest_first(lengths[rows], np.arange(len(rows)))]
    places = slots(lengths, rows, batch.tokens.shape[1], size, max_rows)
    mask_1N = pack_tokens(host_mask, places, False)
    own = size if mesh.driven else size // token_ranks(mesh)
    trained = mask_1N[0, 1 + int(mesh.index("sequence")) * own :][:own].nonzero().squeeze(-1)
    places = places.to(device)
    laid = {n: pack_tokens(x, places, False if x.dtype == torch.bool else 0) for n, x in fields.items()}
    inner = laid.get("segments")
    if inner is None:
        segments = places.segments
        offsets = places.offsets
        bounds = SegmentBounds(places.longest, len(rows), int(lengths[rows].sum()))
    else:  # the row's own sequences, numbered on from row to row
        segments = torch.where(places.used, inner + PARTS_OF_A_ROW * (places.segments - 1), 0)
        offsets = segment_offsets(segments, PARTS_OF_A_ROW * max_rows)
        bounds = SegmentBounds(places.longest, PARTS_OF_A_ROW * len(rows))
    offsets = bound_segments(offsets, bounds)
    laid |= {"positions": laid.get("positions", places.positions), "segments": segments, "offsets": offsets}
    laid |= {name: copy_to_device(x, device) for name, x in (("mask", mask_1N), ("trained", trained))}
    laid |= {n: schema[n].kind.select(x, torch.from_numpy(rows)) for n, x in owned.items()}
    return MicroBatch(copy_to_device(torch.from_numpy(rows), device), places, Batch(schema, **laid))
