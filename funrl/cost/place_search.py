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

from funrl.algos.core import Algorithm
from funrl.asynchrony.admission import AdmissionRule
from funrl.cost.dry_run import plain_job, tokens_of
from funrl.cost.pools import pool_estimate, pool_settings
from funrl.cost.schedules import (
    MOST_SPLITS,
    Workload,
    async_run,
    lengths_of,
    rule_of,
    scoring_times,
    simulate_rule,
    verdict_times,
)
from funrl.cost.search import (
    Candidate,
    Ranked,
    chosen_mesh,
    engine_meshes,
    parameters,
    rank_key,
    ranked_splits,
    scoring_bytes,
    split_flags,
    split_of,
    tensor_nodes,
    training_bytes,
    training_seconds,
)
from funrl.cost.simulation import AsyncRun, ScoredUpdate, Simulated, UpdateLaw
from funrl.cost.tables import duration_text, size
from funrl.cost.tracing.hardware import USABLE, Hardware
from funrl.cost.verdict import Peak, peak_of, quoted_flags
from funrl.mesh import mesh as meshes
from funrl.mesh.mesh import Mesh
from funrl.mesh.plan import RANKS_PER_NODE
from funrl.mesh.pools.placement import Placement, RankPool
from funrl.mesh.text import AXES, MeshError
from funrl.models import Model
from funrl.trainer.jobs.job import RLJob
from funrl.trainer.jobs.models import placeable_roles
from funrl.trainer.jobs.sharding import check_layouts, sizes_on_trainers
from funrl.trainer.settings.declaration import SettingsError
from funrl.trainer.settings.scorers import JUDGE
from funrl.trainer.settings.settings import Settings, with_flags


class ScoringPool(NamedTuple):
    """Devices of a role.

    Attributes:
      sizes: of their mesh.
      times: of a batch.
      seconds: of a batch of mean rows.
    """

    sizes: dict[str, int]
    times: UpdateLaw
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
    ordered = sorted(names, key=lambda name: -parameters(model_of(job, name)))
    return list(dict.fromkeys([(), tuple(ordered[:1]), tuple(ordered)]))


def without_roles(job: RLJob, names: Sequence[str]) -> RLJob:
    """The job of ranks that do not have some roles."""
    models = {name: model for name, model in job.models.items() if name not in names}
    return dataclasses.replace(job, models=models, judge=None if JUDGE in names else job.judge)


def scoring_pools_of(
    job: RLJob, names: Sequence[str], shallow: Mapping[str, Model], work: Workload, *, seconds: float, left: int
) -> dict[str, ScoringPool]:
    """Devices for each of some roles, of which the trainer waits for one after the other.

    A trainer of T devices that works for t seconds, and a pool of R that works for r, take the least time together with
    R / T = sqrt(R r / (T t)). The power of two below that is taken, but at least the fewest devices with room.

    Args:
      job: on the mesh of its trainer, with all roles.
      names: of the roles.
      shallow: their models with few layers, which have the layouts of whole ones.
      work: rows of the run.
      seconds: of the trainer, on a batch of mean rows.
      left: devices that do not train, of which one has to generate.

    Raises:
      SettingsError: they have no room for the models.
    """
    train = Mesh(job.sizes).world
    pools = {name: _least_pool(job, name, shallow, work) for name in names}
    left -= 1 + sum(pool.world for pool in pools.values())
    if left < 0:
        raise SettingsError(f"no device is left to generate beside those of {', '.join(names)}")
    for name, least in pools.items():
        wanted = min(math.sqrt(train * least.world * least.seconds / seconds), least.world + left)
        count = max(least.world, 1 << int(math.log2(max(1.0, wanted))))
        pools[name] = _best_pool(job, name, shallow, count, work) or least
        left -= pools[name].world - least.world
    return pools


def _least_pool(job: RLJob, name: str, shallow: Mapping[str, Model], work: Workload) -> ScoringPool:
    """The smallest pool with room for a role. Raises: SettingsError: a node has none."""
    for power in range(int(math.log2(RANKS_PER_NODE)) + 1):
        pool = _best_pool(job, name, shallow, 1 << power, work)
        if pool is not None:
            return pool
    raise SettingsError(f"a node has no room for the {name}")


