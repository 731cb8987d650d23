"""Report of a dry run of pools: what a rank that trains and a rank that generates hold and do."""

from __future__ import annotations

import json
from collections.abc import Callable

from funrl.cost.remedies import Verdict, verdict_of
from funrl.cost.reports.dry_json import as_object
from funrl.cost.tracing.estimate import Estimate
from funrl.cost.tracing.hardware import Hardware
from funrl.mesh.mesh import text
from funrl.mesh.pools.placement import Placement, RankPool
from funrl.trainer.settings.settings import Settings, with_flags

UNSHARDED = {
    "fsdp": False,
    "fsdp_axes": None,
    "fsdp_models": None,
    "grad_reduce_dtype": "auto",
    "sequence_parallel": "auto",
    "split_residual": "auto",
}
PoolCosts = Callable[[Settings, Hardware, str], Estimate]
Describe = Callable[[Estimate, Settings, Verdict, Hardware], str]


def pools_report(
    settings: Settings, placement: Placement, costs: PoolCosts, describe: Describe, hardware: Hardware
) -> str:
    """Tables and a verdict for each pool, or with --json one object.

    The pools take turns: a step takes the sum of both.

    Args:
      settings: the flags.
      placement: of the ranks.
      costs: (settings, hardware, name of a pool) -> the estimate of a rank that does only that.
      describe: (estimate, flags of the pool, whether it fits, hardware) -> its tables.
      hardware: of each rank.
    """
    pools = {"train": placement.train, "generate": placement.generate}
    parts = [f"place {placement}"]
    objects: dict[str, object] = {"place": str(placement)}
    for name, pool in pools.items():
        own = pool_settings(settings, pool, learns=name == "train")
        estimate = costs(own, hardware, name)
        fits = verdict_of(estimate, own, hardware, lambda changed, name=name: costs(changed, hardware, name))
        estimate = estimate._replace(left_out=(*estimate.left_out, "weights and rows between the pools"))
        objects[name] = as_object(estimate, fits, hardware)
        parts.append(f"{name}: {describe(estimate, own, fits, hardware)}")
    return json.dumps(objects, indent=1) if settings.estimate.json else "\n\n".join(parts)


def pool_settings(settings: Settings, pool: RankPool, learns: bool) -> Settings:
    """Flags of a run on the ranks of one pool.

    Args:
      learns: whether its ranks train; others have no use for flags of sharded training.
    """
    mesh = text(pool.sizes)
    if learns:
        return with_flags(settings, place=None, mesh=mesh)
    return with_flags(settings, place=None, mesh=mesh, generate_mesh=mesh, **UNSHARDED)
