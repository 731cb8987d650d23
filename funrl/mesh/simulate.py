"""All ranks of a mesh in one process, for tests: every tensor made inside holds one value per rank.

Built on `torch.distributed._local_tensor.LocalTensorMode` over a fake process group. The rank is symbolic inside, so
code under simulation may not branch on it; that is what makes it valid for every rank at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from funrl import trees
from funrl.mesh import mesh as meshes
from funrl.mesh.mesh import AXES, Mesh
from funrl.mesh.rules import Layout


@contextmanager
def simulate(text: str) -> Iterator[Mesh]:
    """A mesh such as "dp4,tp2" whose ranks all live in this process.

    Inside, `mesh.index(axis)` is a tensor with one value per rank; `scatter` and `gather` cross the border.
    """
    from torch.distributed._local_tensor import LocalTensorMode

    sizes = meshes.parse(text)
    world = Mesh(sizes).world
    if dist.is_initialized():
        raise RuntimeError("simulate() makes its own process group; end the one that is there first")
    dist.init_process_group("fake", rank=0, world_size=world)
    try:
        with LocalTensorMode(world):
            groups: dict[tuple[str, ...], str] = {}
            for axes in meshes.combinations(sizes):
                group: Any = dist.new_group(meshes.members(sizes, axes)[0])
                groups[axes] = group.group_name
            indices = {a: _per_rank(world, lambda r, a=a: torch.tensor(meshes.coordinates(sizes, r)[a])) for a in AXES}
            yield Mesh(sizes, groups=groups, indices=indices)
    finally:
        dist.destroy_process_group()


def scatter(tree: trees.Tree, layouts: trees.Tree) -> trees.Tree:
    """A simulated tree: each rank has its part of the whole tree."""

    def part(x: Tensor, layout: Layout) -> Tensor:
        def own(rank: int) -> Tensor:
            return x[tuple(slice(low, high) for low, high in layout.box(rank))].clone().contiguous()

        return _per_rank(layout.world, own)

    return trees.map(part, tree, layouts)


def per_rank(world: int, fn: Callable[[int], Tensor]) -> Tensor:
    """A simulated tensor whose value on rank r is `fn(r)`."""
    return _per_rank(world, fn)


def gather(tree: trees.Tree, rank: int) -> trees.Tree:
    """The values of a simulated tree on one rank."""
    return trees.map(lambda x: x._local_tensors[rank] if hasattr(x, "_local_tensors") else x, tree)


def _per_rank(world: int, fn: Callable[[int], Tensor]) -> Any:
    from torch.distributed._local_tensor import LocalTensor
    from torch.utils._python_dispatch import _disable_current_modes

    with _disable_current_modes():
        return LocalTensor({rank: fn(rank) for rank in range(world)})
