"""Admission of groups to an asynchronous run: which may be generated, and which may be trained on.

Groups have numbers. A trainer at version v trains batch v, of P groups; batch b has the places bP to (b+1)P - 1. With
staleness S and window W

- group i is submitted when every generator holds at least version floor(i / P) - S;
- a finished group may be consumed if its number is below that of the oldest unconsumed one + W.

At most W - 1 groups overtake group i, so it is trained in batch floor((i + W - 1) / P) at the latest, and its age, the
version that trains on it less the version that it was submitted at, is at most S + ceil((W - 1) / P). Nothing is
dropped: a place is filled once, by a group with rows or by an empty one where the group has failed. Where the filter of
the algorithm drops a group, its generator writes another prompt's for the same place.

An `Admission` is a value: each of its functions returns the next one. It knows neither devices nor time.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple


class AdmissionError(ValueError):
    """Something was asked for that the rule does not allow."""


class AdmissionRule(NamedTuple):
    """Bound of the age of groups.

    Attributes:
      places: groups of a batch, P.
      staleness: versions that a group may be behind when it is submitted, S. A fraction is rounded to whole groups: at
        S = 0.5 half a batch is generated ahead.
      window: numbers among which finished groups are consumed, W; 1: in the order of submission.
    """

    places: int
    staleness: float = 0
    window: int = 1

    def checked(self) -> AdmissionRule:
        """The same rule. Raises: AdmissionError if a number is outside its range."""
        if self.places < 1 or self.staleness < 0 or self.window < 1:
            raise AdmissionError(f"{self}: places and window are at least 1, staleness is at least 0")
        return self

    @property
    def ahead(self) -> int:
        """Groups that are submitted before the batch that they are in is due, S P."""
        return round(self.staleness * self.places)

    @property
    def most_age(self) -> int:
        """The bound of the age at birth, ceil(S + (W - 1) / P); for a whole S, S + ceil((W - 1) / P)."""
        return -(-(self.ahead + self.window - 1) // self.places)

    def least_version(self, place: int) -> int:
        """The version that all generators hold before a group is submitted, floor(i / P - S); below 0: none is needed.

        Example:
          >>> [AdmissionRule(places=2, staleness=1).least_version(i) for i in range(6)]
          [-1, -1, 0, 0, 1, 1]
        """
        return (place - self.ahead) // self.places

    def submitted_by(self, version: int) -> int:
        """Number of groups that may have been submitted when all generators hold a version."""
        return (version + 1) * self.places + self.ahead


class Admission(NamedTuple):
    """State of the groups of a run.

    Attributes:
      rule: the bounds.
      fresh: number of the first group that was never submitted.
      oldest: number of the first group that is not consumed.
      overtaken: numbers above `oldest` that are consumed.
      again: numbers below `fresh` of groups that a resumed run submits again.
      running: number -> version of its submission, of groups that generators work on.
      finished: number -> version of its submission, of groups that wait to be consumed.
      version: the oldest version that a generator holds; None: none holds one yet.
    """

    rule: AdmissionRule
    fresh: int = 0
    oldest: int = 0
    overtaken: frozenset[int] = frozenset()
    again: tuple[int, ...] = ()
    running: Mapping[int, int] = {}
    finished: Mapping[int, int] = {}
    version: int | None = None

    @property
    def consumed(self) -> int:
        """Number of groups consumed so far, empty ones included."""
        return self.oldest + len(self.overtaken)

    @property
    def batch(self) -> int:
        """The batch that the next consumed group is in: the trainer's version while it takes that batch."""
        return self.consumed // self.rule.places

    @property
    def wanted(self) -> int:
        """Groups that the batch still lacks, 1 to P."""
        return self.rule.places - self.consumed % self.rule.places

    def version_held(self, version: int) -> Admission:
        """All generators hold a version.

        Raises:
          AdmissionError: they held a later version, or the version is not trained yet.
        """
        held = self.version or 0
        if version < held or version > self.batch:
            raise AdmissionError(
                f"generators report version {version}; they held {held}, and the trainer is at {self.batch}"
            )
        return self._replace(version=version)

    def submit(self, until: int) -> tuple[tuple[int, ...], Admission]:
        """Submit all groups that may be: those that wait to be submitted again, then new ones.

        Args:
          until: number of groups of the whole run.

        Returns: their numbers in order, and the next state; () without a generator.
        """
        version = self.version
        if version is None:
            return (), self
        again = tuple(place for place in self.again if self.rule.least_version(place) <= version)
        fresh = max(self.fresh, min(until, self.rule.submitted_by(version)))
        places = (*again, *range(self.fresh, fresh))
        if not places:
            return (), self
        waiting = tuple(place for place in self.again if place not in again)
        running = {**self.running, **dict.fromkeys(places, version)}
        return places, self._replace(fresh=fresh, again=waiting, running=running)

    def finish(self, places: Iterable[int]) -> Admission:
        """Groups are complete: with rows, or empty where the group has failed. They wait to be consumed.

        Raises:
          AdmissionError: one is not running.
        """
        running = dict(self.running)
        finished = dict(self.finished)
        for place in places:
            if place not in running:
                raise AdmissionError(f"group {place} has finished and was not running: a group finishes once")
            finished[place] = running.pop(place)
        return self._replace(running=running, finished=finished)

    def consumable(self, most: int | None = None) -> tuple[int, ...]:
        """The finished groups that the trainer takes now, by number: at most `most`, by default to the batch's end.

        A group that is taken may move the window for the next one.
        """
        most = self.wanted if most is None else min(most, self.wanted)
        taken: set[int] = set()
        oldest = self.oldest
        numbers = sorted(self.finished)
        for place in numbers:
            if len(taken) == most or place >= oldest + self.rule.window:
                break
            taken.add(place)
            while oldest in taken or oldest in self.overtaken:
                oldest += 1
        return tuple(sorted(taken))

    def consume(self, places: Iterable[int]) -> tuple[dict[int, int], Admission]:
        """The trainer takes finished groups into its batch, in an order: `consumable`'s, or that of a log.

        Returns: number -> age at birth, and the next state.

        Raises:
          AdmissionError: one has not finished or is beyond the window; the batch is full; or an age exceeds the bound.
        """
        finished = dict(self.finished)
        overtaken = set(self.overtaken)
        oldest = self.oldest
        ages = {}
        wanted = self.wanted
        for place in places:
            if place not in finished:
                raise AdmissionError(f"group {place} is to be consumed and waits for no trainer")
            if place >= oldest + self.rule.window:
                raise AdmissionError(
                    f"group {place} is to be consumed while {oldest} is not: the window is {self.rule.window}"
                )
            if len(ages) == wanted:
                raise AdmissionError(f"group {place} is to be consumed and batch {self.batch} has all of its groups")
            ages[place] = self.batch - finished.pop(place)
            if ages[place] > self.rule.most_age:
                raise AdmissionError(f"group {place} has age {ages[place]}; the bound is {self.rule.most_age}")
            overtaken.add(place)
            while oldest in overtaken:
                overtaken.remove(oldest)
                oldest += 1
        return ages, self._replace(finished=finished, overtaken=frozenset(overtaken), oldest=oldest)
