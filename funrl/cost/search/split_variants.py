"""Variants of one split of training: the mesh to generate on, and flags that save memory.

A split of training, such as dp64 --fsdp, does not fix the generate mesh: a model that does not fit one device can train
without tensor parallelism and generate with it. If memory is short by formula, --remat=full and smaller token budgets
are variants too. The formula takes a tenth of a millisecond per variant; laying out a model takes much longer, so it is
done once for each split, with few layers.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from funrl.cost.search.closed_form import Rough, closed_form
from funrl.cost.search.closed_split import parameters
from funrl.cost.tracing.estimate import of_depth, traced_layers
from funrl.cost.tracing.hardware import USABLE, Hardware
from funrl.mesh import mesh as meshes
from funrl.mesh.plan import RANKS_PER_NODE
from funrl.models import Model
from funrl.trainer.jobs.compatibility import check_meshes
from funrl.trainer.jobs.job import Job, RLJob
from funrl.trainer.jobs.sharding import generate_sizes
from funrl.trainer.settings.checks import check_together
from funrl.trainer.settings.settings import Settings, with_flags

TOLERANCE = 1.5  # the formula and the trace differ by less than this factor
SMALLER_BUDGETS = (2, 4)  # the token budget is divided by these
MOST_NODES = 8  # limit of a tensor parallel group of the engine


class Candidate(NamedTuple):
    """One way to split a run, with its cost by formula.

    Attributes:
      settings: settings of the run with this split.
      rough: its cost by formula.
      nodes: nodes that its widest tensor parallel group spans.
    """

    settings: Settings
    rough: Rough
    nodes: int


class SearchSpace(NamedTuple):
    """Constants of a search.

    Attributes:
      base: the job on one device.
      shallow: its models with few layers, which have the layouts of whole ones.
      width: tokens of a row.
      hardware: the devices.
    """

    base: Job
    shallow: Mapping[str, Model]
    width: int
    hardware: Hardware

    @property
    def room(self) -> float:
        """Bytes of a device that can be used."""
        return self.hardware.memory * USABLE


def search_space(base: Job, width: int, hardware: Hardware) -> SearchSpace:
    """Constants of a search for meshes of a job."""
    shallow = {name: _shallow(model) for name, model in base.models.items()}
    return SearchSpace(base, shallow, width, hardware)


def _shallow(model: Model) -> Model:
    return of_depth(model, traced_layers(model).few)


def rank_key(fits: bool, nodes: int, seconds: float, nbytes: float) -> tuple[bool, bool, float]:
    """Sort key of ways to split a run: by time if they fit, else by memory.

    A tensor parallel group inside a node comes before one that spans nodes, whose sums cross the network.
    """
    return (not fits, nodes > 1, seconds if fits else nbytes)


def rough_key(candidate: Candidate, room: float) -> tuple[bool, bool, float]:
    """`rank_key` of a candidate by formula."""
    rough = candidate.rough
    return rank_key(rough.nbytes <= room, candidate.nodes, rough.seconds, rough.nbytes)


def tensor_nodes(job: Job) -> int:
    """Nodes that the widest tensor parallel group of a job spans."""
    widest = max(job.sizes["tensor"], job.generate_sizes["tensor"] if isinstance(job, RLJob) else 1)
    return math.ceil(widest / RANKS_PER_NODE)


def engine_meshes(space: SearchSpace, settings: Settings, world: int) -> list[str]:
    """Generate meshes to try in addition to the default one; none if a flag gives one.

    They are tensor parallel inside a node, and over nodes only if a node has no room for the weights.
    """
    base = space.base
    if not isinstance(base, RLJob) or settings.devices.generate_mesh is not None:
        return []
    if not settings.engines.abilities.own_steps:
        return []
    engines = {base.main_role: space.shallow[base.main_role]}
    widest = RANKS_PER_NODE if engine_fits_node(space) else RANKS_PER_NODE * MOST_NODES
    texts = []
    for tensor in (n for n in range(1, min(world, widest) + 1) if world % n == 0):
        text = meshes.text({"data": world // tensor, "expert": 1, "sequence": 1, "tensor": tensor})
        probe = with_flags(settings, mesh=text, generate_mesh=text, fsdp=False, fsdp_axes=None)
        try:
            check_meshes(probe, engines, probe.devices.train.sizes, space.hardware.memory)
        except ValueError:
            continue
        texts.append(text)
    return texts


def engine_bytes_of_node(space: SearchSpace) -> float:
    """Bytes of weights per device of an engine whose tensor parallel group is one node."""
    return space.base.dtype.itemsize * parameters(space.base.models[space.base.main_role]) / RANKS_PER_NODE


def engine_fits_node(space: SearchSpace) -> bool:
    """True if an engine whose tensor parallel group is a node has room for the weights."""
    return engine_bytes_of_node(space) <= space.room


def candidates_of(space: SearchSpace, split: Settings, engines: Sequence[str]) -> list[Candidate]:
    """All variants of a split of training, best first.

    Args:
      engines: generate meshes, in addition to the default.

    Raises:
      ValueError: the models cannot be laid out so.
    """
    check_together(split)
    base = space.base
    sizes = split.devices.train.chosen
    memory = space.hardware.memory
    default = generate_sizes(split, sizes, base.models[base.main_role], memory) if isinstance(base, RLJob) else sizes
    laid_out = with_flags(split, generate_mesh=meshes.text(default)) if isinstance(base, RLJob) else split
    check_meshes(laid_out, space.shallow, sizes, memory)
    candidates = list(
        _with_savings(space, dataclasses.replace(base, settings=split, sizes=sizes, generate_sizes=default))
    )
    for text in engines:
        generating = meshes.parse(text)
        if generating != default:
            settings = with_flags(split, generate_mesh=text)
            job = dataclasses.replace(base, settings=settings, sizes=sizes, generate_sizes=generating)
            candidates += _with_savings(space, job)
    return sorted(candidates, key=lambda candidate: rough_key(candidate, space.room))


def _with_savings(space: SearchSpace, job: Job) -> Iterator[Candidate]:
    """A job unchanged, and if memory may be short, with flags that save memory."""
    nodes = tensor_nodes(job)
    seen = set()
    for settings in _savings(job.settings, space.width):
        rough = closed_form(dataclasses.replace(job, settings=settings), space.width, space.hardware)
        if rough not in seen:  # a budget below a row's tokens changes nothing
            yield Candidate(settings, rough, nodes)
        seen.add(rough)
        if settings is job.settings and rough.nbytes * TOLERANCE <= space.room:
            return


def _savings(settings: Settings, width: int) -> Iterator[Settings]:
    """The settings, then those with smaller token budgets and with --remat=full."""
    budget = settings.updates.token_budget
    budgets = [budget, *(max(width, budget // n) for n in SMALLER_BUDGETS if budget > width)]
    for remat in ["none", "full"] if settings.devices.remat == "none" else [settings.devices.remat]:
        for tokens in dict.fromkeys(budgets):
            same = (remat, tokens) == (settings.devices.remat, budget)
            yield settings if same else with_flags(settings, remat=remat, token_budget=tokens)
