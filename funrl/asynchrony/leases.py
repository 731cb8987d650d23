"""Leases on work for generators that come, die, stop and go during a run.

A unit of work, such as the samples of a prompt, is leased to one generator at a time. A generator that is silent or
makes no progress for too long is lost: its units go to others, from their start and with the same seeds, so that they
become what they would have been. A lease has a number that is never used again. What arrives under a lease that was
taken away is discarded, so that each unit is delivered once.

Nothing here knows devices, messages or clocks: whoever calls gives the time, in seconds of one clock of its own.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import NamedTuple


class LeaseRule(NamedTuple):
    """Bounds of a lease.

    Attributes:
      silent_s: seconds without a sign of life after which a generator is lost.
      stuck_s: seconds without progress after which a generator that holds units is lost.
    """

    silent_s: float = 20.0
    stuck_s: float = 1800.0


class Lease(NamedTuple):
    """A unit in the hands of a generator.

    Attributes:
      number: of the lease.
      unit: what is to be done.
    """

    number: int
    unit: Hashable


class LostGenerator(NamedTuple):
    """A generator that is out of service.

    Attributes:
      generator: its name.
      reason: what was observed, for people.
      units: that it held, in the order in which they are given to others.
    """

    generator: str
    reason: str
    units: tuple[Hashable, ...]


class _Holder:
    """A generator in service."""

    def __init__(self, now: float) -> None:
        self.heard = now  # last sign of life
        self.moved = now  # last progress, or when it began to hold something
        self.progress = -1
        self.leases: dict[int, Hashable] = {}  # number -> unit, in the order of the leases


class Leases:
    """Units of work and who has them.

    Every unit that was opened is in one of three states: it waits, it is leased, or it is delivered or withdrawn and
    forgotten.
    """

    def __init__(self, rule: LeaseRule = LeaseRule()) -> None:  # noqa: B008
        """Begin without units and generators.

        Args:
          rule: when a generator is lost.
        """
        self.rule = rule
        self._count = 0
        self._order: dict[Hashable, int] = {}  # of every unit that is open, when it was opened
        self._opened = 0
        self._waiting: dict[Hashable, None] = {}
        self._holders: dict[str, _Holder] = {}

    @property
    def generators(self) -> tuple[str, ...]:
        """Names of the generators in service."""
        return tuple(self._holders)

    @property
    def waiting(self) -> int:
        """Number of units that nobody has."""
        return len(self._waiting)

    def held_by(self, generator: str) -> tuple[Lease, ...]:
        """Leases of a generator; () of one that is not in service."""
        holder = self._holders.get(generator)
        return () if holder is None else tuple(Lease(*pair) for pair in holder.leases.items())

    def open(self, units: Iterable[Hashable]) -> None:
        """Add units, which are leased in this order.

        Raises:
          ValueError: one is open already.
        """
        for unit in units:
            if unit in self._order:
                raise ValueError(f"unit {unit!r} is open already; each is opened once")
            self._order[unit] = self._opened
            self._opened += 1
            self._waiting[unit] = None

    def withdraw(self, units: Iterable[Hashable]) -> dict[str, tuple[int, ...]]:
        """Forget units, which nobody wants any more; unknown ones are ignored.

        Returns: numbers of the leases that end by it, by generator.
        """
        gone = {unit for unit in units if self._order.pop(unit, None) is not None}
        for unit in gone:
            self._waiting.pop(unit, None)
        ended = {}
        for name, holder in self._holders.items():
            numbers = tuple(number for number, unit in holder.leases.items() if unit in gone)
            for number in numbers:
                del holder.leases[number]
            if numbers:
                ended[name] = numbers
        return ended

    def enter(self, generator: str, now: float) -> None:
        """Take a generator into service.

        Raises:
          ValueError: it is in service.
        """
        if generator in self._holders:
            raise ValueError(f"generator {generator!r} is in service already")
        self._holders[generator] = _Holder(now)

    def heard(self, generator: str, now: float, progress: int | None = None) -> bool:
        """Note a sign of life; returns False if the generator is not in service, so that it has to enter again.

        Args:
          progress: count of its work so far; None: the sign says nothing about it.
        """
        holder = self._holders.get(generator)
        if holder is None:
            return False
        holder.heard = max(holder.heard, now)
        if progress is not None and progress != holder.progress:
            holder.progress = progress
            holder.moved = now
        return True

    def take(self, generator: str, most: int, now: float) -> tuple[Lease, ...]:
        """Lease units that wait to a generator, the first ones first; () if it is not in service.

        Args:
          most: number of units that it has room for.
        """
        holder = self._holders.get(generator)
        if holder is None or most < 1 or not self._waiting:
            return ()
        if not holder.leases:
            holder.moved = now
        taken = []
        for unit in list(self._waiting)[:most]:
            del self._waiting[unit]
            lease = Lease(self._count, unit)
            self._count += 1
            holder.leases[lease.number] = unit
            taken.append(lease)
        return tuple(taken)

    def deliver(self, generator: str, number: int) -> Hashable | None:
        """Accept the result of a lease; returns its unit, or None where the lease has ended: discard the result."""
        holder = self._holders.get(generator)
        unit = None if holder is None else holder.leases.pop(number, None)
        if unit is not None:
            del self._order[unit]
        return unit

    def leave(self, generator: str, reason: str = "it has left") -> LostGenerator | None:
        """Take a generator out of service, and give its units to others; None if it was not in service."""
        holder = self._holders.pop(generator, None)
        if holder is None:
            return None
        units = tuple(sorted(holder.leases.values(), key=self._order.__getitem__))
        again = sorted((*units, *self._waiting), key=self._order.__getitem__)
        self._waiting = dict.fromkeys(again)
        return LostGenerator(generator, reason, units)

    def expire(self, now: float) -> tuple[LostGenerator, ...]:
        """Take generators out of service that are silent, or hold units and make no progress, for too long."""
        reasons = {}
        for name, holder in self._holders.items():
            silent_s = now - holder.heard
            stuck_s = now - holder.moved
            if silent_s > self.rule.silent_s:
                reasons[name] = f"it has been silent for {silent_s:.0f} s"
            elif holder.leases and stuck_s > self.rule.stuck_s:
                reasons[name] = f"it has made no progress for {stuck_s:.0f} s"
        return tuple(filter(None, (self.leave(name, reason) for name, reason in reasons.items())))
