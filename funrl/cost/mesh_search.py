"""A search over meshes: all ways to split a run over N devices, ranked by formula, the best of them traced.

`--mesh=auto:64` is such a search. With --dry_run it is printed; a run takes the first of it. What it finds depends on
flags, the model's config.json and the table of hardware alone, so that all ranks find the same.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from funrl.algos.core import Algorithm
from funrl.cost.closed_form import Rough, closed_form
from funrl.cost.dry_run import check_width, estimate, plain_job, tokens_of
from funrl.cost.estimate import Estimate
from funrl.cost.hardware import USABLE, Hardware
from funrl.cost.rates import Rates, rates_of
from funrl.cost.remedies import Peak, peak_of
from funrl.mesh import mesh as meshes
from funrl.mesh.plan import RANKS_PER_NODE
from funrl.mesh.text import AXES, ROW_AXES, SHORT, wanted_devices
from funrl.models import Model
from funrl.trainer.checks import check_together
from funrl.trainer.declaration import SettingsError
from funrl.trainer.job import Job
from funrl.trainer.job_checks import check_meshes
from funrl.trainer.settings import Settings

BEST = 5  # meshes that are traced


class Traced(NamedTuple):
    """A way to split a run that was traced.

    Attributes:
      settings: of a run that is split so.
      found: the estimate.
      peak: the most that a rank holds.
      rates: of the run.
      fits: whether a device has room for it.
    """

    settings: Settings
    found: Estimate
    peak: Peak
    rates: Rates
    fits: bool

    @property
    def flags(self) -> dict[str, Any]:
        """The flags that split it."""
        return split_flags(self.settings)


class Other(NamedTuple):
    """A way to split a run that was not traced.

    Attributes:
      flags: that split it so.
      rough: its cost by formula; None: it cannot be.
      reason: why it falls out.
    """

    flags: dict[str, Any]
    rough: Rough | None
    reason: str


class Search(NamedTuple):
    """Ways to split a run over some devices.

    Attributes:
      world: devices.
      hardware: by which it was searched.
      best: those that were traced: those that fit by their time, then the others by their memory.
      others: the rest, by formula.
      unused: axes that the model is not split over, and why.
    """

    world: int
    hardware: Hardware
    best: tuple[Traced, ...]
    others: tuple[Other, ...]
    unused: dict[str, str]


def search(settings: Settings, algorithm: Algorithm, hardware: Hardware) -> Search:
    """Rank all meshes of --mesh=auto:N by formula and trace the best of them.

    Raises:
      ValueError: a flag that cannot work on any mesh; or the first reason, where no mesh can be.
    """
    world, room = wanted_devices(settings.mesh) or 1, hardware.memory * USABLE
    tokens = tokens_of(settings, algorithm)
    base = plain_job(dataclasses.replace(settings, mesh="dp1", generate_mesh=None, fsdp=False, fsdp_axes=None),
                     algorithm, hardware.memory)  # fmt: skip
    width = check_width(base, tokens)
    axes, unused = usable_axes(settings, base.models)
    ranked: list[tuple[Settings, Rough]] = []
    others: list[Other] = []
    for changed in ways(settings, world, axes, has_experts(base.models)):
        try:
            job = _job_of(base, changed, hardware)
        except ValueError as error:
            others.append(Other(split_flags(changed), None, str(error).removeprefix(f"--mesh={changed.mesh}: ")))
        else:
            ranked.append((changed, closed_form(job, width, hardware)))
    ranked.sort(key=lambda one: _rank(one[1].nbytes <= room, one[1].seconds, one[1].nbytes))
    best = []
    for changed, rough in ranked:
        if len(best) == BEST:
            slow = "slower" if rough.nbytes <= room else "does not fit"
            others.append(Other(split_flags(changed), rough, slow))
            continue
        try:
            best.append(_traced(changed, algorithm, tokens, hardware))
        except ValueError as error:
            others.append(Other(split_flags(changed), rough, str(error)))
    if not best:
        reason = others[0].reason if others else "there is none"
        raise SettingsError(f"--mesh={settings.mesh}: no mesh of {world} devices can be: {reason}")
    best.sort(key=lambda one: _rank(one.fits, one.rates.seconds, one.peak.nbytes))
    others.sort(key=lambda one: one.rough is None)
    return Search(world, hardware, tuple(best), tuple(others), unused)


def ways(settings: Settings, world: int, axes: tuple[str, ...], experts: bool) -> Iterator[Settings]:
    """All ways to split a run: over each factorisation of the devices, with weights whole, sharded over all rows, or
    sharded inside of groups whose ranks are neighbours. A flag that is given stays.

    Args:
      axes: that the model can be split over.
      experts: whether it has experts, which the expert axis splits; else that axis only makes such groups.
    """
    free = [axis for axis in AXES if axis in axes]
    for sizes in factorisations(world, len(free)):
        mesh = dict.fromkeys(AXES, 1) | dict(zip(free, sizes, strict=True))
        given = dataclasses.replace(settings, mesh=meshes.text(mesh))
        if mesh["expert"] == 1 or experts or settings.fsdp_axes is not None:
            if not settings.fsdp:
                yield given
            if settings.fsdp or any(mesh[axis] > 1 for axis in ROW_AXES):
                yield dataclasses.replace(given, fsdp=True)
        elif mesh["data"] > 1 and mesh["expert"] * mesh["tensor"] == RANKS_PER_NODE:
            yield dataclasses.replace(given, fsdp=True, fsdp_axes="ep")


def factorisations(world: int, count: int) -> Iterator[tuple[int, ...]]:
    """All `count` numbers whose product is `world`, in every order."""
    if count <= 1:
        yield (world,) * count
        return
    for first in (n for n in range(1, world + 1) if world % n == 0):
        for rest in factorisations(world // first, count - 1):
            yield (first, *rest)


def usable_axes(settings: Settings, models: Mapping[str, Model]) -> tuple[tuple[str, ...], dict[str, str]]:
    """The axes that a run may be split over, and why it may not over the others."""
    usable, unused = ["data", "tensor"], {}
    for axis in (axis for axis in AXES if axis not in usable):
        short = next(short for short, name in SHORT.items() if name == axis)
        probe = dataclasses.replace(settings, mesh=f"{short}2", generate_mesh=None, fsdp=axis in ROW_AXES)
        probe = dataclasses.replace(probe, fsdp_axes=settings.fsdp_axes if settings.fsdp else None)
        try:
            check_meshes(probe, models, meshes.parse(probe.mesh), float("inf"))
            usable.append(axis)
        except ValueError as error:
            unused[short] = str(error).rpartition(f"{short}2: ")[2]
    return tuple(usable), unused


def has_experts(models: Mapping[str, Model]) -> bool:
    """True if some weight of a model has experts."""
    return any("experts" in axes for model in models.values() for axes in _logical(model.axes))


def _logical(axes: Any) -> Iterator[tuple[str, ...]]:
    """The logical axes of all leaves."""
    if isinstance(axes, tuple) and all(isinstance(one, str) for one in axes):
        yield axes
    else:
        for one in axes.values() if isinstance(axes, Mapping) else axes:
            yield from _logical(one)


def split_flags(settings: Settings) -> dict[str, Any]:
    """The flags that split a run."""
    chosen = {name: getattr(settings, name) for name in ("mesh", "generate_mesh", "fsdp", "fsdp_axes")}
    return {name: value for name, value in chosen.items() if value}


def _job_of(base: Job, settings: Settings, hardware: Hardware) -> Job:
    """The job on another mesh. Raises: ValueError, its models cannot be laid out there."""
    check_together(settings)
    sizes = meshes.parse(settings.mesh)
    generating = check_meshes(settings, base.models, sizes, hardware.memory)
    return base._replace(settings=settings, sizes=sizes, generate_sizes=generating)


def _traced(settings: Settings, algorithm: Algorithm, tokens: int, hardware: Hardware) -> Traced:
    found = estimate(plain_job(settings, algorithm, hardware.memory), tokens, hardware)
    peak = peak_of(found)
    return Traced(settings, found, peak, rates_of(found, hardware), peak.nbytes <= hardware.memory * USABLE)


def _rank(fits: bool, seconds: float, nbytes: float) -> tuple[bool, float]:
    return (not fits, seconds if fits else nbytes)


def chosen_mesh(settings: Settings, compose: Callable[[], Algorithm], hardware: Hardware) -> tuple[Settings, str]:
    """Settings with the best mesh instead of auto:N, and a line that tells of it.

    Raises:
      SettingsError: the run fits on none, with what the best of them needs.
    """
    found = search(settings, compose(), hardware)
    best = found.best[0]
    flags = " ".join(f"--{name}" if value is True else f"--{name}={value}" for name, value in best.flags.items())
    held, room = (f"{nbytes / 1e9:.3g} GB" for nbytes in (best.peak.nbytes, hardware.memory * USABLE))
    if not best.fits:
        raise SettingsError(
            f"--mesh={settings.mesh}: no mesh of {found.world} devices fits: {flags} needs {held} of {room} a device, "
            f"in {best.peak.phase}; with --dry_run this command says what helps"
        )
    text = f"--mesh={settings.mesh} is {flags}: {held} of a device's {room}, {best.rates.seconds:.3g} s a step"
    return best.settings, f"{text}, by a dry run"
