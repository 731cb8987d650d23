"""The link between the ledger of a run and generators that are Ray actors, on the trainer's first rank.

A thread of its own starts actors, gives them weights and places while the trainer updates, and takes what they deliver.
An actor whose call fails because its process or node is gone is replaced; its places begin again elsewhere, as another
attempt. Ray places actors, notices loss and moves objects; the ledger makes it exact.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from funrl.mesh.pools.placement import GeneratorBounds
from funrl.rollout.certificate import SyncError
from funrl.rollout.ledger import Ledger
from funrl.rollout.ray.cluster import ClusterError, devices_of_cluster, import_ray
from funrl.rollout.remote.engine import EngineDigests

TURN_S = 0.2  # between two turns of the thread without an event
SHORT_S = 10.0  # with fewer generators than the run waits for, after which a line says so
PING_S = 10.0  # between two pings of a generator


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
      then: receives what it returns.
      place: of the ledger, which it writes with any version that the ledger allows; None: it belongs to no place.
      attempt: of the place.
      release: of weights, which generators keep until it has ended; None: it writes a place.
    """

    method: str
    arguments: tuple[object, ...]
    then: Callable[[Any], None]
    place: int | None = None
    attempt: int = 0
    release: int | None = None


@dataclass(slots=True, eq=False)
class RunningGenerator:
    """An actor, as the link sees it.

    Attributes:
      owner: its number in the ledger.
      actor: its handle.
      name: its host and process.
      room: groups that it writes at once; 0: it has not started.
      release: of its weights; None: it has none yet.
      loading: release that it loads; None: none.
      calls: that it works on.
      pinged, heard: when it was asked for a sign of life, and when it gave one; by the monotonic clock.
    """

    owner: int
    actor: Any
    name: str = "that was starting"
    room: int = 0
    release: int | None = None
    loading: int | None = None
    calls: list[GeneratorCall] = field(default_factory=list)
    pinged: float = field(default_factory=time.monotonic)
    heard: float = field(default_factory=time.monotonic)


