"""A generator of a job of its own: it takes requests of a run under leases, and weights when there are new ones."""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch

from funrl import trees
from funrl.mesh.collectives import from_first, gather_objects, psum
from funrl.processes.connections import Addresses, Connection, PeerError, connect_to
from funrl.processes.heartbeat import beat
from funrl.rollout.engine import Engine
from funrl.rollout.joined.messages import BEATS, PROTOCOL, WEIGHTS, WORK, Hello, Orders, Report, TrainerFacts
from funrl.rollout.joined.weight_server import Piece, StaleVersionError, pieces_for, pull
from funrl.rollout.remote.digests import EngineDigests, engine_digests
from funrl.rollout.requests import Completion, Request

LIFE_S = 2.0  # between two signs of life
NEWS_S = 0.2  # that a generator without work waits for answers of all lease servers


class NotJoinedError(PeerError):
    """The trainer ranks do not answer a generator that has not joined yet."""


class Counts(NamedTuple):
    """Work of a generator.

    Attributes:
      units: delivered.
      loads: of weights.
      bytes: of weights that this rank has received.
    """

    units: int = 0
    loads: int = 0
    bytes: int = 0


class _Unit(NamedTuple):
    """A lease that is worked on.

    Attributes:
      lease_server: number of its lease server.
      lease: number of the lease there.
      requests: as the lease server numbers them.
      numbers: of the requests in the engine.
      done: completions by the engine's numbers.
    """

    lease_server: int
    lease: int
    requests: Sequence[Request]
    numbers: Sequence[int]
    done: dict[int, Completion]


class _WeightWay(NamedTuple):
    """Connections to all trainer ranks, and the pieces of weights that this rank asks them for."""

    connections: Sequence[Connection]
    pieces: Sequence[Piece]
    timeout_s: float


class _Step(NamedTuple):
    """Calls of the engine before it is stepped, on all ranks of the generator."""

    load: int | None = None
    submit: Sequence[Request] = ()
    cancel: Sequence[int] = ()
    end: str = ""


class _Progress:
    """Iterations of the engine so far."""

    def __init__(self) -> None:
        self.iterations = 0


class _LeaseServers:
    """The lease servers of a run as the first rank of a generator sees them."""

    def __init__(self, connections: Sequence[Connection], progress: _Progress) -> None:
        self.connections = connections
        self.progress = progress
        self.version: int | None = None
        self.digests: EngineDigests | None = None
        self.units: dict[int, _Unit] = {}  # by the engine's number of each request
        self.ready: list[_Unit] = []
        self.count = 0
        self.delivered = 0

    def held(self, lease_server: int) -> tuple[int, ...]:
        """Leases of a lease server that are worked on."""
        return tuple(dict.fromkeys(unit.lease for unit in self.units.values() if unit.lease_server == lease_server))

    def finish(self, completions: Sequence[Completion]) -> None:
        """Take completions of the engine."""
        for done in completions:
            unit = self.units.get(done.number)
            if unit is None:
                continue
            unit.done[done.number] = done
            if len(unit.done) == len(unit.numbers):
                for number in unit.numbers:
                    del self.units[number]
                self.ready.append(unit)

    def exchange(self, room: int, leaving: bool) -> _Step:
        """Report to all lease servers, and return what they order. Raises: PeerError."""
        submit: list[Request] = []
        cancel: list[int] = []
        versions: set[int | None] = set()
        ended = 0
        for lease_server, connection in enumerate(self.connections):
            delivered = [(unit.lease, _as_asked(unit)) for unit in self.ready if unit.lease_server == lease_server]
            self.ready = [unit for unit in self.ready if unit.lease_server != lease_server]
            report = Report(
                self.progress.iterations,
                self.version,
                max(0, room - len(submit)),
                delivered,
                self.held(lease_server),
                digests=self.digests,
                leaving=leaving,
                wait_s=0.0 if self.units else NEWS_S / len(self.connections),
            )
            orders: Orders = connection.ask(report)
            self.delivered += len(delivered)
            dropped = set(orders.drop)
            gone = [n for n, unit in self.units.items() if unit.lease_server == lease_server and unit.lease in dropped]
            for number in gone:
                del self.units[number]
            cancel += gone
            for lease, requests in orders.work:
                submit += self._begin(lease_server, lease, requests)
            versions.add(orders.version)
            ended += orders.end
        self.digests = None
        if leaving:
            return _Step(end="left")
        if ended:
            return _Step(end="ended")
        newest = (
            versions.pop() if len(versions) == 1 else self.version
        )  # others give their last work before they follow
        load = newest if newest != self.version and not self.units else None
        return _Step(load, submit, cancel)

    def _begin(self, lease_server: int, lease: int, requests: Sequence[Request]) -> list[Request]:
        """Give the requests of a lease numbers of this engine's."""
        numbers = range(self.count, self.count + len(requests))
        self.count += len(requests)
        unit = _Unit(lease_server, lease, requests, numbers, {})
        self.units |= dict.fromkeys(numbers, unit)
        return [request._replace(number=number) for request, number in zip(requests, numbers, strict=True)]


