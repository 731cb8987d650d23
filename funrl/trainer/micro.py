"""Assignment of a batch's rows to ranks and forward passes."""

from __future__ import annotations

import torch
from torch import Tensor

from funrl.batch import FIELDS, Batch, map_fields, select
from funrl.data.packing import balance, micro_batches
from funrl.mesh.mesh import Mesh
from funrl.seeds import derived_seed

WIDTH = 8  # rows are cut to a multiple of this, so that few widths occur


def mini_batches(batch: Batch, count: int, seed: int, step: int, epoch: int) -> list[Batch]:
    """All rows in a random order, in `count` parts of about the same size; the same on every mesh."""
    generator = torch.Generator().manual_seed(derived_seed(seed, step, epoch))
    order = torch.randperm(len(batch.tokens), generator=generator).to(batch.tokens.device)
    parts = order.tensor_split(count)
    return [select(batch, rows) for rows in parts if len(rows)]  # a filter may leave fewer rows than parts


def own_micro_batches(batch: Batch, mesh: Mesh, token_budget: int) -> list[tuple[Tensor, Batch]]:
    """Row numbers and rows of each micro-batch of this data rank: equal work over ranks, similar lengths together.

    Every data rank gets the same number of them, because a forward pass may hold collectives over data. A rank that
    has fewer is given the shortest row with an empty mask: no row number, and no influence on any loss.
    """
    lengths = batch.length.tolist()
    shares = balance(lengths, mesh.size(mesh.row_axes))
    plans = [micro_batches([lengths[i] for i in share], token_budget, WIDTH) for share in shares]
    mine, plan = shares[mesh.index(mesh.row_axes)], plans[mesh.index(mesh.row_axes)]
    device = batch.tokens.device
    pieces = []
    for piece in plan:
        rows = torch.tensor([mine[i] for i in piece], device=device)
        pieces.append((rows, _trim(select(batch, rows))))
    shortest = torch.tensor([lengths.index(min(lengths))], device=device)
    idle = _trim(select(batch, shortest))
    idle = idle._replace(mask=torch.zeros_like(idle.mask))
    return pieces + [(shortest[:0], idle)] * (max(map(len, plans)) - len(pieces))


def _trim(rows: Batch) -> Batch:
    """The rows cut to the longest of them, in every field that is per token."""
    width = min(-(-int(rows.length.max()) // WIDTH) * WIDTH, rows.tokens.shape[1])
    return map_fields(lambda name, x: x if FIELDS[name].kind == "row" else x[:, :width], rows)
