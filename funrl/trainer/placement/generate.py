"""Program of the generator ranks: write groups, and serve trainer ranks, one request after the other.

Between two iterations of its engine a replica looks for requests of the trainer ranks, takes weights that have arrived,
and begins groups. Its first tensor rank decides and tells the others, so that all make the same calls.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, cast

import numpy as np

from funrl.environments.logged import LoggedEpisode
from funrl.mesh.collectives import from_first, gather_objects
from funrl.mesh.mesh import Mesh
from funrl.mesh.pools.channel import LONGEST_S, PROGRESS_S, Answers, End, MethodCall
from funrl.mesh.pools.handover import Handover, send_rows
from funrl.mesh.pools.transfer import TransferGroup, WeightForm, WeightReceiver
from funrl.mesh.reshard import reshard
from funrl.processes import heartbeat
from funrl.processes.workers import stops_when_asked
from funrl.rewards.call import RewardError
from funrl.rewards.pool import Pool
from funrl.rollout.certificate import greedy_of, greedy_requests, held_shards
from funrl.rollout.elsewhere import Greedy
from funrl.rollout.engine import Engine
from funrl.rollout.native.loading import in_form
from funrl.rollout.policy import RunEndingError
from funrl.rollout.remote.engine import EngineDigests, compared_greedy, engine_digests
from funrl.rollout.resident import ResidentEngine, follow
from funrl.trainer.checkpoints.saved_episodes import write_episodes
from funrl.trainer.jobs.build import build, load_directories
from funrl.trainer.jobs.job import RLJob
from funrl.trainer.jobs.row_source import generation_of
from funrl.trainer.placement.board import GroupBoard
from funrl.trainer.placement.groups import ledger_rule
from funrl.trainer.placement.messages import (
    GroupFields,
    GroupWork,
    WrittenGroup,
    baseline_of,
    describe_group,
    own_fields,
    split_origins,
    write_work,
)
from funrl.trainer.settings.scorers import scorers_of
from funrl.trainer.sources.evaluation import EvalRow
from funrl.trainer.sources.group_rows import WrittenSamples
from funrl.trainer.sources.heldout import for_heldout
from funrl.trainer.sources.observing import ShownSample
from funrl.trainer.sources.source import Generation
from funrl.trainer.steps.clock import Clock
from funrl.trainer.steps.parts import Generator
from funrl.trainer.steps.step_rows import Rows, join_rows, take
from funrl.trainer.storage.shard_server import CheckpointError

WRITER_IDLE_S = 0.002  # that an idle replica waits before it looks again
STORE_LOOK_S = 0.001  # between two looks at the store, for each replica more

_T = TypeVar("_T")


class ShowBuffer:
    """Everything that is shown here, until it is sent to the rank that writes it; a `Show`."""

    def __init__(self) -> None:
        """Begin with nothing."""
        self.notes: list[str] = []
        self.kept: list[ShownSample] = []
        self.table: list[EvalRow] = []

    def samples(self, step: int, samples: Sequence[ShownSample]) -> None:
        """Keep samples."""
        self.kept += samples

    def evaluated(self, rows: Sequence[EvalRow]) -> None:
        """Keep rows of an evaluation's table."""
        self.table += rows

    def note(self, text: str) -> None:
        """Keep a remark."""
        self.notes.append(text)

    def take(self) -> ShowBuffer:
        """Everything that is kept, which is then empty."""
        taken = ShowBuffer()
        taken.__dict__, self.__dict__ = self.__dict__, taken.__dict__
        return taken


def write_logged(
    folder: str,
    groups: Sequence[tuple[Sequence[int], int]],
    logged: Mapping[int, Sequence[LoggedEpisode]],
    mesh: Mesh,
) -> int:
    """Write the episodes of groups to files, numbered in the order of the groups. Collective.

    Args:
      folder: for the files, which all ranks see.
      groups: numbers of groups that were written together, in their order, and the episodes of each.
      logged: episodes of the groups of this rank, by the numbers of the groups.
      mesh: of the ranks that write.

    Returns: bytes of all files.

    Raises:
      CheckpointError: a rank cannot write; raised on every rank.
    """
    episodes = [
        episode._replace(number=place * samples + episode.number)
        for numbers, samples in groups
        for place, number in enumerate(numbers)
        for episode in logged.get(number, ())
    ]
    nbytes = 0
    problem = ""
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        nbytes = write_episodes(Path(folder), episodes, mesh)
    except OSError as error:
        problem = f"{error.filename or folder}: cannot be written: {(error.strerror or str(error)).lower()}"
    everywhere = gather_objects((nbytes, problem), mesh)
    if problem := next((text for _, text in everywhere if text), ""):
        raise CheckpointError(problem)
    return sum(nbytes for nbytes, _ in everywhere)


