"""Generators on Ray: their actors, and the trainer-side client that makes batches of their groups.

    actor -- facts and rows of a group, one object --> store of the first rank's node
    first rank -- rows of each rank, one object ------> store of the first rank's node --> ranks that train them

The first rank's link takes a group once it is in the store of its node, where it outlives the actor and its node. The
rank maps the object, reads facts alone, and copies the bytes of rows where the batch is whole: each on its own and
without padding. A batch of 16,384 rows of 33,000 tokens has 16 bytes a token, 8.6 GB: that many cross to the first
rank's node while the trainer updates, and all but the rows of that node cross once more, to each node its own. Its node
needs a store of (S + 2) batches; Ray keeps on disk what is more.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import os
import pickle
import socket
import sys
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from typing import Any, NamedTuple, TypeVar, cast

import cloudpickle
import numpy as np

from funrl import trees
from funrl.batch import map_kinds
from funrl.environments.logged import LoggedEpisode
from funrl.kinds import Value
from funrl.loading import load_files, loaded_files
from funrl.mesh.collectives import from_first, from_first_rank, gather_objects
from funrl.mesh.launch import join_mesh
from funrl.mesh.mesh import Mesh, single
from funrl.mesh.patches import LostPatches
from funrl.mesh.pools.channel import PROGRESS_S, MethodCall, ProgressLimit, Requests
from funrl.mesh.text import text
from funrl.processes.store import connect, keep_store, listen
from funrl.rewards.call import RewardError
from funrl.rollout.certificate import greedy_of, greedy_requests, held_shards
from funrl.rollout.elsewhere import Greedy
from funrl.rollout.ledger import Ledger
from funrl.rollout.policy import RunEndingError
from funrl.rollout.ray.cluster import import_ray, on_this_node
from funrl.rollout.ray.engine import RayEngine, WeightBucket, pull_weights
from funrl.rollout.ray.link import ActorRequest, GeneratorCall, GeneratorLink
from funrl.rollout.remote.engine import EngineDigests, engine_digests
from funrl.rollout.resident import ResidentEngine, follow
from funrl.trainer.jobs.build import build, load_directories
from funrl.trainer.jobs.job import RLJob
from funrl.trainer.jobs.row_source import generation_of, open_rewards
from funrl.trainer.placement import messages
from funrl.trainer.placement.generate import ShowBuffer, write_logged
from funrl.trainer.placement.groups import GroupGenerators
from funrl.trainer.settings.scorers import SCORERS
from funrl.trainer.settings.settings import with_flags
from funrl.trainer.sources.heldout import for_heldout
from funrl.trainer.sources.observing import Show
from funrl.trainer.sources.source import Generation
from funrl.trainer.steps.clock import Clock
from funrl.trainer.steps.step_rows import Rows, join_rows, own_batch
from funrl.trainer.storage.shard_server import CheckpointError

REST_S = 0.02  # that the engine rests at most while there is nothing to do
FOLLOWER_S = 5.0  # in which a process that is gone is noticed

_T = TypeVar("_T")
SentJob = tuple[list[str], list[str], bytes]  # paths of imports, files with functions, and a pickled `RLJob`


class LoadOrder(NamedTuple):
    """Get versions of weights by models; or with `arrived`, load them."""

    versions: Mapping[str, int]
    arrived: bool = False


class DeliveredGroup(NamedTuple):
    """A written group, as a generator returns it.

    Attributes:
      group: facts for all trainer ranks.
      episodes: for the log.
      rows: number under which rows are kept -> each row as `row_bytes` has it.
    """

    group: messages.WrittenGroup
    episodes: Sequence[LoggedEpisode] = ()
    rows: Mapping[int, Sequence[np.ndarray]] = {}


class GeneratorActor:
    """A generator of a run. Ray calls its methods on one event loop, on which the engine steps too.

    With several devices it starts an actor for each of the others on its node, which follows it step by step.

    Example:
      actor = ray.remote(GeneratorActor).options(num_cpus=1).remote(ray.put(sent_job(job)), exchange)
      name, room = ray.get(actor.describe.remote())
      digests = ray.get(actor.load.remote({"": version}))
      group, episodes, rows = ray.get(actor.write.remote(work))
    """

    def __init__(self, job: SentJob, exchange: Any, filters: bool = False) -> None:
        """Begin without an engine.

        Args:
          job: of the run.
          exchange: actor with the references of weights.
          filters: whether prompts are replaced one by one, so that each group is filtered.
        """
        self._sent = job
        self._exchange = exchange
        self._filters = filters
        self._notes = ShowBuffer()
        self._opened = contextlib.ExitStack()  # workers of rewards and process groups; they end with this process
        self._orders: deque[LoadOrder] = deque()
        self._following: list[tuple[Any, Any]] = []  # actors of further devices, and what shows their end
        self._lost = LostPatches()

    async def describe(self) -> tuple[str, int]:
        """Make the engine, without weights. Returns: host and process, and groups that are written at once."""
        job = self._read_job()
        port = 0
        if job.sizes["tensor"] > 1:
            ray = import_ray()
            devices = {name: x for name, x in os.environ.items() if name.endswith("_VISIBLE_DEVICES")}
            listener = listen()
            port = listener.getsockname()[1]
            self._store = keep_store(listener)
            actor = ray.remote(GeneratorActor).options(num_cpus=0, scheduling_strategy=on_this_node(ray))
            for rank in range(1, job.sizes["tensor"]):
                member = actor.remote(self._sent, self._exchange)
                end = member.follow.remote(rank, port, devices)
                self._following.append((member, end))
        try:
            self._build(job, 0, port)
        except Exception:
            await self._end_without_followers()
            raise
        self._stepping = asyncio.create_task(self._step())
        requests = self._generation.sampling.samples + self._generation.greedy_baseline
        return f"{socket.gethostname()}:{os.getpid()}", max(1, job.settings.engines.decode_rows // requests)

    def _read_job(self) -> RLJob:
        paths, files, pickled = self._sent
        sys.path += [path for path in paths if path not in sys.path]
        load_files(files)
        return cast(RLJob, pickle.loads(pickled))

    def _build(self, job: RLJob, rank: int, port: int) -> None:
        """Make the engine of a device.

        Args:
          rank: of the device in this generator.
          port: of the store of its devices.
        """
        pool = self._opened.enter_context(open_rewards(job, rank))
        if job.sizes["tensor"] > 1:
            timeout = timedelta(minutes=job.settings.waiting.timeout)
            self._mesh = self._opened.enter_context(join_mesh(job.sizes, rank, job.device, connect(port), timeout))
        else:
            self._mesh = single("cuda:0" if job.device == "cuda" else "cpu")
        parts = build(job, self._mesh, self._notes.note)
        generator = parts.generator._replace(engine=parts.generator.whole, base=None)  # adapters come merged
        load_directories(generator.frozen)
        parts = dataclasses.replace(parts, generator=generator, pool=pool)
        generation = generation_of(job, parts, {}, Clock(), self._notes)
        alone = Mesh(device=self._mesh.device)
        self._generation = generation._replace(engine=generation.engine._replace(mesh=alone, proof=None))
        self._heldout = for_heldout(self._generation)
        self._engine = generator.engine
        self._engines = {"": generator.engine, **generator.further}
        self._serving = generator.serving
        self._resident = ResidentEngine(generator.serving)
        self._proved = ("", *generator.policies) if job.settings.engines.verify_sync else ()

    async def ping(self) -> None:
        """Give a sign of life."""

    def follow(self, rank: int, port: int, devices: Mapping[str, str]) -> None:
        """Follow the first device of a generator step by step.

        Args:
          rank, port: as of `_build`.
          devices: variables that name the GPUs of the generator.
        """
        os.environ |= devices
        pulled: list[Future[Mapping[str, trees.Tree]]] = []
        with ThreadPoolExecutor(1) as thread, self._opened:
            self._build(self._read_job(), rank, port)
            while True:
                order: LoadOrder | None = from_first(None, self._mesh, "tensor")
                if order is not None and order.arrived:
                    self._load(pulled.pop().result(), order.versions)
                elif order is not None:
                    pulled.append(thread.submit(self._pull, order.versions))
                follow(self._serving, self._mesh)

    async def load(self, versions: Mapping[str, int]) -> dict[str, EngineDigests]:
        """Load versions of models between two steps of the engine.

        Returns: digests of the policies that have weights by their models, where loads are proved.
        """
        self._orders.append(LoadOrder(versions))
        self._pulled = await asyncio.to_thread(self._pull, versions)
        self._loaded = asyncio.get_running_loop().create_future()
        self._orders.append(LoadOrder(versions, True))
        return await self._beside(self._loaded)

    def _pull(self, versions: Mapping[str, int]) -> dict[str, trees.Tree]:
        """This device's weights of the models whose engines have others."""
        ray = import_ray()
        pulled = {}
        for name, version in versions.items():
            engine = self._engines[name]
            if engine.version == version:
                continue
            buckets: dict[object, WeightBucket] = ray.get(self._exchange.take.remote((name, version)))
            patched = not self._lost.ended and any(bucket.patches is not None for bucket in buckets.values())
            base = {engine.version: held} if patched and (held := held_shards(engine)) else {}
            pulled[name], intact = pull_weights(ray, buckets.values(), self._engine.weights, base)
            if base and (remark := self._lost.add(intact)):
                self._notes.note(remark)
        return pulled

    def _load(self, pulled: Mapping[str, trees.Tree], versions: Mapping[str, int]) -> dict[str, EngineDigests]:
        """Load weights into the engines. Collective over the devices of this generator."""
        for name, tree in pulled.items():
            self._engines[name].load(self._engine.weights.named(tree), versions[name])
        self._serving.check([])  # it measures its free memory now, on all devices
        engines = {name: self._engines[name] for name in self._proved}
        return {name: engine_digests(engine) for name, engine in engines.items() if engine.version is not None}

    async def write(self, work: messages.GroupWork) -> DeliveredGroup:
        """Write and reward a group."""
        generation = self._heldout if work.heldout else self._generation
        written = await self._written(messages.write_work(generation, self._resident, work))
        group = messages.WrittenGroup(0, work, None, {}, (), 0.0, notes=self._notes.take().notes)
        if isinstance(written, str):
            return DeliveredGroup(group._replace(problem=written))
        group = messages.describe_group(generation, written, group, filters=self._filters)
        episodes = [episode for part in written for episode in part.episodes]
        numbers = (work.number, messages.baseline_of(work.number))
        rows = {number: row_bytes(part.rows) for number, part in zip(numbers, written, strict=False)}
        return DeliveredGroup(group, episodes, rows)

    async def greedy(self, prompts: Sequence[Sequence[int]], new_tokens: int) -> Greedy:
        """Complete prompts greedily."""
        done = await self._beside(self._resident.ask_all(greedy_requests(prompts, new_tokens)))
        return greedy_of(done, self._generation.engine.mesh.device)

    async def _step(self) -> None:
        """Step the engine for ever, and load weights that have arrived."""
        while True:
            order = self._orders.popleft() if self._orders else None
            from_first(order, self._mesh, "tensor")
            if order is not None and order.arrived:
                self._loaded.set_result(self._load(self._pulled, order.versions))
                del self._pulled
            await self._resident.iterate(self._mesh, REST_S)

    async def _written(self, writing: Awaitable[_T]) -> _T | str:
        """What is written beside the engine, or the problem that ends the run."""
        try:
            return await self._beside(writing)
        except (RewardError, RunEndingError) as error:
            return str(error)

    async def _beside(self, program: Awaitable[_T]) -> _T:
        """The result of a program beside the engine. Raises: what the program or the engine raises."""
        task = asyncio.ensure_future(program)
        await asyncio.wait({task, self._stepping}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            task.cancel()
            await self._end_without_followers()
            self._stepping.result()
        return task.result()

    async def _end_without_followers(self) -> None:
        """End this process, so that Ray notes the loss of the generator, if another device is gone.

        Raises:
          RayTaskError: it has failed.
        """
        errors = import_ray().exceptions
        for _, end in self._following:
            try:
                await asyncio.wait_for(end, FOLLOWER_S)
            except TimeoutError:  # it is there
                continue
            except errors.RayActorError:
                os._exit(1)


def sent_job(job: RLJob) -> SentJob:
    """The job of a run as a generator has it, without models that reward, which are the trainer's."""
    generators = job.settings.devices.generators
    assert generators is not None
    sizes = generators.sizes
    settings = with_flags(job.settings, place=None, mesh=text(sizes), **dict.fromkeys(SCORERS))
    models = {name: model for name, model in job.models.items() if name not in SCORERS}
    own = dataclasses.replace(job, settings=settings, models=models, judge=None, sizes=sizes, generate_sizes=sizes)
    return sys.path, loaded_files(), cloudpickle.dumps(own)


def row_bytes(rows: Rows) -> list[np.ndarray]:
    """Each row as the bytes of its fields, without padding."""

    def dumped(number: int, length: int) -> np.ndarray:
        row = own_batch(rows, np.array([number]))
        row = map_kinds(lambda kind, x: kind.fit(x, length) if kind.per_token else x, row)
        return np.frombuffer(pickle.dumps(messages.GroupFields.of(row), pickle.HIGHEST_PROTOCOL), np.uint8)

    return [dumped(*row) for row in enumerate(rows.lengths.tolist())]


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
        self.requests = self
        for name, own in engine.models.items():
            own.requests = self
            own.held = functools.partial(self._holds, name)
        self._sender = engine
        self._ray = engine.ray
        self._exchange = engine.exchange
        self._answers: dict[int, LocalAnswer] = {}
        self._notes: list[str] = []
        self._rows: dict[int, Sequence[np.ndarray]] = {}  # of groups, and of greedy baselines, by their numbers
        self._logged: dict[int, Sequence[LoggedEpisode]] = {}
        self._link = GeneratorLink(self._actors(job), self._exchange, self._notes.append)
        self.changed = self._link.changed
        if self.mesh.rank == 0:
            engine.publish = self._link.publish
            for topic in engine.published.items():  # models that do not change
                engine.publish(*topic)
            self._link.start()

    def _actors(self, job: RLJob) -> ActorRequest:
        """Actors of a run."""
        bounds = job.settings.devices.generators
        assert bounds is not None
        resource = "GPU" if job.device == "cuda" else "CPU"
        amount = {f"num_{resource.lower()}s": bounds.tensor}
        actor = self._ray.remote(GeneratorActor).options(**amount, max_concurrency=1 << 16)
        own = None if self.mesh.rank else self._ray.put(sent_job(job))
        start = functools.partial(actor.remote, own, self._exchange, self._rule.filters)
        return ActorRequest(bounds, resource, start, 60.0 * job.settings.waiting.timeout)

    def begin_step(self, step: int, position: int, steps: int) -> None:
        """Begin to take the batch of a step; see `GroupGenerators`."""
        with self._link.changed:
            super().begin_step(step, position, steps)
            if self.ledger is not None:
                self._link.train(self.ledger, step - 1)
        self._link.wake()

    def metrics(self) -> dict[str, float]:
        """Metrics of places, and of weights that may be patched; see `GroupGenerators`."""
        sent = self._sender.sent
        return super().metrics() | ({} if sent is None else {"sync/sent_bytes": float(sent)})

    def close(self) -> None:
        """End the generators, and leave the cluster."""
        if self.mesh.rank == 0:
            self._link.close()
            self._ray.kill(self._exchange)
        self._ray.shutdown()

    def post(self, request: MethodCall) -> int:
        """Begin to answer a call; see `Requests`."""
        self.posted += 1
        self._answers[self.posted] = getattr(self, f"_{request.method}")(*request.arguments)
        return self.posted

    def answer(self, number: int, waits_for: str) -> Any:
        """The value of the answer to a call, once it is there; see `Requests`. Collective."""
        look, finish = self._answers.pop(number)
        value = self._awaited_by(look, waits_for)
        problem = None
        try:
            value = finish(value) if self.mesh.rank == 0 else None
        except (RewardError, CheckpointError) as error:
            problem = error
        value, problem = from_first_rank((value, problem), self.mesh)
        if problem is not None:
            raise problem
        return value

    def _digests(self, version: int, base: bool, model: str) -> LocalAnswer:
        del base
        return lambda: self._held_digests(model, version), lambda digests: digests

    def _greedy(self, version: int, prompts: Sequence[Sequence[int]], new_tokens: int) -> LocalAnswer:
        del version
        return self._begin("greedy", [(prompts, new_tokens)]), lambda values: values[0]

    def _write_episodes(self, folder: str, groups: Sequence[tuple[Sequence[int], int]]) -> LocalAnswer:
        return lambda: True, lambda _: write_logged(folder, groups, self._logged, Mesh())

    def _begin_places(self, ledger: Ledger) -> list[int]:
        """The places that may begin and were not asked for; the link begins them in the ledger."""
        return [place for place in ledger.next_places(ledger.version, ledger.until) if place not in self._link.asked]

    def _ask(self, works: Sequence[messages.GroupWork], queue: str = "") -> None:
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

    def _keep(self, work: messages.GroupWork, delivered: DeliveredGroup) -> None:
        """Keep what a generator has written, unless another prompt refills its place. Under the lock."""
        if not self._keep_written(delivered.group):
            return
        self._logged[work.number] = delivered.episodes
        if not work.heldout or self._rescore is not None:
            self._rows |= delivered.rows

    def _received(self, rows: Rows, origins: np.ndarray, to: np.ndarray, mesh: Mesh) -> dict[str, Value]:
        """Fields of the rows that this rank trains, from the object store; see `GroupGenerators`."""
        index = int(mesh.index(mesh.row_axes))
        if self.mesh.rank == 0:
            shares = (
                [self._rows[x >> 32][x & 0xFFFFFFFF] for x in origins[to == rank].tolist()]
                for rank in range(mesh.size(mesh.row_axes))
            )
            references = {rank: self._ray.put(share) for rank, share in enumerate(shares)}
            self._ray.get(self._exchange.post.remote(ROWS, references))
        from_first_rank(None, self.mesh)  # they are there
        share = self._ray.get(self._ray.get(self._exchange.take.remote(ROWS))[index])
        gather_objects(None, self.mesh)  # before others take their place
        for kept, numbers in ((self._rows, self._released), (self._logged, self._unlogged)):
            for number in numbers:
                kept.pop(number, None)
            numbers.clear()
        if share:
            rows = join_rows([pickle.loads(row.data).rows(self._alone) for row in share])
        return messages.own_fields(rows.batch)[0]

    def _held_digests(self, model: str, version: int) -> EngineDigests | None:
        """Digests of a generator that holds a version of a model; None: no one does."""
        digests = self._link.digests.get(model)
        return digests if digests is not None and digests.version == version else None

    def _holds(self, model: str, version: int) -> bool:
        """True if a generator holds a version of a model."""
        return self._held_digests(model, version) is not None

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
