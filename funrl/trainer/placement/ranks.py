"""The program of a rank: it trains, it generates, it does both, or it computes fields of the trainer ranks' rows."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from funrl import trees
from funrl.batch import Batch, as_dict
from funrl.compiled_kernels.exact.dispatch import keep_alignment
from funrl.fields import Field
from funrl.mesh.launch import submesh
from funrl.mesh.mesh import Mesh
from funrl.mesh.pools.channel import Answers, End, end_requests
from funrl.mesh.pools.handover import Handover, blank_fields, line_forms, receive_rows, send_rows
from funrl.mesh.pools.transfer import transfer_group
from funrl.mesh.reshard import reshard
from funrl.mesh.rules import layouts
from funrl.processes import heartbeat
from funrl.processes.environment import shutdown_remark, shutdown_s
from funrl.processes.workers import stops_when_asked
from funrl.rewards.call import RewardError
from funrl.rewards.pool import Pool
from funrl.trainer.jobs.build import build, first_weights
from funrl.trainer.jobs.job import Job, RLJob, rewards_completions
from funrl.trainer.jobs.numerics import check_gpu_kinds
from funrl.trainer.jobs.row_source import completion_scorer, make_source
from funrl.trainer.jobs.sharding import stored_rules
from funrl.trainer.loop import Outcome, train_loop
from funrl.trainer.placement.generate import ShowBuffer, serve_requests
from funrl.trainer.placement.groups import placed_source, sending_client
from funrl.trainer.placement.ray_generators import RayGenerators
from funrl.trainer.settings.settings import scoring_budget
from funrl.trainer.sources.observing import Observer
from funrl.trainer.startup import MakeSource
from funrl.trainer.steps.parts import Parts
from funrl.trainer.steps.remote_scores import RemoteScorer, RowsAnswer, row_field_kinds
from funrl.trainer.steps.score import score_role
from funrl.trainer.steps.step_rows import rows_of


@keep_alignment()
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
    check_gpu_kinds(job, mesh)
    if (remark := shutdown_remark(shutdown_s())) is not None:
        observer.note(remark)
    if job.settings.devices.generators is not None:
        return train_loop(job, mesh, observer, functools.partial(placed_source, client=RayGenerators), pool)
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
    client = functools.partial(sending_client, group)
    outcome = train_loop(job, training, observer, functools.partial(placed_source, client=client), pool)
    end_requests(training, (outcome.error, outcome.stopped))
    return outcome


def serve_role(job: RLJob, name: str, training: Mesh, own: Mesh) -> Any:
    """Compute fields of the trainer ranks' rows until they have ended; returns `End.result`.

    Args:
      job: what runs.
      name: of the role, or "judge".
      training, own: meshes of the trainer ranks, and of the ranks of the role; this rank is in the second.
    """
    show = ShowBuffer()
    with heartbeat.phase("load"):
        parts = build(job, own, show.note, only=name)
        owned: Mapping[str, Field] = {}
        if rewards_completions(job, name):
            params = first_weights(job, parts, ()).get(name)
            compute = completion_scorer(job, parts, name, params, show)
        else:
            scorer = RemoteScorer(name, parts.roles[name], training, scoring_budget(job.settings))
            owned = scorer.owned
            score = functools.partial(score_role, scorer.role, _first_weights(job, parts, scorer))
            compute = lambda rows, _: rows.with_fields(**score(rows, scorer.token_budget))  # noqa: E731
    schema = job.algorithm.schema.extended(owned)
    answers = Answers(own, name)
    with stops_when_asked(), answers.showing_progress():
        while not isinstance(request := answers.take("rows to score"), End):
            if request.step:
                heartbeat.at_step(request.step)
            kinds = row_field_kinds(schema, request.lines)
            way = Handover(request.lengths, request.owner, request.to, source=training, target=own)
            given = receive_rows(blank_fields(request.lines, kinds, own.device), kinds, way)
            given |= {name: x.to(own.device) for name, x in request.known.items()}
            rows = rows_of(Batch(schema, **given), request.to, own)
            try:
                with heartbeat.phase(f"score_{name}"):
                    rows = compute(rows, request.examples)
            except RewardError as error:  # on every rank of the role
                answers.answer(None, show.take().notes, RewardError(str(error)))
                continue
            fields = {field: x for field, x in as_dict(rows.batch).items() if field not in given}
            known = {field: fields.pop(field).cpu() for field in list(fields) if schema[field].kind.everywhere}
            kinds = row_field_kinds(schema, fields)
            answers.answer(RowsAnswer(rows.owner, known, line_forms(fields, kinds)), show.take().notes)
            if fields:
                send_rows(fields, kinds, Handover(request.lengths, rows.owner, request.owner, own, training))
    return request.result


def _first_weights(job: RLJob, parts: Parts, scorer: RemoteScorer) -> trees.Tree:
    """This rank's weights: of the role's own directory, or the run's first weights, which arrive."""
    if scorer.name in job.directories:
        return first_weights(job, parts, ())[scorer.name]
    rules = stored_rules(job.settings, job.main_role)
    stored = layouts(job.model.shapes, job.model.axes, rules, scorer.training.sizes)
    return reshard(None, scorer.first_plan(stored, job.dtype), parts.mesh)