def _best_pool(job: RLJob, name: str, shallow: Mapping[str, Model], count: int, work: Workload) -> ScoringPool | None:
    """The fastest mesh of `count` devices with room for a role; None: there is none."""
    best = None
    for tensor in (n for n in range(1, min(count, RANKS_PER_NODE) + 1) if count % n == 0):
        sizes = dict.fromkeys(AXES, 1) | {"data": count // tensor, "tensor": tensor}
        try:
            check_layouts({name: shallow[name]}, job.settings, sizes, sizes)
        except MeshError:
            continue
        pool = _pool_on(job, name, sizes, work)
        if pool is not None and (best is None or pool.seconds < best.seconds):
            best = pool
    return best


def _pool_on(job: RLJob, name: str, sizes: dict[str, int], work: Workload) -> ScoringPool | None:
    """A role on a mesh; None: it has no room there, by formula."""
    rows = work.mean_rows(job)
    longest = work.prompt + work.lengths.most
    if name == JUDGE and job.judge is not None:
        verdicts = verdict_times(job, job.judge._replace(sizes=sizes), work)
        fits = verdicts.engine.capacity >= longest + verdicts.template + verdicts.written
        return ScoringPool(sizes, verdicts, verdicts.seconds(rows)) if fits else None
    own = dataclasses.replace(job, sizes=sizes, generate_sizes=sizes)
    if scoring_bytes(own, name, longest, work.hardware) > work.hardware.memory * USABLE:
        return None
    times = scoring_times(own, name, work)
    return ScoringPool(sizes, times, times.seconds(rows))


TRACED_PLACES = 3  # placements that are traced, unless one fits before


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
    """The best mesh to train on.

    Attributes:
      job: on that mesh.
      flags: that differ from the given ones.
      nbytes: memory of a rank, by formula.
      pools: devices of roles that it does not have.
    """

    job: RLJob
    flags: dict[str, Any]
    nbytes: float
    pools: Mapping[str, ScoringPool]


def place_search(settings: Settings, algorithm: Algorithm, hardware: Hardware) -> PlaceSearch:
    """Simulate divisions of the devices of --place=auto:N and trace the best of them.

    Raises:
      ValueError: a flag cannot work on any division, or no division is possible; the message has the first reason.
    """
    world = settings.devices.train.wanted or 2
    alone = with_flags(settings, place=None, dry_run=True)
    tokens = tokens_of(alone, algorithm)
    base = plain_job(with_flags(alone, balance_pictures=False), algorithm, hardware.memory)  # of one device
    assert isinstance(base, RLJob)
    work = Workload(lengths_of(alone, base.sampling.max_new_tokens), tokens, hardware)
    rule = rule_of(alone)
    ranked = functools.cache(lambda count: ranked_splits(alone, algorithm, count, hardware))
    moves = roles_to_move(base, placeable_roles(algorithm, alone))
    candidates = []
    dropped = {}
    for train in train_counts(world):
        for apart in moves:
            try:
                candidates.append(_candidate(ranked(train), alone, (train, world), apart, work, rule))
            except ValueError as error:
                dropped.setdefault(train, str(error))
    for train in {len(candidate.placement.train.ranks) for candidate in candidates}:
        dropped.pop(train, None)
    if not candidates:
        reason = next(iter(dropped.values()), "one device cannot be divided")
        raise SettingsError(f"--place={settings.devices.place}: no division of {world} devices is possible: {reason}")
    room = hardware.memory * USABLE
    key = functools.partial(_key, room=room)

    def trace(candidate: PlacedCandidate) -> PlacedCandidate:
        return _traced(candidate, alone, algorithm, hardware, tokens)

    best = _traced_best(sorted(candidates, key=key), trace, room)
    shared = _shared_seconds(lambda: ranked(world), work, rule)
    return PlaceSearch(world, hardware, tuple(sorted(best, key=key)), shared, dropped)


def train_counts(world: int) -> list[int]:
    """Numbers of devices to train on: a few, evenly spaced by a power of two."""
    stride = 1 << max(0, math.ceil(math.log2(world / MOST_SPLITS)))
    return list(range(stride, world, stride))


def _key(candidate: PlacedCandidate, room: float) -> tuple[bool, bool, float]:
    nbytes = max((peak.nbytes for peak in candidate.peaks.values()), default=candidate.nbytes)
    return rank_key(candidate.fits(room), candidate.nodes, candidate.result.step, nbytes)


def _candidate(
    ranked: Ranked,
    settings: Settings,
    counts: tuple[int, int],
    apart: tuple[str, ...],
    work: Workload,
    rule: AdmissionRule,
) -> PlacedCandidate:
    """The best meshes for numbers of devices, simulated.

    Args:
      ranked: splits of the trainer.
      settings: the flags.
      counts: of devices that train, and of all.
      apart: roles with devices of their own.
      work: rows of the run.
      rule: of admission.

    Raises:
      ValueError: there are no such meshes.
    """
    train, world = counts
    trainer = _best_trainer(ranked, settings, apart, work, left=world - train)
    pools = trainer.pools
    generate = world - train - sum(pool.world for pool in pools.values())
    engines = engine_meshes(ranked.space, with_flags(settings, generate_mesh=None), generate)
    runs = [(text, _run(trainer, text, generate, work, rule)) for text in engines]
    roomy = [(text, run) for text, run in runs if run.engine.capacity >= work.prompt + work.lengths.most]
    if not roomy:
        raise SettingsError(
            f"{generate} devices have no room to generate with {trainer.job.model.config.source.family}"
        )
    text, run = max(roomy, key=lambda entry: _tokens_per_second(entry[1]))
    sizes = {"train": trainer.job.sizes, "generate": meshes.parse(text)}
    ranks = _in_turn(sizes | {name: pool.sizes for name, pool in pools.items()})
    placement = Placement(ranks.pop("train"), ranks.pop("generate"), ranks)
    job = dataclasses.replace(trainer.job, generate_sizes=meshes.parse(text))
    flags = {"place": str(placement)} | trainer.flags
    return PlacedCandidate(placement, flags, simulate_rule(run, rule), trainer.nbytes, nodes=tensor_nodes(job))


def _in_turn(sizes: Mapping[str, dict[str, int]]) -> dict[str, RankPool]:
    """Pools on meshes of these sizes, each on the ranks after those before it."""
    pools = {}
    begin = 0
    for name, mesh in sizes.items():
        end = begin + meshes.Mesh(mesh).world
        pools[name] = RankPool(mesh, tuple(range(begin, end)))
        begin = end
    return pools


def _best_trainer(ranked: Ranked, settings: Settings, apart: tuple[str, ...], work: Workload, left: int) -> _Trainer:
    """The fastest split of training that fits without an engine and some roles, by formula, and pools of these roles.

    Args:
      ranked: splits of the trainer.
      settings: the flags.
      apart: the roles.
      work: rows of the run.
      left: devices that do not train.

    Raises:
      SettingsError: there is no split, or no room for a role.
    """
    hardware = work.hardware
    width = work.prompt + work.lengths.most
    best = None
    for candidate in (candidate for candidates in ranked.splits for candidate in candidates):
        job = without_roles(_training_job(ranked, candidate), apart)
        nbytes = training_bytes(job, width, hardware) + _judge_bytes(job)
        seconds = training_seconds(job, split_of(job, width, hardware), hardware)
        nodes = math.ceil(job.sizes["tensor"] / RANKS_PER_NODE)
        key = rank_key(nbytes <= ranked.space.room, nodes, seconds, nbytes)
        if best is None or key < best[0]:
            flags = split_flags(job.settings, settings)
            del flags["mesh"]
            best = key, _Trainer(job, flags, nbytes, {}), candidate
    if best is None:
        raise SettingsError(ranked.others[0].reason if ranked.others else "the model has no mesh of so many devices")
    _, trainer, candidate = best
    shallow = dict(ranked.space.shallow)
    whole = _training_job(ranked, candidate)
    if whole.judge is not None:
        shallow[JUDGE] = whole.judge.model
    seconds = async_run(trainer.job, 1, work, rule_of(settings)).update.seconds(work.mean_rows(whole))
    return trainer._replace(pools=scoring_pools_of(whole, apart, shallow, work, seconds=seconds, left=left))


def _judge_bytes(job: RLJob) -> float:
    """Bytes of the weights of a judge on a rank that trains."""
    judge = job.judge
    return 0.0 if judge is None else job.dtype.itemsize * parameters(judge.model) / judge.sizes["tensor"]


def _training_job(ranked: Ranked, candidate: Candidate) -> RLJob:
    """The job of a candidate, without its engine."""
    settings = with_flags(candidate.settings, generate_mesh=None)
    sizes = settings.devices.train.chosen
    job = ranked.space.base
    assert isinstance(job, RLJob)
    judge = job.judge
    if judge is not None:
        memory = ranked.space.hardware.memory
        judge = judge._replace(sizes=sizes_on_trainers(settings, sizes, judge.model, memory))
    return dataclasses.replace(job, settings=settings, sizes=sizes, generate_sizes=sizes, judge=judge)


def _run(trainer: _Trainer, engine: str, generate: int, work: Workload, rule: AdmissionRule) -> AsyncRun:
    """The run with an engine on a mesh of devices of its own."""
    run = async_run(dataclasses.replace(trainer.job, generate_sizes=meshes.parse(engine)), generate, work, rule)
    scoring = [pool.times for pool in trainer.pools.values()]
    return run._replace(update=ScoredUpdate(run.update, scoring)) if scoring else run


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


def _shared_seconds(ranked: Callable[[], Ranked], work: Workload, rule: AdmissionRule) -> float | None:
    """Seconds of a step on the best mesh of all devices, which take turns; None: there is no mesh."""
    result = ranked()
    if not result.splits:
        return None
    best = result.splits[0][0]
    job = _training_job(result, best)
    devices = meshes.Mesh(job.sizes).world
    generate = best.settings.devices.generate
    run = async_run(
        job if generate is None else dataclasses.replace(job, generate_sizes=generate.sizes), devices, work, rule
    )
    return simulate_rule(run, rule._replace(staleness=0, window=1)).step


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
