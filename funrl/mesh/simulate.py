"""All ranks of a mesh in one process, for tests: every tensor made inside holds one value per rank.

Built on `torch.distributed._local_tensor.LocalTensorMode` over a fake process group. The rank is symbolic inside, so
code under simulation may not branch on it; that is what makes it valid for every rank at once.
"""

from __future__ import annotations

import functools
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
    sizes = meshes.parse(text)
    world = Mesh(sizes).world
    if dist.is_initialized():
        raise RuntimeError("simulate() makes its own process group; end the one that is there first")
    dist.init_process_group("fake", rank=0, world_size=world)
    try:
        with _rank_mode()(world):
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


@functools.cache
def _rank_mode() -> Any:
    """torch's mode, which for most operators does only what they need.

    torch sets and saves the states of random numbers for each rank and operator, which takes longer than the operator.
    """
    from torch.distributed._local_tensor import LocalTensor, LocalTensorMode

    def of_rank(value: Any, rank: int) -> Any:
        if isinstance(value, LocalTensor):
            return value._local_tensors[rank]
        return [of_rank(x, rank) for x in value] if isinstance(value, (list, tuple)) else value

    class RankMode(LocalTensorMode):
        @classmethod
        def _should_skip_dynamo(cls) -> bool:
            return False  # nothing compiles here, and torch would switch that off for each operator

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            kwargs = kwargs or {}
            kind = _kind(func)
            if kind == "other" or set(types) != {LocalTensor} or _has_symbols((args, [*kwargs.values()])):
                return super().__torch_dispatch__(func, types, args, kwargs)
            values = {}
            for rank in sorted(self.ranks):
                values[rank] = func(*of_rank(args, rank), **{name: of_rank(x, rank) for name, x in kwargs.items()})
            if kind == "tensor":
                return LocalTensor(values)
            if any(x != values[0] for x in values.values()):
                return super().__torch_dispatch__(func, types, args, kwargs)
            return values[0]

    return RankMode


@functools.cache
def _kind(func: Any) -> str:
    """Result of an operator that neither writes to an argument, draws nor sends: "tensor" or "number"; else "other"."""
    results = {str(x.type) for x in func._schema.returns}
    draws = torch.Tag.nondeterministic_seeded in func.tags
    if func.namespace not in ("aten", "funrl") or func._schema.is_mutable or draws:
        return "other"
    if len(func._schema.returns) == 1 and results == {"Tensor"}:
        return "tensor"
    return "number" if results <= {"int", "bool", "List[int]"} else "other"


def _has_symbols(values: Any) -> bool:
    """True if numbers of some ranks differ among the arguments of an operator."""
    if isinstance(values, (list, tuple)):
        return any(_has_symbols(x) for x in values)
    return isinstance(values, torch.SymInt)


def _per_rank(world: int, fn: Callable[[int], Tensor]) -> Any:
    from torch.distributed._local_tensor import LocalTensor
    from torch.utils._python_dispatch import _disable_current_modes

    with _disable_current_modes():
        return LocalTensor({rank: fn(rank) for rank in range(world)})
