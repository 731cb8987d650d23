"""Searches over meshes and placements: a descent over the ways to split a run over N devices, each of which is traced.

`--mesh=auto:64` is such a search. It begins with weights that are sharded over all devices, moves factors of the mesh
from axis to axis, changes the mesh to generate on and how weights are sharded, and if memory is short saves some, as
long as a step gets faster. --dry_run prints what was tried; a run takes the best. The result depends only on flags, the
model's config.json and the table of hardware, so it is the same on all ranks.

`--place=auto:64` divides devices between a trainer and generators. The descent gives the trainer's mesh and the time of
a batch, which other numbers of devices share; the run of each division is simulated, and the best are traced.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from funrl import trees
from funrl.algos.core import Algorithm
from funrl.cost.dry_run import (
    TooLargeError,
    TraceMemo,
    check_width,
    estimate,
    plain_job,
    pool_estimate,
    pool_settings,
    tokens_of,
)
from funrl.cost.rows import rows_of_step
from funrl.cost.schedules import (
    MOST_SPLITS,
    AsyncRun,
    Simulated,
    TracedRanks,
    Workload,
    async_run,
    engine_times,
    lengths_of,
    replica_ranks,
    rows_together,
    rule_of,
    simulate_rule,
    traced_ranks,
)
from funrl.cost.tracing.costs import UPDATES
from funrl.cost.tracing.estimate import Estimate, Trace
from funrl.cost.tracing.hardware import USABLE, Hardware
from funrl.cost.verdict import Peak, duration_text, peak_of, quoted_flags, rates_of, size, written_flags
from funrl.mesh import mesh as meshes
from funrl.mesh.pools.placement import Placement, RankPool
from funrl.mesh.text import AXES, ROW_AXES, SHORT, TOKEN_AXES, devices
from funrl.models import Model
from funrl.rollout.ledger import LedgerRule
from funrl.trainer.jobs.compatibility import check_meshes
from funrl.trainer.jobs.job import Job, RLJob
from funrl.trainer.jobs.prepare import new_tokens
from funrl.trainer.jobs.sharding import generate_sizes
from funrl.trainer.settings.declaration import SettingsError
from funrl.trainer.settings.settings import Settings, flag_value, with_flags

SAVING = 4  # a smaller token budget is this part of the given one
UNSHARED = {"fsdp": False, "fsdp_axes": None, "grad_reduce_dtype": "auto"}
SPLIT_FLAGS = ("mesh", "generate_mesh", "fsdp", "fsdp_axes")


class MeshSplit(NamedTuple):
    """A way to split a run over the devices of a search; `data` has those that no other axis has.

    Attributes:
      tensor, sequence, expert: sizes of these axes.
      sharded: whether weights are sharded over ranks that have other tokens.
      grouped: whether they are so inside of each node only; it takes the expert axis of a model without experts.
      engine: tensor ranks of the mesh to generate on; 0: the default one.
      engine_expert: expert ranks of that mesh, where `engine` gives it.
      remat: recompute layers in the backward pass.
      lean: divide the token budget by `SAVING`.
    """

    tensor: int = 1
    sequence: int = 1
    expert: int = 1
    sharded: bool = False
    grouped: bool = False
    engine: int = 0
    engine_expert: int = 1
    remat: bool = False
    lean: bool = False

    @property
    def widest(self) -> int:
        """Devices of its widest tensor parallel group."""
        return max(self.tensor, self.engine)


class Traced(NamedTuple):
    """A way to split a run, traced.

    Attributes:
      settings: settings of the run with this split.
      flags: those that split it, and others that differ from the given ones.
      estimate: cost of a step.
      hardware: of the devices.
    """

    settings: Settings
    flags: dict[str, Any]
    estimate: Estimate
    hardware: Hardware

    @property
    def nbytes(self) -> float:
        """The largest memory of a rank."""
        return peak_of(self.estimate).nbytes

    @property
    def seconds(self) -> float:
        """Seconds of a step."""
        return rates_of(self.estimate, self.hardware).seconds

    @property
    def fits(self) -> bool:
        """True if a device has room for it."""
        return self.nbytes <= self.hardware.memory * USABLE

    @property
    def nodes(self) -> int:
        """Nodes that its widest tensor parallel group spans."""
        return tensor_nodes(self.estimate.job, self.hardware.node)

    @property
    def sensible(self) -> bool:
        """True if it fits and its tensor parallel groups stay inside a node."""
        return self.fits and self.nodes == 1

    @property
    def key(self) -> tuple[bool, bool, float]:
        """Sort key; see `rank_key`."""
        return rank_key(self.fits, self.nodes, self.seconds, self.nbytes)


class Search(NamedTuple):
    """Ways to split a run over some devices.

    Attributes:
      world: devices.
      hardware: of the devices.
      tried: traced splits, the best first.
      refused: reason for each split, as flags, that cannot be.
      unused: axes that the model is not split over, and why.
    """

    world: int
    hardware: Hardware
    tried: tuple[Traced, ...]
    refused: dict[str, str]
    unused: dict[str, str]


def rank_key(fits: bool, nodes: int, seconds: float, nbytes: float) -> tuple[bool, bool, float]:
    """Sort key of ways to split a run: by time if they fit, else by memory.

    A tensor parallel group inside a node comes before one that spans nodes, whose sums cross the network.
    """
    return (not fits, nodes > 1, seconds if fits else nbytes)


def tensor_nodes(job: Job, node: int) -> int:
    """Nodes, of `node` devices, that the widest tensor parallel group of a job spans."""
    widest = max(job.sizes["tensor"], job.generate_sizes["tensor"] if isinstance(job, RLJob) else 1)
    return math.ceil(widest / node)


def search(settings: Settings, algorithm: Algorithm, hardware: Hardware) -> Search:
    """Descend over the meshes of --mesh=auto:N.

    Raises:
      ValueError: a flag cannot work on any mesh, or no mesh is possible; the message has the first reason.
    """
    tokens = tokens_of(settings, algorithm)

    def cost(changed: Settings, memo: TraceMemo) -> Estimate:
        return estimate(plain_job(changed, algorithm, hardware.memory), tokens, hardware, memo=memo)

    return descend(settings, algorithm, settings.devices.train.wanted or 1, hardware, cost)


def descend(
    settings: Settings,
    algorithm: Algorithm,
    world: int,
    hardware: Hardware,
    cost: Callable[[Settings, TraceMemo], Estimate],
    *,
    writes: bool = True,
) -> Search:
    """Try splits of a run over `world` devices, each near the best one so far.

    Args:
      cost: traces a step of the run with other flags.
      writes: choose the mesh to generate on too, if no flag gives it.

    Raises:
      ValueError: as in `search`.
    """
    alone = with_flags(settings, mesh="dp1", generate_mesh=None, **UNSHARED)
    base = plain_job(alone, algorithm, hardware.memory)
    axes, unused = usable_axes(settings, base.models)
    native = settings.engines.abilities.own_steps and settings.devices.generate_mesh is None
    space = Space(
        given=settings,
        world=world,
        base=base,
        axes=axes,
        hardware=hardware,
        width=check_width(base, tokens_of(settings, algorithm)),
        writes=writes and native and isinstance(base, RLJob),
    )
    traces: dict[object, Trace] = {}
    known: dict[MeshSplit, Trial | None] = {}
    refused: dict[str, str] = {}

    def attempt(split: MeshSplit, room: float) -> Trial | None:
        changed = space.settings_of(split)
        flags = split_flags(changed, settings)
        try:
            known[split] = Traced(changed, flags, cost(changed, TraceMemo(traces, room)), hardware)
        except TooLargeError as error:
            known[split] = TooLarge(space.nodes(split), error.nbytes)
            refused[written_flags(flags)] = str(error)
        except ValueError as error:
            known[split] = None
            refused[written_flags(flags)] = str(error).removeprefix(f"--mesh={changed.devices.mesh}: ")
        return known[split]

    split = next((split for split in space.first() if attempt(split, space.room) is not None), None)
    if split is None:
        reason = next(iter(refused.values()), "there is none")
        raise SettingsError(f"--mesh={settings.devices.mesh}: no mesh of {world} devices is possible: {reason}")
    split = _descent(space, known, split, lambda split: attempt(split, space.room))
    if isinstance(known[split], TooLarge):  # nothing fits
        attempt(split, math.inf)
    tried = sorted((trial for trial in known.values() if isinstance(trial, Traced)), key=lambda trial: trial.key)
    return Search(world, hardware, tuple(tried), refused, unused)


def _descent(
    space: Space,
    known: dict[MeshSplit, Trial | None],
    split: MeshSplit,
    attempt: Callable[[MeshSplit], Trial | None],
) -> MeshSplit:
    """Change a split as long as a change makes it better; return the best.

    Tensor parallel groups over nodes are tried only if nothing else fits. A change that makes a step slower is tried
    once.

    Args:
      known: splits that were tried; None: that cannot be.
      attempt: tries a split and adds it to these.
    """
    for most_nodes in (space.nodes(split), space.world):
        moves = list(space.moves())
        failures = number = 0
        while failures < len(moves):
            best = known[split]
            assert best is not None
            changed = moves[number](split, best)
            if changed is not None and changed not in known and space.nodes(changed) <= most_nodes:
                hopeless = best.fits and space.least_bytes(changed, known) > space.room
                known[changed] = None if hopeless else attempt(changed)
            trial = None if changed is None else known.get(changed)
            if changed is not None and trial is not None and trial.key < best.key:
                split = changed
                failures = 0
                continue
            if trial is not None and trial.fits and best.fits:
                moves[number] = lambda split, best: None
            failures += 1
            number = (number + 1) % len(moves)
        if best.fits:
            break
    return split


class TooLarge(NamedTuple):
    """A split whose update alone exceeds the memory of a device.

    Attributes:
      nodes: as in `Traced`.
      nbytes: memory of a rank, at least.
    """

    nodes: int
    nbytes: float
    fits = False

    @property
    def key(self) -> tuple[bool, bool, float]:
        """Sort key; see `rank_key`."""
        return rank_key(False, self.nodes, math.inf, self.nbytes)


Trial = Traced | TooLarge


Move = Callable[["MeshSplit", Trial], "MeshSplit | None"]


class Space(NamedTuple):
    """Splits of a search.

    Attributes:
      given: the flags, which stay.
      world: devices.
      base: the job on one device.
      axes: that the model can be split over.
      hardware: of the devices.
      width: tokens of a row.
      writes: whether the search chooses the mesh to generate on.
    """

    given: Settings
    world: int
    base: Job
    axes: tuple[str, ...]
    hardware: Hardware
    width: int
    writes: bool

    @property
    def room(self) -> float:
        """Bytes of a device that can be used."""
        return self.hardware.memory * USABLE

    @property
    def experts(self) -> bool:
        """True if the expert axis splits experts."""
        return has_experts(self.base.models)

    @property
    def long(self) -> bool:
        """True if a micro-batch has few rows, or a rank none, so that splitting tokens may help."""
        return 4 * self.width > self.given.updates.token_budget or rows_of_step(self.base) < self.world

    def nodes(self, split: MeshSplit) -> int:
        """Nodes that the widest tensor parallel group of a split spans."""
        return math.ceil(split.widest / self.hardware.node)

    def mesh_of(self, split: MeshSplit) -> dict[str, int] | None:
        """Sizes of the mesh to train on; None: the devices do not divide so."""
        near = self.hardware.node // (split.tensor * split.sequence) if split.grouped else split.expert
        data, rest = divmod(self.world, max(1, split.tensor * split.sequence * near))
        if rest or not near:
            return None
        return {"data": data, "expert": near, "sequence": split.sequence, "tensor": split.tensor}

    def engine_of(self, split: MeshSplit) -> dict[str, int]:
        """Sizes of the mesh to generate on that the split gives."""
        sizes = {"expert": split.engine_expert, "tensor": max(1, split.engine)}
        return dict.fromkeys(AXES, 1) | sizes | {"data": self.world // replica_ranks(sizes)}

    def settings_of(self, split: MeshSplit) -> Settings:
        """Flags of a split that `mesh_of` has sizes for."""
        sizes = self.mesh_of(split)
        assert sizes is not None
        flags: dict[str, Any] = {"mesh": meshes.text(sizes), "fsdp": split.sharded}
        if split.grouped:
            flags["fsdp_axes"] = "ep,sp" if split.sequence > 1 else "ep"
        elif not split.sharded:
            flags["fsdp_axes"] = None
        default = None
        if isinstance(self.base, RLJob):
            model = self.base.models[self.base.main_role]
            default = generate_sizes(with_flags(self.given, **flags), sizes, model, self.hardware.memory)
        engine = self.engine_of(split)
        if split.engine and engine != default:
            flags["generate_mesh"] = meshes.text(engine)
        if split.remat:
            flags["remat"] = "full"
        if split.lean:
            flags["token_budget"] = self.given.updates.token_budget // SAVING
        return with_flags(self.given, **flags)

    def first(self) -> Iterator[MeshSplit]:
        """Splits to begin with, until one can be: data parallel, or as little tensor parallel as can be."""
        shards = self.given.sharding.fsdp or self.world > 1
        for tensor in _divisors(self.world):
            split = MeshSplit(tensor=tensor, sharded=shards and tensor < self.world)
            yield self._with_engine(split) if self.writes else split

    def _with_engine(self, split: MeshSplit) -> MeshSplit:
        """The split with replicas whose weights take at most a third of a device.

        Of a dense model they have the fewest ranks. Of experts they are the fastest by formula, whose tensor parallel
        groups stay inside a node if any do.
        """
        abilities = self.base.models[self.base.main_role].abilities
        experts = engine_experts(self.given, self.base.models[self.base.main_role])
        engines = [
            split._replace(engine=tensor, engine_expert=expert)
            for tensor in _divisors(self.world)
            for expert in _divisors(self.world // tensor)
            if abilities.heads % tensor == 0 and experts % expert == 0
        ]
        enough = [x for x in engines if self.engine_bytes(x) <= self.room / 3]
        if not enough:
            return min(engines, key=self.engine_bytes)
        if experts == 1:
            return enough[0]
        return min(enough, key=lambda x: (x.engine > self.hardware.node, self._engine_seconds(x)))

    def _engine_seconds(self, split: MeshSplit) -> float:
        """Seconds in which a replica reads its prompts and decodes its rows, in waves of rows of full length."""
        job = self.base
        assert isinstance(job, RLJob)
        expert = split.engine_expert
        times = engine_times(job.models[job.main_role], self.hardware, split.engine, job.dtype.itemsize, expert=expert)
        rows = math.ceil(rows_of_step(job) / self.engine_of(split)["data"])
        together = min(rows, rows_together(times, expert * self.given.engines.decode_rows, self.width, expert))
        iteration = float(times.without_context(np.array(together))) + times.token * together * self.width / 2
        replies = job.sampling.max_new_tokens
        reading = times.read * (self.width - replies) * rows / job.sampling.samples
        return math.ceil(rows / together) * replies * iteration + reading

    def engine_bytes(self, split: MeshSplit) -> float:
        """Bytes of the weights of a replica on a device; 0: the split gives no mesh to generate on."""
        own = self.base.models[self.base.main_role].abilities.cost.expert_parameters
        numbers = self.parameters - own + own / split.engine_expert
        return self.base.dtype.itemsize * numbers / split.engine if split.engine else 0.0

    def moves(self) -> Iterator[Move]:
        """Changes of a split, each to one that may be better; None: it cannot be made."""
        spares = self.given.devices.remat == "none"
        if spares:
            yield lambda split, best: self._toggled_savings(split, best, remat=True, lean=False)
        if self.writes:
            yield lambda split, _: self._resized(split, "engine", 2)
            yield lambda split, _: self._resized(split, "engine", 0.5)
        for axis in ("expert", "tensor", "sequence"):
            if axis in self.axes and (self.experts if axis == "expert" else axis == "tensor" or self.long):
                for factor in (2, *(n for n in (3, 5, 7) if self.world % n == 0), 0.5):
                    yield lambda split, _, axis=axis, factor=factor: self._resized(split, axis, factor)
        yield lambda split, _: self._resized(split._replace(remat=False, lean=False), "tensor", 2)
        if not self.given.sharding.fsdp:
            yield self._whole
            yield lambda split, best: self._whole(self._as_engine(split), best)
            yield lambda split, best: self._whole(self._swapped(self._as_engine(split)), best)
        if not self.experts and self.given.sharding.fsdp_axes is None and "expert" in self.axes:
            yield self._toggled_groups
        for remat in (True, False)[not spares :]:
            yield lambda split, best, remat=remat: self._toggled_savings(split, best, remat, lean=True)

    def _toggled_savings(self, split: MeshSplit, best: Trial, remat: bool, lean: bool) -> MeshSplit | None:
        """The split with further savings of memory if it does not fit, and else with fewer or others."""
        changed = split._replace(remat=split.remat != remat, lean=split.lean != lean)
        adds = changed.remat >= split.remat and changed.lean >= split.lean
        return changed if adds != best.fits else None

    def _resized(self, split: MeshSplit, axis: str, factor: float) -> MeshSplit | None:
        size = getattr(split, axis) * factor
        if size < 1 or size != int(size) or self.world % size:
            return None
        model = self.base.models[self.base.main_role]
        parts = {"expert": model.abilities.routers.experts if model.abilities.routers else 0, "sequence": 0}
        if parts.get(axis, model.abilities.heads) % size:
            return None
        changed = split._replace(**{axis: int(size)})
        return None if self.world % (changed.engine_expert * max(1, changed.engine)) else self._checked(changed)

    def _whole(self, split: MeshSplit, best: Trial) -> MeshSplit | None:
        """Whole weights instead of sharded ones, if they have room."""
        weights = self.base.dtype.itemsize * self.parameters / split.tensor
        if not split.sharded or weights + self._states(best) * (self.world // split.tensor) > self.room:
            return None
        return self._checked(split._replace(sharded=False, grouped=False))

    def _as_engine(self, split: MeshSplit) -> MeshSplit:
        """The split with at least the tensor ranks of its engine."""
        return split._replace(tensor=max(split.tensor, split.engine))

    def _swapped(self, split: MeshSplit) -> MeshSplit:
        """The split with the other way to save memory."""
        return split._replace(remat=split.lean and self.given.devices.remat == "none", lean=split.remat)

    @property
    def parameters(self) -> int:
        """Parameters of the main role's model."""
        return self.base.models[self.base.main_role].parameters

    def _toggled_groups(self, split: MeshSplit, best: Trial) -> MeshSplit | None:
        """Shards inside of each node, if each node has room for all states, or over all devices."""
        if not split.grouped and self._states(best) * (self.world // self.hardware.node) > self.room:
            return None
        return self._checked(split._replace(grouped=not split.grouped, sharded=True))

    def _states(self, best: Trial) -> float:
        """Bytes of sharded optimizer states, and as many of weights and gradients; infinite if they do not fit."""
        if not isinstance(best, Traced) or not best.fits:
            return math.inf
        updates = (costs for name, costs in best.estimate.phases.items() if name.startswith(UPDATES))
        return 2 * max((costs.peak.get("optimizer", 0.0) for costs in updates), default=0.0)

    def least_bytes(self, split: MeshSplit, known: Mapping[MeshSplit, Trial | None]) -> float:
        """Bytes of a rank at least: those of a tried split that saves as much, over the ranks that share more tokens.

        The engine's own weights are left out. More ranks of the expert axis would gather fewer experts.
        """
        least = [0.0]
        for other, trial in known.items():
            saves = other.remat >= split.remat and other.lean >= split.lean and other.sharded >= split.sharded
            if trial is not None and saves and other.grouped <= split.grouped and other.expert >= split.expert:
                share = other.tensor * other.sequence / (split.tensor * split.sequence)
                least.append((trial.nbytes - self.engine_bytes(other)) * min(1.0, share))
        return max(least)

    def _checked(self, split: MeshSplit) -> MeshSplit | None:
        """The split if the devices divide so."""
        sizes = self.mesh_of(split)
        if sizes is None or (split.grouped and (sizes["data"] == 1 or sizes["expert"] == 1)):
            return None
        if split.sharded and not any(sizes[axis] > 1 for axis in TOKEN_AXES):
            return split._replace(sharded=False) if not self.given.sharding.fsdp else None
        return split


def _divisors(world: int) -> list[int]:
    return [n for n in range(1, world + 1) if world % n == 0]


def usable_axes(settings: Settings, models: Mapping[str, Model]) -> tuple[tuple[str, ...], dict[str, str]]:
    """The axes that a run can be split over, and for each other axis the reason why not."""
    usable = ["data", "tensor"]
    unused = {}
    for axis in (axis for axis in AXES if axis not in usable):
        short = next(short for short, name in SHORT.items() if name == axis)
        probe = with_flags(settings, mesh=f"{short}2", generate_mesh=None, fsdp=axis in ROW_AXES)
        probe = with_flags(probe, fsdp_axes=settings.sharding.fsdp_axes if settings.sharding.fsdp else None)
        try:
            check_meshes(probe, models, probe.devices.train.chosen, float("inf"))
            usable.append(axis)
        except ValueError as error:
            unused[short] = str(error).rpartition(f"{short}2: ")[2]
    return tuple(usable), unused


def has_experts(models: Mapping[str, Model]) -> bool:
    """True if some weight of a model has experts."""
    return any(model.abilities.routers is not None for model in models.values())


def engine_experts(settings: Settings, model: Model) -> int:
    """Experts of a model that the ranks of an engine may share; 1: they may share none."""
    routers = model.abilities.routers
    return routers.experts if routers is not None and settings.engines.abilities.shares_experts else 1


def split_flags(settings: Settings, given: Settings) -> dict[str, Any]:
    """The flags that split a run, and those that differ from the given ones."""
    names = [name for name in SPLIT_FLAGS if flag_value(settings, name)]
    names += [name for name in ("remat", "token_budget") if flag_value(settings, name) != flag_value(given, name)]
    return {name: flag_value(settings, name) for name in names}


def spans_text(nodes: int) -> str:
    """Remark on a tensor parallel group that spans nodes."""
    return f"tp over {nodes} nodes"


def chosen_mesh(settings: Settings, compose: Callable[[], Algorithm], hardware: Hardware) -> tuple[Settings, str]:
    """Settings with the best mesh instead of auto:N, and a line that describes it.

    Raises:
      SettingsError: the run fits no mesh; the message has the memory that the best one needs.
    """
    result = search(settings, compose(), hardware)
    best = result.tried[0]
    flags = written_flags(best.flags)
    held = size(best.nbytes)
    room = size(hardware.memory * USABLE)
    if not best.fits:
        raise SettingsError(
            f"--mesh={settings.devices.mesh}: no mesh of {result.world} devices fits: {flags} "
            f"needs {held} of {room} per device, in {peak_of(best.estimate).phase}; "
            "with --dry_run this command shows what helps"
        )
    slow = "" if best.sensible else f", {spans_text(best.nodes)}, as nothing else fits"
    text = f"--mesh={settings.devices.mesh} is {flags}: {held} of a device's {room}"
    return best.settings, f"{text}, {duration_text(best.seconds)} a step{slow}, by a dry run"


def with_groups(
    settings: Settings, compose: Callable[[], Algorithm], hardware: Hardware, node: int | None
) -> tuple[Settings, str | None]:
    """Settings that shard inside each node if a shard of that size fits, and a line on the choice.

    Inside a node gathers are an order of magnitude faster than between nodes, and the only traffic between nodes is
    then one sum of gradients per step. Shards are larger: each node holds all weights. `ep` of a model without experts
    splits rows as `dp` does, within it. A given --fsdp_axes, and a mesh chosen by --mesh=auto:N, are not changed.

    Args:
      node: ranks of each node; None: all are on one node.
    """
    sharding = settings.sharding
    if not sharding.fsdp or sharding.fsdp_axes is not None or node is None or settings.devices.train.wanted is not None:
        return settings, None
    sizes = settings.devices.train.chosen
    world = devices(sizes)
    if world <= node or world % node:
        return settings, None
    over = devices(sizes, TOKEN_AXES)
    everywhere = f"--fsdp: weights are sharded over all {over} ranks that have other tokens"
    try:
        algorithm = compose()
        job = plain_job(settings, algorithm, hardware.memory)
        inside = node_mesh(sizes, node, has_experts(job.models))
        if inside is None:
            return settings, f"{everywhere}: on {settings.devices.mesh} no axis ends with a node of {node}"
        short = {axis: name for name, axis in SHORT.items()}
        axes = ",".join(short[axis] for axis in TOKEN_AXES[1:] if inside[axis] > 1)
        changed = with_flags(settings, mesh=meshes.text(inside), fsdp_axes=axes)
        job = plain_job(changed, algorithm, hardware.memory)
        held = peak_of(estimate(job, tokens_of(changed, algorithm), hardware)).nbytes
    except ValueError:
        return settings, None  # a flag cannot work; the run reports it
    needs = f"{held / 1e9:.3g} GB of a device's {hardware.memory * USABLE / 1e9:.3g} GB"
    if held > hardware.memory * USABLE:
        return settings, f"{everywhere}: inside of nodes of {node} they would need {needs}"
    return changed, (
        f"--fsdp: weights are sharded inside of each node of {node} and copied to {world // node} nodes, which needs "
        f"{needs}: --mesh={changed.devices.mesh} --fsdp_axes={axes}; --fsdp_axes=dp,ep,sp shards over all"
    )


def node_mesh(sizes: dict[str, int], node: int, experts: bool) -> dict[str, int] | None:
    """The mesh with `data` across nodes and all other token axes inside a node; None: there is none.

    Args:
      node: ranks of a node, which divide those of the mesh.
      experts: whether the expert axis splits experts and so must stay unchanged.
    """
    near = sizes["tensor"] * sizes["sequence"]
    group, rest = divmod(node, near)
    if experts or sizes["expert"] > 1:
        return sizes if group == sizes["expert"] > 1 and not rest else None
    if rest or sizes["data"] % group or group * sizes["sequence"] == 1:
        return None
    return sizes | {"data": sizes["data"] // group, "expert": group}


TRACED_PLACES = 3  # placements that are traced, unless one fits before
MOST_NODES = 8  # limit of a tensor parallel group of an engine


class PlacedCandidate(NamedTuple):
    """A way to divide the devices.

    Attributes:
      placement: of the ranks.
      flags: `place`, and those of training that differ from the given ones.
      result: of the simulation.
      nbytes: memory of a rank that trains, by the trace of a trainer with other devices.
      peaks: the largest memory of a rank of each pool, traced; empty: the placement was not traced.
    """

    placement: Placement
    flags: dict[str, Any]
    result: Simulated
    nbytes: float
    peaks: Mapping[str, Peak] = {}

    def fits(self, room: float) -> bool:
        """True if every rank has room for it."""
        return all(peak.nbytes <= room for peak in self.peaks.values()) and self.nbytes <= room

    def key(self, hardware: Hardware) -> tuple[bool, bool, float]:
        """Sort key; see `rank_key`."""
        fits = self.fits(hardware.memory * USABLE)
        tensor = max(pool.sizes["tensor"] for pool in self.placement.pools.values())
        nbytes = max((peak.nbytes for peak in self.peaks.values()), default=self.nbytes)
        return rank_key(fits, math.ceil(tensor / hardware.node), self.result.step, nbytes)


class PlaceSearch(NamedTuple):
    """Ways to divide some devices.

    Attributes:
      world: devices.
      room: bytes of a device that can be used.
      candidates: those that fit first, then the fastest; the first was traced.
      shared: seconds of a step where all devices train and generate by turns, simulated; None: that cannot be.
      dropped: reason for each number of training devices that has no placement.
    """

    world: int
    room: float
    candidates: tuple[PlacedCandidate, ...]
    shared: float | None
    dropped: dict[int, str]


def place_search(settings: Settings, algorithm: Algorithm, hardware: Hardware) -> PlaceSearch:
    """Simulate divisions of the devices of --place=auto:N and trace the best of them.

    Raises:
      ValueError: a flag cannot work on any division, or no division is possible; the message has the first reason.
    """
    world = settings.devices.train.wanted or 2
    alone = with_flags(settings, place=None, dry_run=True)
    refused = f"--place={settings.devices.place}: no division of {world} devices is possible"
    counts = train_counts(world)
    if not counts:
        raise SettingsError(f"{refused}: one device cannot be divided")
    lengths = lengths_of(alone, new_tokens(alone))
    work = Workload(lengths, tokens_of(alone, algorithm), hardware)
    rule = rule_of(alone)
    memo = TraceMemo({})

    def cost(changed: Settings, limited: TraceMemo) -> Estimate:
        return pool_estimate(changed, algorithm, work.rank(memo=memo._replace(room=limited.room)))

    split = descend(alone, algorithm, counts[-1], hardware, cost, writes=False).tried[0]
    trainer = traced_ranks(split.settings, algorithm, lengths, work.rank(memo=memo))
    flags = {name: value for name, value in split.flags.items() if name != "mesh"}
    candidates = []
    dropped = {}
    for train in counts:
        try:
            run, sizes = _division(trainer, (train, world - train), work, rule)
        except SettingsError as error:
            dropped[train] = str(error)
            continue
        placement = Placement(
            RankPool(sizes["train"], tuple(range(train))), RankPool(sizes["generate"], tuple(range(train, world))), {}
        )
        place = {"place": str(placement)} | flags
        candidates.append(PlacedCandidate(placement, place, simulate_rule(run, rule), trainer.nbytes(train)))
    if not candidates:
        raise SettingsError(f"{refused}: {next(iter(dropped.values()))}")
    candidates.sort(key=lambda candidate: candidate.key(work.hardware))
    for number, candidate in enumerate(candidates[:TRACED_PLACES]):
        chosen = with_flags(alone, **candidate.flags)
        peaks = {}
        for name, pool in candidate.placement.pools.items():
            own = pool_settings(chosen, pool, learns=candidate.placement.shards(name))
            peaks[name] = peak_of(pool_estimate(own, algorithm, work.rank(name, memo=memo)))
        candidates[number] = candidate._replace(peaks=peaks, nbytes=peaks["train"].nbytes)
        if candidates[number].fits(work.room):
            break
    candidates.sort(key=lambda candidate: candidate.key(work.hardware))
    try:
        run, _ = _division(trainer, (world, world), work, rule)
        shared = simulate_rule(run, rule._replace(staleness=0, window=1)).step
    except SettingsError:
        shared = None
    return PlaceSearch(world, work.room, tuple(candidates), shared, dropped)


def train_counts(world: int) -> list[int]:
    """Numbers of devices to train on: a few, evenly spaced by a power of two."""
    stride = 1 << max(0, math.ceil(math.log2(world / MOST_SPLITS)))
    return list(range(stride, world, stride))


def _division(
    trainer: TracedRanks, counts: tuple[int, int], work: Workload, rule: LedgerRule
) -> tuple[AsyncRun, dict[str, dict[str, int]]]:
    """The run with devices to train and to generate, and the meshes of both.

    Of the meshes to generate on, the one that samples the most tokens a second is taken. Replicas are tensor parallel
    inside a node, and over nodes only if a node has no room for the weights.

    Args:
      trainer: traced with other devices.
      counts: of devices to train, and to generate.

    Raises:
      SettingsError: no mesh has room.
    """
    train, generate = counts
    sizes, update = trainer.on(train)
    job = trainer.full.job
    assert isinstance(job, RLJob)
    model = job.models[job.main_role]
    fits_node = job.dtype.itemsize * trees.count(model.shapes) / work.hardware.node <= work.room
    node = work.hardware.node
    widest = node if fits_node else node * MOST_NODES
    best = None
    experts = engine_experts(job.settings, model)
    for tensor, expert in itertools.product(_divisors(generate), repeat=2):
        splits = tensor <= widest and model.abilities.heads % tensor == 0 and generate % (tensor * expert) == 0
        if not splits or experts % expert:
            continue
        engine = dict.fromkeys(AXES, 1) | {"data": generate // (tensor * expert), "expert": expert, "tensor": tensor}
        run = async_run(dataclasses.replace(job, generate_sizes=engine), update, generate, work, rule)
        if run.engine.capacity / expert >= work.prompt + work.lengths.most:
            rows = min(run.slots, math.ceil(run.rule.places * run.samples / run.replicas))
            rate = run.replicas * rows / run.iteration_seconds(rows)
            if best is None or rate > best[0]:
                best = rate, run, engine
    if best is None:
        raise SettingsError(f"{generate} devices have no room to generate with {model.config.source.family}")
    return best[1], {"train": sizes, "generate": best[2]}


def chosen_devices(settings: Settings, compose: Callable[[], Algorithm], hardware: Hardware) -> tuple[Settings, str]:
    """Settings with the best mesh or placement instead of auto:N, and a line that describes it.

    Raises:
      SettingsError: the run fits none.
    """
    if settings.devices.place is None:
        return chosen_mesh(settings, compose, hardware)
    result = place_search(settings, compose(), hardware)
    best = result.candidates[0]
    if not best.fits(result.room):
        pool, peak = max(best.peaks.items(), key=lambda entry: entry[1].nbytes)
        raise SettingsError(
            f"--place={settings.devices.place}: no division of {result.world} devices fits: "
            f"{quoted_flags(best.flags)} needs {size(peak.nbytes)} of {size(result.room)} per device, to {pool}"
        )
    chosen = with_flags(settings, **best.flags)
    return chosen, f"--place={settings.devices.place} is {reasons_text(result)}, by a dry run"


def reasons_text(result: PlaceSearch) -> str:
    """The best placement and why: its time, who waits, and what shared devices take."""
    best = result.candidates[0]
    busy = best.result
    beside = "" if result.shared is None else f"; on shared devices {duration_text(result.shared)}"
    return (
        f"{quoted_flags(best.flags)}: {duration_text(busy.step)} a step, in which the trainer works for "
        f"{busy.trainer_busy:.0%} and the generators for {busy.generators_busy:.0%}{beside}"
    )
