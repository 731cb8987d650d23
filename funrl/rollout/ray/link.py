"""The link between the ledger of a run and generators that are Ray actors, on the trainer's first rank.

A thread of its own starts actors, gives them weights and places while the trainer updates, and takes what they deliver.
An actor whose call fails because its process or node is gone is replaced; its places begin again elsewhere, as another
attempt. Ray places actors, notices loss and moves objects; the ledger makes it exact.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from funrl.mesh.pools.placement import GeneratorBounds
from funrl.rollout.certificate import SyncError
from funrl.rollout.ledger import Ledger
from funrl.rollout.ray.cluster import ClusterError, devices_of_cluster, import_ray
from funrl.rollout.remote.digests import EngineDigests

TURN_S = 0.2  # between two turns of the thread without an event
SHORT_S = 10.0  # with fewer generators than the run waits for, after which a line says so
PING_S = 10.0  # between two pings of a generator


class GeneratorFacts(NamedTuple):
    """Facts of a generator that has started.

    Attributes:
      name: its host and process.
      room: groups that it writes at once.
    """

    name: str
    room: int


class ActorRequest(NamedTuple):
    """Actors that a run asks Ray for.

    Attributes:
      bounds: on their number.
      resource: Ray's name of a generator's device, "GPU" or "CPU".
      start: () -> an actor, which may wait for its device.
      limit_s: seconds without enough generators, or without an answer of one, before that is an error.
    """

    bounds: GeneratorBounds
    resource: str
    start: Callable[[], Any]
    limit_s: float


@dataclass(slots=True, eq=False)
class GeneratorCall:
    """A call of a generator, which writes a place of the ledger, or something with one version of the weights.

    Attributes:
      method, arguments: of the actor.
      then: receives what it returns: a value, and references of objects with these objects.
      objects: number of these.
      place: of the ledger, which it writes with any version that the ledger allows; None: it belongs to no place.
      attempt: of the place.
      version: of the weights, which generators keep until it has ended; None: it writes a place.
    """

    method: str
    arguments: tuple[object, ...]
    then: Callable[[Any, Sequence[Any], Sequence[Any]], None]
    objects: int = 0
    place: int | None = None
    attempt: int = 0
    version: int | None = None


@dataclass(slots=True)
class RunningGenerator:
    """An actor, as the link sees it.

    Attributes:
      actor: its handle.
      facts: None until it has started.
      version: of its weights; None: it has none yet.
      loading: version that it loads; None: none.
      calls: that it works on.
      pinged, heard: when it was asked for a sign of life, and when it gave one; by the monotonic clock.
    """

    actor: Any
    facts: GeneratorFacts | None = None
    version: int | None = None
    loading: int | None = None
    calls: list[GeneratorCall] = field(default_factory=list)
    pinged: float = field(default_factory=time.monotonic)
    heard: float = field(default_factory=time.monotonic)

    @property
    def load(self) -> float:
        """Share of its room that is in use."""
        return len(self.calls) / (self.facts.room if self.facts else 1)


class GeneratorLink:
    """Generators of a run, and their work.

    Attributes:
      changed: the lock of everything here and of the ledger, notified after each turn.
      ledger: of the run; None: not yet.
      asked: place -> call that writes it, of those that wait to begin.
      batches: version of weights -> newest batch that is trained with it.
      digests: of the newest version that a generator holds.

    Example:
      link = GeneratorLink(request, exchange, note)
      link.start()
      link.publish(0)  # weights
      with link.changed:
        link.changed.wait_for(is_complete, timeout=1.0)
        link.check()
    """

    def __init__(self, request: ActorRequest, exchange: Any, note: Callable[[str], None]) -> None:
        """Begin without generators; a thread asks for them.

        Args:
          request: actors.
          exchange: actor with the references of weights.
          note: receives remarks, in the thread.
        """
        self.changed = threading.Condition()
        self.ledger: Ledger | None = None
        self.batches: dict[int, int] = {}
        self.digests: EngineDigests | None = None
        self.asked: dict[int, GeneratorCall] = {}
        self._request = request
        self._exchange = exchange
        self._note = note
        self._generators: dict[int, RunningGenerator] = {}
        self._count = 0
        self._versions: list[int] = []  # in the exchange, ascending
        self._calls: deque[GeneratorCall] = deque()  # of one version each
        self._events: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._fault: BaseException | None = None
        self._short_since: float | None = None
        self._said_short = False
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="generators", daemon=True)

    def start(self) -> None:
        """Begin to ask for generators."""
        self._thread.start()

    def publish(self, version: int) -> None:
        """Have generators load a version, which is in the exchange."""
        with self.changed:
            self._versions.append(version)
        self.wake()

    def begin(self, calls: Sequence[GeneratorCall]) -> None:
        """Begin calls. Until those without a place have ended, no newer version than theirs is loaded."""
        with self.changed:
            self.asked |= {call.place: call for call in calls if call.place is not None}
            for call in calls:
                if call.place is None:
                    call.version = self._versions[-1]
                    self._calls.append(call)
        self.wake()

    def wake(self) -> None:
        """Look for work soon."""
        self._events.put(lambda: None)

    def check(self) -> None:
        """Raise the error that ends the run, if there is one. Call it under the lock."""
        if self._fault is not None:
            raise self._fault

    def close(self) -> None:
        """End all generators, and the thread."""
        self._closed = True
        self.wake()
        if self._thread.is_alive():
            self._thread.join()
        for generator in self._generators.values():
            _kill(generator.actor)

    def _run(self) -> None:
        while not self._closed:
            events = [*self._waited()]
            with self.changed:
                try:
                    for event in events:
                        event()
                    self._turn()
                except BaseException as error:  # the main thread raises it
                    self._fault = self._fault or error
                self.changed.notify_all()

    def _waited(self) -> Iterator[Callable[[], None]]:
        """Events that have come, or that come soon."""
        try:
            yield self._events.get(timeout=TURN_S)
            while True:
                yield self._events.get_nowait()
        except queue.Empty:
            return

    def _turn(self) -> None:
        """Start actors, and give weights, calls and places to those that may have some."""
        while len(self._generators) < self._request.bounds.most and self._fault is None:
            self._start_one()
        self._check_short()
        for owner, generator in list(self._generators.items()):
            self._ping(owner, generator)
            idle = generator.facts is not None and generator.loading is None
            if idle and self._target not in (None, generator.version):
                self._load(owner, generator, self._target)
        started = {owner: x for owner, x in self._generators.items() if x.facts is not None}
        while started:
            owner = min(started, key=lambda owner: started[owner].load)
            if started[owner].load >= 1 or not (
                self._give_call(owner, started[owner]) or self._give_place(owner, started[owner], len(started))
            ):
                del started[owner]

    @property
    def _target(self) -> int | None:
        """The version that generators are to hold: the newest, or that of calls which have not ended."""
        calls = [*self._calls, *(call for generator in self._generators.values() for call in generator.calls)]
        pinned = [call.version for call in calls if call.version is not None]
        return min(pinned) if pinned else self._versions[-1] if self._versions else None

    def _start_one(self) -> None:
        owner = self._count
        self._count += 1
        actor = self._request.start()
        self._generators[owner] = RunningGenerator(actor)
        self._call(owner, actor.describe.remote(), lambda facts: self._started(owner, facts))

    def _started(self, owner: int, facts: GeneratorFacts) -> None:
        self._generators[owner].facts = facts
        count = sum(generator.facts is not None for generator in self._generators.values())
        self._note(f"generator {facts.name} has started; {count} of {self._request.bounds.most} are there")

    def _load(self, owner: int, generator: RunningGenerator, version: int) -> None:
        generator.loading = version

        def loaded(digests: EngineDigests | None) -> None:
            generator.version = version
            generator.loading = None
            known = self.digests
            if digests is not None and known is not None and known.version == version and digests != known:
                raise SyncError(f"generators hold different weights of version {version}")
            self.digests = digests or known
            loading = [x.loading for x in self._generators.values() if x.loading is not None]
            oldest = min([*loading, self._target or version, version])
            self._exchange.drop.remote([older for older in self._versions if older < oldest])
            self._versions = [newer for newer in self._versions if newer >= oldest]

        self._call(owner, generator.actor.load.remote(self._exchange, version), loaded)

    def _give_call(self, owner: int, generator: RunningGenerator) -> bool:
        """Give a generator a call that waits; False: there is none for it."""
        if not self._calls or self._calls[0].version != generator.version:
            return False
        self._give(owner, generator, self._calls.popleft())
        return True

    def _give_place(self, owner: int, generator: RunningGenerator, generators: int) -> bool:
        """Give a generator the next place that its version allows; False: there is none."""
        ledger = self.ledger
        version = None if generator.version is None else self.batches.get(generator.version)
        if ledger is None or version is None:
            return False
        share = -(-(ledger.rule.places + ledger.rule.ahead) // generators)
        numbers = [number for number in ledger.next_places(version, 1) if number in self.asked]
        if not numbers or len(generator.calls) >= share:
            return False
        call = self.asked.pop(numbers[0])
        call.attempt = ledger.begin(owner, numbers, version)[numbers[0]]
        self._give(owner, generator, call)
        return True

    def _give(self, owner: int, generator: RunningGenerator, call: GeneratorCall) -> None:
        generator.calls.append(call)
        method = getattr(generator.actor, call.method).options(num_returns=1 + call.objects)
        returned = method.remote(*call.arguments)
        value, *references = returned if call.objects else [returned]

        def ended(result: Any) -> None:
            objects = import_ray().get(references, timeout=self._request.limit_s)  # from now on they are on this node
            generator.calls.remove(call)
            ledger = self.ledger
            if call.place is None or (ledger is not None and ledger.deliver(owner, call.place, call.attempt)):
                call.then(result, references, objects)

        self._call(owner, value, ended)

    def _ping(self, owner: int, generator: RunningGenerator) -> None:
        """Ask a generator for a sign of life now and then; one without is ended."""
        now = time.monotonic()
        if generator.facts is None or now < generator.pinged + PING_S:
            return
        if generator.heard < generator.pinged:
            if now > generator.pinged + self._request.limit_s:
                self._lose(owner, f"it has been silent for {now - generator.pinged:.0f} s")
            return
        generator.pinged = now
        self._call(owner, generator.actor.ping.remote(), lambda _: None)

    def _call(self, owner: int, reference: Any, then: Callable[[Any], None]) -> None:
        """Call `then` with an object of a generator once it is there, unless the generator is lost."""
        future: Future[Any] = reference.future()
        future.add_done_callback(lambda done: self._events.put(lambda: self._end_call(owner, done, then)))

    def _end_call(self, owner: int, done: Future[Any], then: Callable[[Any], None]) -> None:
        errors = import_ray().exceptions
        if owner not in self._generators:
            return
        self._generators[owner].heard = time.monotonic()
        try:
            then(done.result())
        except errors.RayTaskError:
            raise
        except errors.RayError as error:  # the process, its node or an object is gone
            if getattr(error, "actor_init_failed", False):  # each further one would fail too
                raise ClusterError(f"a generator cannot start: {error}") from error
            self._lose(owner, str(error).strip().partition("\n")[0])

    def _lose(self, owner: int, cause: str) -> None:
        """Give the work of a generator that is gone to others."""
        generator = self._generators.pop(owner)
        _kill(generator.actor)
        numbers = [] if self.ledger is None else self.ledger.lost(owner)
        self.asked |= {call.place: call for call in generator.calls if call.place is not None}
        self._calls.extendleft(reversed([call for call in generator.calls if call.place is None]))
        name = "that was starting" if generator.facts is None else generator.facts.name
        self._note(f"generator {name} is lost: {cause}; {len(numbers)} of its groups go to others")

    def _check_short(self) -> None:
        """Note, and in the end raise, that there are fewer generators than the run waits for.

        Raises:
          ClusterError: for longer than the limit.
        """
        least = self._request.bounds.least
        count = sum(generator.facts is not None for generator in self._generators.values())
        now = time.monotonic()
        if count >= least:
            self._short_since = None
            self._said_short = False
            return
        self._short_since = self._short_since or now
        short_s = now - self._short_since
        is_over = short_s > self._request.limit_s
        if not is_over and (short_s <= SHORT_S or self._said_short):
            return
        resource = self._request.resource
        missing = f"{least} generators with 1 {resource} each, and {count} are there: {devices_of_cluster(resource)}"
        if is_over:
            raise ClusterError(f"waited {short_s:.0f} s (--timeout) for {missing}")
        self._said_short = True
        self._note(f"waiting for {missing}")


def _kill(actor: Any) -> None:
    """End an actor, if it is there."""
    import_ray().kill(actor)
