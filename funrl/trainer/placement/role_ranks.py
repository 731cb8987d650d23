"""The ranks of a role that does not learn, which compute fields of trainer ranks' rows, one request after another."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from funrl import trees
from funrl.batch import Batch, as_dict
from funrl.data.prompts import Example
from funrl.fields import Field, Schema
from funrl.mesh.mesh import Mesh
from funrl.mesh.pools.channel import Answers, End
from funrl.mesh.pools.handover import Handover, blank_fields, line_forms, receive_rows, send_rows
from funrl.mesh.reshard import reshard
from funrl.mesh.rules import layouts
from funrl.processes import heartbeat
from funrl.processes.workers import stops_when_asked
from funrl.rewards.call import RewardError
from funrl.trainer.jobs.build import build, first_weights
from funrl.trainer.jobs.job import RLJob, rewards_completions
from funrl.trainer.jobs.row_source import completion_scorer
from funrl.trainer.jobs.sharding import stored_rules
from funrl.trainer.placement.generate import ShowBuffer
from funrl.trainer.settings.settings import scoring_budget
from funrl.trainer.sources.completion_scores import Scorer
from funrl.trainer.steps.parts import Parts
from funrl.trainer.steps.remote_scores import RemoteScorer, RowsAnswer, RowsRequest, row_field_kinds
from funrl.trainer.steps.score import score_role
from funrl.trainer.steps.step_rows import Rows, rows_of


class RoleService(NamedTuple):
    """A role, as its ranks see it.

    Attributes:
      name: of the role.
      compute: gives the rows with its fields, on the mesh of `answers`.
      schema: declarations of the fields of the rows.
      answers: to requests of the trainer ranks.
      training: mesh of the trainer ranks.
      show: receives remarks that go to them.
    """

    name: str
    compute: Scorer
    schema: Schema
    answers: Answers
    training: Mesh
    show: ShowBuffer

    def answer(self, request: RowsRequest) -> None:
        """Receive rows, compute fields, and send them back. Collective over the ranks of the role."""
        if request.step:
            heartbeat.at_step(request.step)
        mesh = self.answers.mesh
        kinds = row_field_kinds(self.schema, request.lines)
        way = Handover(request.lengths, request.owner, request.to, source=self.training, target=mesh)
        given, _ = receive_rows(blank_fields(request.lines, kinds, mesh.device), kinds, way)
        given |= {name: x.to(mesh.device) for name, x in request.known.items()}
        rows = rows_of(Batch(self.schema, **given), request.to, mesh)
        try:
            with heartbeat.phase(f"score_{self.name}"):
                rows = self.compute(rows, request.examples)
        except RewardError as error:  # on every rank of the role
            self.answers.answer(RowsAnswer(rows.owner, {}, {}, self.show.take().notes, str(error)))
            return
        fields = {name: x for name, x in as_dict(rows.batch).items() if name not in given}
        known = {name: x.cpu() for name, x in fields.items() if self.schema[name].kind.everywhere}
        fields = {name: x for name, x in fields.items() if name not in known}
        kinds = row_field_kinds(self.schema, fields)
        self.answers.answer(RowsAnswer(rows.owner, known, line_forms(fields, kinds), self.show.take().notes))
        if fields:
            send_rows(fields, kinds, Handover(request.lengths, rows.owner, request.owner, mesh, self.training))


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
            compute = functools.partial(_with_scores, scorer, _first_weights(job, parts, scorer))
    service = RoleService(name, compute, job.algorithm.schema.extended(owned), Answers(own, name), training, show)
    with stops_when_asked(), service.answers.showing_progress():
        while not isinstance(request := service.answers.take("rows to score"), End):
            service.answer(request)
    return request.result


def _first_weights(job: RLJob, parts: Parts, scorer: RemoteScorer) -> trees.Tree:
    """This rank's weights: of the role's own directory, or the run's first weights, which arrive."""
    if scorer.name in job.directories:
        return first_weights(job, parts, ())[scorer.name]
    rules = stored_rules(job.settings, job.main_role)
    stored = layouts(job.model.shapes, job.model.axes, rules, scorer.training.sizes)
    return reshard(None, scorer.first_plan(stored, job.dtype), parts.mesh)


def _with_scores(scorer: RemoteScorer, params: trees.Tree, rows: Rows, examples: Sequence[Example]) -> Rows:
    del examples
    return rows.with_fields(**score_role(scorer.role, params, rows, scorer.token_budget))
