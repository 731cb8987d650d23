"""Parts of every dry run: ranks that do not exist, traces of a step, and the lines through two of them."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from funrl import trees
from funrl.cost.tracing.costs import UPDATES, Costs, along
from funrl.cost.tracing.hardware import Hardware
from funrl.cost.tracing.tracer import Tracer
from funrl.mesh import launch
from funrl.mesh import mesh as meshes
from funrl.mesh.mesh import Mesh, single
from funrl.mesh.rules import COMPUTE, layouts
from funrl.models import Model
from funrl.models.fsdp import layers_of_group
from funrl.models.lora import decoder_of
from funrl.trainer.jobs.build import Parts
from funrl.trainer.jobs.job import Job
from funrl.trainer.jobs.sharding import stored_rules
from funrl.trainer.steps.clock import Clock
from funrl.trainer.steps.micro import sizes_of, token_ranks

# Messages of layers that are traced; deeper models are on the line through the two. With fewer than three no layer
# stands between one whose weights are on their way and one whose gradients are.
DEPTHS = (3, 4)
# what sends messages from rank to rank, instead of a collective's rings
MOVE = "move_rows"
RESHARD = "reshard"
MOVES = ("move_rows", "move_rows_again")  # phases: before the rows are scored, and before further passes over them
TRACED = 2  # micro-batches that are traced at most: the second is the first that finds a gradient to add to


class Estimate(NamedTuple):
    """Cost of one step for one rank.

    Attributes:
      job: what was estimated.
      roles: that it has.
      step: what a step is, in words.
      tokens: of a row.
      phases: by name, in the order of a step.
      axes: name of each process group -> the mesh axes it is over, such as "tp8", and the axes' sizes.
      parameters: of the model that learns.
      trained: those of them that learn.
      useful: by phase that packs rows, the share of useful FLOPs in those that all ranks have time for: micro-batch i
        begins when all ranks have done i - 1.
      left_out: what the numbers do not have in them, in words.
    """

    job: Job
    roles: tuple[str, ...]
    step: str
    tokens: int
    phases: dict[str, Costs]
    axes: dict[str, tuple[str, tuple[str, ...], dict[str, int]]]
    parameters: int
    trained: int
    useful: dict[str, float]
    left_out: tuple[str, ...]


class Trace(NamedTuple):
    """A traced step without generation.

    Attributes:
      phases: costs of each.
      resting: bytes of models and optimizers, by kind.
      row_bytes: of a row of the scored batch.
      token_bytes: that a move sends of a token, before the rows are scored and after it.
      written: of each field that roles write, what it has of a token, and its dtype.
    """

    phases: dict[str, Costs]
    resting: dict[str, float]
    row_bytes: float
    token_bytes: tuple[int, int]
    written: dict[str, tuple[torch.Size, torch.dtype]]


def stage_of(phase: str) -> str:
    """generate, score, update or reshard, of which the proof of the engine's weights is a part."""
    if phase in ("generate", "reshard"):
        return phase
    if phase == "verify":
        return "reshard"
    return "update" if phase.startswith(UPDATES) or phase == MOVES[1] else "score"


@contextlib.contextmanager
def pretended(sizes: dict[str, int]) -> Iterator[Mesh]:
    """A rank of a mesh whose other ranks do not exist; what is sent to them goes nowhere.

    Of those that share the tokens of rows it is the last: where keys go round a ring it has most to do.
    """
    world = Mesh(sizes).world
    rank = (sizes["sequence"] - 1) * sizes["tensor"]
    if world == 1:
        yield single()
        return
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
    try:
        yield Mesh(sizes, rank, torch.device("cpu"), launch.groups(sizes))
    finally:
        dist.destroy_process_group()


def axes_of(mesh: Mesh) -> dict[str, tuple[str, tuple[str, ...], dict[str, int]]]:
    """`Estimate.axes` of one mesh."""
    shorts = {axis: short for short, axis in meshes.SHORT.items()}
    return {
        name: (",".join(f"{shorts[a]}{mesh.sizes[a]}" for a in axes), axes, mesh.sizes)
        for axes, name in mesh.groups.items()
    }


def tracer_of(job: Job, parts: Parts, hardware: Hardware, real: bool = False) -> Tracer:
    """A tracer that recognizes the weights of the roles; a real one computes what it counts."""
    stored = [role.placed.stored for role in parts.roles.values()]
    shapes = {tuple(layout.local_shape(0)) for layout in trees.leaves(stored)}
    shapes |= {tuple(x.shape) for x in trees.leaves(job.model.shapes)} if job.settings.devices.fsdp else set()
    vocabulary = next((layout.local_shape(0)[0] for layout in trees.leaves(unembedding(parts))), 0)
    return Tracer(hardware, shapes, (vocabulary,), real=real)


