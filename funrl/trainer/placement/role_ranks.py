"""The ranks of roles that do not learn, which compute fields of other ranks' rows, one request after the other.

A role has ranks of its own, or rewards completions on trainer ranks, which serve generator ranks while they wait for
them.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from funrl import trees
from funrl.batch import Batch, as_dict
from funrl.data.prompts import Example
from funrl.fields import Field, Schema
from funrl.mesh.mesh import Mesh
from funrl.mesh.pools.channel import Answers, End, Requests, answer_key, first_asked
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
from funrl.trainer.settings.scorers import scorers_of
from funrl.trainer.settings.settings import scoring_budget
from funrl.trainer.sources.completion_scores import Scorer
from funrl.trainer.sources.observing import Show
from funrl.trainer.steps.parts import Parts
from funrl.trainer.steps.remote_scores import RemoteScorer, RowsAnswer, RowsRequest, role_pool, row_field_kinds
from funrl.trainer.steps.score import score_role
from funrl.trainer.steps.step_rows import Rows, rows_of


class RoleService(NamedTuple):
    """A role, and some ranks that ask it.

    Attributes:
      name: of the role.
      compute: gives the rows with its fields, on the mesh of `answers`.
      schema: declarations of the fields of the rows.
      answers: to their requests.
      asking: their mesh.
      show: receives remarks that go to them.
    """

    name: str
    compute: Scorer
    schema: Schema
    answers: Answers
    asking: Mesh
    show: ShowBuffer

    def answer_next(self) -> Any:
        """Answer the next request; returns it. Collective over the ranks of the role."""
        request = self.answers.take("rows to score")
        if not isinstance(request, End):
            self._answer(request)
        return request

    def _answer(self, request: RowsRequest) -> None:
        """Receive rows, compute fields, and send them back."""
        if request.step:
            heartbeat.at_step(request.step)
        mesh = self.answers.mesh
        kinds = row_field_kinds(self.schema, request.lines)
        way = Handover(request.lengths, request.owner, request.to, source=self.asking, target=mesh)
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
            send_rows(fields, kinds, Handover(request.lengths, rows.owner, request.owner, mesh, self.asking))


def serve_role(job: RLJob, name: str, training: Mesh, generating: Mesh, own: Mesh) -> Any:
    """Compute fields of other ranks' rows until the trainer ranks have ended; returns `End.result`.

    Args:
      job: what runs.
      name: of the role, or "judge".
      training, generating, own: meshes of the trainer ranks, of generator ranks, which evaluate, and of the ranks of
        the role; this rank is in the last.
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
    schema = job.algorithm.schema.extended(owned)
    services = [
        RoleService(name, compute, schema, Answers(own, role_pool(name, side)), mesh, show)
        for side, mesh in (("train", training), ("generate", generating))
    ]
    request: Any = None
    with stops_when_asked(), contextlib.ExitStack() as stack:
        for service in services:
            stack.enter_context(service.answers.showing_progress())
        while not isinstance(request, End):
            asked = first_asked([service.answers for service in services], "rows to score")
            service = next((service for service in services if service.answers is asked), services[0])
            request = service.answer_next()
    return request.result


def _first_weights(job: RLJob, parts: Parts, scorer: RemoteScorer) -> trees.Tree:
    """This rank's weights: of the role's own directory, or the run's first weights, which arrive."""
    if scorer.name in job.directories:
        return first_weights(job, parts, ())[scorer.name]
    rules = stored_rules(job.settings, job.main_role)
    stored = layouts(job.model.shapes, job.model.axes, rules, scorer.asking.sizes)
    return reshard(None, scorer.first_plan(stored, job.dtype), parts.mesh)


def _with_scores(scorer: RemoteScorer, params: trees.Tree, rows: Rows, examples: Sequence[Example]) -> Rows:
    del examples
    return rows.with_fields(**score_role(scorer.role, params, rows, scorer.token_budget))


class RewardsOfTrainers:
    """Models on the trainer ranks, which reward completions of generator ranks while they wait for these.

    Attributes:
      scorers: by name.
    """

    def __init__(
        self, job: RLJob, parts: Parts, frozen: Mapping[str, trees.Tree], show: Show, *, generating: Mesh
    ) -> None:
        """Begin without a request.

        Args:
          job, parts, frozen, show: as of any source, on the trainer ranks.
          generating: mesh of generator ranks.
        """
        apart = {} if job.placement is None else job.placement.scoring
        names = [name for name in scorers_of(job.settings) if name not in apart]
        self.scorers = {name: completion_scorer(job, parts, name, frozen.get(name), show) for name in names}
        schema = job.algorithm.schema
        self._services = {
            id(answers): RoleService(name, scorer, schema, answers, generating, ShowBuffer())
            for name, scorer in self.scorers.items()
            for answers in [Answers(parts.mesh, role_pool(name, "generate"))]
        }

    def serve_until(self, requests: Requests, number: int, waits_for: str) -> None:
        """Reward completions until a request to the generator ranks has been answered. Collective.

        Args:
          requests: to them.
          number: of the request.
          waits_for: name of its answer.
        """
        sides = [service.answers for service in self._services.values()]
        key = answer_key(requests.pool, number)
        while sides and (asked := first_asked(sides, waits_for, key, requests)) is not None:
            with asked.showing_progress():
                self._services[id(asked)].answer_next()
