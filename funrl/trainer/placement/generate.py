"""Program of the generator ranks: serve trainer ranks, one request after the other."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

from funrl.environments.logged import LoggedEpisode
from funrl.mesh.collectives import gather_objects
from funrl.mesh.mesh import Mesh
from funrl.mesh.pools.channel import Answers, End
from funrl.mesh.pools.handover import Handover, send_rows
from funrl.mesh.pools.transfer import WeightDelivery, WeightForm, WeightReceiver
from funrl.mesh.reshard import reshard
from funrl.processes import heartbeat
from funrl.processes.workers import stops_when_asked
from funrl.rewards.call import RewardError
from funrl.rewards.pool import Pool
from funrl.rollout.native.engine import NativeEngine
from funrl.rollout.native.loading import in_form
from funrl.rollout.remote.digests import EngineDigests, compared_greedy, engine_digests
from funrl.rollout.remote.engine import DigestsRequest, GreedyRequest, LoadRequest, ReadyRequest
from funrl.rollout.resident import park_requests
from funrl.trainer.ahead.heldout import HeldoutWriter, WrittenPart
from funrl.trainer.checkpoints.saved_episodes import write_episodes
from funrl.trainer.jobs.build import build, load_directories
from funrl.trainer.jobs.job import RLJob
from funrl.trainer.jobs.row_source import generation_of
from funrl.trainer.placement.groups import admission_rule
from funrl.trainer.placement.messages import (
    BeginEvaluationRequest,
    EndEvaluationRequest,
    EpisodesRequest,
    HeldoutEvaluation,
    PoolAnswer,
    SendGroupsRequest,
    SendRequest,
    WriteRequest,
    WrittenFiles,
    WrittenRows,
    own_fields,
    split_origins,
    written_rows,
)
from funrl.trainer.placement.writer import GroupWriter
from funrl.trainer.sources.evaluation import EvalRow
from funrl.trainer.sources.observing import ShownSample
from funrl.trainer.sources.prompts import evaluate_heldout, first_samples, rewarded_rows
from funrl.trainer.sources.source import Generation
from funrl.trainer.steps.clock import Clock
from funrl.trainer.steps.parts import Generator
from funrl.trainer.steps.step_rows import Rows, join_rows, take


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

    def taken(self) -> ShowBuffer:
        """Everything that is kept, which is then nothing."""
        taken = ShowBuffer()
        taken.__dict__, self.__dict__ = self.__dict__, taken.__dict__
        return taken


class GeneratingRank:
    """The engine of this rank, and rows that it has written."""

    def __init__(
        self, generation: Generation, generator: Generator, training: Mesh, show: ShowBuffer, group: Any = None
    ) -> None:
        """Begin without rows.

        Args:
          generation: as of a source.
          generator: with an engine of this rank.
          training: the mesh of the trainer ranks.
          show: receives what is shown.
          group: of `transfer_group`.
        """
        self.group = group
        self.generation = generation
        self.generator = generator
        self.training = training
        self.show = show
        self.clock = Clock()
        self.held: dict[int, Rows] = {}  # by the number of their request
        self.step = 0  # of the newest rows
        episodes = generation.episodes
        self.log = [] if episodes is None or episodes.log is None else episodes.log

    def load(self, request: LoadRequest) -> EngineDigests | None:
        """Take weights."""
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
            engine.load(self._arriving(engine.weights, plan), request.version)
        return engine_digests(engine) if request.digests else None

    def take(self, arrived: WeightDelivery) -> None:
        """Load arrived weights into the engines."""
        engine = self.generator.engine
        engine.load(engine.weights.named(arrived.tree), arrived.transfer.version)
        whole = self.generator.whole.weights
        for name, tree in arrived.further.items():
            self.generator.further[name].load(whole.named(tree), arrived.transfer.further[name])

    def _arriving(self, weights: Any, plan: Any) -> Any:
        yield from weights.named(reshard(None, plan, weights.mesh))

    def write(self, request: WriteRequest, number: int) -> tuple[WrittenRows, list[ShownSample]]:
        """Generate and reward rows, which stay here. Raises: RewardError."""
        heartbeat.at_step(request.step)
        if request.step != self.step:
            self.step = request.step
            self.log.clear()
        prompts = self.generation.schedule.prompts
        examples = [prompts[place] for place in request.places.tolist()]
        done, rows = rewarded_rows(self.generation, self.clock, examples, request.sampling, request.seed)
        self.held[number] = rows
        shown = []
        if self.generation.shows(request.step):
            shown = first_samples(self.generation, examples, done, rows=rows, samples=request.sampling.samples)
        return written_rows(done, rows), shown

    def send(self, request: SendRequest) -> None:
        """Hand rows over, and let go of all others."""
        if len(request.origins):  # a step has no row where all its episodes have failed
            rows = join_rows([take(self.held[number], rows) for number, rows in split_origins(request.origins)])
            way = Handover(rows.lengths, rows.owner, request.to, source=rows.mesh, target=self.training)
            with heartbeat.phase("send_rows"):
                send_rows(*own_fields(rows.batch), way)
        self.held.clear()

    def evaluation(self, metrics: dict[str, float]) -> HeldoutEvaluation:
        """Metrics of an evaluation with what was shown."""
        return HeldoutEvaluation(metrics, self.show.kept, self.show.table)

    def write_episodes(self, folder: str, episodes: Sequence[LoggedEpisode]) -> WrittenFiles:
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

    def answer(self, request: Any, number: int) -> Any:
        """The value of the answer to a request. Raises: RewardError."""
        if isinstance(request, WriteRequest):
            return self.write(request, number)
        if isinstance(request, SendRequest):
            return self.send(request)
        if isinstance(request, EpisodesRequest):
            return self.write_episodes(request.folder, self.log)
        return self.evaluation(evaluate_heldout(self.generation, self.clock, self.show, request.step))


def serve_requests(job: RLJob, training: Mesh, generating: Mesh, pool: Pool | None, group: Any = None) -> Any:
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
        load_directories(parts.generator.frozen)
        generation = generation_of(job, parts, {}, Clock(), show)
    rank = GeneratingRank(generation, parts.generator, training, show, group)
    answers = Answers(generating)
    with stops_when_asked(), answers.showing_progress():
        if job.settings.asynchrony.staleness:
            return _serve_beside_groups(job, rank, answers)
        while not isinstance(request := answers.take("a request of the trainer ranks"), End):
            _serve(rank, request, answers)
    return request.result


def _serve(rank: GeneratingRank, request: Any, answers: Answers) -> None:
    """Answer one request. Collective."""
    if isinstance(request, ReadyRequest):
        answers.answer(None)
    elif isinstance(request, LoadRequest):
        answers.answer(rank.load(request))
    elif isinstance(request, GreedyRequest):
        answers.answer(compared_greedy(rank.generator.engine, request.prompts, request.new_tokens))
    else:
        _answer(rank, answers, lambda: rank.answer(request, answers.taken - 1))


def _answer(rank: GeneratingRank, answers: Answers, make: Callable[[], Any]) -> None:
    """Answer a request with a value that is made now. Collective."""
    value = problem = None
    try:
        value = make()
    except RewardError as error:  # on every rank of the mesh
        problem = str(error)
    answers.answer(PoolAnswer(value, tuple(rank.show.taken().notes), problem))


def _serve_beside_groups(job: RLJob, rank: GeneratingRank, answers: Answers) -> Any:
    """Serve requests while groups are written without a break; returns `End.result`."""
    generator = rank.generator
    receiver = WeightReceiver(
        answers.mesh,
        WeightForm(generator.to_engine, functools.partial(in_form, generator.engine.weights)),
        WeightForm(generator.to_whole, functools.partial(in_form, generator.whole.weights)),
        rank.group,
    )
    generation = rank.generation
    writer = GroupWriter(generation, admission_rule(job), receiver, rank.take)
    heldout: HeldoutWriter | None = None
    with receiver.receiving(), contextlib.closing(writer):
        while True:
            if not writer.turn(answers).request:
                writer.step()
                continue
            request = answers.take("a request of the trainer ranks")
            if isinstance(request, End):
                return request.result
            if isinstance(request, SendGroupsRequest):
                writer.send(request, rank.training)
                answers.answer(PoolAnswer(None, tuple(rank.show.taken().notes)))
                continue
            if isinstance(request, BeginEvaluationRequest):
                heldout = _begin_evaluation(generation, request, writer)
                answers.answer(PoolAnswer(None))
                continue
            if isinstance(request, EndEvaluationRequest):
                assert heldout is not None
                _answer(rank, answers, functools.partial(_evaluation, rank, heldout, _result_beside(writer)))
                continue
            if isinstance(request, EpisodesRequest):
                files = rank.write_episodes(request.folder, writer.logged_episodes(request.groups))
                answers.answer(PoolAnswer(files, tuple(rank.show.taken().notes)))
                continue
            writer.take_version(request.version if isinstance(request, VERSIONED) else 0)
            if isinstance(request, DigestsRequest):
                answers.answer(engine_digests(generator.engine))
                continue
            with park_requests(generation.engine.engine, answers.mesh, writer.resident):
                _serve(rank, request, answers)


def _begin_evaluation(generation: Generation, request: BeginEvaluationRequest, writer: GroupWriter) -> HeldoutWriter:
    """Begin an evaluation beside groups once this replica has its weights. Collective."""
    writer.take_version(request.version)
    heldout = HeldoutWriter(generation, request.step)
    writer.beside.begin(heldout.write)
    return heldout


def _result_beside(writer: GroupWriter) -> Any:
    """Wait for the program beside groups; returns its result on the first tensor rank. Collective over "tensor"."""
    while writer.beside.goes_on:
        writer.turn(None)
        writer.step()
    return writer.beside.result


def _evaluation(rank: GeneratingRank, heldout: HeldoutWriter, part: WrittenPart | None) -> HeldoutEvaluation:
    return rank.evaluation(heldout.evaluate(part, rank.show, Clock()))


VERSIONED = (DigestsRequest, GreedyRequest)  # served with the newest weights
