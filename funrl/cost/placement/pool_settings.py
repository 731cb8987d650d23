"""Flags of a run on the ranks of one of its pools."""

from __future__ import annotations

from funrl.mesh.mesh import text
from funrl.mesh.pools.placement import RankPool
from funrl.trainer.settings.settings import Settings, with_flags

UNSHARDED = {
    "fsdp": False,
    "fsdp_axes": None,
    "fsdp_models": None,
    "grad_reduce_dtype": "auto",
    "sequence_parallel": "auto",
    "split_residual": "auto",
}


def pool_settings(settings: Settings, pool: RankPool, learns: bool) -> Settings:
    """Flags of a run on the ranks of one pool.

    Args:
      settings: the flags of the whole run.
      pool: its ranks.
      learns: whether its ranks may shard weights as those that train do; see `Placement.shards`.
    """
    mesh = text(pool.sizes)
    if learns:
        return with_flags(settings, place=None, mesh=mesh)
    return with_flags(settings, place=None, mesh=mesh, generate_mesh=mesh, **UNSHARDED)
