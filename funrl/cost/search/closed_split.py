"""The split of a job over its mesh, for the formulas of memory and of time."""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

from funrl import trees
from funrl.cost.row_plan import rows_of_step
from funrl.cost.tracing.estimate import TRACED
from funrl.cost.tracing.hardware import Hardware
from funrl.mesh.text import AXES, ROW_AXES, SHORT, TOKEN_AXES, devices
from funrl.models import Model
from funrl.trainer.jobs.job import Job
from funrl.trainer.jobs.sharding import is_sharded, splits_residual
from funrl.trainer.settings.declaration import parts


class MeshSplit(NamedTuple):
    """Split of a job over its mesh.

    Attributes:
      tensor, rows, sequence: ranks that split a layer, the rows, and the tokens of a row.
      experts: ranks over which experts are split while a layer computes.
      shards: ranks that weights are sharded over; 1: none.
      alone: those of them that have the same experts.
      reach: number of neighbouring ranks that a group of shards spans.
      generating: (tensor, rows) while generating, where each rank has all experts.
      stream: tensor ranks that share the tokens of the residual stream.
      item: bytes per number of a forward pass.
      width: tokens of a row.
      count: rows of a step.
    """

    tensor: int
    rows: int
    sequence: int
    experts: int
    shards: int
    alone: int
    reach: int
    generating: tuple[int, int]
    stream: int
    item: int
    width: int
    count: int

    @property
    def tokens(self) -> int:
        """Tokens of the rank with the most rows."""
        return math.ceil(math.ceil(self.count / self.rows) * self.width / self.sequence)


def split_of(job: Job, width: int, hardware: Hardware) -> MeshSplit:
    """The split of a job whose rows have `width` tokens."""
    settings = job.settings
    over = [SHORT[short] for short in parts(settings.sharding.fsdp_axes)] or list(TOKEN_AXES)
    outermost = next((axis for axis in AXES if axis in over and job.sizes[axis] > 1), "tensor")
    return MeshSplit(
        tensor=job.sizes["tensor"],
        rows=devices(job.sizes, ROW_AXES),
        sequence=job.sizes["sequence"],
        experts=job.sizes["expert"],
        shards=devices(job.sizes, over) if settings.sharding.fsdp else 1,
        alone=devices(job.sizes, [axis for axis in over if axis != "expert"]) if settings.sharding.fsdp else 1,
        reach=devices(job.sizes, AXES[AXES.index(outermost) :]),
        generating=(job.generate_sizes["tensor"], devices(job.generate_sizes, ROW_AXES)),
        stream=job.sizes["tensor"] if splits_residual(settings, job.sizes, hardware.accelerator) else 1,
        item=job.dtype.itemsize,
        width=width,
        count=rows_of_step(job),
    )


def shards_of(job: Job, split: MeshSplit, role: str) -> int:
    """Ranks that the weights of a role are sharded over; 1: none."""
    return split.shards if is_sharded(job.settings, role) else 1


class RowPieces(NamedTuple):
    """Micro-batches of a rank's rows.

    Attributes:
      count: their number; the last counts as a fraction if there are more than are traced.
      tokens: tokens of the largest.
    """

    count: float
    tokens: float


def pieces_of(split: MeshSplit, parts: int, budget: int) -> RowPieces:
    """Micro-batches of whole rows.

    Args:
      parts: number of mini-batches that the rows are divided into.
      budget: tokens of a micro-batch; a longer row raises it.
    """
    rows = math.ceil(split.count / split.rows / parts)
    most = max(1, budget * split.sequence // split.width)
    count = rows / most
    if count <= TRACED:
        count = math.ceil(count)
        most = math.ceil(rows / count)
    return RowPieces(count, most * split.width / split.sequence)


@functools.lru_cache(maxsize=64)
def parameters(model: Model) -> int:
    """Parameters of a model."""
    return trees.count(model.shapes)


def stored(job: Job, split: MeshSplit, role: str) -> float:
    """Parameters of a role that a rank stores between steps."""
    model = job.models[role]
    own = model.abilities.cost.expert_parameters
    sharded = shards_of(job, split, role) > 1
    count = (parameters(model) - own) / (split.tensor * (split.shards if sharded else 1))
    return count + own / (split.tensor * split.experts * (split.alone if sharded else 1))


def computed(model: Model, experts: int) -> float:
    """Parameters that a rank has while layers compute, before tensor ranks split them."""
    own = model.abilities.cost.expert_parameters
    return parameters(model) - own + own / experts


def tables(model: Model) -> int:
    """Parameters of the embedding and of the unembedding."""
    shared = model.config.tied or not model.generates
    return model.config.vocab * model.config.embed * (1 if shared else 2)


def generated(job: Job, split: MeshSplit) -> float:
    """Parameters that a rank of the engine has."""
    return parameters(job.models[job.main_role]) / split.generating[0]


def copies_weights(job: Job, split: MeshSplit) -> bool:
    """True if the engine has its own copy of the weights, in another dtype or with another sharding."""
    experts = split.experts > 1 and job.models[job.main_role].abilities.routers is not None
    return experts or (split.item, split.shards, job.generate_sizes) != (job.master.itemsize, 1, job.sizes)
