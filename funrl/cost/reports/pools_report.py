"""Report of a dry run of pools: what a rank of each holds and does, and what goes between them."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import NamedTuple

from funrl.cost.placement.pool_settings import pool_settings
from funrl.cost.placement.transfers import PoolTransfer
from funrl.cost.rates import step_seconds
from funrl.cost.remedies import Verdict, verdict_of
from funrl.cost.reports.dry_json import as_object
from funrl.cost.reports.schedule_report import Schedules, schedules_object, schedules_text
from funrl.cost.tables import duration_text, size, table
from funrl.cost.tracing.estimate import Estimate
from funrl.cost.tracing.hardware import Hardware
from funrl.mesh.pools.placement import Placement
from funrl.trainer.settings.settings import Settings

PoolCosts = Callable[[Settings, Hardware, str], Estimate]
Describe = Callable[[Estimate, Settings, Verdict, Hardware], str]


class PlacedRun(NamedTuple):
    """A placement and what its pools exchange.

    Attributes:
      placement: of the ranks.
      transfers: between the pools in a step.
      schedules: simulated runs; None: none are asked for.
    """

    placement: Placement
    transfers: Sequence[PoolTransfer]
    schedules: Schedules | None = None


def pools_report(settings: Settings, run: PlacedRun, costs: PoolCosts, describe: Describe, hardware: Hardware) -> str:
    """Tables and a verdict for each pool, what goes between them, and a step; or with --json one object.

    Args:
      settings: the flags.
      run: how they place it.
      costs: (settings, hardware, name of a pool) -> the estimate of a rank that does only that.
      describe: (estimate, flags of the pool, whether it fits, hardware) -> its tables.
      hardware: of each rank.
    """
    placement = run.placement
    parts = [f"place {placement}"]
    objects: dict[str, object] = {"place": str(placement)}
    seconds = {}
    for name, pool in placement.pools.items():
        own = pool_settings(settings, pool, learns=placement.shards(name))
        estimate = costs(own, hardware, name)
        fits = verdict_of(estimate, own, hardware, lambda changed, name=name: costs(changed, hardware, name))
        objects[name] = as_object(estimate, fits, hardware)
        parts.append(f"{name}: {describe(estimate, own, fits, hardware)}")
        seconds[name] = step_seconds(estimate, hardware)
    moved = {transfer.content: transfer.seconds(hardware) for transfer in run.transfers}
    overlaps = settings.asynchrony.staleness > 0
    parts.append(transfers_text(run.transfers, hardware))
    if placement.scoring:
        parts.append(f"not counted: rows to the ranks of {', '.join(placement.scoring)}, and what comes back")
    parts.append(_step_text(seconds, moved, overlaps))
    if settings.estimate.json:
        objects["transfers"] = [transfer._asdict() for transfer in run.transfers]
        objects["step"] = {"seconds": placed_seconds(seconds, moved, overlaps), **seconds, **moved}
        if run.schedules is not None:
            objects["schedules"] = schedules_object(run.schedules)
        return json.dumps(objects, indent=1)
    if run.schedules is not None:
        parts.append(schedules_text(run.schedules))
    return "\n\n".join(parts)


def transfers_text(transfers: Sequence[PoolTransfer], hardware: Hardware) -> str:
    """Table of what goes between the pools."""
    rows = [
        (x.content, size(x.sent), size(x.received), str(x.messages), duration_text(x.seconds(hardware), 3))
        for x in transfers
    ]
    head = ("between the pools", "a rank sends", "a rank receives", "messages", "seconds")
    return "\n".join([*table(head, rows), "sent, received, messages: of the rank with the most of each"])


def placed_seconds(pools: dict[str, float], moved: dict[str, float], overlaps: bool) -> float:
    """Seconds of a step, where all rows have full length.

    Args:
      pools: seconds of each pool's work.
      moved: seconds of what goes between them.
      overlaps: whether the pools work at the same time.
    """
    generating = pools["generate"]
    others = sum(pools.values()) - generating
    return (max(generating, others) if overlaps else generating + others) + sum(moved.values())


def _step_text(pools: dict[str, float], moved: dict[str, float], overlaps: bool) -> str:
    total = duration_text(placed_seconds(pools, moved, overlaps))
    each = ", ".join(f"{name} {duration_text(x)}" for name, x in (pools | moved).items())
    if overlaps:
        return f"a step takes {total}, with both pools at work at the same time: {each}"
    return f"a step takes {total}, as the pools take turns: {each}"
