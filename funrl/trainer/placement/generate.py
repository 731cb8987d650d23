"""Program of the generator ranks: write groups, and serve trainer ranks, one request after the other."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

from funrl.environments.logged import LoggedEpisode
from funrl.mesh.collectives import gather_objects
from funrl.mesh.mesh import Mesh
from funrl.mesh.pools.channel import Answers, End
from funrl.mesh.pools.transfer import TransferGroup, WeightDelivery, WeightForm, WeightReceiver
from funrl.mesh.reshard import reshard
from funrl.processes import heartbeat
from funrl.processes.workers import stops_when_asked
from funrl.rewards.call import RewardError
from funrl.rewards.pool import Pool
from funrl.rollout.certificate import greedy_of, greedy_requests
from funrl.rollout.elsewhere import Greedy
from funrl.rollout.native.engine import NativeEngine
from funrl.rollout.native.loading import in_form
from funrl.rollout.remote.digests import compared_greedy, engine_digests
from funrl.rollout.remote.engine import DigestsRequest, GreedyRequest, LoadRequest
from funrl.trainer.checkpoints.saved_episodes import write_episodes
from funrl.trainer.jobs.build import build, load_directories
from funrl.trainer.jobs.job import RLJob
from funrl.trainer.jobs.row_source import generation_of
from funrl.trainer.placement.board import GroupBoard
from funrl.trainer.placement.groups import ledger_rule
from funrl.trainer.placement.messages import (
    HELDOUT,
    BeginEvaluationRequest,
    EndEvaluationRequest,
    EpisodesRequest,
    HeldoutEvaluation,
    PoolAnswer,
    ScoresRequest,
    SendGroupsRequest,
    WrittenFiles,
    WrittenRows,
    written_rows,
)
from funrl.trainer.placement.writer import GroupWriter
from funrl.trainer.settings.scorers import scorers_of
from funrl.trainer.sources.evaluation import EvalRow
from funrl.trainer.sources.generation import Rollout
from funrl.trainer.sources.heldout import HeldoutWriter, heldout_metrics
from funrl.trainer.sources.observing import ShownSample
from funrl.trainer.sources.source import Generation
from funrl.trainer.steps.clock import Clock
from funrl.trainer.steps.parts import Generator
from funrl.trainer.steps.step_rows import Rows


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


class GeneratorRank:
    """A rank that generates: it writes groups, and serves requests of the trainer ranks meanwhile."""

    def __init__(
        self,
        generation: Generation,
        generator: Generator,
        training: Mesh,
        show: ShowBuffer,
        writer: GroupWriter,
        *,
        scored: bool,
    ) -> None:
        """Begin without groups.

        Args:
          generation: as of a source.
          generator: with an engine of this rank.
          training: the mesh of the trainer ranks.
          show: receives what is shown.
          writer: of the groups.
          scored: whether models on the trainer ranks score completions.
        """
        self.scored = scored
        self.generation = generation
        self.generator = generator
        self.training = training
        self.show = show
        self.writer = writer
        self._heldout: HeldoutWriter | None = None
        self._unscored: list[tuple[Rollout, Rows]] = []  # completions of an evaluation that models score

    def next_request(self, answers: Answers) -> object:
        """The next request of the trainer ranks, before which groups are written. Collective."""
        while not self.writer.turn(answers).request:
            self.writer.step()
        return answers.take("a request of the trainer ranks")

    def answer(self, request: object) -> object:
        """The value of the answer to a request. Raises: RewardError."""
        if isinstance(request, SendGroupsRequest):
            return self.writer.send(request, self.training)
        if isinstance(request, EpisodesRequest):
            return self._write_episodes(request.folder, self.writer.logged_episodes(request.groups))
        if isinstance(request, EndEvaluationRequest | ScoresRequest):
            return self._end_evaluation(request)
        assert isinstance(request, DigestsRequest | GreedyRequest | BeginEvaluationRequest)
        self.writer.take_version(request.version)
        if isinstance(request, DigestsRequest):
            return engine_digests(self.generator.whole if request.base else self.generator.engine)
        if isinstance(request, GreedyRequest):
            return self._greedy(request)
        self._heldout = HeldoutWriter(self.generation, request.step)
        return self.writer.begin_evaluation(self._heldout.write)

    def _end_evaluation(self, request: EndEvaluationRequest | ScoresRequest) -> HeldoutEvaluation | WrittenRows:
        """End the evaluation, or have models score its rows first. Collective."""
        heldout = self._heldout
        if heldout is None:
            raise RuntimeError("no evaluation has begun")
        if isinstance(request, ScoresRequest):
            done, rows = self._unscored.pop()
            rows = rows.with_fields(**{name: x.to(rows.mesh.device) for name, x in request._asdict().items()})
        else:
            done, rows = heldout.join(self.writer.end_evaluation())
            if self.scored:
                self.writer.keep(HELDOUT, rows)
                self._unscored.append((done, rows))
                return written_rows(done, rows)
        metrics = heldout_metrics(heldout.generation, done, rows, self.show, heldout.step)
        return HeldoutEvaluation(metrics, self.show.kept, self.show.table)

    def load(self, request: LoadRequest) -> None:
        """Take weights. Collective."""
        generator = self.generator
        engine = generator.engine
        plan = generator.to_engine
        if request.base and generator.base is not None:
            engine = generator.base.engine
            plan = generator.base.to_engine
        if request.model:
            engine = cast(NativeEngine, generator.further[request.model])
            plan = generator.to_whole
        with heartbeat.phase("reshard"):
            engine.load(engine.weights.named(reshard(None, plan, engine.weights.mesh)), request.version)

    def _greedy(self, request: GreedyRequest) -> Greedy:
        """Greedy completions of the first replica, beside the groups."""
        mesh = self.generation.engine.mesh
        done = self.writer.complete_beside(greedy_requests(request.prompts, request.new_tokens))
        return compared_greedy(greedy_of(done, mesh.device), mesh)

    def _write_episodes(self, folder: str, episodes: Sequence[LoggedEpisode]) -> WrittenFiles:
        """Write episodes of this replica; the answer is of all replicas. Collective."""
        mesh = self.generation.engine.mesh
        nbytes = 0
        problem = ""
        try:
            Path(folder).mkdir(parents=True, exist_ok=True)
            nbytes = write_episodes(Path(folder), episodes, mesh)
        except OSError as error:
            problem = f"{error.filename or folder}: cannot be written: {(error.strerror or str(error)).lower()}"
        everywhere = gather_objects((nbytes, problem), mesh)
        problems = (problem for _, problem in everywhere if problem)
        return WrittenFiles(sum(nbytes for nbytes, _ in everywhere), next(problems, ""))


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
    form = WeightForm(generator.to_engine, functools.partial(in_form, generator.engine.weights))
    whole_form = WeightForm(generator.to_whole, functools.partial(in_form, generator.whole.weights))
    receiver = WeightReceiver(generating, form, whole_form, group)
    board = GroupBoard(generating.size(generating.row_axes), int(generating.index(generating.row_axes)))
    take_weights = functools.partial(load_arrived, generator)
    writer = GroupWriter(generation, receiver, take_weights, board, ledger_rule(job, generation))
    rank = GeneratorRank(generation, generator, training, show, writer, scored=bool(scorers_of(job.settings)))
    with stops_when_asked(), answers.showing_progress(), receiver.receiving(), contextlib.closing(writer):
        while not isinstance(request := rank.next_request(answers), End):
            _serve(rank, request, answers)
    return request.result


def load_arrived(generator: Generator, arrived: WeightDelivery) -> None:
    """Load weights that have arrived into the engines."""
    for name, tree in arrived.trees.items():
        engine, form = (generator.further[name], generator.whole) if name else (generator.engine, generator.engine)
        engine.load(form.weights.named(tree), arrived.versions[name])


def _serve(rank: GeneratorRank, request: object, answers: Answers) -> None:
    """Answer one request. Collective."""
    if isinstance(request, LoadRequest):
        answers.answer(None)
        rank.load(request)
        return
    value = problem = None
    try:
        value = rank.answer(request)
    except RewardError as error:  # on every rank of the mesh
        problem = str(error)
    if not isinstance(request, PLAIN_REQUESTS):
        value = PoolAnswer(value, tuple(rank.show.take().notes), problem)
    answers.answer(value)


# Requests whose answers are values without remarks; nobody reads that of the last one.
PLAIN_REQUESTS = (GreedyRequest, DigestsRequest, BeginEvaluationRequest)
