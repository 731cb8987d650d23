"""Some ranks of a run as all processes there are, for a library that knows no others."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from funrl.mesh.launch import unbound
from funrl.mesh.mesh import AXES, Mesh

FIRST_NUMBER = 1_000_000  # in the names of groups that are made here: names of the run's own later ones are theirs


@contextlib.contextmanager
def as_whole_world(mesh: Mesh) -> Iterator[None]:
    """Make a mesh's process group torch's default one inside the context. Collective over the mesh.

    Groups that are made meanwhile are made by these ranks alone, and number them from 0; they stay usable. Nothing else
    may use the default group meanwhile. Does nothing where the mesh is over all processes of the run.

    Args:
      mesh: this process is in it.
    """
    if not dist.is_initialized() or mesh.world == dist.get_world_size():
        yield
        return
    world = c10d._world
    run = world.default_pg
    count = world.group_count
    ranks = list(mesh.ranks)
    with unbound(run):
        own: Any = mesh.group(AXES) if mesh.world > 1 else dist.new_group(ranks, use_local_synchronization=True)
    world.group_count = FIRST_NUMBER
    c10d._update_default_pg(own)
    try:
        yield
    finally:
        c10d._update_default_pg(run)
        world.group_count = count
