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
import pickle
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from funrl import trees
from funrl.environments.logged import LoggedEpisode
from funrl.kinds import Value
from funrl.mesh.collectives import from_first_rank
from funrl.mesh.mesh import Mesh
from funrl.mesh.pools.channel import PROGRESS_S, ProgressLimit
from funrl.mesh.pools.placement import generators_on_ray
from funrl.rewards.call import RewardError
from funrl.rollout.elsewhere import Greedy
from funrl.rollout.ledger import Ledger
from funrl.rollout.ray.engine import RayEngine
from funrl.rollout.ray.link import ActorRequest, GeneratorCall, GeneratorLink
from funrl.rollout.remote.digests import EngineDigests
from funrl.trainer.jobs.job import Job, RLJob
from funrl.trainer.jobs.row_source import remarked_generation
from funrl.trainer.placement.generate import write_logged
from funrl.trainer.placement.groups import GroupGenerators, source_of_generators
from funrl.trainer.placement.messages import (
    EpisodesRequest,
    GroupPrompt,
    GroupWork,
    WrittenFiles,
    WrittenGroup,
    WrittenRows,
    baseline_of,
    in_place_of,
    join_groups,
    own_fields,
    split_origins,
)
from funrl.trainer.placement.ray_actor import GeneratorActor, rows_of_fields, samples_of, sent_job
from funrl.trainer.sources.heldout import for_heldout, heldout_metrics
from funrl.trainer.sources.observing import Show
from funrl.trainer.sources.source import Generation, NextRows, Source, StepRows
from funrl.trainer.steps.clock import Clock
from funrl.trainer.steps.parts import GeneratingParts, Parts
from funrl.trainer.steps.step_rows import Rows, join_rows, split_rows, take

ROWS = "rows"  # topic of the exchange


class PromptCounter:
    """Positions of prompts in their order, which the first rank alone takes; in place of a `GroupBoard`.

    Attributes:
      replicas: number of replicas by which metrics divide; generators come and go.
    """

    replicas = 1

    def __init__(self) -> None:
        """Begin with the first prompt."""
        self._taken = 0

    def take_prompt(self, count: int = 1) -> int:
        """Position of the first of some prompts, which are taken."""
        self._taken += count
        return self._taken - count


