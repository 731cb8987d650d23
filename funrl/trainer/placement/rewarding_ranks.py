"""The ranks of models that reward completions of other ranks, one request after the other.

A model has ranks of its own, or is on trainer ranks, which serve the others while they wait for them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from funrl import trees
from funrl.batch import FIELDS, Batch, as_dict
from funrl.mesh.mesh import Mesh
from funrl.mesh.pools.channel import Answers, End, Requests, answer_key, first_asked
from funrl.mesh.pools.handover import Handover, blank_fields, line_forms, receive_rows, send_rows
from funrl.processes import heartbeat
from funrl.processes.workers import stops_when_asked
from funrl.rewards.call import RewardError
from funrl.trainer.jobs.build import build, first_weights
from funrl.trainer.jobs.job import RLJob, scoring_pools
from funrl.trainer.jobs.row_source import completion_scorer
from funrl.trainer.placement.generate import ShowBuffer
from funrl.trainer.settings.scorers import scorers_of
from funrl.trainer.sources.completion_scores import Scorer
from funrl.trainer.sources.observing import Show
from funrl.trainer.steps.parts import Parts
from funrl.trainer.steps.remote_scores import RewardedRows, RewardProblem, RewardRequest, first_request, row_field_kinds
from funrl.trainer.steps.step_rows import rows_of


class RewardingSide(NamedTuple):
    """A model that rewards completions, and some ranks that ask it.

    Attributes:
      scorer: of the model, on the mesh of `answers`.
      answers: to their requests.
      asking: their mesh.
      show: receives remarks that go to them.
    """

    scorer: Scorer
    answers: Answers
    asking: Mesh
    show: ShowBuffer

    def answer_next(self) -> Any:
        """Answer the next request; returns it. Collective over the ranks of the model."""
        request = self.answers.take("completions to reward")
        if not isinstance(request, End):
            self._answer(request)
        return request

    def _answer(self, request: RewardRequest) -> None:
        """Receive rows, reward them, and answer."""
        own = self.answers.mesh
        device = own.device
        kinds = row_field_kinds(FIELDS, request.lines)
        way = Handover(request.lengths, request.owner, request.to, source=self.asking, target=own)
        fields, _ = receive_rows(blank_fields(request.lines, kinds, device), kinds, way)
        known = {name: x.to(device) for name, x in request.fields.items()}
        rows = rows_of(Batch(**known, **fields), request.to, own)
        try:
            with heartbeat.phase("reward"):
                rows = self.scorer(rows, request.examples)
        except RewardError as error:  # on every rank of the model
            self.answers.answer(RewardProblem(self.show.take().notes, str(error)))
            return
        batch = rows.batch
        written = {name: x for name, x in as_dict(batch).items() if name not in {*known, *kinds, "score", "scores"}}
        kinds = row_field_kinds(FIELDS, written)
        notes = self.show.take().notes
        self.answers.answer(
            RewardedRows(batch.scores.cpu(), batch.score.cpu(), rows.owner, line_forms(written, kinds), notes)
        )
        if written:
            back = Handover(request.lengths, rows.owner, request.owner, source=own, target=self.asking)
            send_rows(written, kinds, back)


def serve_rewarding(job: RLJob, name: str, asking: Sequence[Mesh], own: Mesh) -> Any:
    """Reward completions of other ranks until trainer ranks have ended; returns `End.result`.

    Args:
      job: what runs.
      name: of the role, or "judge".
      asking: meshes of the generator ranks, which evaluate, and of the trainer ranks.
      own: mesh of the ranks of the role; this rank is in it.
    """
    pool = list(scoring_pools(job)).index(name)
    show = ShowBuffer()
    with heartbeat.phase("load"):
        parts = build(job, own, show.note, only=name)
        params = first_weights(job, parts, ()).get(name)
        scorer = completion_scorer(job, parts, name, params, show)
    sides = [
        RewardingSide(scorer, Answers(own, first_request(pool, batches=number > 0)), mesh, show)
        for number, mesh in enumerate(asking)
    ]
    request: Any = None
    with stops_when_asked(), contextlib.ExitStack() as stack:
        for side in sides:
            stack.enter_context(side.answers.showing_progress())
        while not isinstance(request, End):
            asked = first_asked([side.answers for side in sides], "completions to reward")
            side = next((side for side in sides if side.answers is asked), sides[0])
            request = side.answer_next()
    return request.result


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
        numbers = list(scoring_pools(job))
        self._sides = [
            RewardingSide(scorer, Answers(parts.mesh, first_request(numbers.index(name))), generating, ShowBuffer())
            for name, scorer in self.scorers.items()
        ]

    def serve_until(self, requests: Requests, number: int, waits_for: str) -> None:
        """Reward completions until a request to the generator ranks has been answered. Collective.

        Args:
          requests: to them.
          number: of the request.
          waits_for: name of its answer.
        """
        by_answers = {id(side.answers): side for side in self._sides}
        answers = [side.answers for side in self._sides]
        while answers and (asked := first_asked(answers, waits_for, answer_key(number), requests)) is not None:
            with asked.showing_progress():
                by_answers[id(asked)].answer_next()
