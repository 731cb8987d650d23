"""A counter that all processes of a run take numbers from, without a collective."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

from funrl.mesh.collectives import pmax
from funrl.mesh.mesh import AXES, Mesh
from funrl.processes.heartbeat import entered, left


def shared_counter(mesh: Mesh) -> Callable[[int], int]:
    """A counter from 0: `(count)` -> the first of `count` numbers, which no other caller gets.

    Collective over the mesh: its first rank names the counter in the store. After that a number costs one message to
    the process that holds the store.
    """
    if mesh.world == 1 or not dist.is_initialized():
        taken = [0]

        def take(count: int) -> int:
            taken[0] += count
            return taken[0] - count

        return take
    store = dist.distributed_c10d._get_default_store()
    number = store.add("funrl/counters", 1) if mesh.rank == 0 else 0
    number = int(pmax(torch.tensor(number, device=mesh.device), mesh, AXES))
    key = f"funrl/counter/{number}"

    def take_shared(count: int) -> int:
        entered("the counter of the run")
        begin = store.add(key, count) - count
        left()
        return begin

    return take_shared
