"""A generator as a Ray actor: on its event loop each group is a coroutine beside a resident engine."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import importlib
import os
import pickle
import socket
import sys
from collections.abc import Awaitable, Sequence
from typing import Any, NamedTuple, TypeVar, cast

import cloudpickle
import numpy as np

from funrl import trees
from funrl.batch import FIELDS, Batch, as_dict
from funrl.environments.run import episode_groups
from funrl.loading import load_files, loaded_files
from funrl.mesh.mesh import Mesh, single
from funrl.rewards.call import RewardError
from funrl.rollout.certificate import greedy_of, greedy_requests
from funrl.rollout.elsewhere import Greedy
from funrl.rollout.policy import RunEndingError
from funrl.rollout.ray.engine import WeightBucket, pull_weights
from funrl.rollout.ray.link import GeneratorFacts
from funrl.rollout.remote.digests import EngineDigests, engine_digests
from funrl.rollout.resident import ResidentEngine
from funrl.trainer.jobs.build import build, load_directories
from funrl.trainer.jobs.job import RLJob
from funrl.trainer.jobs.row_source import generation_of, open_rewards
from funrl.trainer.placement.generate import ShowBuffer
from funrl.trainer.placement.messages import (
    GroupFields,
    GroupWork,
    WrittenGroup,
    describe_group,
    further_fields,
    group_parts,
)
from funrl.trainer.settings.scorers import SCORERS
from funrl.trainer.settings.settings import with_flags
from funrl.trainer.sources.generation import Rollout
from funrl.trainer.sources.group_rows import write_group
from funrl.trainer.sources.heldout import for_heldout
from funrl.trainer.sources.selection import filter_samples
from funrl.trainer.steps.clock import Clock
from funrl.trainer.steps.step_rows import Rows, rows_of, take

REST_S = 0.2  # that the engine rests at most while there is nothing to do

_T = TypeVar("_T")
WrittenHeldout = tuple[Rollout, GroupFields] | str  # completions of a prompt and their rows; or the run's problem


class SentJob(NamedTuple):
    """The job of a generator, on its way.

    Attributes:
      paths: of the imports of the process that trains.
      files: that it has loaded functions from.
      job: a pickled `RLJob`.
    """

    paths: list[str]
    files: list[str]
    job: bytes


class GeneratorActor:
    """A generator of a run. Ray calls its methods on one event loop, on which the engine steps too.

    Example:
      actor = ray.remote(GeneratorActor).options(num_cpus=1).remote(ray.put(sent_job(job)), False)
      name, room = ray.get(actor.describe.remote())
      digests = ray.get(actor.load.remote(exchange, version))
      facts, episodes, *samples = actor.write.options(num_returns=4).remote(work)
    """

    def __init__(self, job: SentJob, filters: bool) -> None:
        """Begin without an engine.

        Args:
          job: of the run.
          filters: whether prompts are replaced one by one, so that each group is filtered.
        """
        self._sent = job
        self._filters = filters
        self._notes = ShowBuffer()
        self._workers = contextlib.ExitStack()  # of rewards; they end with this process
        self._stepping: asyncio.Task[None] | None = None

    async def describe(self) -> GeneratorFacts:
        """Make the engine, without weights."""
        sys.path += [path for path in self._sent.paths if path not in sys.path]
        load_files(self._sent.files)
        self._job = job = cast(RLJob, pickle.loads(self._sent.job))
        pool = self._workers.enter_context(open_rewards(job, 0))
        self._mesh = single("cuda:0" if job.device == "cuda" else "cpu")
        parts = build(job, self._mesh, self._notes.note)
        generator = parts.generator._replace(engine=parts.generator.whole, base=None)  # adapters come merged
        load_directories(generator.frozen)
        parts = dataclasses.replace(parts, generator=generator, pool=pool)
        self._engine = generator.engine
        generation = generation_of(job, parts, {}, Clock(), self._notes)
        engine = generation.engine._replace(proof=None, note=self._notes.note)
        self._generation = generation._replace(engine=engine)
        self._resident = ResidentEngine(generator.serving)
        requests = generation.sampling.samples + generation.greedy_baseline
        name = f"{socket.gethostname()}:{os.getpid()}"
        return GeneratorFacts(name, max(1, job.settings.engines.decode_rows // requests))

    async def ping(self) -> None:
        """Give a sign of life."""

    async def load(self, exchange: Any, version: int) -> EngineDigests | None:
        """Load a version of the weights between two steps of the engine; digests, where loads are proved."""
        ray = importlib.import_module("ray")
        spec = self._engine.weights
        buckets: list[WeightBucket] = await exchange.take.remote(version)
        tree = await asyncio.to_thread(pull_weights, ray, buckets, spec)
        self._engine.load(spec.named(tree), version)
        self._stepping = self._stepping or asyncio.create_task(self._step())
        return engine_digests(self._engine) if self._job.settings.engines.verify_sync else None

    async def write(self, work: GroupWork) -> tuple[object, ...]:
        """Write and reward a group.

        Returns: facts of the group and whether the filter keeps some of it; the log of its episodes; the rows of each
          sample, and of a greedy baseline beside them: pickled `GroupFields`, None where there are none.
        """
        generation = self._generation
        samples = generation.sampling.samples
        example = generation.schedule.prompts[work.prompt.index]
        parts = group_parts(work, generation.sampling)
        writing = (write_group(generation, self._resident, example, *part) for part in parts)
        try:
            written = await self._beside(asyncio.gather(*writing))
        except (RewardError, RunEndingError) as error:
            group = WrittenGroup(0, work, None, {}, (), 0.0, notes=self._notes.take().notes, problem=str(error))
            return (group, True), [], *[None] * (samples + work.baseline)
        group = WrittenGroup(0, work, None, {}, (), 0.0, notes=self._notes.take().notes)
        facts = describe_group(generation, written, group)
        keeps = not self._filters or bool(filter_samples(generation, written[0].rows, 1).any())
        episodes = [episode for part in written for episode in part.episodes]
        sizes = [samples, *[1] * (len(written) - 1)]
        rows = [x for part, size in zip(written, sizes, strict=True) for x in rows_by_sample(part.rows, size)]
        return (facts, keeps), episodes, *rows

    async def write_heldout(self, place: int) -> WrittenHeldout:
        """Write and reward the samples of a held-out prompt."""
        generation = for_heldout(self._generation)
        heldout, sampling, _, seed, _ = generation.evaluation
        seeds = episode_groups(heldout, sampling.samples, seed)[place].seeds
        writing = write_group(generation, self._resident, heldout[place], sampling, seeds)
        try:
            done, rows, _ = await self._beside(writing)
        except (RewardError, RunEndingError) as error:
            return str(error)
        return done, _fields(rows)

    async def greedy(self, prompts: Sequence[Sequence[int]], new_tokens: int) -> Greedy:
        """Complete prompts greedily."""
        done = await self._beside(self._resident.ask_all(greedy_requests(prompts, new_tokens)))
        return greedy_of(done, self._mesh.device)

    async def _step(self) -> None:
        """Step the engine for ever."""
        while True:
            await self._resident.iterate(self._mesh, REST_S)

    async def _beside(self, program: Awaitable[_T]) -> _T:
        """The result of a program beside the engine. Raises: what the program or the engine raises."""
        assert self._stepping is not None
        task = asyncio.ensure_future(program)
        await asyncio.wait({task, self._stepping}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            task.cancel()
            self._stepping.result()
        return task.result()


def sent_job(job: RLJob) -> SentJob:
    """The job of a run as a generator has it: on one device, without models that reward, which are the trainer's."""
    settings = with_flags(job.settings, place=None, mesh="dp1", **dict.fromkeys(SCORERS))
    models = {name: model for name, model in job.models.items() if name not in SCORERS}
    sizes = dict.fromkeys(job.sizes, 1)
    own = dataclasses.replace(job, settings=settings, models=models, judge=None, sizes=sizes, generate_sizes=sizes)
    return SentJob(sys.path, loaded_files(), cloudpickle.dumps(own))