class RayGenerators(GroupGenerators):
    """Trainer-side client of generators on Ray; a `RemoteGenerators`."""

    def __init__(self, job: RLJob, engine: RayEngine, generation: Generation, show: Show) -> None:
        """Ask for generators, on the first rank.

        Args:
          job: of the run.
          engine: through which weights go.
          generation: of the trainer ranks.
          show: receives remarks.
        """
        super().__init__(job, engine, generation, show)
        self._generation = generation
        self._ray = engine.ray
        self._exchange = engine.exchange
        self._notes: list[str] = []
        self._replaced: dict[int, WrittenGroup] = {}  # by place, which other prompts refill
        self._rows: dict[int, WrittenRows] = {}  # of groups and of greedy baselines, by their numbers
        self._objects: dict[int, tuple[Sequence[Any], Sequence[Any]]] = {}  # references and values of their samples
        self._logged: dict[int, Sequence[LoggedEpisode]] = {}
        filters = self._rule.prompts > 1 and not self._rule.rounds
        self._link = GeneratorLink(_request(job, engine, filters), self._exchange, self._notes.append)
        self._board = PromptCounter()
        engine.complete = self._complete_greedily
        engine.wait_for_digests = self._wait_for_digests
        if self.mesh.rank == 0:
            engine.publish = self._link.publish
            engine.digests_of = self._digests
            self._link.start()

    def take_step(self, next_rows: NextRows, state: trees.Tree, step: int, steps: int) -> StepRows:
        """Rows of a step; see `GroupGenerators`. Collective."""
        with self._link.changed:
            for number in self._released:
                for kept in (self._rows, self._objects, self._logged):
                    kept.pop(number, None)
        self._released.clear()
        self._unlogged.clear()
        if self.mesh.rank == 0:
            self._exchange.drop.remote([(ROWS, step - 1)])
        return super().take_step(next_rows, state, step, steps)

    def begin_step(self, step: int, position: int, steps: int) -> None:
        """Begin to take the batch of a step; see `GroupGenerators`."""
        with self._link.changed:
            super().begin_step(step, position, steps)
            self._link.ledger = self.ledger
            self._link.batches[self.engine.version or 0] = step - 1
        self._link.wake()

    def _write_episodes(self, request: EpisodesRequest) -> WrittenFiles:
        """Write episodes on the first rank; see `GroupGenerators`. Collective."""
        return from_first_rank(write_logged(request, self._logged, Mesh()), self.mesh)

    def end_step(self) -> None:
        """Take the batch of a step; see `GroupGenerators`. Collective."""
        with self._link.changed:
            super().end_step()

    def begin_evaluation(self, step: int) -> Callable[[], dict[str, float]]:
        """Have generators evaluate the newest weights, before other work; see `Source`. Collective."""
        wait = self._begin("write_heldout", [(place,) for place in range(len(self._generation.evaluation.heldout))])
        return lambda: self._evaluated_by(wait, step)

    def close(self) -> None:
        """End the generators, and leave the cluster."""
        if self.mesh.rank == 0:
            self._link.close()
            self._ray.kill(self._exchange)
        self._ray.shutdown()

    def _ask_for_batch(self, lost: Sequence[int], prompts: Sequence[GroupPrompt]) -> Sequence[int]:
        with self._link.changed:
            return super()._ask_for_batch(lost, prompts)

    def _begin_places(self, ledger: Ledger) -> list[int]:
        """The places that may begin and were not asked for; the link begins them in the ledger."""
        return [place for place in ledger.next_places(ledger.version, ledger.until) if place not in self._link.asked]

    def _ask(self, works: Sequence[GroupWork], queue: str = "") -> None:
        """Ask for groups; those without a place are written with the newest weights."""
        del queue

        def call(work: GroupWork) -> GeneratorCall:
            keep = functools.partial(self._keep, work)
            return GeneratorCall("write", (work,), keep, objects=1 + self._samples + work.baseline, place=work.place)

        self._link.begin([call(work) for work in works])

    def _gathered(self, numbers: Sequence[int], name: str) -> dict[int, WrittenGroup]:
        """Groups that have ended; see `GroupGenerators`. Collective."""
        groups = self._awaited_by(lambda: self.ledger and self._complete(self.ledger, numbers), name)
        if groups is not None and self.mesh.world > 1:
            references = {
                (number, sample): [reference]
                for group in groups
                for number in (group, baseline_of(group))
                for sample, reference in enumerate(self._objects.get(number, ((), ()))[0])
            }
            self._ray.get(self._exchange.post.remote((ROWS, self.step), references))
        groups = from_first_rank(groups, self.mesh)
        for number, group in groups.items():
            parts = {number: group.written, baseline_of(number): group.baseline}
            self._rows |= {part: rows for part, rows in parts.items() if rows is not None}
        return groups

    def _look(self, look: Callable[[], Any], limit: ProgressLimit) -> Any:
        """The result of `look`, under the lock; None: it has given none for some seconds.

        Raises:
          Exception: whatever ends the run, such as ClusterError.
        """
        del limit  # the link has its own
        deadline = time.monotonic() + PROGRESS_S
        result = None
        try:
            with self._link.changed:
                self._link.check()
                while (result := look()) is None and not self._notes:
                    if not self._link.changed.wait(max(0.0, deadline - time.monotonic())):
                        break
                    self._link.check()
        finally:
            while self._notes:
                self.show.note(self._notes.pop(0))
        return result

    def _keep(self, work: GroupWork, value: tuple[WrittenGroup, bool], references: Any, objects: Any) -> None:
        """Keep what a generator has written, unless another prompt refills its place. Under the lock."""
        group, keeps = value
        place = work.place
        if place is not None:
            group = in_place_of(self._replaced.pop(place, None), group)
            if self.refills and not keeps and self.ledger is not None and self.ledger.refill([place]):
                self._replaced[place] = group
                self._ask_places(self.ledger)
                return
        self._written[work.number] = group
        self._logged[work.number] = objects[0]
        end = 1 + self._samples
        self._objects[work.number] = references[1:end], objects[1:end]
        self._objects[baseline_of(work.number)] = references[end:], objects[end:]

    def _received(self, rows: Rows, origins: np.ndarray, to: np.ndarray, mesh: Mesh) -> dict[str, Value]:
        """Fields of the rows that this rank trains, from the object store; see `GroupGenerators`."""
        origins = origins[to == int(mesh.index(mesh.row_axes))]
        if not len(origins):
            return own_fields(rows.batch)[0]
        places = []
        for number, own in split_origins(origins):
            written = self._rows[number]
            sample_B = samples_of(written.fields, len(written.owner))
            places += [((number, int(sample_B[row])), int((sample_B[:row] == sample_B[row]).sum())) for row in own]
        keys = list(dict.fromkeys(key for key, _ in places))
        if self.mesh.rank == 0:
            objects = [self._objects[number][1][sample] for number, sample in keys]
        else:
            taken = self._ray.get(self._exchange.take.remote((ROWS, self.step), keys))
            objects = self._ray.get([reference for [reference] in taken])
        alone = Mesh(device=self.mesh.device, timeout=self.mesh.timeout)
        samples = {key: rows_of_fields(pickle.loads(x), alone) for key, x in zip(keys, objects, strict=True)}
        return own_fields(join_rows([take(samples[key], np.array([index])) for key, index in places]).batch)[0]

    def _digests(self, version: int) -> EngineDigests | None:
        """Digests of a generator that holds a version; None: no one does."""
        with self._link.changed:
            self._link.check()
            digests = self._link.digests
        return digests if digests is not None and digests.version == version else None

    def _wait_for_digests(self, version: int) -> EngineDigests:
        """Digests of a generator, once it holds the newest weights. Collective."""
        digests = self._awaited_by(lambda: self._digests(version), f"the generators' weights {version}")
        return from_first_rank(digests, self.mesh)

    def _begin(self, method: str, arguments: Sequence[tuple[object, ...]]) -> Callable[[str], list[Any]]:
        """Begin calls of generators with the newest weights.

        Returns: a function that waits for their values, which the first rank gets; collective, with a name.
        """
        values: dict[int, Any] = {}

        def call(number: int, own: tuple[object, ...]) -> GeneratorCall:
            return GeneratorCall(method, own, lambda value, references, objects: values.update({number: value}))

        if self.mesh.rank == 0:
            self._link.begin([call(number, own) for number, own in enumerate(arguments)])
        look = lambda: [values[i] for i in range(len(arguments))] if len(values) == len(arguments) else None  # noqa: E731
        return lambda name: self._awaited_by(look, name) or []

    def _complete_greedily(self, prompts: Sequence[Sequence[int]], new_tokens: int) -> Greedy:
        results = self._begin("greedy", [(prompts, new_tokens)])("the generators' probe")
        tokens_BS, logp_BS, spread = from_first_rank(results[0] if results else None, self.mesh)
        return Greedy(tokens_BS.to(self.mesh.device), logp_BS.to(self.mesh.device), spread)

    def _evaluated_by(self, wait: Callable[[str], list[Any]], step: int) -> dict[str, float]:
        """Metrics of an evaluation. Collective.

        Raises:
          RewardError: a reward function or the environment has failed; on every rank.
        """
        written = wait(f"the generators' evaluation after step {step}")
        problem = from_first_rank(next((x for x in written if isinstance(x, str)), None), self.mesh)
        if problem is not None:
            raise RewardError(problem)
        generation = for_heldout(self._generation)
        if generation.rewards.rescore is not None:
            written = from_first_rank(written, self.mesh)
        metrics = None
        if written:
            alone = Mesh(device=self.mesh.device)
            generation = generation._replace(engine=generation.engine._replace(mesh=alone))
            heldout, sampling, *_ = generation.evaluation
            facts = [done._asdict() for done, _ in written]
            parts = [rows_of_fields(x, alone) for _, x in written]
            done, rows = join_groups(facts, parts, alone, samples=sampling.samples)
            if generation.rewards.rescore is not None:
                ranks = self.mesh.size(self.mesh.row_axes)
                shares = split_rows(rows.batch, np.arange(len(rows.owner)) * ranks // len(rows.owner), self.mesh)
                scored = generation.rewards.rescore(shares, heldout, "eval").batch
                rows = rows.with_fields(score=scored.score, scores=scored.scores)
            completions = [
                x._replace(number=place * sampling.samples + x.number)
                for place, of in enumerate(facts)
                for x in of["completions"]
            ]
            done = done._replace(completions=completions)
            if self.mesh.rank == 0:
                metrics = heldout_metrics(generation, done, rows, self.show, step)
        return from_first_rank(metrics, self.mesh)


def ray_source(job: Job, parts: Parts, frozen: Mapping[str, trees.Tree], clock: Clock, show: Show) -> Source:
    """The source of trainer ranks whose rows generators on Ray write; a `MakeSource`."""
    assert isinstance(job, RLJob) and isinstance(parts, GeneratingParts)
    generation = remarked_generation(job, parts, frozen, clock, show)
    engine: object = parts.generator.engine
    assert isinstance(engine, RayEngine)
    generators = RayGenerators(job, engine, generation, show)
    return source_of_generators(job, generation, generators, clock, show)


def _request(job: RLJob, engine: RayEngine, filters: bool) -> ActorRequest:
    """Actors of a run; `filters` as of a `GeneratorActor`."""
    bounds = generators_on_ray(job.settings.devices.place)
    assert bounds is not None
    ray = engine.ray
    resource = "GPU" if job.device == "cuda" else "CPU"
    amount = {"num_gpus": 1} if resource == "GPU" else {"num_cpus": 1}
    own = None if engine.mesh.rank else ray.put(sent_job(job))

    def start() -> Any:
        actor = ray.remote(GeneratorActor).options(**amount, max_concurrency=1 << 16)
        return actor.remote(own, filters)

    return ActorRequest(bounds, resource, start, 60.0 * job.settings.waiting.timeout)
