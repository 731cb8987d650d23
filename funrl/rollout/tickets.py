"""Distribution of groups of requests to replicas as they have room, so that none idles while another has a backlog.

A replica takes the next groups from a shared counter: many at first, few later, so that all replicas end at about the
same time. Which replica completes a group does not change its completions: they depend on request and weights only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from funrl.mesh import collectives
from funrl.mesh.mesh import Mesh
from funrl.processes.heartbeat import beat
from funrl.rollout.engine import NO_CALLBACKS, Callbacks, Engine, check_running
from funrl.rollout.requests import Completion, Request


def complete_shared(
    engine: Engine,
    groups: Sequence[Sequence[Request]],
    take: Callable[[int], int],
    mesh: Mesh,
    callbacks: Callbacks = NO_CALLBACKS,
    own: Sequence[Request] = (),
) -> list[Completion]:
    """Complete the groups that this replica takes.

    Args:
      engine: this replica's engine, without unfinished requests.
      groups: groups of all replicas; the requests of a group stay together.
      take: a counter that the replicas share; see `mesh.counter.shared_counter`.
      mesh: of the engines; its row axes are the replicas.
      callbacks: receives what happens.
      own: requests of this replica alone, such as parked ones; they come first.

    Returns: completions by their numbers.

    Raises:
      ValueError, RuntimeError, FloatingPointError: as the engine raises them.
    """
    replicas = mesh.size(mesh.row_axes)
    first = mesh.index("tensor") == 0
    next_group = 0
    completions: list[Completion] = []
    begun = [own]
    engine.submit(own)
    try:
        while next_group < len(groups) or engine.unfinished():
            if next_group < len(groups) and engine.room():
                most = -(-(len(groups) - next_group) // (1 if replicas == 1 else 2 * replicas))
                next_group, count = _take(engine, groups, most, take=take, mesh=mesh, first=first)
                taken = groups[next_group : next_group + count]
                begun += taken
                engine.submit([request for group in taken for request in group])
                next_group += count
            check_running(engine)
            beat()
            newest = engine.step()
            callbacks.iterated()
            for done in newest:
                callbacks.finished(done)
            completions += newest
    finally:
        engine.cancel(request.number for group in begun for request in group)
    return sorted(completions, key=lambda done: done.number)


def _take(
    engine: Engine, groups: Sequence[Sequence[Request]], most: int, take: Callable[[int], int], mesh: Mesh, first: bool
) -> tuple[int, int]:
    """Take the next groups of this replica: the number of the first one, and how many."""
    count = max(1, min(most, -(-engine.room() // max(1, len(groups[0])))))
    begin = take(count) if first else 0  # one rank of the replica takes for all
    return int(collectives.psum(torch.tensor(begin, device=mesh.device), mesh, "tensor")), count
