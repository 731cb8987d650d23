"""Program of the generator ranks: serve trainer ranks, one request after the other."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, cast

from torch import Tensor

from funrl.environments.logged import LoggedEpisode
from funrl.mesh.collectives import gather_objects
from funrl.mesh.mesh import Mesh
from funrl.mesh.plan import Plan
from funrl.mesh.pools.channel import Answers, End
from funrl.mesh.pools.handover import Handover, send_rows
from funrl.mesh.pools.transfer import TransferGroup, WeightDelivery, WeightForm, WeightReceiver
from funrl.mesh.reshard import reshard
from funrl.processes import heartbeat
from funrl.processes.workers import stops_when_asked
from funrl.rewards.call import RewardError
from funrl.rewards.pool import Pool
from funrl.rollout.certificate import complete_greedily, greedy_of, greedy_requests
from funrl.rollout.elsewhere import Greedy
from funrl.rollout.engine import WeightSpec
from funrl.rollout.native.engine import NativeEngine
from funrl.rollout.native.loading import in_form
from funrl.rollout.remote.digests import EngineDigests, compared_greedy, engine_digests
from funrl.rollout.remote.engine import DigestsRequest, GreedyRequest, LoadRequest, ReadyRequest
from funrl.trainer.checkpoints.saved_episodes import write_episodes
from funrl.trainer.jobs.build import build, load_directories
from funrl.trainer.jobs.job import RLJob
from funrl.trainer.jobs.row_source import generation_of
from funrl.trainer.placement.messages import (
    BeginEvaluationRequest,
    EpisodesRequest,
    EvaluateRequest,
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
from funrl.trainer.sources.group_rows import first_samples
from funrl.trainer.sources.heldout import HeldoutWriter, evaluate_heldout
from funrl.trainer.sources.observing import ShownSample
from funrl.trainer.sources.prompts import rewarded_rows
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

    def take(self) -> ShowBuffer:
        """Everything that is kept, which is then empty."""
        taken = ShowBuffer()
        taken.__dict__, self.__dict__ = self.__dict__, taken.__dict__
        return taken


class GeneratingRank:
    """The engine of this rank, and rows that it has written."""

    def __init__(self, generation: Generation, generator: Generator, training: Mesh, show: ShowBuffer) -> None:
        """Begin without rows.

        Args:
          generation: as of a source.
          generator: with an engine of this rank.
          training: the mesh of the trainer ranks.
          show: receives what is shown.
        """
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

    def _arriving(self, weights: WeightSpec, plan: Plan) -> Iterator[tuple[str, Tensor]]:
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

    def next_request(self, answers: Answers) -> object:
        """The next request of the trainer ranks. Collective."""
        return answers.take("a request of the trainer ranks")

    def greedy(self, request: GreedyRequest) -> Greedy:
        """Greedy completions of this replica."""
        return complete_greedily(self.generator.engine, request.prompts, request.new_tokens)

    def answer(self, request: object, number: int) -> object:
        """The value of the answer to a request. Raises: RewardError."""
        if isinstance(request, WriteRequest):
            return self.write(request, number)
        if isinstance(request, SendRequest):
            return self.send(request)
        if isinstance(request, EpisodesRequest):
            return self.write_episodes(request.folder, self.log)
        assert isinstance(request, EvaluateRequest)
        return self.evaluation(evaluate_heldout(self.generation, self.clock, self.show, request.step))


class GroupRank(GeneratingRank):
    """A `GeneratingRank` that writes groups without a break, and serves requests meanwhile."""

    def __init__(
        self, generation: Generation, generator: Generator, training: Mesh, show: ShowBuffer, writer: GroupWriter
    ) -> None:
        """Begin without groups; `writer` writes them, the others are as of `GeneratingRank`."""
        super().__init__(generation, generator, training, show)
        self.writer = writer
        self.heldout: HeldoutWriter | None = None

    def next_request(self, answers: Answers) -> object:
        """Write groups until there is a request. Collective."""
        while not self.writer.turn(answers).request:
            self.writer.step()
        return super().next_request(answers)

    def greedy(self, request: GreedyRequest) -> Greedy:
        """Greedy completions of this replica, beside its groups."""
        self.writer.take_version(request.version)
        done = self.writer.complete_beside(greedy_requests(request.prompts, request.new_tokens))
        return greedy_of(done, self.generation.engine.mesh.device)

    def answer(self, request: object, number: int) -> object:
        """The value of the answer to a request. Raises: RewardError."""
        del number
        if isinstance(request, SendGroupsRequest):
            return self.writer.send(request, self.training)
        if isinstance(request, EpisodesRequest):
            return self.write_episodes(request.folder, self.writer.logged_episodes(request.groups))
        if isinstance(request, DigestsRequest):
            self.writer.take_version(request.version)
            return engine_digests(self.generator.engine)
        if isinstance(request, BeginEvaluationRequest):
            self.writer.take_version(request.version)
            self.heldout = HeldoutWriter(self.generation, request.step)
            return self.writer.begin_evaluation(self.heldout.write)
        assert self.heldout is not None
        return self.evaluation(self.heldout.evaluate(self.writer.end_evaluation(), self.show, Clock()))


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
    with stops_when_asked(), answers.showing_progress(), contextlib.ExitStack() as stack:
        rank = GeneratingRank(generation, generator, training, show)
        if job.settings.asynchrony.staleness:
            form = WeightForm(generator.to_engine, functools.partial(in_form, generator.engine.weights))
            whole_form = WeightForm(generator.to_whole, functools.partial(in_form, generator.whole.weights))
            receiver = WeightReceiver(generating, form, whole_form, group)
            take_weights = functools.partial(load_arrived, generator)
            writer = GroupWriter(generation, receiver, take_weights)
            stack.enter_context(receiver.receiving())
            stack.enter_context(contextlib.closing(writer))
            rank = GroupRank(generation, generator, training, show, writer)
        while not isinstance(request := rank.next_request(answers), End):
            _serve(rank, request, answers)
    return request.result


def load_arrived(generator: Generator, arrived: WeightDelivery) -> None:
    """Load weights that have arrived into the engines."""
    engine = generator.engine
    engine.load(engine.weights.named(arrived.tree), arrived.transfer.version)
    for name, tree in arrived.further.items():
        generator.further[name].load(generator.whole.weights.named(tree), arrived.transfer.further[name])


def _serve(rank: GeneratingRank, request: object, answers: Answers) -> None:
    """Answer one request. Collective."""
    value = problem = None
    try:
        if isinstance(request, LoadRequest):
            value = rank.load(request)
        elif isinstance(request, GreedyRequest):
            value = compared_greedy(rank.greedy(request), answers.mesh)
        elif not isinstance(request, ReadyRequest):
            value = rank.answer(request, answers.taken - 1)
    except RewardError as error:  # on every rank of the mesh
        problem = str(error)
    if not isinstance(request, PLAIN_REQUESTS):
        value = PoolAnswer(value, tuple(rank.show.take().notes), problem)
    answers.answer(value)


# Requests whose answers are values without remarks; nobody reads that of the last one.
PLAIN_REQUESTS = (ReadyRequest, LoadRequest, GreedyRequest, DigestsRequest, BeginEvaluationRequest)
