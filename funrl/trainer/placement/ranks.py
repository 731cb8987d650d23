"""The program of a rank: it trains, it generates, it does both, or it scores for a role."""

from __future__ import annotations

import functools

from funrl.mesh.launch import submesh
from funrl.mesh.mesh import Mesh
from funrl.mesh.pools.channel import end_requests
from funrl.mesh.pools.transfer import transfer_group
from funrl.processes.environment import shutdown_remark, shutdown_s
from funrl.rewards.pool import Pool
from funrl.trainer.jobs.job import Job, RLJob
from funrl.trainer.jobs.row_source import make_source
from funrl.trainer.loop import Outcome, train_loop
from funrl.trainer.placement.generate import serve_requests
from funrl.trainer.placement.ray_generators import ray_source
from funrl.trainer.placement.role_ranks import serve_role
from funrl.trainer.placement.source import placed_source
from funrl.trainer.sources.observing import Observer
from funrl.trainer.startup import MakeSource


def run_rank(
    job: Job, mesh: Mesh, observer: Observer, source: MakeSource = make_source, pool: Pool | None = None
) -> Outcome:
    """Run a job on this rank; see `train_loop`.

    Args:
      job: what to do.
      mesh: over all ranks, of the sizes `job.launched`.
      observer, source, pool: as of `train_loop`; a job with a placement has a source of its own.
    """
    placement = job.placement
    if (remark := shutdown_remark(shutdown_s())) is not None:
        observer.note(remark)
    if job.settings.devices.generators is not None:
        return train_loop(job, mesh, observer, ray_source, pool)
    if placement is None:
        return train_loop(job, mesh, observer, source, pool)
    assert isinstance(job, RLJob)
    training = submesh(mesh, placement.train.sizes, placement.train.ranks)
    generating = submesh(mesh, placement.generate.sizes, placement.generate.ranks)
    group = transfer_group(mesh)  # every rank makes it
    scoring = {name: submesh(mesh, pool.sizes, pool.ranks) for name, pool in placement.scoring.items()}
    for name, own in scoring.items():
        if own.here:
            error, stopped = serve_role(job, name, training, own)
            return Outcome({}, {}, error, stopped)
    if generating.here:
        error, stopped = serve_requests(job, training, generating, pool, group)
        return Outcome({}, {}, error, stopped)
    outcome = train_loop(job, training, observer, functools.partial(placed_source, group=group), pool)
    end_requests(training, (outcome.error, outcome.stopped))
    return outcome
