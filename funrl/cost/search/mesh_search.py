"""A search over meshes: all ways to split a run over N devices, ranked by formula; the best are traced.

`--mesh=auto:64` is such a search. --dry_run prints it; a run takes its first mesh. The result depends only on flags,
the model's config.json and the table of hardware, so it is the same on all ranks.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from funrl.algos.core import Algorithm
from funrl.cost.dry_run import check_width, estimate, plain_job, tokens_of
from funrl.cost.rates import Rates, rates_of
from funrl.cost.remedies import Peak, peak_of, written_flags
from funrl.cost.search.closed_form import Rough
from funrl.cost.search.split_variants import (
    TOLERANCE,
    Candidate,
    SearchSpace,
    candidates_of,
    engine_meshes,
    rank_key,
    rough_key,
    search_space,
    tensor_nodes,
)
from funrl.cost.tables import duration_text, size
from funrl.cost.tracing.estimate import Estimate
from funrl.cost.tracing.hardware import USABLE, Hardware
from funrl.mesh import mesh as meshes
from funrl.mesh.plan import RANKS_PER_NODE
from funrl.mesh.text import AXES, ROW_AXES, SHORT
from funrl.models import Model
from funrl.trainer.jobs.compatibility import check_meshes
from funrl.trainer.settings.declaration import SettingsError
from funrl.trainer.settings.settings import Settings, flag_value, with_flags

BEST = 5  # meshes that are traced
SPANNING = 2  # of these, at most so many that fit and whose tensor parallel groups span nodes
RESCUES = 2  # further meshes, if none of the best is sensible and fits


class Traced(NamedTuple):
    """A way to split a run that was traced.

    Attributes:
      settings: settings of the run with this split.
      flags: those that differ from the given ones.
      estimate: cost of a step, traced.
      peak: the largest memory of a rank.
      rates: times and throughput of the run.
      fits: whether a device has room for it.
    """

    settings: Settings
    flags: dict[str, Any]
    estimate: Estimate
    peak: Peak
    rates: Rates
    fits: bool

    @property
    def nodes(self) -> int:
        """Nodes that its widest tensor parallel group spans."""
        return tensor_nodes(self.estimate.job)

    @property
    def sensible(self) -> bool:
        """True if it fits and its tensor parallel groups stay inside a node."""
        return self.fits and self.nodes == 1


class Other(NamedTuple):
    """A way to split a run that was not traced.

    Attributes:
      flags: of this split.
      rough: its cost by formula; None: the split is impossible.
      reason: why it was dropped.
    """

    flags: dict[str, Any]
    rough: Rough | None
    reason: str


class Ranked(NamedTuple):
    """Ways to split a run, by formula.

    Attributes:
      space: the constants of the search.
      splits: the candidates of each split of training, best first.
      others: impossible splits.
      unused: axes that the model is not split over, and why.
    """

    space: SearchSpace
    splits: list[list[Candidate]]
    others: list[Other]
    unused: dict[str, str]


class Search(NamedTuple):
    """Ways to split a run over some devices.

    Attributes:
      world: devices.
      hardware: of the devices.
      best: traced splits in the order of `rank_key`.
      others: the rest, by formula.
      ranked: all splits, by formula.
    """

    world: int
    hardware: Hardware
    best: tuple[Traced, ...]
    others: tuple[Other, ...]
    ranked: Ranked

    @property
    def unused(self) -> dict[str, str]:
        """Axes that the model is not split over, and why."""
        return self.ranked.unused


def search(settings: Settings, algorithm: Algorithm, hardware: Hardware) -> Search:
    """Rank all meshes of --mesh=auto:N by formula and trace the best of them.

    Raises:
      ValueError: a flag cannot work on any mesh, or no mesh is possible; the message has the first reason.
    """
    world = settings.devices.train.wanted or 1
    tokens = tokens_of(settings, algorithm)
    ranked = ranked_splits(settings, algorithm, world, hardware)

    def trace(candidate: Candidate) -> Traced:
        changed = candidate.settings
        estimated = estimate(plain_job(changed, algorithm, hardware.memory), tokens, hardware)
        peak = peak_of(estimated)
        fits = peak.nbytes <= hardware.memory * USABLE
        return Traced(changed, split_flags(changed, settings), estimated, peak, rates_of(estimated, hardware), fits)

    best, errors = _traced(ranked, trace)
    others = [_other(ranked, number, errors, settings) for number in _untraced(ranked, best)] + ranked.others
    if not best:
        reason = others[0].reason if others else "there is none"
        raise SettingsError(f"--mesh={settings.devices.mesh}: no mesh of {world} devices is possible: {reason}")
    best.sort(key=lambda traced: rank_key(traced.fits, traced.nodes, traced.rates.seconds, traced.peak.nbytes))
    return Search(world, hardware, tuple(best), tuple(others), ranked)


def ranked_splits(settings: Settings, algorithm: Algorithm, world: int, hardware: Hardware) -> Ranked:
    """Rank all ways to split a run over `world` devices by formula.

    Raises:
      ValueError: a flag that cannot work on any mesh.
    """
    unshared = {"fsdp": False, "fsdp_axes": None, "grad_reduce_dtype": "auto"}
    alone = with_flags(settings, mesh="dp1", generate_mesh=None, **unshared)
    base = plain_job(alone, algorithm, hardware.memory)
    space = search_space(base, check_width(base, tokens_of(settings, algorithm)), hardware)
    axes, unused = usable_axes(settings, base.models)
    engines = engine_meshes(space, settings, world)
    splits: list[list[Candidate]] = []
    others: list[Other] = []
    for changed in ways(settings, world, axes, has_experts(base.models)):
        try:
            splits.append(candidates_of(space, changed, engines))
        except ValueError as error:
            reason = str(error).removeprefix(f"--mesh={changed.devices.mesh}: ")
            others.append(Other(split_flags(changed, settings), None, reason))
    splits.sort(key=lambda candidates: rough_key(candidates[0], space.room))
    return Ranked(space, splits, others, unused)


def _traced(ranked: Ranked, trace: Callable[[Candidate], Traced]) -> tuple[list[Traced], dict[int, str]]:
    """Trace the best candidate of each of the first splits.

    If a traced split does not fit, a candidate of it with less memory is traced too. If nothing sensible fits, so are
    candidates that exceed the memory by a little, by formula.

    Returns: the traced splits, and the reason for each split, by number, that could not be traced.
    """
    best: list[Traced] = []
    errors: dict[int, str] = {}

    def attempt(number: int, candidate: Candidate) -> Traced | None:
        try:
            best.append(trace(candidate))
        except ValueError as error:
            errors[number] = str(error)
            return None
        return best[-1]

    room = ranked.space.room
    splits = ranked.splits
    waiting = [(rough_key(candidates[0], room), number, 0) for number, candidates in enumerate(splits)]
    while waiting and len(best) < BEST and sum(traced.fits and traced.nodes > 1 for traced in best) < SPANNING:
        _, number, position = heapq.heappop(waiting)
        traced = attempt(number, splits[number][position])
        rough = splits[number][position].rough
        if traced is not None and not traced.fits and rough.nbytes <= room:
            later = enumerate(splits[number][position + 1 :], position + 1)
            leaner = (i for i, candidate in later if candidate.rough.nbytes < rough.nbytes)
            for position in leaner:
                heapq.heappush(waiting, (rough_key(splits[number][position], room), number, position))
                break
    if any(traced.sensible for traced in best):
        return best, errors
    tried = [traced.settings for traced in best]
    near = []
    for number, candidates in enumerate(splits):
        inside = [x for x in candidates if x.nodes == 1 and x.rough.nbytes < TOLERANCE * room]
        leanest = min(inside, key=lambda candidate: candidate.rough.nbytes, default=None)
        if leanest is not None and number not in errors and leanest.settings not in tried:
            near.append((leanest.rough.nbytes, number, leanest))
    for _, number, candidate in heapq.nsmallest(RESCUES, near, key=lambda entry: entry[0]):
        attempt(number, candidate)
    return best, errors


def _untraced(ranked: Ranked, best: Sequence[Traced]) -> list[int]:
    """The numbers of the splits none of whose candidates was traced."""
    traced = {_training(candidates.settings) for candidates in best}
    return [
        number for number, candidates in enumerate(ranked.splits) if _training(candidates[0].settings) not in traced
    ]


def _training(settings: Settings) -> tuple[str, bool, str | None]:
    return settings.devices.mesh, settings.sharding.fsdp, settings.sharding.fsdp_axes


def _other(ranked: Ranked, number: int, errors: Mapping[int, str], given: Settings) -> Other:
    """The best candidate by formula of a split that was not traced, with the reason why it was dropped."""
    best = ranked.splits[number][0]
    reason = errors.get(number)
    if reason is None and best.rough.nbytes > ranked.space.room:
        reason = "too large"
    elif reason is None:
        reason = "slower" if best.nodes == 1 else spans_text(best.nodes)
    return Other(split_flags(best.settings, given), best.rough, reason)


def spans_text(nodes: int) -> str:
    """Remark on a tensor parallel group that spans nodes."""
    return f"tp over {nodes} nodes"


def ways(settings: Settings, world: int, axes: tuple[str, ...], experts: bool) -> Iterator[Settings]:
    """Enumerate the ways to split a run: each factorisation of the devices with each way to shard weights.

    Weights are whole, sharded over all rows, or sharded inside groups of neighboring ranks. Flags that are given stay.

    Args:
      settings: the flags.
      world: devices.
      axes: axes that the model can be split over.
      experts: whether the model has experts to split; if not, the expert axis only forms such groups.
    """
    free = [axis for axis in AXES if axis in axes]
    for sizes in factorisations(world, len(free)):
        mesh = dict.fromkeys(AXES, 1) | dict(zip(free, sizes, strict=True))
        given = with_flags(settings, mesh=meshes.text(mesh))
        if mesh["expert"] == 1 or experts or settings.sharding.fsdp_axes is not None:
            if not settings.sharding.fsdp:
                yield given
            if settings.sharding.fsdp or any(mesh[axis] > 1 for axis in ROW_AXES):
                yield with_flags(given, fsdp=True)
        elif mesh["data"] > 1 and mesh["expert"] * mesh["tensor"] == RANKS_PER_NODE:
            yield with_flags(given, fsdp=True, fsdp_axes="ep")


def factorisations(world: int, count: int) -> Iterator[tuple[int, ...]]:
    """All `count` numbers whose product is `world`, in every order."""
    if count <= 1:
        yield (world,) * count
        return
    for first in (n for n in range(1, world + 1) if world % n == 0):
        for rest in factorisations(world // first, count - 1):
            yield (first, *rest)


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
    return any("experts" in axes for model in models.values() for axes in _logical(model.axes))


def _logical(axes: Any) -> Iterator[tuple[str, ...]]:
    """The logical axes of all leaves."""
    if isinstance(axes, tuple) and all(isinstance(axis, str) for axis in axes):
        yield axes
    else:
        for child in axes.values() if isinstance(axes, Mapping) else axes:
            yield from _logical(child)


def split_flags(settings: Settings, given: Settings) -> dict[str, Any]:
    """The flags that split a run, and those that differ from the given ones."""
    chosen = {name: flag_value(settings, name) for name in ("mesh", "generate_mesh", "fsdp", "fsdp_axes")}
    flags = {name: value for name, value in chosen.items() if value}
    saving = ("remat", "token_budget")
    return flags | {
        name: flag_value(settings, name) for name in saving if flag_value(settings, name) != flag_value(given, name)
    }


def chosen_mesh(settings: Settings, compose: Callable[[], Algorithm], hardware: Hardware) -> tuple[Settings, str]:
    """Settings with the best mesh instead of auto:N, and a line that describes it.

    Raises:
      SettingsError: the run fits no mesh; the message has the memory that the best one needs.
    """
    result = search(settings, compose(), hardware)
    best = result.best[0]
    flags = written_flags(best.flags)
    held = size(best.peak.nbytes)
    room = size(hardware.memory * USABLE)
    if not best.fits:
        raise SettingsError(
            f"--mesh={settings.devices.mesh}: no mesh of {result.world} devices fits: {flags} "
            f"needs {held} of {room} per device, in {best.peak.phase}; with --dry_run this command shows what helps"
        )
    slow = "" if best.sensible else f", {spans_text(best.nodes)}, as nothing else fits"
    text = (
        f"--mesh={settings.devices.mesh} is {flags}: {held} of a device's {room}, "
        f"{duration_text(best.rates.seconds)} a step"
    )
    return best.settings, f"{text}{slow}, by a dry run"
