"""The lease server of a replica of the trainer ranks: generators of other jobs take its requests under leases.

Threads serve the connections, so that no generator waits for the trainer's own steps. The trainer opens units of work
and collects completions.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from funrl.asynchrony.leases import LeaseRule, Leases, LostGenerator
from funrl.processes.connections import Connection, PeerError
from funrl.rollout.joined.messages import WORK, Hello, Orders, Report
from funrl.rollout.joined.weight_server import WeightServer
from funrl.rollout.remote.digests import EngineDigests
from funrl.rollout.requests import Completion, Request

PROGRAM_REQUESTS = 1 << 40  # the numbers of a program's requests begin at the program's number times this
CHECKS = 8  # of the generators, in the time after which a silent one is lost
FAREWELL_S = 3.0  # for generators to hear of the end


class LeaseNews(NamedTuple):
    """News of a lease server.

    Attributes:
      completions: that have arrived.
      remarks: on generators that have come, gone or been lost.
      fault: where a generator has other weights than the trainer, which; "": none has.
      alone: the message that no generator has joined in time; "": there is one, or time is left.
    """

    completions: Sequence[Completion] = ()
    remarks: Sequence[str] = ()
    fault: str = ""
    alone: str = ""


class LeaseServer:
    """Units of work, and the generators that do them. Its methods may be called by any thread."""

    def __init__(self, rule: LeaseRule, weight_server: WeightServer) -> None:
        """Begin without work.

        Args:
          rule: when a generator is lost.
          weight_server: has the weights.
        """
        self.weight_server = weight_server
        self._lock = threading.Condition()
        self._leases = Leases(rule)
        self._units: dict[int, Sequence[Request]] = {}
        self._unit_of: dict[int, int] = {}  # number of a request -> its unit
        self._opened = 0
        self._drops: dict[str, list[int]] = {}
        self._completions: dict[int, list[Completion]] = {}  # by program
        self._woken = False  # whether the main program is not to wait
        self._remarks: list[str] = []
        self._fault = ""
        self._expected: Mapping[str, int] | None = None  # digests of the newest weights
        self._given: dict[str, tuple[int, EngineDigests]] = {}  # by generator, with the version
        self._proved: dict[str, int] = {}  # version that a generator has proved to have
        self._ended = False
        self._alone_since = time.monotonic()
        self._closed = threading.Event()
        period_s = rule.silent_s / CHECKS
        self._watch = threading.Thread(target=self._look, args=(period_s,), name="leases", daemon=True)
        self._watch.start()

    @property
    def generators(self) -> tuple[str, ...]:
        """Names of the generators in service."""
        with self._lock:
            return self._leases.generators

    def open(self, units: Iterable[Sequence[Request]]) -> None:
        """Add units of work: requests that one generator completes together."""
        with self._lock:
            if not self._units:
                self._alone_since = time.monotonic()
            for requests in units:
                self._units[self._opened] = requests
                self._unit_of |= {request.number: self._opened for request in requests}
                self._leases.open([self._opened])
                self._opened += 1
            self._lock.notify_all()

    def withdraw(self, numbers: Iterable[int]) -> None:
        """Forget requests. A unit is taken from its generator when all of its requests are forgotten."""
        with self._lock:
            touched = [self._unit_of.pop(number) for number in numbers if number in self._unit_of]
            units = {x for x in touched if not any(r.number in self._unit_of for r in self._units[x])}
            for name, leases in self._leases.withdraw(units).items():
                self._drops.setdefault(name, []).extend(leases)
            for unit in units:
                self._forget(unit)

    def expect(self, digests: Mapping[str, int]) -> None:
        """Take the digests of the newest weights, with which generators have to prove that they have them."""
        with self._lock:
            self._expected = digests
            for name in self._leases.generators:
                self._prove(name)
            self._lock.notify_all()

    def proved(self, timeout_s: float) -> bool:
        """True if a generator has proved to have the newest weights, or does so in time."""
        with self._lock:
            return self._lock.wait_for(lambda: self.weight_server.version in self._proved.values(), timeout_s)

    def published(self) -> None:
        """Note that the weight server has new weights with unknown digests."""
        with self._lock:
            self._expected = None
            version = self.weight_server.version
            self._given = {name: given for name, given in self._given.items() if given[0] == version}
            self._proved = {name: proved for name, proved in self._proved.items() if proved == version}
            self._lock.notify_all()

    def collect(self, timeout_s: float, program: int = 0) -> LeaseNews:
        """News since the last call, waited for if there are none.

        Args:
          timeout_s: bound on the wait.
          program: whose requests have been completed, by `PROGRAM_REQUESTS`. The main one, 0, gets the remarks too.
        """
        completed = self._completions
        with self._lock:
            if program:
                self._lock.wait_for(lambda: program in completed or self._fault, timeout_s)
                return LeaseNews(completed.pop(program, ()), fault=self._fault)
            news = lambda: program in completed or self._remarks or self._fault or self._woken  # noqa: E731
            self._lock.wait_for(news, timeout_s)
            self._woken = False
            remarks = tuple(self._remarks)
            self._remarks.clear()
            return LeaseNews(completed.pop(program, ()), remarks, self._fault)

    def wake(self) -> None:
        """Wake the main program's `collect`."""
        with self._lock:
            self._woken = True
            self._lock.notify_all()

    def unfinished(self) -> int:
        """Number of requests of all programs that are not complete."""
        with self._lock:
            return len(self._unit_of)

    def alone_s(self) -> float:
        """Seconds since a generator was in service, while there is work; 0 if one is."""
        with self._lock:
            if self._leases.generators or not self._units:
                self._alone_since = time.monotonic()
            return time.monotonic() - self._alone_since

    def close(self, *, complete: bool) -> None:
        """End.

        Args:
          complete: whether the run is. If so, generators get a message and a short time to read it; else they wait
            for another run to go on.
        """
        if complete:
            with self._lock:
                self._ended = True
                self._lock.notify_all()
                self._lock.wait_for(lambda: not self._leases.generators, FAREWELL_S)
        self._closed.set()
        self._watch.join()

    def serve(self, hello: Hello, connection: Connection) -> None:
        """Serve a generator's connection for work or beats until it ends. Raises: PeerError."""
        if hello.purpose == WORK:
            self._serve_work(hello.generator, connection)
            return
        while True:
            progress = connection.receive(whenever=True)
            with self._lock:
                self._leases.heard(hello.generator, time.monotonic(), progress)

    def _serve_work(self, name: str, connection: Connection) -> None:
        with self._lock:
            self._enter(name, "has joined")
        reason = "its connection has ended"
        try:
            while True:
                report: Report = connection.receive(whenever=True)
                orders = self._orders(name, report)
                connection.send(orders)
                if report.leaving or orders.end:
                    reason = ""
                    return
        except PeerError as error:
            reason = str(error)
            raise
        finally:
            with self._lock:
                self._lost(self._leases.leave(name, reason), known=not reason)

    def _orders(self, name: str, report: Report) -> Orders:
        """Take a generator's report in, and give it orders."""
        with self._lock:
            now = time.monotonic()
            if not self._leases.heard(name, now, report.progress):
                self._enter(name, "is back")
            known = {lease.number for lease in self._leases.held_by(name)}
            for number, completions in report.delivered:
                self._deliver(name, number, completions)
            if report.leaving:
                return Orders()
            if report.digests is not None and report.version is not None:
                self._given[name] = report.version, report.digests
                self._prove(name)
            if report.wait_s:
                news = lambda: self._ended or self._lacks(report) or self._works(name, report)  # noqa: E731
                self._lock.wait_for(news, report.wait_s)
            drop = [number for number in report.held if number not in known] + self._drops.pop(name, [])
            work = self._take(name, report.room) if self._works(name, report) else ()
            return Orders(self.weight_server.version, work, tuple(dict.fromkeys(drop)), self._ended)

    def _lacks(self, report: Report) -> bool:
        """True if a generator has other weights than the newest."""
        return report.version != self.weight_server.version

    def _works(self, name: str, report: Report) -> bool:
        """True if there is work that a generator may do."""
        if self._lacks(report) or report.version is None or not self._leases.waiting:
            return False
        return report.room > 0 and (not self.weight_server.facts.digests or self._proved.get(name) == report.version)

    def _take(self, name: str, room: int) -> list[tuple[int, Sequence[Request]]]:
        """Lease units to a generator as long as it has room for their requests."""
        work = []
        while room > 0 and (taken := self._leases.take(name, 1, time.monotonic())):
            requests = self._units[taken[0].unit]  # type: ignore[index]
            work.append((taken[0].number, requests))
            room -= len(requests)
        return work

    def _deliver(self, name: str, number: int, completions: Sequence[Completion]) -> None:
        unit = self._leases.deliver(name, number)
        if not isinstance(unit, int):
            return
        if len(completions) != len(self._units[unit]):
            self._fault = (
                f"generator {name} delivers {len(completions)} of {len(self._units[unit])} requests of a lease"
            )
            self._lock.notify_all()
            return
        wanted = [request.number in self._unit_of for request in self._units[unit]]
        requests = self._forget(unit)
        version = self.weight_server.version
        for request, done in zip(requests, completions, strict=True):
            if done.number != request.number or bool((done.versions != version).any()):
                self._fault = self._fault or (
                    f"generator {name} delivers request {done.number} with weights {done.versions.tolist()[:1]}; "
                    f"request {request.number} with weights {version} was leased to it"
                )
        for done in (done for done, known in zip(completions, wanted, strict=True) if known):
            self._completions.setdefault(done.number // PROGRAM_REQUESTS, []).append(done)
        self._lock.notify_all()

    def _prove(self, name: str) -> None:
        """Compare the digests of a generator's weights with the trainer's, if both are known."""
        version, given = self._given.get(name, (None, None))
        if given is None or version is None or version != self.weight_server.version or self._expected is None:
            return
        problem = given.faults[0] if given.faults else ""
        if not problem and given.version != version:
            problem = f"the version is {given.version}"
        wrong = [weight for weight, digest in self._expected.items() if given.digests.get(weight, (0,))[0] != digest]
        if not problem and wrong:
            problem = f"{wrong[0]} differs; {len(wrong)} of {len(self._expected)} weights differ"
        if problem:
            self._fault = f"generator {name} does not hold the trainer's weights {version}: {problem}"
        else:
            self._proved[name] = version
        self._lock.notify_all()

    def _enter(self, name: str, event: str) -> None:
        self._leases.enter(name, time.monotonic())
        count = len(self._leases.generators)
        self._remark(f"generator {name} {event}; {count} in service")

    def _lost(self, lost: LostGenerator | None, known: bool = False) -> None:
        """Note that a generator is out of service.

        Args:
          known: whether it has said that it goes.
        """
        if lost is None:
            self._lock.notify_all()
            return
        self._drops.pop(lost.generator, None)  # its proof is kept: it sends it once, and may come back
        count = len(self._leases.generators)
        if not self._ended:
            event = "has left" if known else f"is lost: {lost.reason}"
            moved = f", and {len(lost.units)} of its groups go to others" if lost.units else ""
            self._remark(f"generator {lost.generator} {event}{moved}; {count} in service")
        self._alone_since = time.monotonic()
        self._lock.notify_all()

    def _remark(self, text: str) -> None:
        self._remarks.append(text)
        self._lock.notify_all()

    def _forget(self, unit: int) -> Sequence[Request]:
        requests = self._units.pop(unit, ())
        for request in requests:
            self._unit_of.pop(request.number, None)
        return requests

    def _look(self, period_s: float) -> None:
        """Take generators that are lost out of service, in a thread of its own."""
        last = time.monotonic()
        while not self._closed.wait(period_s):
            now = time.monotonic()
            paused = now - last > 2 * period_s  # this process stood still, and has not read what was sent meanwhile
            last = now
            if paused:
                continue
            with self._lock:
                for lost in self._leases.expire(now):
                    self._lost(lost)
