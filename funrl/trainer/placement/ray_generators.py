"""Trainer-side client of generators on Ray: their groups become batches, and rows go to the ranks that train them.

    actors -- facts --> first rank: link, ledger, batch     (kilobytes a group)
    actors -- rows  --> object store of its node            (once a row: it outlives the actor and its node)
                        object store --> rank that trains a row, which takes the samples that it needs

A batch of 16,384 rows of 33,000 tokens has 16 bytes a token, 8.6 GB: that many cross to the first rank's node while the
trainer updates, and all but the rows of that node cross once more, to each node its own. The first rank maps these
objects and never unpickles rows of others. Its node needs a store of (S + 1) batches; Ray keeps on disk what is more.
"""

from __future__ import annotations

import copy
import pickle
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from funrl import trees
from funrl.batch import Batch, as_dict, declare, schema_of
from funrl.environments.logged import LoggedEpisode
from funrl.fields import FIELDS
from funrl.mesh.collectives import from_first_rank
from funrl.mesh.mesh import Mesh
from funrl.mesh.pools.ray_pool import generators_on_ray
from funrl.processes.heartbeat import beat, entered, left
from funrl.rewards.call import RewardError
from funrl.rollout.elsewhere import Greedy
from funrl.rollout.ledger import Ledger, LedgerRule
from funrl.rollout.ray.engine import RayEngine
from funrl.rollout.ray.link import ActorRequest, GeneratorLink, PinnedCall
from funrl.rollout.remote.digests import EngineDigests
from funrl.trainer.jobs.job import Job, RLJob
from funrl.trainer.jobs.row_source import remarked_generation
from funrl.trainer.placement.generators import ORIGIN
from funrl.trainer.placement.group_prompts import GroupPrompt
from funrl.trainer.placement.groups import GroupGenerators, ledger_rule
from funrl.trainer.placement.joined_groups import in_place_of, join_groups
from funrl.trainer.placement.messages import WrittenGroup, own_fields, split_origins
from funrl.trainer.placement.ray_actor import GeneratorActor, generator_job, rows_of_fields, samples_of
from funrl.trainer.placement.source import needs_tokens, timed_evaluation
from funrl.trainer.sources.curriculum import as_chosen
from funrl.trainer.sources.heldout import for_heldout, heldout_metrics
from funrl.trainer.sources.observing import Show
from funrl.trainer.sources.pair_rows import SAMPLED_PAIRS, pair_source
from funrl.trainer.sources.prompts import prompt_source
from funrl.trainer.sources.source import Generation, Source, StepLog
from funrl.trainer.steps.clock import Clock
from funrl.trainer.steps.parts import GeneratingParts, Parts
from funrl.trainer.steps.step_rows import Rows, join_rows, moved, rows_of, take, with_stale

LOOK_S = 5.0  # between two signs of the first rank to the others, while it waits
ROWS = "rows"  # topic of the exchange