def serve_run(
    engine: Engine, addresses: Addresses, timeout_s: float, leaving: Callable[[], bool], note: Callable[[str], None]
) -> tuple[str, Counts]:
    """Serve a run until it ends or this generator leaves. Collective over the engine's mesh.

    Args:
      engine: without unfinished requests.
      addresses: of the trainer ranks.
      timeout_s: bound on each wait for one of them.
      leaving: true when this generator is to go; it gives back what it has not completed.
      note: receives remarks.

    Returns: "ended" or "left", and what was done.

    Raises:
      NotJoinedError: a rank that trains does not answer.
      PeerError: one is gone.
      ValueError: the run has another model or version of funrl, or the mesh has several replicas.
    """
    mesh = engine.weights.mesh
    if mesh.size(mesh.row_axes) > 1:
        raise ValueError(
            f"a generator is one replica, and {mesh} has {mesh.size(mesh.row_axes)}; start as many of them"
        )
    name = gather_objects(f"{socket.gethostname()}:{os.getpid()}-{secrets.token_hex(2)}", mesh)[0]
    progress = _Progress()
    begun = 0
    with contextlib.ExitStack() as connections:
        way, lease_servers, digests = _join(engine, addresses, name, progress, timeout_s=timeout_s, stack=connections)
        if lease_servers is not None:
            note(f"{name} has joined; the run has {len(addresses.hosts)} trainer ranks")
        connections.callback(lambda: engine.cancel(range(begun)))
        counts = Counts()
        while True:
            beat()
            room = engine.room()
            step = None if lease_servers is None else lease_servers.exchange(room, leaving())
            step = from_first(step, mesh, "tensor") or _Step()
            if step.end:
                return step.end, counts if lease_servers is None else counts._replace(units=lease_servers.delivered)
            if step.load is not None:
                counts, loaded = _load(way, engine, step.load, counts)
                proof = engine_digests(engine) if loaded and digests else None
                if loaded and lease_servers is not None:
                    lease_servers.version = step.load
                    lease_servers.digests = proof
            if step.cancel:
                engine.cancel(step.cancel)
            if step.submit:
                begun += len(step.submit)
                engine.submit(step.submit)
            completions = engine.step() if engine.unfinished() else []
            progress.iterations += 1
            if lease_servers is not None:
                lease_servers.finish(completions)


def _join(
    engine: Engine,
    addresses: Addresses,
    name: str,
    progress: _Progress,
    *,
    timeout_s: float,
    stack: contextlib.ExitStack,
) -> tuple[_WeightWay, _LeaseServers | None, bool]:
    """The way of weights, the lease servers on the generator's first rank, and whether each load is proved.

    Raises:
      NotJoinedError: a rank that trains does not answer.
      ValueError: the run has another model or version of funrl.
    """
    mesh = engine.weights.mesh
    lease_servers = None
    try:
        opened, facts = _weight_connections(addresses, name, timeout_s, stack)
        if mesh.rank == 0:
            work = [_open(addresses, rank, Hello(name, WORK), timeout_s, stack) for rank in facts.lease_servers]
            beats = [_open(addresses, rank, Hello(name, BEATS), timeout_s, stack) for rank in facts.lease_servers]
            lease_servers = _LeaseServers(work, progress)
            stack.enter_context(_beating(beats, progress))
    except PeerError as error:
        raise NotJoinedError(str(error)) from error
    layouts = dict(trees.named(engine.weights.layouts))
    turn = int(name[-4:], 16) + mesh.rank
    pieces = pieces_for(facts.stored, layouts, mesh.rank, turn)
    return _WeightWay(opened, pieces, timeout_s), lease_servers, facts.digests


def _load(way: _WeightWay, engine: Engine, version: int, counts: Counts) -> tuple[Counts, bool]:
    """Pull weights of a version and give them to the engine, unless the run has newer ones. Collective.

    Returns: the counts, and whether the engine has the weights.
    """
    tree = None
    received = 0
    with contextlib.suppress(StaleVersionError):  # the next orders name the newer ones
        tree, received = pull(way.connections, way.pieces, engine.weights, version, way.timeout_s)
    mesh = engine.weights.mesh
    ranks = psum(torch.tensor(int(tree is not None), device=mesh.device), mesh, "tensor")
    if tree is None or int(ranks) < mesh.size("tensor"):
        return counts, False
    engine.load(engine.weights.named(tree), version)
    return counts._replace(loads=counts.loads + 1, bytes=counts.bytes + received), True


def _as_asked(unit: _Unit) -> list[Completion]:
    """Completions of a unit with the numbers of its lease server."""
    done = [unit.done[number] for number in unit.numbers]
    return [x._replace(number=request.number) for x, request in zip(done, unit.requests, strict=True)]


def _weight_connections(
    addresses: Addresses, name: str, timeout_s: float, stack: contextlib.ExitStack
) -> tuple[list[Connection], TrainerFacts]:
    """Connections for weights to all trainer ranks, and facts of the weights.

    Raises:
      PeerError: a rank does not answer.
      ValueError: it has another version of funrl.
    """
    ranks = range(len(addresses.hosts))
    opened = [_open(addresses, rank, Hello(name, WEIGHTS), timeout_s, stack) for rank in ranks]
    facts = [connection.receive() for connection in opened]
    if isinstance(facts[0], str):
        raise ValueError(facts[0])
    return opened, facts[0]


def _open(addresses: Addresses, rank: int, hello: Hello, timeout_s: float, stack: contextlib.ExitStack) -> Connection:
    """A connection to a rank that trains, which the stack closes."""
    host, port = addresses.hosts[rank]
    connection = connect_to(host, port, addresses.secret, timeout_s)
    stack.callback(connection.close)
    connection.send(hello._replace(protocol=PROTOCOL))
    return connection


@contextlib.contextmanager
def _beating(connections: Sequence[Connection], progress: _Progress) -> Iterator[None]:
    """Send signs of life, in a thread of its own."""
    ended = threading.Event()

    def live() -> None:
        while not ended.wait(LIFE_S):
            for connection in connections:
                with contextlib.suppress(PeerError):  # the connections for work say so too
                    connection.send(progress.iterations)

    thread = threading.Thread(target=live, name="beats", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
