"""A search over placements: ways to divide N devices between a trainer, generators and roles, ranked by simulation.

`--place=auto:64` is such a search. For each number of devices that train, the search of meshes gives the trainer's
mesh, and the rates of the hardware that of the generators; the run of both is simulated. So it is with the largest of
the roles that only score on devices of its own, and with all of them. The best are traced. The result depends only on
flags, the model's config.json and the table of hardware, so it is the same on all ranks.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from funrl import trees
from funrl.algos.core import Algorithm
from funrl.asynchrony.admission import AdmissionRule
from funrl.cost.dry_run import TraceMemo, estimate, plain_job, tokens_of
from funrl.cost.pools import pool_estimate, pool_settings
from funrl.cost.rows import rows_of_step
from funrl.cost.schedules import (
    MOST_SPLITS,
    TracedRanks,
    Workload,
    async_run,
    lengths_of,
    rule_of,
    simulate_rule,
    traced_ranks,
)
from funrl.cost.search import chosen_mesh, descend, rank_key
from funrl.cost.simulation import AsyncRun, ScoredUpdate, Simulated, UpdateLaw, UpdateTimes
from funrl.cost.tables import duration_text, size
from funrl.cost.tracing.estimate import Estimate
from funrl.cost.tracing.hardware import USABLE, Hardware
from funrl.cost.verdict import Peak, peak_of, phase_seconds, quoted_flags
from funrl.mesh import mesh as meshes
from funrl.mesh.mesh import Mesh
from funrl.mesh.plan import RANKS_PER_NODE
from funrl.mesh.pools.placement import Placement, RankPool
from funrl.mesh.text import AXES, MeshError
from funrl.models import Model
from funrl.trainer.jobs.job import RLJob
from funrl.trainer.jobs.models import placeable_roles
from funrl.trainer.settings.declaration import SettingsError
from funrl.trainer.settings.scorers import JUDGE
from funrl.trainer.settings.settings import Settings, with_flags

TRACED_PLACES = 3  # placements that are traced, unless one fits before
MOST_NODES = 8  # limit of a tensor parallel group of an engine


class ScoringPool(NamedTuple):
    """Devices of a role.

    Attributes:
      sizes: of their mesh.
      times: of a batch.
      seconds: of a batch of mean rows.
    """

    sizes: dict[str, int]
    times: UpdateTimes
    seconds: float

    @property
    def world(self) -> int:
        """Number of devices."""
        return Mesh(self.sizes).world


def model_of(job: RLJob, name: str) -> Model:
    """The model of a role, or of the judge."""
    if name == JUDGE and job.judge is not None:
        return job.judge.model
    return job.models[name]


def roles_to_move(job: RLJob, names: Sequence[str]) -> list[tuple[str, ...]]:
    """Sets of roles to try on devices of their own: none, the one with the largest model, and all.

    Args:
      names: of the roles that may have some.
    """
    ordered = sorted(names, key=lambda name: -trees.count(model_of(job, name).shapes))
    return list(dict.fromkeys([(), tuple(ordered[:1]), tuple(ordered)]))


def scoring_pools_of(
    names: Sequence[str], least_pool: Callable[[str], ScoringPool], *, seconds: float, train: int, left: int
) -> dict[str, ScoringPool]:
    """Devices for each of some roles, of which the trainer waits for one after the other.

    A trainer of T devices that works for t seconds, and a pool of R that works for r, take the least time together with
    R / T = sqrt(R r / (T t)). The power of two below that is taken, but at least the fewest devices with room; more
    share the rows.

    Args:
      names: of the roles.
      least_pool: (role) -> the smallest pool with room for it.
      seconds: of the trainer, on a batch of mean rows.
      train: devices that train.
      left: devices that do not train, of which one has to generate.

    Raises:
      SettingsError: they have no room for the models.
    """
    pools = {name: least_pool(name) for name in names}
    left -= 1 + sum(pool.world for pool in pools.values())
    if left < 0:
        raise SettingsError(f"no device is left to generate beside those of {', '.join(names)}")
    for name, least in pools.items():
        wanted = min(math.sqrt(train * least.world * least.seconds / seconds), least.world + left)
        share = max(1, (1 << int(math.log2(max(1.0, wanted)))) // least.world)
        times = least.times._replace(ranks=least.times.ranks * share)
        sizes = {**least.sizes, "data": least.sizes["data"] * share}
        pools[name] = ScoringPool(sizes, times, least.seconds / share)
        left -= pools[name].world - least.world
    return pools


def smallest_pool(settings: Settings, algorithm: Algorithm, name: str, work: Workload) -> ScoringPool:
    """The smallest pool of one node with room for a role, traced. Raises: SettingsError: a node has none."""
    for tensor in (1 << power for power in range(int(math.log2(RANKS_PER_NODE)) + 1)):
        sizes = dict.fromkeys(AXES, 1) | {"tensor": tensor}
        flags = pool_settings(settings, RankPool(sizes, tuple(range(tensor))), learns=False)
        try:
            traced = traced_ranks(flags, algorithm, work, name, (name,))
        except MeshError:
            continue
        if traced.nbytes(tensor) <= work.room:
            rows = np.full(rows_of_step(traced.full.job), work.prompt + work.lengths.mean)
            return ScoringPool(sizes, traced.times, traced.times.seconds(rows))
    raise SettingsError(f"a node has no room for the {name}")


class PlacedCandidate(NamedTuple):
    """A way to divide the devices.

    Attributes:
      placement: of the ranks.
      flags: `place`, and those of training that differ from the given ones.
      result: of the simulation.
      nbytes: memory of a rank that trains, by formula.
      nodes: nodes that the widest tensor parallel group spans.
      peaks: the largest memory of a rank of each pool, traced; empty: the placement was not traced.
    """

    placement: Placement
    flags: dict[str, Any]
    result: Simulated
    nbytes: float
    nodes: int
    peaks: Mapping[str, Peak] = {}

    def fits(self, room: float) -> bool:
        """True if every rank has room for it: traced, or else by formula."""
        return all(peak.nbytes <= room for peak in self.peaks.values()) if self.peaks else self.nbytes <= room


class PlaceSearch(NamedTuple):
    """Ways to divide some devices.

    Attributes:
      world: devices.
      hardware: of the devices.
      candidates: those that fit first, then the fastest; the first was traced.
      shared: seconds of a step where all devices train and generate by turns, simulated; None: that cannot be.
      dropped: reason for each number of training devices that has no placement.
    """

    world: int
    hardware: Hardware
    candidates: tuple[PlacedCandidate, ...]
    shared: float | None
    dropped: dict[int, str]

    @property
    def room(self) -> float:
        """Bytes of a device that can be used."""
        return self.hardware.memory * USABLE


class _Trainer(NamedTuple):
    """The split that trains.

    Attributes:
      traced: on the most devices that train.
      flags: that differ from the given ones, but for the mesh.
      shares: of the seconds of a step, by phase.
    """

    traced: TracedRanks
    flags: dict[str, Any]
    shares: Mapping[str, float]


class _Division(NamedTuple):
    """Constants of a search.

    Attributes:
      settings: the flags, without --place.
      base: the job on one device.
      trainer: the split that trains.
      least_pool: as in `scoring_pools_of`.
      work: rows of the run.
      rule: of admission.
    """

    settings: Settings
    base: RLJob
    trainer: _Trainer
    least_pool: Callable[[str], ScoringPool]
    work: Workload
    rule: AdmissionRule


def place_search(settings: Settings, algorithm: Algorithm, hardware: Hardware) -> PlaceSearch:
    """Simulate divisions of the devices of --place=auto:N and trace the best of them.

    Raises:
      ValueError: a flag cannot work on any division, or no division is possible; the message has the first reason.
    """
    world = settings.devices.train.wanted or 2
    alone = with_flags(settings, place=None, dry_run=True)
    tokens = tokens_of(alone, algorithm)
    base = plain_job(alone, algorithm, hardware.memory)  # of one device
    assert isinstance(base, RLJob)
    work = Workload(lengths_of(alone, base.sampling.max_new_tokens), tokens, hardware)
    refused = f"--place={settings.devices.place}: no division of {world} devices is possible"
    counts = train_counts(world)
    if not counts:
        raise SettingsError(f"{refused}: one device cannot be divided")
    trainer = _best_trainer(alone, algorithm, counts[-1], work)
    least_pool = functools.cache(lambda name: smallest_pool(alone, algorithm, name, work))
    division = _Division(alone, base, trainer, least_pool, work, rule_of(alone))
    candidates = []
    dropped = {}
    for train in counts:
        for apart in roles_to_move(base, placeable_roles(algorithm, alone)):
            try:
                candidates.append(_candidate(division, train, world, apart))
            except ValueError as error:
                dropped.setdefault(train, str(error))
    for train in {len(candidate.placement.train.ranks) for candidate in candidates}:
        dropped.pop(train, None)
    if not candidates:
        raise SettingsError(f"{refused}: {next(iter(dropped.values()))}")
    key = functools.partial(_key, room=work.room)

    def trace(candidate: PlacedCandidate) -> PlacedCandidate:
        return _traced(candidate, alone, algorithm, hardware, tokens)

    best = _traced_best(sorted(candidates, key=key), trace, work.room)
    return PlaceSearch(world, hardware, tuple(sorted(best, key=key)), _shared_seconds(division, world), dropped)


def train_counts(world: int) -> list[int]:
    """Numbers of devices to train on: a few, evenly spaced by a power of two."""
    stride = 1 << max(0, math.ceil(math.log2(world / MOST_SPLITS)))
    return list(range(stride, world, stride))


def _key(candidate: PlacedCandidate, room: float) -> tuple[bool, bool, float]:
    nbytes = max((peak.nbytes for peak in candidate.peaks.values()), default=candidate.nbytes)
    return rank_key(candidate.fits(room), candidate.nodes, candidate.result.step, nbytes)


def _best_trainer(settings: Settings, algorithm: Algorithm, count: int, work: Workload) -> _Trainer:
    """The fastest split of training over `count` devices that fits without an engine, traced."""

    def cost(changed: Settings, memo: TraceMemo) -> Estimate:
        job = plain_job(changed, algorithm, work.hardware.memory)
        return estimate(job, work.prompt, work.hardware, "train", memo=memo)

    best = descend(settings, algorithm, count, work.hardware, cost, writes=False).tried[0]
    flags = {name: value for name, value in best.flags.items() if name != "mesh"}
    phases = best.estimate.phases.items()
    seconds = {name: phase_seconds(best.estimate, costs, work.hardware) for name, costs in phases}
    shares = {name: x / sum(seconds.values()) for name, x in seconds.items()}
    return _Trainer(traced_ranks(best.settings, algorithm, work), flags, shares)


def _candidate(division: _Division, train: int, world: int, apart: tuple[str, ...]) -> PlacedCandidate:
    """The best meshes for numbers of devices, simulated.

    Args:
      division: constants of the search.
      train: devices that train.
      world: all devices.
      apart: roles with devices of their own.

    Raises:
      ValueError: there are no such meshes.
    """
    work = division.work
    job, nbytes, update = _trainer_on(division, train, apart)
    seconds = update.seconds(work.mean_rows(job))
    pools = scoring_pools_of(apart, division.least_pool, seconds=seconds, train=train, left=world - train)
    generate = world - train - sum(pool.world for pool in pools.values())
    scored = ScoredUpdate(update, [pool.times for pool in pools.values()]) if pools else update
    engine, run = _best_engine(division, job, scored, generate)
    ranks = _in_turn({"train": job.sizes, "generate": engine} | {name: pool.sizes for name, pool in pools.items()})
    placement = Placement(ranks.pop("train"), ranks.pop("generate"), ranks)
    flags = {"place": str(placement)} | division.trainer.flags
    nodes = math.ceil(max(engine["tensor"], job.sizes["tensor"]) / RANKS_PER_NODE)
    return PlacedCandidate(placement, flags, simulate_rule(run, division.rule), nbytes, nodes)


def _trainer_on(division: _Division, count: int, apart: Sequence[str]) -> tuple[RLJob, float, UpdateTimes]:
    """The trainer's job on `count` devices without some roles, the memory of a rank, and the times of a batch.

    Raises:
      SettingsError: the devices are no multiple of those that share a row.
    """
    traced = division.trainer.traced
    job = traced.full.job
    assert isinstance(job, RLJob)
    world = Mesh(job.sizes).world
    unit = world // job.sizes["data"]
    if count % unit:
        raise SettingsError(f"{count} devices are not a multiple of {unit}")
    sizes = {**job.sizes, "data": count // unit}
    kept = 1 - sum(division.trainer.shares.get(f"score_{name}", 0.0) for name in apart)
    times = traced.times
    update = times._replace(ranks=times.ranks * count // world, token=times.token * kept)
    gone = sum(trees.count(model_of(division.base, name).shapes) for name in apart)
    sharded = count if job.settings.sharding.fsdp else sizes["tensor"]
    nbytes = traced.nbytes(count) - job.dtype.itemsize * gone / sharded
    return dataclasses.replace(job, sizes=sizes, generate_sizes=sizes), nbytes, update


def _best_engine(division: _Division, job: RLJob, update: UpdateLaw, count: int) -> tuple[dict[str, int], AsyncRun]:
    """The mesh of `count` devices that samples the most tokens a second, and the run with it.

    Replicas are tensor parallel inside a node, and over nodes only if a node has no room for the weights.

    Raises:
      SettingsError: no mesh has room.
    """
    work = division.work
    model = division.base.models[division.base.main_role]
    fits_node = division.base.dtype.itemsize * trees.count(model.shapes) / RANKS_PER_NODE <= work.room
    widest = RANKS_PER_NODE if fits_node else RANKS_PER_NODE * MOST_NODES
    runs = []
    for tensor in (n for n in range(1, min(count, widest) + 1) if count % n == 0 and model.abilities.heads % n == 0):
        sizes = dict.fromkeys(AXES, 1) | {"data": count // tensor, "tensor": tensor}
        run = async_run(dataclasses.replace(job, generate_sizes=sizes), update, count, work, division.rule)
        if run.engine.capacity >= work.prompt + work.lengths.most:
            runs.append((sizes, run))
    if not runs:
        raise SettingsError(f"{count} devices have no room to generate with {job.model.config.source.family}")
    return max(runs, key=lambda entry: _tokens_per_second(entry[1]))


def _in_turn(sizes: Mapping[str, dict[str, int]]) -> dict[str, RankPool]:
    """Pools on meshes of these sizes, each on the ranks after those before it."""
    pools = {}
    begin = 0
    for name, mesh in sizes.items():
        end = begin + meshes.Mesh(mesh).world
        pools[name] = RankPool(mesh, tuple(range(begin, end)))
        begin = end
    return pools


def _tokens_per_second(run: AsyncRun) -> float:
    """Tokens that all replicas sample in a second while all slots have rows."""
    rows = min(run.slots, math.ceil(run.rule.places * run.samples / run.replicas))
    context = rows * (run.prompt + run.lengths.mean / 2)
    iteration = float(run.engine.without_context(np.array(rows))) + run.engine.token * context
    return run.replicas * rows / iteration


def _traced_best(
    candidates: list[PlacedCandidate], trace: Callable[[PlacedCandidate], PlacedCandidate], room: float
) -> list[PlacedCandidate]:
    """The candidates, of which the first few are traced until one fits."""
    traced = []
    for candidate in candidates[:TRACED_PLACES]:
        traced.append(trace(candidate))
        if traced[-1].fits(room):
            break
    return traced + candidates[len(traced) :]


def _traced(
    candidate: PlacedCandidate, settings: Settings, algorithm: Algorithm, hardware: Hardware, tokens: int
) -> PlacedCandidate:
    """A candidate with the peaks of all pools."""
    placement = candidate.placement
    chosen = with_flags(settings, **candidate.flags)
    peaks = {}
    for name, pool in placement.pools.items():
        own = pool_settings(chosen, pool, learns=placement.shards(name))
        peaks[name] = peak_of(pool_estimate(own, algorithm, tokens, hardware, name, apart=placement.scoring))
    return candidate._replace(peaks=peaks)


def _shared_seconds(division: _Division, world: int) -> float | None:
    """Seconds of a step where all devices train as the trainer does, and generate by turns; None: they cannot."""
    try:
        job, _, update = _trainer_on(division, world, ())
        run = _best_engine(division, job, update, world)[1]
    except SettingsError:
        return None
    return simulate_rule(run, division.rule._replace(staleness=0, window=1)).step


def chosen_devices(settings: Settings, compose: Callable[[], Algorithm], hardware: Hardware) -> tuple[Settings, str]:
    """Settings with the best mesh or placement instead of auto:N, and a line that describes it.

    Raises:
      SettingsError: the run fits none.
    """
    choose = chosen_mesh if settings.devices.place is None else chosen_place
    return choose(settings, compose, hardware)


def chosen_place(settings: Settings, compose: Callable[[], Algorithm], hardware: Hardware) -> tuple[Settings, str]:
    """Settings with the best placement instead of auto:N, and a line that describes it.

    Raises:
      SettingsError: the run fits no placement.
    """
    result = place_search(settings, compose(), hardware)
    best = result.candidates[0]
    room = size(result.room)
    if not best.fits(result.room):
        pool, peak = max(best.peaks.items(), key=lambda entry: entry[1].nbytes)
        raise SettingsError(
            f"--place={settings.devices.place}: no division of {result.world} devices fits: "
            f"{quoted_flags(best.flags)} needs {size(peak.nbytes)} of {room} per device, to {pool}"
        )
    return with_flags(
        settings, **best.flags
    ), f"--place={settings.devices.place} is {reasons_text(result)}, by a dry run"


def reasons_text(result: PlaceSearch) -> str:
    """The best placement and why: its time, who waits, and what the roles elsewhere and shared devices take."""
    best = result.candidates[0]
    busy = best.result
    beside = "" if result.shared is None else f"; on shared devices {duration_text(result.shared)}"
    return (
        f"{quoted_flags(best.flags)}: {duration_text(busy.step)} a step, in which the trainer works for "
        f"{busy.trainer_busy:.0%} and the generators for {busy.generators_busy:.0%}{_other_roles(result)}{beside}"
    )


def _other_roles(result: PlaceSearch) -> str:
    """Time of the best placement that differs in whether roles have ranks of their own; "": there is none."""
    best = result.candidates[0]
    apart = bool(best.placement.scoring)
    other = next((x for x in result.candidates if bool(x.placement.scoring) != apart), None)
    if other is None:
        return ""
    names = ", ".join((best if apart else other).placement.scoring)
    took = duration_text(other.result.step) if other.fits(result.room) else "it does not fit"
    return f"; with {'no ' if apart else ''}ranks for {names} alone {took}"