class PromptOrder:
    """Prompts of places, given when these begin, and kept until other prompts refill them; the board of a ledger.

    Attributes:
      replicas: number of replicas by which metrics divide; generators come and go.
    """

    replicas = 1

    def __init__(self, link: GeneratorLink, rule: LedgerRule, *, weighed: bool) -> None:
        """Begin before the first place.

        Args:
          link: receives the ledger.
          rule: of the ledger.
          weighed: whether weights choose the prompts of batches.
        """
        self._link = link
        self._rule = rule
        self._weighed = weighed
        self._opened: Ledger | None = None
        self._used = 0  # prompts
        self._first: int | None = None  # position of the first prompt of a round
        self._given: dict[int, Sequence[int]] = {}
        self._prompts: dict[int, GroupPrompt] = {}

    def open(self, ledger: Ledger) -> None:
        """Have generators begin places of a ledger."""
        with self._link.changed:
            self._opened = copy.deepcopy(ledger)
            self._link.ledger = ledger

    def train(self, batch: int, version: int) -> None:
        """Record the version that a batch is trained with, after which the groups of others are done."""
        with self._link.changed:
            self._link.batches[version] = batch
            self._first = None
            oldest = self._link.ledger.oldest if self._link.ledger is not None else 0
            self._prompts = {number: prompt for number, prompt in self._prompts.items() if number >= oldest}

    def give_prompts(self, first: int, positions: Sequence[Sequence[int]]) -> None:
        """Take the positions of the prompts of batches from `first` on."""
        with self._link.changed:
            self._given = dict(enumerate(positions, first))

    def work(self, number: int) -> tuple[int, GroupPrompt]:
        """A place that begins, and its prompt, which is the same in each attempt."""
        if number not in self._prompts:
            self._prompts[number] = self._next(number)
        return number, self._prompts[number]

    def refill(self, ledger: Ledger, numbers: Sequence[int]) -> list[int]:
        """Give other prompts to written places; returns those that have some, as `Ledger.refill`."""
        refilled = ledger.refill(numbers)
        self._first = None
        for number in refilled:
            del self._prompts[number]
        return refilled

    def _next(self, number: int) -> GroupPrompt:
        ledger = self._opened
        assert ledger is not None
        places = self._rule.places
        if self._rule.prompts > 1:
            position = ledger.prompt_of(self._used)
            self._used += 1
            if self._rule.staleness:
                return GroupPrompt(position, first=position)
            self._first = position if self._first is None else self._first
            return GroupPrompt(position, self._first)
        if self._weighed:
            batch, place = divmod(number, places)
            position = self._given[batch][place]
            return GroupPrompt(position, first=position)
        base = ledger.prompts - ledger.version * places
        return GroupPrompt(base + number, base + number // places * places)


class RayGenerators(GroupGenerators):
    """Trainer-side client of generators on Ray; a `RemoteGenerators`.

    Attributes:
      episodes: of the newest rows, for the log of the run; on the first rank.
    """

    def __init__(self, job: RLJob, engine: RayEngine, generation: Generation, show: Show, clock: Clock) -> None:
        """Ask for generators, on the first rank.

        Args:
          job: of the run.
          engine: through which weights go.
          generation: of the trainer ranks.
          show: receives remarks.
          clock: of the phases.
        """
        rule = ledger_rule(job, generation)
        super().__init__(engine, show, rule=rule, generation=generation, early=needs_tokens(job, generation))
        self.generating = generation.engine.mesh
        self.early = self.early or (rule.rounds and rule.prompts > 1)
        self.refills = not rule.rounds
        self.episodes: list[LoggedEpisode] = []
        self._generation = generation
        self._samples = generation.sampling.samples
        self._ray = engine.ray
        self._exchange = engine.exchange
        self._notes: list[str] = []
        self._replaced: dict[int, WrittenGroup] = {}  # whose places other prompts refill
        self._objects: dict[int, tuple[Sequence[Any], Sequence[Any]]] = {}  # references and values of samples
        self._logged: dict[int, Sequence[LoggedEpisode]] = {}
        self._link = link = GeneratorLink(_request(job, engine), self._exchange, self._notes.append)
        self._board = PromptOrder(link, rule, weighed=self.weighed)
        link.work = self._board.work
        link.deliver = self._deliver
        link.objects = 2 + self._samples
        engine.greedy = self._greedy
        engine.wait_for_digests = self._wait_for_digests
        if self.mesh.rank == 0:
            engine.publish = link.publish
            engine.digests_of = self._digests
            link.start()

    def begin_step(self, step: int, position: int, steps: int) -> None:
        """Begin to take the batch of a step; see `GroupGenerators`."""
        with self._link.changed:
            taken = self._groups.keys() - self._written.keys()
            for number in taken:
                self._objects.pop(number, None)
                self._logged.pop(number, None)
        self.episodes.clear()
        if self.mesh.rank == 0 and taken:
            self._exchange.drop.remote([ROWS])
        super().begin_step(step, position, steps)

    def end_step(self) -> None:
        """Take the batch of a step; see `GroupGenerators`. Collective."""
        with self._link.changed:
            super().end_step()

    def saved(self, state: trees.Tree) -> trees.Tree:
        """The state with what is ahead; see `GroupGenerators`."""
        return super().saved(state) if self._rule.staleness else state

    def dropped(self) -> list[Any]:
        """Prompts that were replaced where they were written; see `RemoteGenerators`."""
        return super().dropped() if self.refills else []

    def log(self) -> list[tuple[object, ...]] | None:
        """The groups of the newest batch; see `GroupGenerators`."""
        return super().log() if self._rule.staleness else None

    def metrics(self) -> dict[str, float]:
        """Metrics of the newest batch; see `GroupGenerators`."""
        return super().metrics() if self._rule.staleness else {}

    def begin_evaluation(self, step: int) -> Callable[[], dict[str, float]]:
        """Have generators evaluate the newest weights, before other work; see `Source`. Collective."""
        places = [(place,) for place in range(len(self._generation.evaluation.heldout))]
        calls = self._begin("write_heldout", places)
        return lambda: self._evaluated_by(calls, step)

    def move(self, rows: Rows, to: np.ndarray, mesh: Mesh) -> Rows:
        """`moved`, also for rows in the object store, of which each rank takes its own. Collective."""
        if rows.mesh.here:
            return moved(rows, to, mesh)
        fields = as_dict(rows.batch)
        origins = fields.pop("origin").cpu().numpy()
        own = self._own_rows(origins[to == int(mesh.index(mesh.row_axes))])
        own, _ = own_fields(rows.batch if own is None else own.batch)
        further = {name: field for name, field in schema_of(rows.batch).items() if name not in FIELDS | ORIGIN}
        batch = declare(Batch(), further)._replace(**{**fields, **own})
        result = rows_of(batch, to, mesh)
        return with_stale(result, self.engine.version or 0, self.staleness) if "version" in own else result

    def close(self) -> None:
        """End the generators, and leave the cluster."""
        if self.mesh.rank == 0:
            self._link.close()
            self._ray.kill(self._exchange)
        self._ray.shutdown()

    def _collected(self, lost: Sequence[int]) -> dict[int, WrittenGroup]:
        """Groups that have ended; see `GroupGenerators`. Collective."""
        ledger = self.ledger
        if ledger is not None and lost:
            with self._link.changed:
                self._board.refill(ledger, lost)
        groups = self._awaited_by(lambda: self._complete(lost), f"the generators' groups of step {self.step}")
        if groups is not None and self.mesh.world > 1:
            references = {
                (number, sample): [reference]
                for number in groups
                for sample, reference in enumerate(self._objects.get(number, ((), ()))[0])
            }
            self._ray.get(self._exchange.post.remote(ROWS, references))
        groups = from_first_rank(groups, self.mesh)
        for place, number in enumerate(groups):
            episodes = self._logged.get(number, ())
            self.episodes += [x._replace(number=place * self._samples + x.number) for x in episodes]
        return groups

    def _complete(self, lost: Sequence[int]) -> dict[int, WrittenGroup] | None:
        """Groups of the batch, or those of other prompts in some places; None: some are not written. Under the lock."""
        if problems := [item for item in self._written.items() if item[1].problem is not None]:
            return dict(problems[:1])
        assert self.ledger is not None
        self.ledger.fill_batch()
        numbers = lost or (sorted(self.ledger.batch) if len(self.ledger.batch) == self._rule.places else ())
        if not numbers or not self._written.keys() >= set(numbers):
            return None
        groups = {number: self._written.pop(number) for number in numbers}
        return {n: in_place_of(self._groups[n], group) if lost else group for n, group in groups.items()}

    def _awaited_by(self, look: Callable[[], Any], name: str) -> Any:
        """Wait until `look` gives a result on the first rank, under the lock; None on the others. Collective.

        Raises:
          Exception: whatever ends the run, such as ClusterError.
        """
        entered(name)
        result = None
        while True:
            if self.mesh.rank == 0:
                with self._link.changed:
                    result = self._look(look)
                while self._notes:
                    self.show.note(self._notes.pop(0))
            if from_first_rank(result is not None, self.mesh):
                break
            beat()
        left()
        return result

    def _look(self, look: Callable[[], Any]) -> Any:
        deadline = time.monotonic() + LOOK_S
        while True:
            self._link.check()
            result = look()
            if result is not None or self._notes or not self._link.changed.wait(max(0.0, deadline - time.monotonic())):
                return result

    def _deliver(self, number: int, value: tuple[WrittenGroup, bool], references: Sequence[Any], objects: Any) -> None:
        """Keep what a generator has written, unless another prompt refills its place. Under the lock."""
        group, keeps = value
        if number in self._replaced:
            group = in_place_of(self._replaced.pop(number), group)
        if not keeps and self.refills and self.ledger is not None and self._board.refill(self.ledger, [number]):
            self._replaced[number] = group
            return
        self._written[number] = group
        self._logged[number] = objects[0]
        self._objects[number] = references[1:], objects[1:]

    def _own_rows(self, origins: np.ndarray) -> Rows | None:
        """Rows by their origins, which this rank trains; None: there are none."""
        if not len(origins):
            return None
        places = []
        for number, own in split_origins(origins):
            written = self._groups[number].rows
            sample_B = samples_of(written.fields, len(written.owner))
            places += [((number, int(sample_B[row])), int((sample_B[:row] == sample_B[row]).sum())) for row in own]
        keys = list(dict.fromkeys(key for key, _ in places))
        if self.mesh.rank == 0:
            objects = [self._objects[number][1][sample] for number, sample in keys]
        else:
            taken = self._ray.get(self._exchange.take.remote(ROWS, keys))
            objects = self._ray.get([reference for [reference] in taken])
        alone = Mesh(device=self.mesh.device, timeout=self.mesh.timeout)
        samples = {key: rows_of_fields(pickle.loads(x), alone) for key, x in zip(keys, objects, strict=True)}
        return join_rows([take(samples[key], np.array([index])) for key, index in places])

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

    def _begin(self, method: str, arguments: Sequence[tuple[object, ...]]) -> list[PinnedCall]:
        if self.mesh.rank != 0:
            return []
        return self._link.begin(self.engine.version or 0, method, arguments)

    def _results(self, calls: Sequence[PinnedCall], name: str) -> list[Any]:
        """Results of calls, on the first rank; none on the others. Collective."""

        def look() -> list[Any] | None:
            results = [call.result for call in calls]
            return None if any(result is None for result in results) else results

        return self._awaited_by(look, name) or []

    def _greedy(self, prompts: Sequence[Sequence[int]], new_tokens: int) -> Greedy:
        results = self._results(self._begin("greedy", [(prompts, new_tokens)]), "the generators' probe")
        tokens_BS, logp_BS, spread = from_first_rank(results[0] if results else None, self.mesh)
        return Greedy(tokens_BS.to(self.mesh.device), logp_BS.to(self.mesh.device), spread)

    def _evaluated_by(self, calls: Sequence[PinnedCall], step: int) -> dict[str, float]:
        """Metrics of an evaluation. Collective.

        Raises:
          RewardError: a reward function or the environment has failed; on every rank.
        """
        written = self._results(calls, f"the generators' evaluation after step {step}")
        problem: str | None = next((x for x in written if isinstance(x, str)), None)
        metrics = None if problem is not None or self.mesh.rank else self._heldout_metrics(written, step)
        metrics, problem = from_first_rank((metrics, problem), self.mesh)
        if problem is not None:
            raise RewardError(problem)
        return metrics

    def _heldout_metrics(self, written: Sequence[Any], step: int) -> dict[str, float]:
        alone = Mesh(device=self.mesh.device)
        generation = for_heldout(self._generation)
        generation = generation._replace(engine=generation.engine._replace(mesh=alone))
        samples = generation.evaluation.sampling.samples
        facts = [done._asdict() for done, _ in written]
        done, rows = join_groups(facts, [rows_of_fields(x, alone) for _, x in written], alone, samples=samples)
        completions = [
            x._replace(number=place * samples + x.number) for place, of in enumerate(facts) for x in of["completions"]
        ]
        return heldout_metrics(generation, done._replace(completions=completions), rows, self.show, step)


def ray_source(job: Job, parts: Parts, frozen: Mapping[str, trees.Tree], clock: Clock, show: Show) -> Source:
    """The source of trainer ranks whose rows generators on Ray write; a `MakeSource`."""
    assert isinstance(job, RLJob) and isinstance(parts, GeneratingParts)
    generation = remarked_generation(job, parts, frozen, clock, show)
    engine: object = parts.generator.engine
    assert isinstance(engine, RayEngine)
    generators = RayGenerators(job, engine, generation, show, clock)
    staleness = job.settings.asynchrony.staleness
    own = generation._replace(schedule=as_chosen(generation.schedule)) if staleness else generation
    source = prompt_source(own._replace(remote=generators), clock, show)
    if job.algorithm.example in SAMPLED_PAIRS:
        source = pair_source(source, job.reward_names)
    init, next_rows = source.init, source.next_rows
    beside = staleness and not generators.weighed  # a curriculum may read its metrics before the next step
    return source._replace(
        init=lambda: generators.saved(init()),
        next_rows=lambda state, step: generators.take_step(next_rows, state, step, job.settings.run.steps),
        move=generators.move,
        close=generators.close,
        begin_evaluation=timed_evaluation(generators.begin_evaluation, clock) if beside else None,
        log=StepLog(generators.episodes, groups=generators.log),
    )


def _request(job: RLJob, engine: RayEngine) -> ActorRequest:
    """Actors of a run."""
    bounds = generators_on_ray(job.settings.devices.place)
    assert bounds is not None
    ray = engine.ray
    resource = "GPU" if job.device == "cuda" else "CPU"
    amount = {"num_gpus": 1} if resource == "GPU" else {"num_cpus": 1}
    own = None if engine.mesh.rank else ray.put(generator_job(job))

    def start() -> Any:
        actor = ray.remote(GeneratorActor).options(**amount, max_concurrency=1 << 16)
        return actor.remote(own)

    return ActorRequest(bounds, resource, start, 60.0 * job.settings.waiting.timeout)
