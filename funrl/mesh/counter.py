"""A counter that all processes of a run take numbers from, without a collective."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch.distributed as dist

from funrl.mesh.heartbeat import entered, left
from funrl.mesh.mesh import Mesh

_MADE = itertools.count()


def shared_counter(mesh: Mesh) -> Callable[[int], int]:
    """A counter from 0: `(count)` -> the first of `count` numbers, which nobody else gets.

    A number costs one message to the process that keeps the run's rendezvous.

    Args:
      mesh: any mesh of the run. Every process of the run makes its counters in the same order.
    """
    key = f"funrl/counter/{next(_MADE)}"
    if mesh.world == 1 or not dist.is_initialized():
        taken = [0]

        def take(count: int) -> int:
            taken[0] += count
            return taken[0] - count

        return take
    store = dist.distributed_c10d._get_default_store()

    def take_shared(count: int) -> int:
        entered("the counter of the run")
        begin = store.add(key, count) - count
        left()
        return begin

    return take_shared
