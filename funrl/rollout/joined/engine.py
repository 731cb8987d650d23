"""An engine whose requests are completed by generators of other jobs, which come and go during the run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from funrl import trees
from funrl.mesh.collectives import from_first, psum
from funrl.mesh.mesh import AXES, Mesh
from funrl.models.deployed import DeviceWeights
from funrl.models.model import ModelConfig
from funrl.processes.connections import Connection
from funrl.processes.heartbeat import beat, entered, left
from funrl.rollout.certificate import SyncError, complete_greedily
from funrl.rollout.elsewhere import Greedy
from funrl.rollout.engine import EngineCost, WeightSpec
from funrl.rollout.joined.lease_server import PROGRAM_REQUESTS, Collected, LeaseServer
from funrl.rollout.joined.messages import PROTOCOL, WEIGHTS, Hello
from funrl.rollout.joined.weight_server import WeightServer
from funrl.rollout.remote.digests import trained_digests
from funrl.rollout.requests import Completion, Request, check_requests
from funrl.rollout.sampling_parameters import Sampling
from funrl.rollout.sync_proof import SyncProof

COMPLETION_WAIT_S = 0.25  # of a step, for completions
PROOF_S = 30.0  # for a generator to load the newest weights
ALONE_S = 10.0  # without a generator, after which the run says that it waits
ROOM = 1 << 20  # requests that begin at once: generators are many, and take them as they have room


_Key = tuple[tuple[int, ...], Sampling, tuple[int, ...]]


class NoGeneratorError(RuntimeError):
    """No generator has joined the run in time."""


class StoppedError(RuntimeError):
    """The program beside the trainer's is to end."""


class LateProof(SyncProof):
    """The proof of weights that generators load when they come, settled when their rows are complete."""

    def iterated(self) -> None:
        """Do nothing: how often the trainer looks for completions says nothing of the generators."""


class JoinedDigests(NamedTuple):
    """Digests of the newest weights, which each generator has to prove; as `SyncDigests`.

    Attributes:
      lease_server: of this replica; None on its other ranks.
    """

    lease_server: LeaseServer | None

    def ready(self) -> bool:
        """Return True: generators load the weights when they come, and rows of others do not arrive."""
        return True

    def compare(self) -> bool:
        """Return whether a generator has proved the weights; one that has others fails in `JoinedEngine.step`."""
        return self.lease_server is None or self.lease_server.proved(PROOF_S)


