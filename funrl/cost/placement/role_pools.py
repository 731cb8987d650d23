"""Devices of their own for roles that only score, and for a judge, in a search over placements."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from funrl.cost.schedules.simulation import UpdateLaw
from funrl.cost.schedules.splits import Workload, scoring_times, verdict_times
from funrl.cost.search.closed_form import scoring_bytes
from funrl.cost.search.closed_split import parameters
from funrl.cost.tracing.hardware import USABLE
from funrl.mesh.mesh import Mesh
from funrl.mesh.plan import RANKS_PER_NODE
from funrl.mesh.text import AXES, MeshError
from funrl.models import Model
from funrl.trainer.jobs.job import RLJob
from funrl.trainer.jobs.sharding import check_layouts
from funrl.trainer.settings.declaration import SettingsError
from funrl.trainer.settings.scorers import JUDGE


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
