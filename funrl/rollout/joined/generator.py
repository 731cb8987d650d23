"""A generator of a job of its own: it takes requests of a run under leases, and weights when there are new ones."""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from funrl import trees
from funrl.mesh.collectives import from_first, gather_objects
from funrl.processes.heartbeat import beat
from funrl.processes.lines import Addresses, Line, LineError, call
from funrl.rollout.engine import Engine
from funrl.rollout.joined.messages import BEATS, WEIGHTS, WORK, Hello, Orders, Report, TrainerFacts
from funrl.rollout.joined.shelf import Piece, pieces_for, pull
from funrl.rollout.remote.digests import EngineDigests, engine_digests
from funrl.rollout.requests import Completion, Request

BEAT_S = 2.0  # between two signs of life


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
      office: number of its office.
      lease: number of the lease there.
      requests: as the office numbers them.
      numbers: of the requests in the engine.
      done: completions by the engine's numbers.
    """

    office: int
    lease: int
    requests: Sequence[Request]
    numbers: Sequence[int]
    done: dict[int, Completion]


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


class _Offices:
    """The offices of a run as the first rank of a generator sees them."""

    def __init__(self, lines: Sequence[Line], progress: _Progress, digests: bool) -> None:
        self.lines = lines
        self.progress = progress
        self.asks_digests = digests
        self.version: int | None = None
        self.digests: EngineDigests | None = None
        self.units: dict[int, _Unit] = {}  # by the engine's number of each request
        self.ready: list[_Unit] = []
        self.count = 0
        self.delivered = 0

    def held(self, office: int) -> tuple[int, ...]:
        """Leases of an office that are worked on."""
        return tuple(dict.fromkeys(unit.lease for unit in self.units.values() if unit.office == office))

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
        """Report to all offices, and return what they order. Raises: LineError."""
        submit: list[Request] = []
        cancel: list[int] = []
        newest = self.version
        ended = 0
        for office, line in enumerate(self.lines):
            delivered = [(unit.lease, _as_asked(unit)) for unit in self.ready if unit.office == office]
            self.ready = [unit for unit in self.ready if unit.office != office]
            report = Report(
                self.progress.iterations,
                self.version,
                max(0, room - len(submit)),
                delivered,
                self.held(office),
                digests=self.digests,
                leaving=leaving,
            )
            orders: Orders = line.ask(report)
            self.delivered += len(delivered)
            dropped = set(orders.drop)
            gone = [n for n, unit in self.units.items() if unit.office == office and unit.lease in dropped]
            for number in gone:
                del self.units[number]
            cancel += gone
            for lease, requests in orders.work:
                submit += self._begin(office, lease, requests)
            if orders.version is not None and orders.version != self.version:
                newest = orders.version
            ended += orders.end
        self.digests = None
        if leaving:
            return _Step(end="left")
        if ended:
            return _Step(end="ended")
        load = newest if newest != self.version and not self.units else None
        return _Step(load, submit, cancel)

    def _begin(self, office: int, lease: int, requests: Sequence[Request]) -> list[Request]:
        """Give the requests of a lease numbers of this engine's."""
        numbers = range(self.count, self.count + len(requests))
        self.count += len(requests)
        unit = _Unit(office, lease, requests, numbers, {})
        self.units |= dict.fromkeys(numbers, unit)
        return [request._replace(number=number) for request, number in zip(requests, numbers, strict=True)]


def serve_run(
    engine: Engine, addresses: Addresses, timeout_s: float, leaving: Callable[[], bool], note: Callable[[str], None]
) -> tuple[str, Counts]:
    """Serve a run until it ends or this generator leaves. Collective over the engine's mesh.

    Args:
      engine: without unfinished requests.
      addresses: of the ranks that train.
      timeout_s: bound on each wait for one of them.
      leaving: true when this generator is to go; it gives back what it has not completed.
      note: receives remarks.

    Returns: "ended" or "left", and what was done.

    Raises:
      LineError: a rank that trains is gone.
      ValueError: the run has another model.
    """
    mesh = engine.weights.mesh
    first = mesh.rank == 0
    name = gather_objects(f"{socket.gethostname()}:{os.getpid()}-{secrets.token_hex(2)}", mesh)[0]
    progress = _Progress()
    with contextlib.ExitStack() as lines:
        weight_lines, facts = _weight_lines(addresses, name, timeout_s, lines)
        layouts = dict(trees.named(engine.weights.layouts))
        pieces = pieces_for(facts.stored, layouts, mesh.rank, turn=hash(name) % 4096 + mesh.rank)
        offices = None
        if first:
            work = [_line(addresses, rank, Hello(name, WORK), timeout_s, lines) for rank in facts.offices]
            beats = [_line(addresses, rank, Hello(name, BEATS), timeout_s, lines) for rank in facts.offices]
            offices = _Offices(work, progress, facts.digests)
            lines.enter_context(_beating(beats, progress))
            note(f"{name} has joined; the run has {len(addresses.hosts)} ranks that train")
        counts = Counts()
        while True:
            beat()
            step = None
            if offices is not None:
                step = offices.exchange(engine.room(), leaving())
            step = from_first(step, mesh, "tensor") or _Step()
            if step.end:
                engine.cancel(range(0 if offices is None else offices.count))
                return step.end, counts._replace(units=0 if offices is None else offices.delivered)
            if step.load is not None:
                counts = _load(engine, weight_lines, pieces, step.load, timeout_s, counts)
                digests = engine_digests(engine) if facts.digests else None
                if offices is not None:
                    offices.version = step.load
                    offices.digests = digests
            if step.cancel:
                engine.cancel(step.cancel)
            if step.submit:
                engine.submit(step.submit)
            completions = engine.step() if engine.unfinished() else []
            progress.iterations += 1
            if offices is not None:
                offices.finish(completions)


def _load(
    engine: Engine, lines: Sequence[Line], pieces: Sequence[Piece], version: int, timeout_s: float, counts: Counts
) -> Counts:
    """Pull weights of a version and give them to the engine."""
    tree, received = pull(lines, pieces, engine.weights, version, timeout_s)
    engine.load(engine.weights.named(tree), version)
    return counts._replace(loads=counts.loads + 1, bytes=counts.bytes + received)


def _as_asked(unit: _Unit) -> list[Completion]:
    """Completions of a unit with the numbers of its office."""
    done = [unit.done[number] for number in unit.numbers]
    return [x._replace(number=request.number) for x, request in zip(done, unit.requests, strict=True)]


def _weight_lines(
    addresses: Addresses, name: str, timeout_s: float, lines: contextlib.ExitStack
) -> tuple[list[Line], TrainerFacts]:
    """Lines for weights to all ranks that train, and what these say of them."""
    opened = [_line(addresses, rank, Hello(name, WEIGHTS), timeout_s, lines) for rank in range(len(addresses.hosts))]
    facts = [line.receive() for line in opened]
    return opened, facts[0]


def _line(addresses: Addresses, rank: int, hello: Hello, timeout_s: float, lines: contextlib.ExitStack) -> Line:
    host, port = addresses.hosts[rank]
    line = call(host, port, addresses.secret, timeout_s)
    lines.callback(line.close)
    line.send(hello)
    return line


@contextlib.contextmanager
def _beating(lines: Sequence[Line], progress: _Progress) -> Iterator[None]:
    """Send signs of life, in a thread of its own."""
    ended = threading.Event()

    def live() -> None:
        while not ended.wait(BEAT_S):
            for line in lines:
                with contextlib.suppress(LineError):  # the lines for work say so too
                    line.send(progress.iterations)

    thread = threading.Thread(target=live, name="beats", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
