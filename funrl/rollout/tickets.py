"""Distribution of groups of requests to replicas as they have room, so that none idles while another has a backlog.

A replica takes the next groups from a shared counter: many at first, few later, so that all replicas end at about the
same time. Which replica completes a group does not change its completions: they depend on request and weights only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

import torch

from funrl.mesh import collectives
from funrl.mesh.counter import shared_counter
from funrl.mesh.mesh import SINGLE, Mesh
from funrl.mesh.sums import own_range
from funrl.processes.heartbeat import beat
from funrl.processes.spans import GroupSpans
from funrl.rollout.engine import NO_CALLBACKS, Callbacks, Engine, check_running
from funrl.rollout.requests import Completion, Request

_Group = TypeVar("_Group", covariant=True)
TAKE_EVERY_S = 0.01  # so that no replica takes all groups before the others begin


class Tickets(Generic[_Group]):
    """The groups that this replica takes.

    Attributes:
      groups: those of all replicas.
      next_group: number of the group after those that this replica took last.
    """

    def __init__(self, groups: Sequence[_Group], take: Callable[[int], int], replicas: int = 1, *, size: int = 1):
        """Begin before the first group.

        Args:
          groups: those of all replicas.
          take: a counter that the replicas share; see `mesh.counter.shared_counter`.
          replicas: their number.
          size: requests that a group begins with.
        """
        self.groups = groups
        self.next_group = 0
        self._take = take
        self._shares = 1 if replicas == 1 else 2 * replicas
        self._size = max(1, size)

    @property
    def left(self) -> bool:
        """False once all groups have been taken."""
        return self.next_group < len(self.groups)

    def take(self, room: int, mesh: Mesh = SINGLE) -> Sequence[_Group]:
        """Take the next groups. Collective over "tensor".

        Args:
          room: requests that would begin at once, at least 1.
          mesh: whose first tensor rank takes for all of its tensor ranks.
        """
        most = -(-(len(self.groups) - self.next_group) // self._shares)
        count = max(1, min(most, -(-room // self._size)))
        begin = self._take(count) if mesh.index("tensor") == 0 else 0
        begin = int(collectives.psum(torch.tensor(begin, device=mesh.device), mesh, "tensor"))
        self.next_group = begin + count
        return self.groups[begin : begin + count]


def share_tickets(groups: Sequence[_Group], mesh: Mesh, *, size: int, fixed: bool = False) -> Tickets[_Group]:
    """Tickets by which the replicas of a mesh share groups. Collective.

    Args:
      groups: those of all replicas, the same on every rank.
      mesh: of the engines; its row axes are the replicas.
      size: requests that a group begins with.
      fixed: whether each replica takes an equal range instead of what it has room for.
    """
    if fixed:
        share = own_range(len(groups), mesh, mesh.row_axes)
        return Tickets(groups[share.start : share.stop], shared_counter(SINGLE), size=size)
    return Tickets(groups, shared_counter(mesh), mesh.size(mesh.row_axes), size=size)


def complete_shared(
    engine: Engine,
    tickets: Tickets[Sequence[Request]],
    mesh: Mesh,
    callbacks: Callbacks = NO_CALLBACKS,
) -> list[Completion]:
    """Complete the groups that this replica takes, without coroutines, which would cost the host more.

    Args:
      engine: this replica's engine, without unfinished requests.
      tickets: of groups of requests; those of a group stay together.
      mesh: of the engines. All tensor ranks of a replica make this call, and its first one takes tickets.
      callbacks: receives what happens.

    Returns: completions by their numbers.

    Raises:
      ValueError, RuntimeError, FloatingPointError: as the engine raises them.
    """
    completions: list[Completion] = []
    begun: list[Sequence[Request]] = []
    groups = GroupSpans()
    try:
        while tickets.left or engine.unfinished():
            if tickets.left and (room := engine.room()):
                taken = tickets.take(room, mesh)
                begun += taken
                for group in taken:
                    groups.begin([request.number for request in group])
                engine.submit([request for group in taken for request in group])
            check_running(engine)
            beat()
            newest = engine.step()
            callbacks.iterated()
            for done in newest:
                callbacks.finished(done)
                groups.end(done.number)
            completions += newest
    finally:
        engine.cancel(request.number for group in begun for request in group)
    return sorted(completions, key=lambda done: done.number)