def unembedding(parts: Parts) -> trees.Tree:
    """The layout of the unembedding that the run begins with."""
    placed = parts.begin
    return () if placed.model.unembed is None else placed.model.unembed(placed.stored)


def make_weights(tracer: Tracer, stored: trees.Tree, dtype: torch.dtype) -> trees.Tree:
    """Weights of rank 0 in these layouts, held from now on."""
    params = trees.map(lambda layout: tracer.empty(layout.local_shape(0), dtype), stored)
    tracer.hold_tree(params, "weights")
    return params


class TracedClock(Clock):
    """A clock that marks the phases of a tracer."""

    def __init__(self, tracer: Tracer) -> None:
        super().__init__()
        self.tracer = tracer

    def phase(self, name: str) -> contextlib.AbstractContextManager[None]:
        """Count what runs inside the context as the phase `name` of the tracer."""
        return self.tracer.phase(name)


def depths_of(model: Model, joined: int = 1) -> tuple[int, int]:
    """The layers that are traced of a model: `DEPTHS` with experts, where it has such, behind those without.

    Args:
      joined: layers of a message: as many are left of the last one as in the whole model.
    """
    routers = model.abilities.routers
    before = routers.layers[0] if routers is not None and routers.layers else 0
    few = (DEPTHS[0] + -(-before // joined)) * joined + model.config.layers % joined
    return few, few + joined


def of_all_layers(job: Job, costs: Callable[[Job], dict[str, Costs]]) -> dict[str, Costs]:
    """Costs by phase of a job, from those of shallower ones.

    Args:
      costs: of a job.
    """
    models = {job.directories.get(name): model for name, model in job.models.items()}
    joined = {path: _together(job, path) for path in models}
    few = {path: depths_of(model, joined[path])[0] for path, model in models.items()}
    layers = {path: model.config.layers for path, model in models.items()}
    deep = {path: count for path, count in layers.items() if count > few[path] + joined[path]}
    low = costs(_with_layers(job, {path: few[path] for path in deep}))
    # A model of its own, such as a teacher, has a depth of its own, and a line of its own.
    ways = [
        (
            costs(_with_layers(job, {other: few[other] + joined[other] * (other == path) for other in deep})),
            (layers - few[path]) / joined[path],
        )
        for path, layers in deep.items()
    ]
    return {name: along(first, *((way[name], n) for way, n in ways)) for name, first in low.items()}


def _together(job: Job, path: str | None) -> int:
    """Layers of the models of a directory that are gathered in one message; None: of those that begin as the job's."""
    counts = [1]
    for name, model in job.models.items():
        if job.directories.get(name) == path and job.settings.devices.fsdp:
            tables = stored_rules(job.settings, name), COMPUTE
            stored, compute = (decoder_of(layouts(model.shapes, model.axes, table, job.sizes)) for table in tables)
            counts.append(layers_of_group(stored["layers"], compute["layers"], job.dtype.itemsize))
    return max(counts)


def _with_layers(job: Job, layers: Mapping[str | None, int]) -> Job:
    """The job with models of other depths.

    Args:
      layers: by the directory of a model; None: of those that begin as the job's.
    """

    def shallow(model: Model, path: str | None) -> Model:
        return model.with_layers(layers[path]) if path in layers else model

    models = {id(job.model): shallow(job.model, None)}  # roles with equal models go on having one
    for name, model in job.models.items():
        models[id(model)] = models.get(id(model)) or shallow(model, job.directories.get(name))
    return dataclasses.replace(
        job, model=models[id(job.model)], models={name: models[id(x)] for name, x in job.models.items()}
    )


def rows_of_a_pass(token_budget: int, width: int, mesh: Mesh) -> int:
    """Rows of `width` tokens in one forward pass."""
    return sizes_of(np.array([width]), token_budget, token_ranks(mesh))[0][-1] // width


def at_rows(trace_at: Callable[[int], Trace], rows: int, piece: int) -> dict[str, Costs]:
    """Costs of `rows` rows of this rank in micro-batches of `piece`: the third and later ones are like the second.

    Args:
      at: the trace of a number of rows of this rank.
    """
    if rows <= TRACED * piece:
        return trace_at(rows).phases
    few = trace_at((TRACED - 1) * piece).phases
    more = trace_at(TRACED * piece).phases
    phases = {}
    steps = rows / piece - (TRACED - 1)
    for name, costs in few.items():
        phases[name] = along(costs, (more[name], steps))
        if name.startswith(UPDATES):  # a gradient is held from the second on, and not once more
            phases[name].peaks = {
                part: held | {"batch": phases[name].peaks.get(part, held).get("batch", 0.0)}
                for part, held in more[name].peaks.items()
            }
    return phases