class JoinedEngine:
    """An `Engine` over generators of other jobs. Consecutive requests of one prompt are a unit of work.

    Attributes:
      weights: as they are laid out on the trainer ranks.
      mesh: of the replicas.
      version, paused: as in `Engine`.
    """

    def __init__(
        self,
        config: ModelConfig,
        mesh: Mesh,
        weight_server: WeightServer,
        weights: WeightSpec,
        lease_server: LeaseServer | None,
        limit_s: float,
    ) -> None:
        """Make the engine without weights.

        Args:
          config: of the model.
          mesh: of the replicas; its "tensor" ranks get the same completions.
          weight_server: of this rank's weights, which are laid out as `weights`.
          lease_server: on the first rank of a replica; None on others.
          limit_s: seconds that requests wait for a generator to join.
        """
        self.weights = weights
        self.version: int | None = None
        self.paused = False
        self.note: Callable[[str], None] = lambda text: None
        self._config = config
        self.mesh = mesh
        self._weight_server = weight_server
        self._lease_server = lease_server
        self._limit_s = limit_s
        self._requests: dict[int, Request] = {}
        self._count = 0  # requests so far, which the lease server knows by numbers of their own
        self._asked: dict[int, int] = {}  # the lease server's number of a request -> its number here
        self._pending: set[int] = set()  # the lease server's numbers of those whose completions have not arrived
        self._ahead: dict[_Key, range] = {}  # the lease server's numbers of units that are not asked for yet
        self._early: dict[int, Completion] = {}  # completions of these
        self._said_alone = False
        self._program = 0  # number of the program that asks, of those of this rank
        self._programs = 0  # that were begun beside this one
        self._beside: set[JoinedEngine] = set()  # engines whose runs continue
        self._stopped = False

    def serve(self, connection: Connection) -> None:
        """Serve a generator's connection until it ends. Raises: PeerError."""
        hello: object = connection.receive()
        if not isinstance(hello, Hello) or hello.protocol != PROTOCOL:
            theirs = hello.protocol if isinstance(hello, Hello) else type(hello).__name__
            connection.send(
                f"the run's messages to generators are of version {PROTOCOL}, and those of this generator of {theirs}; "
                "install the same funrl for both"
            )
            return
        if hello.purpose == WEIGHTS or self._lease_server is None:
            self._weight_server.serve(connection)
        else:
            self._lease_server.serve(hello, connection)

    def close(self, *, complete: bool) -> None:
        """End the service; see `LeaseServer.close`."""
        if self._lease_server is not None:
            self._lease_server.close(complete=complete)

    def load(self, named_weights: Iterable[tuple[str, Tensor]], version: int = 0) -> None:
        """Put weights on the weight server, from which generators take them; see `Engine`. Collective over the mesh.

        Waits until all requests of `write_ahead` and of programs beside this one are complete on all replicas: a unit
        is completed by one version, and a generator takes weights of all ranks.

        Raises:
          RuntimeError: further requests are unfinished.
          SyncError, NoGeneratorError: as in `step`.
        """
        if self._requests:
            raise RuntimeError(f"{len(self._requests)} requests are unfinished: new weights come when there is none")
        self.finish_ahead()
        self.version = None
        self._weight_server.put(named_weights, version)
        if self._lease_server is not None:
            self._lease_server.published()
        self.version = version

    def finish_ahead(self) -> None:
        """Wait until what was begun ahead is complete on all replicas. Collective over the mesh.

        Raises:
          SyncError, NoGeneratorError: as in `step`.
        """
        self._receive_while(lambda: len(self._pending) + len(self._beside))

    def finish_program(self, engine: JoinedEngine | None) -> None:
        """Wait until a program beside this one has ended on all replicas. Collective over the mesh.

        Args:
          engine: of `beside`; None: this rank has not begun it.

        Raises:
          SyncError, NoGeneratorError: as in `step`.
        """
        self._receive_while(lambda: int(engine in self._beside))

    def _receive_while(self, pending: Callable[[], int]) -> None:
        """Take completions as long as something is pending on a replica. Collective over the mesh."""
        while bool(psum(torch.tensor(pending(), device=self.mesh.device), self.mesh, AXES)):
            beat()
            self._receive(COMPLETION_WAIT_S)

    def beside(self) -> JoinedEngine:
        """An engine with these weights for a program in another thread, which ends by `leave`. New weights wait for it.

        Called on the first rank of a replica.
        """
        lease_server = self._lease_server
        assert lease_server is not None
        self._programs += 1
        alone = Mesh(device=self.mesh.device)
        engine = JoinedEngine(self._config, alone, self._weight_server, self.weights, lease_server, self._limit_s)
        engine.version = self.version
        engine._program = self._programs
        engine._count = self._programs * PROGRAM_REQUESTS
        self._beside.add(engine)
        return engine

    def leave(self, engine: JoinedEngine) -> None:
        """Note that a program beside this one has ended. May be called by its thread."""
        self._beside.discard(engine)
        if self._lease_server is not None:
            self._lease_server.wake()

    def stop(self) -> None:
        """Make `step` raise StoppedError from now on. May be called by any thread."""
        self._stopped = True

    def held_weights(self) -> Iterable[tuple[str, Tensor | None]]:
        """No weights that can be read here: generators have them, and prove it. See `Engine`."""
        return ((name, None) for name, _ in self.weights.names.values())

    def check(self, requests: Sequence[Request]) -> None:
        """Raise ValueError if a request can be completed by no generator."""
        check_requests(self._config, requests, self._requests)

    def submit(self, requests: Sequence[Request]) -> None:
        """Take requests; see `Engine`."""
        self.check(requests)
        self._requests |= {request.number: request for request in requests}
        for unit in prompt_units(requests):
            numbers = self._ahead.pop(_key_of(unit), None)
            numbers = self._open(unit) if numbers is None else numbers
            self._asked |= {number: request.number for number, request in zip(numbers, unit, strict=True)}

    def write_ahead(self, requests: Sequence[Request]) -> None:
        """Tell generators to complete later requests with the present weights, unless they do already.

        The later requests have the same prompts, sampling and seeds; their numbers may be others.
        """
        for unit in prompt_units(requests):
            if _key_of(unit) not in self._ahead:
                self._ahead[_key_of(unit)] = self._open(unit)

    def _open(self, unit: Sequence[Request]) -> range:
        """Give a unit to the lease server; returns its numbers there."""
        numbers = range(self._count, self._count + len(unit))
        self._count += len(unit)
        self._pending |= set(numbers)
        if self._lease_server is not None:
            self._lease_server.open([[x._replace(number=number) for number, x in zip(numbers, unit, strict=True)]])
        return numbers

    def step(self) -> list[Completion]:
        """Wait shortly for completions; see `Engine`. Collective over "tensor".

        Raises:
          SyncError: a generator does not hold the trainer's weights.
          NoGeneratorError: none has joined in time.
          StoppedError: `stop` was called.
        """
        if self._stopped:
            raise StoppedError("the run continues without what was begun ahead")
        if self.paused or not self._requests:
            return []
        if self.version is None:
            raise RuntimeError("the engine has no weights: call load first")
        early = self._early.keys() & self._asked.keys()
        self._receive(0.0 if early else COMPLETION_WAIT_S)
        done = [self._early.pop(number) for number in sorted(self._early.keys() & self._asked.keys())]
        completions = [completion._replace(number=self._asked.pop(completion.number)) for completion in done]
        for completion in completions:
            del self._requests[completion.number]
        return completions

    def _receive(self, timeout_s: float) -> None:
        """Take completions that have arrived, waited for if there are none. Collective over "tensor"."""
        news = None
        if self._lease_server is not None:
            joined = bool(self._lease_server.generators)
            entered("completions of joined generators" if joined else "a generator to join the run")
            news = self._with_limit(self._lease_server.collect(timeout_s, self._program), self._lease_server)
            left()
        news = from_first(news, self.mesh, "tensor") or Collected()
        for remark in news.remarks:
            self.note(remark)
        if news.fault:
            raise SyncError(news.fault)
        if news.alone:
            raise NoGeneratorError(news.alone)
        self._early |= {done.number: done for done in news.completions if done.number in self._pending}
        self._pending -= {done.number for done in news.completions}

    def _with_limit(self, news: Collected, lease_server: LeaseServer) -> Collected | None:
        """News with a remark or a fault where no generator is in service; None: there are none."""
        alone_s = lease_server.alone_s()
        if alone_s == 0.0:
            self._said_alone = False
        if alone_s > self._limit_s:
            alone = (
                f"{lease_server.unfinished()} requests have waited {alone_s:.0f} s for a generator, "
                "and none is in service; "
                "start one with funrl join RUN_DIR, or wait longer with --timeout, in minutes"
            )
            news = news._replace(alone=alone)
        elif alone_s > ALONE_S and not self._said_alone:
            self._said_alone = True
            remark = f"no generator is in service: {lease_server.unfinished()} requests wait for funrl join RUN_DIR"
            news = news._replace(remarks=(*news.remarks, remark))
        return news if any(news) else None

    def unfinished(self) -> int:
        """Number of unfinished requests; at least 1 after `stop`, so that `step` is called."""
        return len(self._requests) or int(self._stopped)

    def sampled(self, number: int, begin: int = 0) -> list[int]:
        """Nothing: a completion arrives when it has ended; see `Engine`."""
        return []

    def room(self) -> int:
        """Any number of requests may begin."""
        return ROOM

    def reserve(self, tokens: int) -> None:
        """Do nothing: the caches are the generators'."""

    def cancel(self, numbers: Iterable[int]) -> list[Completion]:
        """Cancel requests; see `Engine`. The generators' tokens so far are lost."""
        gone = [number for number in dict.fromkeys(numbers) if number in self._requests]
        requests = [self._requests.pop(number) for number in gone]
        ended = [there for there, number in self._asked.items() if number not in self._requests]
        for there in ended:
            del self._asked[there]
            self._pending.discard(there)
            self._early.pop(there, None)
        if self._lease_server is not None:
            self._lease_server.withdraw(ended)
        dtype = torch.promote_types(self.weights.dtype, torch.float32)
        empty = torch.zeros(0, dtype=dtype)
        whole = torch.zeros(0, dtype=torch.int64)
        return [Completion(x.number, whole, empty, empty, versions=whole, finish="cancelled") for x in requests]

    def pause(self) -> None:
        """Make `step` do nothing until `resume`."""
        self.paused = True

    def resume(self) -> None:
        """Allow `step` again after `pause`."""
        self.paused = False

    def cost(self) -> EngineCost:
        """No memory here; see `Engine`."""
        counts = dict.fromkeys(("used_pages", "peak_pages", "passes", "prefilled", "cached", "decoded", "preempted"), 0)
        return EngineCost(cache_bytes=0, page_tokens=1, pages=0, rows=ROOM, **counts)

    def sync_digests(self, source: DeviceWeights, version: int) -> JoinedDigests:
        """Ask generators to prove that they hold the trainer's weights. Collective over the trainer ranks.

        Args:
          source: the weights that were put on the weight server.
          version: theirs.
        """
        own_N2 = psum(trained_digests(source, self.weights), source.mesh, AXES)
        names = [name for name, _ in trees.named(self.weights.layouts)]
        if self._lease_server is not None:
            self._lease_server.expect(dict(zip(names, own_N2[:, 0].tolist(), strict=True)))
        return JoinedDigests(self._lease_server)

    def greedy(self, prompts: Sequence[Sequence[int]], new_tokens: int) -> Greedy:
        """Greedy completions of this replica; see `certificate.greedy`."""
        return complete_greedily(self, prompts, new_tokens)


def _key_of(unit: Sequence[Request]) -> _Key:
    """Identity of a unit, whatever its numbers are."""
    first = unit[0]
    return tuple(first.prompt), first.sampling, tuple(request.seed for request in unit)


def prompt_units(requests: Sequence[Request]) -> list[list[Request]]:
    """Runs of consecutive requests with the same prompt."""
    units: list[list[Request]] = []
    for request in requests:
        if units and units[-1][0].prompt == request.prompt:
            units[-1].append(request)
        else:
            units.append([request])
    return units
