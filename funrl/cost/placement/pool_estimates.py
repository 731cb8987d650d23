"""Cost of one step for the ranks of one pool."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection

from funrl import trees
from funrl.algos.core import Algorithm
from funrl.cost.descriptions import left_out
from funrl.cost.dry_run import check_width, estimate, plain_job
from funrl.cost.judge_cost import judging, tokens_to_read, verdicts_of_step
from funrl.cost.tracing.costs import plus
from funrl.cost.tracing.estimate import Estimate, pretended
from funrl.cost.tracing.hardware import Hardware
from funrl.mesh.mesh import Mesh
from funrl.trainer.jobs.build import build
from funrl.trainer.jobs.job import RLJob
from funrl.trainer.jobs.sharding import check_layouts
from funrl.trainer.settings.declaration import SettingsError, blaming
from funrl.trainer.settings.scorers import JUDGE
from funrl.trainer.settings.settings import Settings, with_flags


def pool_estimate(
    settings: Settings, algorithm: Algorithm, tokens: int, hardware: Hardware, pool: str, apart: Collection[str]
) -> Estimate:
    """Cost of one step for a rank of a pool.

    Args:
      settings: of a run on the ranks of the pool, by `pool_settings`.
      algorithm: of the run.
      tokens: of a prompt.
      hardware: of each rank.
      pool: name of the pool; "": the rank does everything.
      apart: roles, or the judge, on ranks of their own.

    Raises:
      ValueError: a flag cannot work there.
    """
    if pool == JUDGE:
        return _judge_estimate(settings, algorithm, tokens, hardware)
    return estimate(plain_job(settings, algorithm, hardware.memory), tokens, hardware, pool, apart)


def _judge_estimate(settings: Settings, algorithm: Algorithm, tokens: int, hardware: Hardware) -> Estimate:
    """Cost of a step's verdicts on ranks that have the judge alone."""
    sizes = settings.devices.train.chosen
    spread = f"dp{Mesh(sizes).world}"  # a mesh of the policy, which need not divide as the judge does
    job = plain_job(with_flags(settings, mesh=spread, generate_mesh=None), algorithm, hardware.memory)
    assert isinstance(job, RLJob) and job.judge is not None
    model = job.judge.model
    with blaming("judge"):
        check_layouts({JUDGE: model}, settings, sizes, sizes)
        if not model.pages:
            raise SettingsError("it runs transformers' own code, which a dry run does not count; leave its pool out")
    judge = job.judge._replace(sizes=sizes)
    job = dataclasses.replace(job, judge=None)
    with pretended(job.sizes) as mesh:
        verdicts = judging(job, judge, build(job, mesh, lambda _: None), tokens, 0.0, hardware)
    read = tokens_to_read(job, judge, tokens)
    step = f"{verdicts_of_step(job):,} verdicts of {judge.sampling.max_new_tokens:,} tokens, each after {read:,} tokens"
    return Estimate(
        job=dataclasses.replace(job, model=model, sizes=sizes, generate_sizes=sizes),
        roles=(JUDGE,),
        step=f"{step}, all of full length",
        tokens=check_width(job, tokens),
        phases={"score_judge": plus(verdicts.costs, {"weights": verdicts.weights})},
        axes=verdicts.axes,
        parameters=trees.count(model.shapes),
        trained=trees.count(model.shapes),
        useful={},
        left_out=left_out(job, judge, hardware),
    )
