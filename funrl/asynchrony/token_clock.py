"""The clock of an asynchronous run that is the same twice: every decision stands at an iteration of an engine.

Replica r of N writes the r-th, (r + N)-th, ... group of the run's plan. Its time has turns: it begins turn b when it
takes the weights that train batch b, and counts the iterations of its engine from there. Between two iterations

- it is at the gate of turn b + 1 when its groups below (b + 1) P + D have ended, where D = min(P, ceil(S P / 2)).
  There it waits for the weights of batch b + 1, with all of its sequences, however late they are;
- in turn b it begins its groups below (b + 1) P + S P, each as soon as the engine has room.

Neither reads a time, nor what another replica has done, so a replica does the same in every run. A group has ended at
the iteration after its last token, or after the last answer of its environment; its reward may come later. Where a
filter may give its place to another prompt, the engine waits for its reward, and it ends with the last prompt.

With a window above 1 the trainer takes groups in the order of (turn, iteration, number) in which they have ended, each
as soon as the window allows. It may take a group when no replica can still end one before it.

No deadlock: a replica waits only at a gate, and needs nothing from others to get there, since D <= S P lets it begin
all groups that the gate asks for. At the gate of turn b + 1 all of its groups below (b + 1) P have ended. So once all
replicas wait for the weights of batch b + 1, the trainer may take every group that has ended, and while it has taken
fewer than (b + 1) P of them, the oldest that it has not taken is among them: batch b becomes complete.

Overlap: D groups beyond batch b are written while the trainer learns from it. The bound of `admission` holds, as a
group of batch b begins in turn b - S or later, and its tokens are of the weights of this turn and later ones.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import NamedTuple

from funrl.asynchrony.admission import AdmissionRule


class EngineTime(NamedTuple):
    """Time of a replica.

    Attributes:
      turn: the batch that the replica's weights train.
      tick: iterations of its engine in this turn.
    """

    turn: int
    tick: int


class ReplicaClock:
    """The turns of a replica, and its groups in them.

    Attributes:
      turn: of the replica; -1: it has not begun.
      tick: iterations of the turn.
      running: numbers of its groups that have begun and not ended.
      next_group: its next group; None: there is none.
    """

    def __init__(
        self, rule: AdmissionRule, number_of: Callable[[int], int | None], replica: int, replicas: int
    ) -> None:
        """Begin before the first turn.

        Args:
          rule: of admission.
          number_of: ticket -> number of a group, ascending; None: there are no more.
          replica: number of this one.
          replicas: count of them.
        """
        self.turn = -1
        self.tick = 0
        self.running: set[int] = set()
        self._rule = rule
        self._number_of = number_of
        self._ticket = replica
        self._replicas = replicas
        self.next_group = number_of(replica)

    @property
    def at_gate(self) -> bool:
        """True if the replica takes the weights of the next turn before it goes on."""
        limit = (self.turn + 1) * self._rule.places + self._lead
        left = self.running if self.next_group is None else {*self.running, self.next_group}
        return self.turn < 0 or min(left, default=limit) >= limit

    @property
    def time(self) -> EngineTime:
        """The earliest time at which a running group or a later one may end."""
        return EngineTime(self.turn + 1, 0) if self.at_gate else EngineTime(self.turn, self.tick)

    @property
    def may_begin(self) -> bool:
        """True if the next group may begin in this turn."""
        return self.turn >= 0 and self.next_group is not None and self.next_group < self._rule.submitted_by(self.turn)

    def begin(self) -> int:
        """Begin the next group; returns its number."""
        assert self.next_group is not None
        number = self.next_group
        self.running.add(number)
        self._ticket += self._replicas
        self.next_group = self._number_of(self._ticket)
        return number

    def end(self, number: int) -> EngineTime:
        """End a group; returns the time."""
        self.running.remove(number)
        return EngineTime(self.turn, self.tick)

    def pass_gate(self) -> None:
        """Begin the next turn."""
        self.turn += 1
        self.tick = 0

    @property
    def _lead(self) -> int:
        """Groups of later batches that end before the weights of the next turn are waited for, D."""
        return min(self._rule.places, -(-self._rule.ahead // 2))


class EndedGroups:
    """Groups that replicas have delivered, in the order in which the trainer takes them."""

    def __init__(self) -> None:
        """Begin without groups."""
        self._groups: list[tuple[EngineTime, int]] = []

    def add(self, number: int, ended: tuple[int, int]) -> None:
        """Add a group that ended at a time."""
        heapq.heappush(self._groups, (EngineTime(*ended), number))

    def take(self, horizon: tuple[int, int] | None = None) -> int | None:
        """The next group; None: there is none, or one that ends before it may follow.

        Args:
          horizon: time before which every group that ends has been added; None: any order will do.
        """
        if not self._groups or (horizon is not None and self._groups[0][0] >= horizon):
            return None
        return heapq.heappop(self._groups)[1]
