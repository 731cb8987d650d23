"""Trainer-side client of generators on Ray: their groups become batches, and each trainer rank gets its rows.

    actors -- facts --> first rank: link, ledger, batch     (kilobytes a group)
    actors -- rows  --> object store of its node            (once a row: it outlives the actor and its node)
                        object store --> rank that trains a row, which takes the samples that it needs

A batch of 16,384 rows of 33,000 tokens has 16 bytes a token, 8.6 GB: that many cross to the first rank's node while the
trainer updates, and all but the rows of that node cross once more, to each node its own. The first rank maps these
objects and never unpickles rows of others. Its node needs a store of (S + 1) batches; Ray keeps on disk what is more.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from funrl import trees
from funrl.environments.logged import LoggedEpisode
from funrl.kinds import Value
from funrl.mesh.collectives import from_first_rank, gather_objects
from funrl.mesh.mesh import Mesh
from funrl.mesh.pools.channel import PROGRESS_S, ProgressLimit, Requests
from funrl.rollout.ledger import Ledger
from funrl.rollout.ray.engine import RayEngine
from funrl.rollout.ray.link import ActorRequest, GeneratorCall, GeneratorLink
from funrl.rollout.remote.digests import EngineDigests
from funrl.rollout.remote.engine import DigestsRequest, GreedyRequest
from funrl.trainer.jobs.job import Job, RLJob
from funrl.trainer.jobs.row_source import remarked_generation
from funrl.trainer.placement.generate import ShowBuffer, write_logged
from funrl.trainer.placement.groups import GroupGenerators, source_of_generators
from funrl.trainer.placement.messages import (
    HELDOUT,
    BeginEvaluationRequest,
    EpisodesRequest,
    GroupPrompt,
    GroupWork,
    HeldoutEvaluation,
    PoolAnswer,
    ScoresRequest,
    WrittenGroup,
    in_place_of,
    join_groups,
    own_fields,
    written_rows,
)
from funrl.trainer.placement.ray_actor import (
    DeliveredGroup,
    GeneratorActor,
    WrittenHeldout,
    row_bytes,
    rows_of_bytes,
    rows_of_fields,
    sent_job,
)
from funrl.trainer.sources.heldout import for_heldout, heldout_metrics
from funrl.trainer.sources.observing import Show
from funrl.trainer.sources.source import Generation, Source
from funrl.trainer.steps.clock import Clock
from funrl.trainer.steps.parts import GeneratingParts, Parts
from funrl.trainer.steps.step_rows import Rows

# A function that gives a value on the first rank, None before it is there, and another that makes the answer of it.
LocalAnswer = tuple[Callable[[], Any], Callable[[Any], Any]]
ROWS = "rows"  # topic of the exchange


class RayGenerators(GroupGenerators, Requests):
    """Trainer-side client of generators on Ray; a `RemoteGenerators`.

    Requests that generator ranks would answer are answered by this program, on its first rank.
    """

    def __init__(self, job: RLJob, engine: RayEngine, generation: Generation, show: Show) -> None:
        """Ask for generators, on the first rank.

        Args:
          job: of the run.
          engine: through which weights go.
          generation: of the trainer ranks.
          show: receives remarks.
        """
        GroupGenerators.__init__(self, job, engine, generation, show)
        Requests.__init__(self, self.mesh)
        self.requests = engine.requests = self
        engine.held = lambda version: self._digests(version) is not None
        self._ray = engine.ray
        self._exchange = engine.exchange
        self._alone = Mesh(device=self.mesh.device, timeout=self.mesh.timeout)
        generation = for_heldout(generation)
        self._evaluation = generation._replace(engine=generation.engine._replace(mesh=self._alone))
        self._evaluated_step = 0
        self._answers: dict[int, LocalAnswer] = {}
        self._notes: list[str] = []
        self._replaced: dict[int, WrittenGroup] = {}  # by place, which other prompts refill
        self._rows: dict[int, Sequence[np.ndarray]] = {}  # of groups, and of greedy baselines, by their numbers
        self._logged: dict[int, Sequence[LoggedEpisode]] = {}
        self._positions = 0  # of prompts that are taken
        self._link = GeneratorLink(self._actors(job), self._exchange, self._notes.append)
        if self.mesh.rank == 0:
            engine.publish = self._link.publish
            self._link.start()

    def _actors(self, job: RLJob) -> ActorRequest:
        """Actors of a run."""
        bounds = job.settings.devices.generators
        assert bounds is not None
        resource = "GPU" if job.device == "cuda" else "CPU"
        filters = self._rule.prompts > 1 and not self._rule.rounds
        actor = self._ray.remote(GeneratorActor).options(**{f"num_{resource.lower()}s": 1}, max_concurrency=1 << 16)
        own = None if self.mesh.rank else self._ray.put(sent_job(job))
        start = functools.partial(actor.remote, own, filters)
        return ActorRequest(bounds, resource, start, 60.0 * job.settings.waiting.timeout)

    def begin_step(self, step: int, position: int, steps: int) -> None:
        """Begin to take the batch of a step; see `GroupGenerators`."""
        with self._link.changed:
            super().begin_step(step, position, steps)
            self._link.ledger = self.ledger
            self._link.batches[self.engine.version] = step - 1
        self._link.wake()

    def end_step(self) -> None:
        """Take the batch of a step; see `GroupGenerators`. Collective."""
        with self._link.changed:
            super().end_step()

    def close(self) -> None:
        """End the generators, and leave the cluster."""
        if self.mesh.rank == 0:
            self._link.close()
            self._ray.kill(self._exchange)
        self._ray.shutdown()

    def post(self, request: object) -> int:
        """Begin to answer a request; see `Requests`."""
        if isinstance(request, DigestsRequest):
            answer = functools.partial(self._digests, request.version), lambda digests: digests
        elif isinstance(request, GreedyRequest):
            answer = self._begin("greedy", [(request.prompts, request.new_tokens)]), lambda values: values[0]
        elif isinstance(request, EpisodesRequest):
            answer = lambda: True, lambda _: PoolAnswer(write_logged(request, self._logged, Mesh()))
        elif isinstance(request, BeginEvaluationRequest):
            self._evaluated_step = request.step
            self._heldout_values = self._begin("write_heldout", [(place,) for place in range(len(self._heldout))])
            return -1  # nobody waits for an answer
        else:
            answer = self._heldout_values, functools.partial(self._evaluated_by, request)
        self.posted += 1
        self._answers[self.posted] = answer
        return self.posted

    def answer(self, number: int, waits_for: str) -> Any:
        """The answer to a request, once it is there; see `Requests`. Collective."""
        look, finish = self._answers.pop(number)
        value = self._awaited_by(look, waits_for)
        return from_first_rank(finish(value) if self.mesh.rank == 0 else None, self.mesh)

    def _take_prompts(self, count: int = 1) -> int:
        self._positions += count
        return self._positions - count

    def _ask_for_batch(self, lost: Sequence[int], prompts: Sequence[GroupPrompt]) -> Sequence[int]:
        with self._link.changed:
            return super()._ask_for_batch(lost, prompts)

    def _begin_places(self, ledger: Ledger) -> list[int]:
        """The places that may begin and were not asked for; the link begins them in the ledger."""
        return [place for place in ledger.next_places(ledger.version, ledger.until) if place not in self._link.asked]

    def _ask(self, works: Sequence[GroupWork], queue: str = "") -> None:
        """Ask for groups; those without a place are written with the newest weights."""
        del queue
        keep = self._keep
        self._link.begin([GeneratorCall("write", (work,), functools.partial(keep, work), work.place) for work in works])

    def _look(self, look: Callable[[], Any], limit: ProgressLimit) -> Any:
        """The result of `look`, under the lock; None: it has given none for some seconds.

        Raises:
          Exception: whatever ends the run, such as ClusterError.
        """
        del limit  # the link has its own

        link = self._link
        try:
            with link.changed:
                return link.changed.wait_for(lambda: link.check() or look(), PROGRESS_S)
        finally:
            while self._notes:
                self.show.note(self._notes.pop(0))

    def _keep(self, work: GroupWork, delivered: DeliveredGroup) -> None:
        """Keep what a generator has written, unless another prompt refills its place. Under the lock."""
        group = delivered.group
        place = work.place
        if place is not None:
            group = in_place_of(self._replaced.pop(place, None), group)
            if self.refills and not delivered.keeps and self.ledger is not None and self.ledger.refill([place]):
                self._replaced[place] = group
                self._ask_places(self.ledger)
                return
        self._written[work.number] = group
        self._logged[work.number] = delivered.episodes
        self._rows |= delivered.rows

    def _received(self, rows: Rows, origins: np.ndarray, to: np.ndarray, mesh: Mesh) -> dict[str, Value]:
        """Fields of the rows that this rank trains, from the object store; see `GroupGenerators`."""
        index = int(mesh.index(mesh.row_axes))
        if self.mesh.rank == 0:
            shares = (
                [self._rows[x >> 32][x & 0xFFFFFFFF] for x in origins[to == rank].tolist()]
                for rank in range(mesh.size(mesh.row_axes))
            )
            references = {rank: [self._ray.put(share)] for rank, share in enumerate(shares)}
            self._ray.get(self._exchange.post.remote(ROWS, references))
        from_first_rank(None, self.mesh)  # they are there
        [[reference]] = self._ray.get(self._exchange.take.remote(ROWS, [index]))
        share = self._ray.get(reference)
        gather_objects(None, self.mesh)  # before others take their place
        for kept, numbers in ((self._rows, self._released), (self._logged, self._unlogged)):
            for number in numbers:
                kept.pop(number, None)
            numbers.clear()
        return own_fields(rows_of_bytes(share, self._alone).batch if share else rows.batch)[0]

    def _digests(self, version: int) -> EngineDigests | None:
        """Digests of a generator that holds a version; None: no one does."""
        digests = self._link.digests
        return digests if digests is not None and digests.version == version else None

    def _begin(self, method: str, arguments: Sequence[tuple[object, ...]]) -> Callable[[], list[Any] | None]:
        """Begin calls of generators with the newest weights, on the first rank.

        Returns: a function that gives their values; None before all are there.
        """
        values: dict[int, Any] = {}
        if self.mesh.rank == 0:
            keep = values.__setitem__
            calls = [GeneratorCall(method, own, functools.partial(keep, n)) for n, own in enumerate(arguments)]
            self._link.begin(calls)
        return lambda: [values[n] for n in sorted(values)] if len(values) == len(arguments) else None

    def _evaluated_by(self, request: object, written: Sequence[WrittenHeldout]) -> PoolAnswer:
        """End an evaluation whose completions are there, or have models score their rows first."""
        groups = [group for group in written if not isinstance(group, str)]
        if len(groups) < len(written):
            return PoolAnswer(None, problem=next(problem for problem in written if isinstance(problem, str)))
        generation = self._evaluation
        samples = generation.evaluation.sampling.samples
        parts = [rows_of_fields(fields, self._alone) for _, fields in groups]
        done, rows = join_groups([done._asdict() for done, _ in groups], parts, self._alone, samples=samples)
        done = done._replace(completions=[completion for part, _ in groups for completion in part.completions])
        if isinstance(request, ScoresRequest):
            del self._rows[HELDOUT]
            rows = rows.with_fields(**{name: x.to(self.mesh.device) for name, x in request._asdict().items()})
        elif self._rescore is not None:
            self._rows[HELDOUT] = row_bytes(rows)
            return PoolAnswer(written_rows(done, rows))
        show = ShowBuffer()
        metrics = heldout_metrics(generation, done, rows, show, self._evaluated_step)
        return PoolAnswer(HeldoutEvaluation(metrics, show.kept, show.table))


def ray_source(job: Job, parts: Parts, frozen: Mapping[str, trees.Tree], clock: Clock, show: Show) -> Source:
    """The source of trainer ranks whose rows generators on Ray write; a `MakeSource`."""
    assert isinstance(job, RLJob) and isinstance(parts, GeneratingParts)
    generation = remarked_generation(job, parts, frozen, clock, show)
    engine: object = parts.generator.engine
    assert isinstance(engine, RayEngine)
    generators = RayGenerators(job, engine, generation, show)
    return source_of_generators(job, generation, generators, clock, show)
