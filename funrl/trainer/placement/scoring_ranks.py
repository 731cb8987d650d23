"""The ranks of a role that does not learn, which score rows of the trainer ranks, one request after the other."""

from __future__ import annotations

from typing import Any

import torch

from funrl import trees
from funrl.batch import FIELDS, Batch
from funrl.mesh.mesh import Mesh
from funrl.mesh.pools.channel import Answers, End
from funrl.mesh.pools.handover import Handover, blank_fields, line_forms, receive_rows, send_rows
from funrl.mesh.reshard import reshard
from funrl.mesh.rules import layouts
from funrl.processes import heartbeat
from funrl.processes.workers import stops_when_asked
from funrl.trainer.jobs.build import build, first_weights
from funrl.trainer.jobs.job import RLJob, scoring_pools
from funrl.trainer.jobs.sharding import stored_rules
from funrl.trainer.settings.settings import scoring_budget
from funrl.trainer.steps.parts import Parts
from funrl.trainer.steps.remote_scores import RemoteScorer, ScoreRequest, first_request, row_field_kinds
from funrl.trainer.steps.score import score_role
from funrl.trainer.steps.step_rows import rows_of


def serve_scores(job: RLJob, name: str, training: Mesh, own: Mesh) -> Any:
    """Score for the trainer ranks until they have ended; returns `End.result`.

    Args:
      job: what runs.
      name: of the role.
      training, own: meshes of the trainer ranks, and of those of the role; this rank is in the second.
    """
    pool = list(scoring_pools(job)).index(name)
    with heartbeat.phase("load"):
        parts = build(job, own, lambda _: None, only=name)
        scorer = RemoteScorer(name, parts.roles[name], training, pool, scoring_budget(job.settings))
        params = _first_weights(job, parts, scorer)
    answers = Answers(own, first=first_request(pool))
    with stops_when_asked(), answers.showing_progress():
        while not isinstance(request := answers.take("rows to score"), End):
            heartbeat.at_step(request.step)
            with heartbeat.phase(f"score_{name}"):
                fields, way = _scored(scorer, params, request)
            kinds = row_field_kinds(job.algorithm.schema, fields)
            answers.answer(line_forms(fields, kinds))
            send_rows(fields, kinds, way)
    return request.result


def _first_weights(job: RLJob, parts: Parts, scorer: RemoteScorer) -> trees.Tree:
    """This rank's weights: of the role's own directory, or the run's first weights, which arrive."""
    if scorer.name in job.directories:
        return first_weights(job, parts, ())[scorer.name]
    rules = stored_rules(job.settings, job.main_role)
    stored = layouts(job.model.shapes, job.model.axes, rules, scorer.training.sizes)
    return reshard(None, scorer.first_plan(stored, job.dtype), parts.mesh)


def _scored(
    scorer: RemoteScorer, params: trees.Tree, request: ScoreRequest
) -> tuple[dict[str, torch.Tensor], Handover]:
    """The fields of this rank's rows, after they have arrived, and the way back. Collective over its mesh."""
    lengths, mesh = request.lengths, scorer.mesh
    to = scorer.targets(lengths)
    schema = FIELDS.extended(scorer.owned)
    kinds = row_field_kinds(schema, request.lines)
    like = blank_fields(request.lines, kinds, mesh.device)
    way = Handover(lengths, request.owner, to, source=scorer.training, target=mesh)
    own, _ = receive_rows(like, kinds, way)
    batch = Batch(schema, length=torch.from_numpy(lengths).to(mesh.device), **own)
    fields = score_role(scorer.role, params, rows_of(batch, to, mesh), scorer.token_budget)
    return fields, Handover(lengths, to, request.owner, source=mesh, target=scorer.training)
