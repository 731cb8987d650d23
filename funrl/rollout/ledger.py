"""Ledger of the prompt groups of a run: which are waited for, written and trained on, and the bounds on their age.

    source -- take --> Ledger <-- begin, deliver -- link <-- runner (a replica: its loop and resident engine)

A place is the number of a group in the run. Batch b has the places bP to (b+1)P - 1, and the trainer is at version v
while it trains batch v. A place is in one of these states:

    waiting --begin--> running --deliver--> written --score--> scored --take--> taken
       ^------ lost -------+                    |                 |
       ^----------------------- refill ---------+-----------------+

With staleness S and window W

- place i begins when its runner holds at least version floor(i / P) - S;
- a written place joins a batch if its number is below that of the oldest place in no batch + W.

At most W - 1 places overtake place i, so it is in batch floor((i + W - 1) / P) at the latest, and its age, the version
that trains on it less the version at which it began, is at most S + ceil((W - 1) / P). Nothing is dropped: each place
is taken once. A place begins anew as another attempt, and a delivery of an earlier attempt changes nothing. Where the
filter of the algorithm drops a group, another prompt refills its place, as long as the budget of its batch lasts.

The ledger has numbers, owners and states alone. It knows neither devices nor time nor tokens. The cost of a transition
grows with the places that it concerns, not with all. It changes the ledger in place; `copy.deepcopy` keeps a moment.
"""

from __future__ import annotations

import bisect
import enum
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple


class LedgerError(ValueError):
    """A transition that the rule does not allow."""