def samples_of(fields: Any, rows: int) -> np.ndarray:
    """[B] sample of each row of a group, from fields that all ranks know."""
    episode_B = fields.get("episode")
    return np.arange(rows) if episode_B is None else episode_B.cpu().numpy()


def rows_by_sample(rows: Rows, samples: int) -> list[np.ndarray | None]:
    """Bytes of the rows of each sample of a group; None where it has no row."""
    sample_B = samples_of(as_dict(rows.batch), len(rows.owner))
    numbers = [np.flatnonzero(sample_B == sample) for sample in range(samples)]
    return [
        np.frombuffer(pickle.dumps(_fields(take(rows, own)), pickle.HIGHEST_PROTOCOL), np.uint8) if len(own) else None
        for own in numbers
    ]


def rows_of_fields(fields: GroupFields, mesh: Mesh) -> Rows:
    """The rows of `GroupFields`, on one rank."""
    batch = Batch(FIELDS | fields.further if fields.further else FIELDS, **fields.fields)
    batch = batch._replace(**trees.map(lambda x: x.to(mesh.device), as_dict(batch)))
    return rows_of(batch, mesh=mesh)


def _fields(rows: Rows) -> GroupFields:
    return GroupFields(trees.map(lambda x: x.cpu(), as_dict(rows.batch)), further_fields(rows.batch))