class ReplicaStep(NamedTuple):
    """The next thing that all tensor ranks of a replica do; without any, they step the engine.

    Attributes:
      request: take a request of the trainer ranks.
      weights: take weights that have arrived.
      rows: fields of the rows of groups that have ended, by the numbers of the groups.
    """

    request: bool = False
    weights: bool = False
    rows: dict[int, GroupFields] = {}  # noqa: RUF012  (never mutated)


class GroupWriter:
    """Writer of the groups of this rank's replica, which serves the trainer ranks meanwhile.

    Attributes:
      resident: the engine as coroutines see it; None: this is not the replica's first tensor rank.
      engine: of this rank.
      mesh: to generate on.
      logged: episodes of groups, the newest batch included, by the groups' numbers.
    """

    def __init__(
        self,
        job: RLJob,
        generation: Generation,
        generator: Generator,
        training: Mesh,
        receiver: WeightReceiver,
        show: ShowBuffer,
    ) -> None:
        """Begin without groups.

        Args:
          job: what runs.
          generation: as of a source, on the mesh to generate on.
          generator: with an engine of this rank.
          training: mesh of the trainer ranks.
          receiver: of weights.
          show: receives what an evaluation shows.
        """
        self.generation = generation
        self.show = show
        self.mesh = mesh = generation.engine.mesh
        self.engine = generation.engine.engine
        self.resident = ResidentEngine(self.engine) if mesh.index("tensor") == 0 else None
        self._replicas = mesh.size(mesh.row_axes)
        self._notes = ShowBuffer()
        self._alone = Mesh(device=mesh.device, timeout=mesh.timeout)
        self._generation = generation._replace(
            engine=generation.engine._replace(mesh=self._alone, proof=None, note=self._notes.note)
        )
        self._heldout = for_heldout(self._generation)
        self._receiver = receiver
        self._generator = generator
        self._training = training
        self._board = GroupBoard(self._replicas, int(mesh.index(mesh.row_axes)))
        self._rule = ledger_rule(job, generation)
        self._scored = bool(scorers_of(job.settings))  # models on the trainer ranks score completions
        self._loop = asyncio.new_event_loop()
        self._tasks: dict[GroupWork, asyncio.Task[Sequence[WrittenSamples]]] = {}
        self._held: dict[int, Rows] = {}
        self.logged: dict[int, list[LoggedEpisode]] = {}
        self._reported: int | None = None  # the newest version that the others know of
        self._measured = False
        self._next_look = 0.0
        self._next_sign = 0.0
        self._rest_s = 0.0  # that a rest may take, longer the longer there is nothing to write
        self._waited_s = 0.0

    def turn(self, answers: Answers | None) -> ReplicaStep:
        """The next thing to do. Collective over "tensor".

        Args:
          answers: the requests to look for; None: none is taken.
        """
        if not self._measured and self.engine.version is not None:
            self.engine.check([])  # a native engine measures its free memory now, on all ranks
            self._measured = True
        decided = self._decide(answers) if self.resident is not None else None
        turn: ReplicaStep = from_first(decided, self.mesh, "tensor") or ReplicaStep()
        self._held |= {number: fields.rows(self._alone) for number, fields in turn.rows.items()}
        if turn.weights:
            self.take()
        if turn.request:
            self._rest_s = 0.0
        return turn

    def step(self) -> None:
        """Step the engine once, or wait a little where it has nothing to do. Collective over "tensor"."""
        if self.resident is None:
            follow(self.engine, self.mesh)
            return
        rests = not self._tasks
        if rests and not self._rest_s:
            heartbeat.entered("a request of the trainer ranks")
        self._rest_s = min(LONGEST_S, max(WRITER_IDLE_S, 1.1 * self._rest_s)) if rests else 0.0
        begin = time.monotonic()
        self._loop.run_until_complete(self.resident.iterate(self.mesh, self._rest_s or WRITER_IDLE_S))
        end = time.monotonic()
        if rests:
            self._waited_s += end - begin
        elif end >= self._next_sign:
            self._next_sign = end + PROGRESS_S
            self._board.show_work()

    def take(self) -> None:
        """Load weights that have arrived on all tensor ranks into the engine. Collective over "tensor"."""
        arrived = self._receiver.arrived()
        assert arrived is not None
        generator = self._generator
        for name, tree in arrived.trees.items():
            engine, form = (generator.further[name], generator.whole) if name else (generator.engine, generator.engine)
            engine.load(form.weights.named(tree), arrived.versions[name])
        self._receiver.release()

    def take_version(self, version: int) -> None:
        """Write groups, and what is left of an evaluation, until the engine has a version. Collective over "tensor".

        Older weights are taken too: nothing is received as long as they are in the second buffer.
        """
        while (self.engine.version or 0) < version:
            self.turn(None)
            self.step()
        self._tell_version()

    def serve(self, call: MethodCall, answers: Answers) -> None:
        """Answer a call of one of the methods below. Collective."""
        if call.method == "load":  # weights follow the answer
            answers.answer()
            self.load(*call.arguments)
            return
        value = problem = None
        try:
            value = getattr(self, call.method)(*call.arguments)
        except (RewardError, CheckpointError) as error:  # on every rank of the mesh
            problem = type(error)(str(error))
        answers.answer(value, self.show.take().notes, problem)

    def load(self, version: int, base: bool, model: str) -> None:
        """Take the first weights of an engine, rank to rank by its plan. Collective.

        Args:
          version: of the weights.
          base: whether they are the base weights of adapters.
          model: name of the agents' model whose weights they are; "": they are the policy's.
        """
        plan = self._generator.to_whole if base or model else self._generator.to_engine
        engine = self._engine(base, model)
        with heartbeat.phase("reshard"):
            engine.load(engine.weights.named(reshard(None, plan, engine.weights.mesh)), version)

    def digests(self, version: int, base: bool, model: str) -> EngineDigests:
        """Digests of an engine's weights of a version, held or on their way. Collective. Args: as of `load`."""
        self.take_version(version)
        return engine_digests(self._engine(base, model))

    def _engine(self, base: bool, model: str) -> Engine:
        own = self._generator.whole if base else self._generator.engine
        return cast(Engine, self._generator.further[model]) if model else own

    def write_episodes(self, folder: str, groups: Sequence[tuple[Sequence[int], int]]) -> int:
        """Write the episodes of groups of the newest step; see `write_logged`. Collective."""
        return write_logged(folder, groups, self.logged, self.mesh)

    def _end_beside(self, task: asyncio.Task[_T] | None) -> _T | None:
        """Write groups until a task of the first tensor rank has ended; its result there. Collective over "tensor"."""
        while not from_first(task is None or task.done(), self.mesh, "tensor"):
            self.turn(None)
            self.step()
        return None if task is None else task.result()

    def greedy(self, version: int, prompts: Sequence[Sequence[int]], new_tokens: int) -> Greedy:
        """Greedy completions of the first replica, beside the groups. Collective.

        Args:
          version: of the weights; no newer ones arrive meanwhile.
          prompts: token ids.
          new_tokens: of each completion.
        """
        self.take_version(version)
        requests = greedy_requests(prompts, new_tokens)
        task = None if self.resident is None else self._loop.create_task(self.resident.ask_all(requests))
        done = from_first(self._end_beside(task), self.mesh, "tensor")
        return compared_greedy(greedy_of(done, self.mesh.device), self.mesh)

    def send_groups(
        self,
        origins: np.ndarray,
        way: tuple[np.ndarray, np.ndarray, np.ndarray],
        groups: Sequence[int],
        unlogged: Sequence[int],
    ) -> None:
        """Hand over rows of groups, and let go of some groups. Collective.

        Args:
          origins: [B] of the rows, as `origins_of` numbers them, by their groups.
          way: first fields of a `Handover` of the rows to the trainer ranks.
          groups: numbers of those whose rows nobody asks for any more.
          unlogged: numbers of those whose episodes nobody asks for any more.
        """
        handover = Handover(*way, source=self.mesh, target=self._training)
        own = np.flatnonzero(handover.owner == self._board.owner)
        if len(own):
            rows = join_rows([take(self._held[number], places) for number, places in split_origins(origins[own])])
            with heartbeat.phase("send_rows"):
                send_rows(*own_fields(rows.batch), handover)
        for number in groups:
            self._held.pop(number, None)
        for number in unlogged:
            self.logged.pop(number, None)

    def close(self) -> None:
        """End all groups."""
        tasks = self._tasks.values()
        for task in tasks:
            task.cancel()
        if tasks:
            self._loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        self._loop.close()

    def _decide(self, answers: Answers | None) -> ReplicaStep | None:
        rows = self._deliver_ended()
        now = time.monotonic()
        if now < self._next_look:
            return ReplicaStep(rows=rows) if rows else None
        self._next_look = now + STORE_LOOK_S * max(1, self._replicas // 8)
        self._tell_version()
        if answers is not None and answers.waiting():
            return ReplicaStep(request=True, rows=rows)
        arrived = self._receiver.arrived()
        if arrived is not None and max(arrived.versions.values()) <= self._latest_version():
            return ReplicaStep(weights=True, rows=rows)
        self._begin_groups()
        return ReplicaStep(rows=rows) if rows else None

    def _latest_version(self) -> float:
        """Version that the engine may load: an evaluation is written with its own weights alone."""
        evaluated = [work.weights for work in self._tasks if work.heldout]
        if (upcoming := self._board.evaluated()) is not None:
            evaluated.append(upcoming)
        return min(evaluated, default=math.inf)

    def _tell_version(self) -> None:
        """Publish the version of this replica."""
        version = self.engine.version
        if self.resident is None or version is None or version == self._reported:
            return
        for passed in range(version if self._reported is None else self._reported + 1, version + 1):
            self._board.hold(passed)
        self._reported = version

    def _begin_groups(self) -> None:
        """Begin the groups that may begin and for which the engine has room."""
        if self.resident is None or self._reported is None:
            return
        setup = self._generation.episodes
        is_fixed = self._generation.engine.queue == "fixed" and not self._rule.staleness  # all begin at once
        room = math.inf if is_fixed else self.resident.room()
        if setup is not None:
            room = min(room, setup.limits.waiting - sum(map(self._requests_of, self._tasks)))
        while (room > 0 or not self._tasks) and (work := self._board.next_group()) is not None:
            self._tasks[work] = self._loop.create_task(self._write(self.resident, work))
            room -= self._requests_of(work)
            if work.place is not None:
                heartbeat.at_step(work.place // self._rule.places + 1)

    def _requests_of(self, work: GroupWork) -> int:
        """Requests that a group begins with."""
        return 1 if work.is_greedy else work.sampling(self._generation).samples + work.baseline

    def _deliver_ended(self) -> dict[int, GroupFields]:
        """Deliver groups that have ended; returns their rows."""
        ended = [work for work, task in self._tasks.items() if task.done()]
        kept: dict[int, GroupFields] = {}
        for work in ended:
            task = self._tasks.pop(work)
            try:
                parts = task.result()
            except (RewardError, RunEndingError) as error:
                self._board.deliver(self._group(work, problem=str(error)))
                continue
            numbers = (work.number, baseline_of(work.number))
            if not work.heldout or self._scored:
                kept |= {n: GroupFields.of(part.rows.batch) for n, part in zip(numbers, parts, strict=False)}
            generation = self._generation_of(work)
            self._board.deliver(describe_group(generation, parts, self._group(work), filters=self._rule.filters))
        return kept

    def _generation_of(self, work: GroupWork) -> Generation:
        return self._heldout if work.heldout else self._generation

    def _group(self, work: GroupWork, problem: str | None = None) -> WrittenGroup:
        """A group without rows, with what has happened since the last one."""
        waited_s = 0.0
        if not work.heldout:
            waited_s, self._waited_s = self._waited_s, 0.0
        notes = self._notes.take().notes
        return WrittenGroup(self._board.owner, work, None, {}, (), waited_s, notes=notes, problem=problem)

    async def _write(self, resident: ResidentEngine, work: GroupWork) -> Sequence[WrittenSamples]:
        """Write and reward a group. Raises: RewardError, RunEndingError: the run ends."""
        parts = await write_work(self._generation_of(work), resident, work)
        self.logged[work.number] = [episode for part in parts for episode in part.episodes]
        return parts


def serve_requests(job: RLJob, training: Mesh, generating: Mesh, pool: Pool | None, group: TransferGroup = None) -> Any:
    """Serve the trainer ranks, on a rank that generates, until they have ended; returns `End.result`.

    Args:
      job: what runs.
      training, generating: the meshes; this rank is in the second.
      pool: this rank's reward workers.
      group: of `transfer_group`.
    """
    show = ShowBuffer()
    with heartbeat.phase("load"):
        parts = dataclasses.replace(build(job, training, show.note), pool=pool)
        generator = parts.generator
        load_directories(generator.frozen)
        generation = generation_of(job, parts, {}, Clock(), show)
    answers = Answers(generating)
    prepare = functools.partial(in_form, generator.engine.weights)
    form = WeightForm(generator.to_engine, prepare, functools.partial(held_shards, generator.engine))
    whole_form = WeightForm(generator.to_whole, functools.partial(in_form, generator.whole.weights))
    receiver = WeightReceiver(generating, form, whole_form, group)
    writer = GroupWriter(job, generation, generator, training, receiver, show)
    with stops_when_asked(), answers.showing_progress(), receiver.receiving(), contextlib.closing(writer):
        while True:
            while not writer.turn(answers).request:
                writer.step()
            request = answers.take("a request of the trainer ranks")
            if isinstance(request, End):
                return request.result
            writer.serve(request, answers)
