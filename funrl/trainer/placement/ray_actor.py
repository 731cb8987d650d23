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
from collections.abc import Awaitable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar, cast

import cloudpickle
import numpy as np

from funrl import trees
from funrl.batch import FIELDS, Batch, as_dict, map_kinds
from funrl.data.prompts import Example
from funrl.environments.logged import LoggedEpisode
from funrl.environments.run import episode_groups
from funrl.loading import load_files, loaded_files
from funrl.mesh.mesh import Mesh, single
from funrl.rewards.call import RewardError
from funrl.rollout.certificate import greedy_of, greedy_requests
from funrl.rollout.elsewhere import Greedy
from funrl.rollout.policy import RunEndingError
from funrl.rollout.ray.engine import WeightBucket, pull_weights
from funrl.rollout.remote.digests import EngineDigests, engine_digests
from funrl.rollout.resident import ResidentEngine
from funrl.trainer.jobs.build import build, load_directories
from funrl.trainer.jobs.job import RLJob
from funrl.trainer.jobs.row_source import generation_of, open_rewards
from funrl.trainer.placement.generate import ShowBuffer
from funrl.trainer.placement.messages import (
    GroupFields,
    GroupPart,
    GroupWork,
    WrittenGroup,
    baseline_of,
    describe_group,
    further_fields,
    group_parts,
)
from funrl.trainer.settings.scorers import SCORERS
from funrl.trainer.settings.settings import with_flags
from funrl.trainer.sources.generation import Rollout
from funrl.trainer.sources.group_rows import WrittenSamples, write_group
from funrl.trainer.sources.heldout import for_heldout
from funrl.trainer.sources.selection import filter_samples
from funrl.trainer.sources.source import Generation
from funrl.trainer.steps.clock import Clock
from funrl.trainer.steps.step_rows import Rows, join_rows, own_batch, rows_of

REST_S = 0.2  # that the engine rests at most while there is nothing to do

_T = TypeVar("_T")
WrittenHeldout = tuple[Rollout, GroupFields] | str  # completions of a prompt and their rows; or the run's problem


class DeliveredGroup(NamedTuple):
    """What a generator returns of a group.

    Attributes:
      group: facts for all trainer ranks.
      keeps: whether the filter keeps some of it.
      episodes: for the log.
      rows: number under which rows are kept -> each row as `row_bytes` has it.
    """

    group: WrittenGroup
    keeps: bool = True
    episodes: Sequence[LoggedEpisode] = ()
    rows: Mapping[int, Sequence[np.ndarray]] = {}


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
      group, keeps, episodes, rows = ray.get(actor.write.remote(work))
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

    async def describe(self) -> tuple[str, int]:
        """Make the engine, without weights. Returns: host and process, and groups that are written at once."""
        sys.path += [path for path in self._sent.paths if path not in sys.path]
        load_files(self._sent.files)
        job = cast(RLJob, pickle.loads(self._sent.job))
        pool = self._workers.enter_context(open_rewards(job, 0))
        parts = build(job, single("cuda:0" if job.device == "cuda" else "cpu"), self._notes.note)
        generator = parts.generator._replace(engine=parts.generator.whole, base=None)  # adapters come merged
        load_directories(generator.frozen)
        parts = dataclasses.replace(parts, generator=generator, pool=pool)
        generation = generation_of(job, parts, {}, Clock(), self._notes)
        self._generation = generation._replace(engine=generation.engine._replace(proof=None))
        self._engine = generator.engine
        self._resident = ResidentEngine(generator.serving)
        self._verifies = job.settings.engines.verify_sync
        requests = generation.sampling.samples + generation.greedy_baseline
        return f"{socket.gethostname()}:{os.getpid()}", max(1, job.settings.engines.decode_rows // requests)

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
        return engine_digests(self._engine) if self._verifies else None

    async def write(self, work: GroupWork) -> DeliveredGroup:
        """Write and reward a group."""
        generation = self._generation
        example = generation.schedule.prompts[work.prompt.index]
        written = await self._write(generation, example, group_parts(work, generation.sampling))
        group = WrittenGroup(0, work, None, {}, (), 0.0, notes=self._notes.take().notes)
        if isinstance(written, str):
            return DeliveredGroup(group._replace(problem=written))
        group = describe_group(generation, written, group)
        keeps = not self._filters or bool(filter_samples(generation, written[0].rows, 1).any())
        episodes = [episode for part in written for episode in part.episodes]
        numbers = (work.number, baseline_of(work.number))
        rows = {number: row_bytes(part.rows) for number, part in zip(numbers, written, strict=False)}
        return DeliveredGroup(group, keeps, episodes, rows)

    async def write_heldout(self, place: int) -> WrittenHeldout:
        """Write and reward the samples of a held-out prompt."""
        generation = for_heldout(self._generation)
        heldout, sampling, _, seed, _ = generation.evaluation
        example, first, seeds = episode_groups(heldout, sampling.samples, seed)[place]
        written = await self._write(generation, example, [GroupPart(sampling, list(seeds))])
        if isinstance(written, str):
            return written
        done, rows, _ = written[0]
        numbered = [completion._replace(number=first + completion.number) for completion in done.completions]
        return done._replace(completions=numbered), group_fields(rows.batch)

    async def greedy(self, prompts: Sequence[Sequence[int]], new_tokens: int) -> Greedy:
        """Complete prompts greedily."""
        done = await self._beside(self._resident.ask_all(greedy_requests(prompts, new_tokens)))
        return greedy_of(done, self._generation.engine.mesh.device)

    async def _step(self) -> None:
        """Step the engine for ever."""
        while True:
            await self._resident.iterate(self._generation.engine.mesh, REST_S)

    async def _write(
        self, generation: Generation, example: Example, parts: Sequence[GroupPart]
    ) -> list[WrittenSamples] | str:
        """Write and reward parts of a group; returns them, or the problem that ends the run."""
        writing = (write_group(generation, self._resident, example, *part) for part in parts)
        try:
            return await self._beside(asyncio.gather(*writing))
        except (RewardError, RunEndingError) as error:
            return str(error)

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


def row_bytes(rows: Rows) -> list[np.ndarray]:
    """Each row as the bytes of its fields, without padding."""

    def dumped(number: int, length: int) -> np.ndarray:
        row = own_batch(rows, np.array([number]))
        row = map_kinds(lambda kind, x: kind.fit(x, length) if kind.per_token else x, row)
        return np.frombuffer(pickle.dumps(group_fields(row), pickle.HIGHEST_PROTOCOL), np.uint8)

    return [dumped(*row) for row in enumerate(rows.lengths.tolist())]


def rows_of_bytes(parts: Sequence[np.ndarray], mesh: Mesh) -> Rows:
    """The rows of `row_bytes`, on one rank. There is at least one."""
    return join_rows([rows_of_fields(pickle.loads(part.data), mesh) for part in parts])


def group_fields(batch: Batch) -> GroupFields:
    """Fields of rows on the host."""
    return GroupFields(trees.map(lambda x: x.cpu(), as_dict(batch)), further_fields(batch))


def rows_of_fields(fields: GroupFields, mesh: Mesh) -> Rows:
    """The rows of `group_fields`, on one rank."""
    values = trees.map(lambda x: x.to(mesh.device), fields.fields)
    return rows_of(Batch(FIELDS | fields.further if fields.further else FIELDS, **values), mesh=mesh)