class GeneratorLink:
    """Generators of a run, and their work.

    The models that generators have are published one by one. Each time begins a release, the versions of all of them.

    Attributes:
      changed: the lock of everything here and of the ledger, notified after each turn.
      ledger: of the run; None: not yet.
      asked: place -> call that writes it, of those that wait to begin.
      digests: of the newest version that a generator holds, by the models that are proved; "" is the policy.

    Example:
      link = GeneratorLink(request, exchange, note)
      link.start()
      link.publish("", 0)  # weights of the policy
      with link.changed:
        link.changed.wait_for(is_complete, timeout=1.0)
        link.check()
    """

    def __init__(self, request: ActorRequest, exchange: Any, note: Callable[[str], None]) -> None:
        """Begin without generators; a thread asks for them.

        Args:
          request: actors.
          exchange: actor with the references of weights, by model and version.
          note: receives remarks, in the thread.
        """
        self.changed = threading.Condition()
        self.ledger: Ledger | None = None
        self.digests: dict[str, EngineDigests] = {}
        self.asked: dict[int, GeneratorCall] = {}
        self._request = request
        self._exchange = exchange
        self._note = note
        self._generators: dict[int, RunningGenerator] = {}
        self._started = 0  # actors of the run
        self._releases: dict[int, Mapping[str, int]] = {}  # in the exchange, ascending: versions by models
        self._newest = -1  # release
        self._batches: dict[int | None, int] = {}  # release -> newest batch that is trained with it
        self._calls: deque[GeneratorCall] = deque()  # that have no place and wait to begin
        self._pinned: list[int] = []  # releases of calls that have no place and have not ended
        self._events: deque[Callable[[], None]] = deque()
        self._is_due = threading.Event()
        self._fault: BaseException | None = None
        self._enough = time.monotonic()  # when there were enough generators
        self._noted_short = False
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="generators", daemon=True)

    def start(self) -> None:
        """Begin to ask for generators."""
        self._thread.start()

    def publish(self, model: str, version: int) -> None:
        """Have generators load a version of a model, which is in the exchange; "" is the policy."""
        with self.changed:
            versions = {**self._releases.get(self._newest, {}), model: version}
            self._newest += 1
            self._releases[self._newest] = versions
        self.wake()

    def train(self, ledger: Ledger, batch: int) -> None:
        """Take the places of a ledger. Call it under the lock, when a batch begins, which the newest weights are of."""
        self.ledger = ledger
        self._batches[self._newest] = batch

    def begin(self, calls: Sequence[GeneratorCall]) -> None:
        """Begin calls. Until those without a place have ended, no newer weights than theirs are loaded."""
        with self.changed:
            for call in calls:
                if call.place is not None:
                    self.asked[call.place] = call
                    continue
                call.release = self._newest
                self._pinned.append(call.release)
                self._calls.append(call)
        self.wake()

    def wake(self) -> None:
        """Look for work soon."""
        self._is_due.set()

    def check(self) -> None:
        """Raise the error that ends the run, if there is one. Call it under the lock."""
        if self._fault is not None:
            raise self._fault

    def close(self) -> None:
        """End all generators, and the thread."""
        self._closed = True
        self.wake()
        self._thread.join()
        for generator in self._generators.values():
            import_ray().kill(generator.actor)

    def _run(self) -> None:
        while not self._closed:
            self._is_due.wait(TURN_S)
            self._is_due.clear()
            with self.changed:
                try:
                    while self._events:
                        self._events.popleft()()
                    self._turn()
                except BaseException as error:  # the main thread raises it
                    self._fault = self._fault or error
                self.changed.notify_all()

    def _turn(self) -> None:
        """Start actors, and give weights, calls and places to those that may have some."""
        while len(self._generators) < self._request.bounds.most and self._fault is None:
            self._start_actor()
        target = self._target
        for generator in [x for x in self._generators.values() if x.room]:
            self._ping(generator)
            if generator.loading is None and target >= 0 and target != generator.release:
                self._load(generator, target)
        ready = sorted((x for x in self._generators.values() if x.room), key=lambda x: len(x.calls) / x.room)
        self._check_short(len(ready))
        rule = self.ledger and self.ledger.rule
        share = -(-(rule.places + rule.ahead) // max(1, len(ready))) if rule else 0
        while ready:
            ready = [x for x in ready if len(x.calls) < x.room and self._give(x, share)]

    @property
    def _target(self) -> int:
        """The release that generators are to hold: the newest, or that of calls which have not ended."""
        return min(self._pinned, default=self._newest)

    def _start_actor(self) -> None:
        owner = self._started
        self._started += 1
        generator = self._generators[owner] = RunningGenerator(owner, self._request.start())

        def started(facts: tuple[str, int]) -> None:
            generator.name, generator.room = facts
            count = sum(x.room > 0 for x in self._generators.values())
            self._note(f"generator {generator.name} has started; {count} of {self._request.bounds.most} are there")

        self._call(generator, generator.actor.describe.remote(), started)

    def _load(self, generator: RunningGenerator, release: int) -> None:
        generator.loading = release

        def loaded(digests: Mapping[str, EngineDigests]) -> None:
            generator.release = release
            generator.loading = None
            for model, own in digests.items():
                known = self.digests.get(model)
                if known is not None and known.version == own.version and known != own:
                    of_model = f" of {model}" if model else ""
                    raise SyncError(f"generators hold different weights{of_model} of version {own.version}")
                self.digests[model] = own
            oldest = min([self._target, *(x.loading for x in self._generators.values() if x.loading is not None)])
            past = [number for number in self._releases if number < oldest]
            topics = {topic for number in past for topic in self._releases.pop(number).items()}
            needed = {topic for versions in self._releases.values() for topic in versions.items()}
            self._exchange.drop.remote([*topics - needed])

        self._call(generator, generator.actor.load.remote(self._releases[release]), loaded)

    def _give(self, generator: RunningGenerator, share: int) -> bool:
        """Give a generator the next call of its release, or the next place that it allows; False: there is none.

        Args:
          share: of the places, which a generator has at most at once.
        """
        ledger = self.ledger
        version = self._batches.get(generator.release)
        if self._calls and self._calls[0].release == generator.release:
            call = self._calls.popleft()
        elif ledger is None or version is None or len(generator.calls) >= share:
            return False
        else:
            numbers = [number for number in ledger.next_places(version, 1) if number in self.asked]
            if not numbers:
                return False
            call = self.asked.pop(numbers[0])
            call.attempt = ledger.begin(generator.owner, numbers, version)[numbers[0]]
        generator.calls.append(call)

        def ended(result: Any) -> None:
            generator.calls.remove(call)
            if call.release is not None:
                self._pinned.remove(call.release)
            if call.place is None or (ledger is not None and ledger.deliver(generator.owner, call.place, call.attempt)):
                call.then(result)

        self._call(generator, getattr(generator.actor, call.method).remote(*call.arguments), ended)
        return True

    def _ping(self, generator: RunningGenerator) -> None:
        """Ask a generator for a sign of life now and then; one without is ended."""
        now = time.monotonic()
        silent_s = now - generator.pinged
        if generator.heard < generator.pinged and silent_s > self._request.limit_s:
            self._lose(generator, f"it has been silent for {silent_s:.0f} s")
        elif generator.heard >= generator.pinged and silent_s > PING_S:
            generator.pinged = now
            self._call(generator, generator.actor.ping.remote(), lambda _: None)

    def _call(self, generator: RunningGenerator, reference: Any, then: Callable[[Any], None]) -> None:
        """Call `then` with an object of a generator once it is on this node, unless the generator is lost."""

        def end(done: Future[Any]) -> None:
            self._events.append(lambda: self._end_call(generator, done, then))
            self.wake()

        reference.future().add_done_callback(end)

    def _end_call(self, generator: RunningGenerator, done: Future[Any], then: Callable[[Any], None]) -> None:
        errors = import_ray().exceptions
        if generator.owner not in self._generators:
            return
        generator.heard = time.monotonic()
        try:
            then(done.result())
        except errors.RayTaskError:
            raise
        except errors.RayError as error:  # the process, its node or an object is gone
            if getattr(error, "actor_init_failed", False):  # each further one would fail too
                raise ClusterError(f"a generator cannot start: {error}") from error
            self._lose(generator, str(error).strip().partition("\n")[0])

    def _lose(self, generator: RunningGenerator, cause: str) -> None:
        """Give the work of a generator that is gone to others."""
        del self._generators[generator.owner]
        import_ray().kill(generator.actor)
        numbers = [] if self.ledger is None else self.ledger.lost(generator.owner)
        self.asked |= {call.place: call for call in generator.calls if call.place is not None}
        self._calls.extendleft(reversed([call for call in generator.calls if call.place is None]))
        self._note(f"generator {generator.name} is lost: {cause}; {len(numbers)} of its groups go to others")

    def _check_short(self, count: int) -> None:
        """Note, and in the end raise, that there are fewer generators than the run waits for.

        Args:
          count: of those that have started.

        Raises:
          ClusterError: for longer than the limit.
        """
        bounds, resource, _, limit_s = self._request
        now = time.monotonic()
        if count >= bounds.least:
            self._enough = now
            self._noted_short = False
        short_s = now - self._enough
        if short_s <= min(limit_s, SHORT_S) or (self._noted_short and short_s <= limit_s):
            return
        of_cluster = devices_of_cluster(resource)
        missing = f"{bounds.least} generators with {bounds.tensor} {resource} each, and {count} are there: {of_cluster}"
        if short_s > limit_s:
            raise ClusterError(f"waited {short_s:.0f} s (--timeout) for {missing}")
        self._noted_short = True
        self._note(f"waiting for {missing}")