class LedgerRule(NamedTuple):
    """Bounds on the places of a run.

    Attributes:
      places: groups of a batch, P.
      staleness: versions that a group may be behind when it begins, S. A fraction is rounded to whole groups: at
        S = 0.5 half a batch is generated ahead.
      window: numbers among which written groups join a batch, W; 1: in the order of places.
      prompts: prompts of a batch for each of its places; the prompts above 1 are one budget of refills for the batch.
      scores: whether models score the written rows of a batch before it may be taken.
    """

    places: int
    staleness: float = 0
    window: int = 1
    prompts: int = 1
    scores: bool = False

    def checked(self) -> LedgerRule:
        """The same rule. Raises: LedgerError if a number is outside its range."""
        if min(self.places, self.window, self.prompts) < 1 or self.staleness < 0:
            raise LedgerError(f"{self}: places, window and prompts are at least 1, staleness is at least 0")
        return self

    @property
    def ahead(self) -> int:
        """Groups that begin before their batch is due, S P."""
        return round(self.staleness * self.places)

    @property
    def most_age(self) -> int:
        """The bound of the age, ceil(S + (W - 1) / P); for a whole S, S + ceil((W - 1) / P)."""
        return -(-(self.ahead + self.window - 1) // self.places)

    @property
    def refills(self) -> int:
        """Prompts that may replace others in a batch."""
        return self.places * (self.prompts - 1)

    @property
    def rounds(self) -> bool:
        """True where refills wait until the batch is written, so that they do not depend on timing."""
        return self.scores or not self.staleness

    @property
    def filters(self) -> bool:
        """True where the filter sees each group once it is written, and another prompt refills its place at once."""
        return self.prompts > 1 and not self.rounds

    def least_version(self, place: int) -> int:
        """Version that a runner holds before a place begins, floor(i / P - S); below 0: any.

        Example:
          >>> [LedgerRule(places=2, staleness=1).least_version(i) for i in range(6)]
          [-1, -1, 0, 0, 1, 1]
        """
        return (place - self.ahead) // self.places


class PlaceState(enum.IntEnum):
    """State of a place that is not taken."""

    WAITING = 0
    RUNNING = 1
    WRITTEN = 2
    SCORED = 3


class Place(NamedTuple):
    """A place that was begun, or passed over by a later one that was.

    Attributes:
      state: of it.
      attempt: how often it has begun.
      version: at which it began; None: it waits.
    """

    state: PlaceState = PlaceState.WAITING
    attempt: int = 0
    version: int | None = None


@dataclass(slots=True)
class Ledger:
    """State of the places of a run.

    Attributes:
      rule: the bounds.
      until: places of the run.
      version: batches taken.
      fresh: the first place that neither began nor was passed over.
      oldest: the first place that is in no batch.
      overtaken: places above `oldest` that are in a batch.
      places: the places below `fresh` that are not taken.
      waiting, written: those of them that wait to begin; that are written and in no batch. Ascending.
      running: owner -> places.
      batch: place -> age, of the next batch as far as it is filled.
      refilled: batch -> prompts that have replaced others in its places.
      counts: events of places since the owner of the ledger has read them: begun, lost, refilled, taken.
      prompts: prompts that batches have used, refilled ones included.
      passed: positions of prompts in their order that were not used while later ones were, ascending.

    Example:
      >>> ledger = Ledger(LedgerRule(places=2, staleness=1), until=100)
      >>> ledger.begin(owner=0, numbers=ledger.next_places(version=0, room=3), version=0)
      {0: 1, 1: 1, 2: 1}
      >>> [ledger.deliver(owner=0, number=number, attempt=1) for number in (0, 2, 0)]
      [True, True, False]
      >>> ledger.fill_batch(), ledger.take()  # 2 waits for 1
      ({0: 0}, None)
      >>> ledger.deliver(owner=0, number=1, attempt=1), ledger.fill_batch(), ledger.take()
      (True, {1: 0}, (0, 1))
    """

    rule: LedgerRule
    until: int
    version: int = 0
    fresh: int = 0
    oldest: int = 0
    overtaken: set[int] = field(default_factory=set)
    places: dict[int, Place] = field(default_factory=dict)
    waiting: list[int] = field(default_factory=list)
    written: list[int] = field(default_factory=list)
    running: defaultdict[int, set[int]] = field(default_factory=lambda: defaultdict(set))
    batch: dict[int, int] = field(default_factory=dict)
    refilled: Counter[int] = field(default_factory=Counter)
    counts: Counter[str] = field(default_factory=Counter)
    prompts: int = 0
    passed: list[int] = field(default_factory=list)

    @classmethod
    def restored(cls, rule: LedgerRule, until: int, version: int, overtaken: Sequence[bool] = ()) -> Ledger:
        """The ledger of a resumed run: every place that is not taken waits.

        Args:
          rule, until, version: its attributes.
          overtaken: what `taken_in_window` gave after the last batch.

        Example:
          >>> rule = LedgerRule(places=4, staleness=1, window=3)
          >>> ledger = Ledger.restored(rule, until=20, version=2, overtaken=[True, False])
          >>> ledger.oldest, ledger.overtaken, ledger.waiting, ledger.fresh
          (7, {8}, [7], 9)
        """
        oldest = version * rule.places - sum(overtaken)
        taken = {oldest + 1 + index for index, is_taken in enumerate(overtaken) if is_taken}
        fresh = max(taken, default=oldest - 1) + 1
        waiting = [number for number in range(oldest, fresh) if number not in taken]
        places = {number: Place() for number in waiting}
        return cls(rule, until, version, fresh, oldest, overtaken=taken, places=places, waiting=waiting)

    @property
    def taken_in_window(self) -> list[bool]:
        """Flags of the W - 1 places after the oldest one: whether each is taken, between two batches."""
        return [number in self.overtaken for number in range(self.oldest + 1, self.oldest + self.rule.window)]

    def use_prompts(self, positions: Collection[int]) -> None:
        """Note the positions of prompts that a batch uses.

        Example:
          >>> ledger = Ledger(LedgerRule(places=2), until=100, prompts=5, passed=[3])
          >>> ledger.use_prompts([3, 7, 6, 9])
          >>> ledger.passed, ledger.prompts
          ([8], 9)
        """
        end = self.prompts + len(self.passed)
        passed = {*self.passed, *range(end, max(positions, default=0) + 1)}
        self.passed = sorted(passed.difference(positions))
        self.prompts += len(positions)

    def next_places(self, version: int, room: int) -> list[int]:
        """Places that a runner with room for some may begin at a version: those that wait, then new ones."""
        least = self.rule.least_version
        waiting = [number for number in self.waiting[:room] if least(number) <= version]
        end = min(self.until, (version + 1) * self.rule.places + self.rule.ahead, self.fresh + room - len(waiting))
        return [*waiting, *range(self.fresh, end)]

    def begin(self, owner: int, numbers: Iterable[int], version: int) -> dict[int, int]:
        """Begin places on a runner. Places below these that did not begin yet wait from now on.

        Returns: place -> attempt.

        Raises:
          LedgerError: a place runs already, is written or taken or beyond the run; the runner's version is too old, or
            not trained yet.
        """
        attempts = {}
        for number in numbers:
            place = Place() if self.fresh <= number < self.until else self.places.get(number)
            trained = self.rule.least_version(number) <= version <= self.version
            if place is None or place.state != PlaceState.WAITING or not trained:
                raise LedgerError(f"place {number} is to begin at version {version} of {self.version}; it is {place}")
            for passed in range(self.fresh, number + 1):
                self.places[passed] = Place()
                self.waiting.append(passed)
            self.fresh = max(self.fresh, number + 1)
            attempts[number] = place.attempt + 1
            self.places[number] = Place(PlaceState.RUNNING, place.attempt + 1, version)
            _remove(self.waiting, number)
            self.running[owner].add(number)
            self.counts["begun"] += 1
        return attempts

    def lost(self, owner: int) -> list[int]:
        """Return the places of a runner that is gone, which then begin again."""
        numbers = sorted(self.running.pop(owner, ()))
        for number in numbers:
            self._wait(number)
        self.counts["lost"] += len(numbers)
        return numbers

    def deliver(self, owner: int, number: int, attempt: int) -> bool:
        """Note that a place is written, with rows or empty; False: another attempt has replaced this one."""
        if number not in self.running.get(owner, ()) or self.places[number].attempt != attempt:
            return False
        self.running[owner].remove(number)
        self.places[number] = self.places[number]._replace(state=PlaceState.WRITTEN)
        if number in self.batch:
            self.batch[number] = self._age(number)
        else:
            bisect.insort(self.written, number)
        return True

    def refill(self, numbers: Collection[int]) -> list[int]:
        """Give another prompt to written places whose rows the filter drops, lowest first, as the budget allows.

        Returns: the places that wait again. The others stay empty.

        Raises:
          LedgerError: a place is not written, or the rule refills in rounds and the batch is not written.
        """
        is_due = not self.rule.rounds or (self._is_whole(PlaceState.WRITTEN) and self.batch.keys() >= set(numbers))
        if not is_due or any(self.places.get(n, Place()).state < PlaceState.WRITTEN for n in numbers):
            raise LedgerError(f"places {sorted(numbers)} are to be refilled and are not written, or not their batch")
        waiting = []
        for number in sorted(numbers):
            batch = self.version if self.rule.rounds else number // self.rule.places
            if self.refilled[batch] < self.rule.refills:
                self.refilled[batch] += 1
                self._wait(number)
                waiting.append(number)
        self.counts["refilled"] += len(waiting)
        return waiting

    def score(self, numbers: Iterable[int]) -> None:
        """Note that models have scored written places of the batch. Raises: LedgerError, one is not written."""
        for number in numbers:
            if number not in self.batch or self.places[number].state != PlaceState.WRITTEN:
                raise LedgerError(f"place {number} is to be scored and is not written, or not of the batch")
            self.places[number] = self.places[number]._replace(state=PlaceState.SCORED)

    def fill_batch(self, most: int | None = None) -> dict[int, int]:
        """Let written places join the next batch, lowest first: at most `most`, by default as many as it lacks.

        A place that joins may move the window for the next one.

        Returns: place -> age.
        """
        room = self.rule.places - len(self.batch)
        room = room if most is None else min(room, most)
        ages = {}
        for number in self.written:
            if len(ages) == room or number >= self.oldest + self.rule.window:
                break
            ages[number] = self._age(number)
            self.overtaken.add(number)
            while self.oldest in self.overtaken:
                self.overtaken.remove(self.oldest)
                self.oldest += 1
        del self.written[: len(ages)]
        self.batch |= ages
        return ages

    def take(self) -> tuple[int, ...] | None:
        """Take the next batch once it is whole: its places in order; None before."""
        if not self._is_whole(PlaceState.SCORED if self.rule.scores else PlaceState.WRITTEN):
            return None
        for number in self.batch:
            del self.places[number]
        taken = tuple(sorted(self.batch))
        self.counts["taken"] += len(taken)
        self.batch = {}
        self.version += 1
        for batch in [batch for batch in self.refilled if batch < self.oldest // self.rule.places]:
            del self.refilled[batch]
        return taken

    def _age(self, number: int) -> int:
        return self.version - (self.places[number].version or 0)

    def _is_whole(self, state: PlaceState) -> bool:
        return len(self.batch) == self.rule.places and all(self.places[n].state >= state for n in self.batch)

    def _wait(self, number: int) -> None:
        _remove(self.written, number)
        self.places[number] = Place(attempt=self.places[number].attempt)
        bisect.insort(self.waiting, number)


def _remove(numbers: list[int], number: int) -> None:
    """Remove a number from ascending ones, if it is among them."""
    index = bisect.bisect_left(numbers, number)
    if numbers[index : index + 1] == [number]:
        del numbers[index]
