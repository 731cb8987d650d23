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
from torch.distributed._local_tensor import (
    LocalTensor,
    LocalTensorMode,
    _combine_rank_results,
    _map_to_rank_local_val,
)
from torch.utils._python_dispatch import _disable_current_modes

from funrl import trees
from funrl.mesh import mesh as meshes
from funrl.mesh.mesh import AXES, Mesh
from funrl.mesh.rules import Layout

_aten = torch.ops.aten
_SIZE = _aten.sym_size.default
_SPECIAL = (torch.Tag.nondeterministic_seeded, torch.Tag.inplace_view)


@contextmanager
def simulate(text: str, node: int | None = None) -> Iterator[Mesh]:
    """A mesh such as "dp4,tp2" whose ranks all live in this process.

    Inside, `mesh.index(axis)` is a tensor with one value per rank; `scatter` and `gather` cross the border.

    Args:
      node: ranks that count as a node each; None: all ranks are on one.
    """
    sizes = meshes.parse(text)
    world = Mesh(sizes).world
    if dist.is_initialized():
        raise RuntimeError("simulate() makes its own process group; end the one that is there first")
    dist.init_process_group("fake", rank=0, world_size=world)
    try:
        with _RanksMode(world):

            def group_of(sizes: dict[str, int], axes: tuple[str, ...] = ("expert",)) -> str:
                group: Any = dist.new_group(meshes.members(sizes, axes)[0])
                return group.group_name

            groups = {axes: group_of(sizes, axes) for axes in meshes.combinations(sizes)}
            indices = {a: _per_rank(world, lambda r, a=a: torch.tensor(meshes.coordinates(sizes, r)[a])) for a in AXES}
            yield meshes.with_nodes(Mesh(sizes, groups=groups, indices=indices), node, group_of)
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
    with _disable_current_modes():
        return LocalTensor({rank: fn(rank) for rank in range(world)})


class _RanksMode(LocalTensorMode):
    """The mode of torch, which runs an operator that only computes without saving each rank's random state around it.

    Nor do views share a storage with their arguments, which only a compiler asks for.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled under it, and the guard costs more than the call

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is _SIZE and type(args[0]) is LocalTensor:  # half of all calls
            return tuple(args[0]._size)
        if self._disable or not types or any(kind is not LocalTensor for kind in types) or not _only_computes(func):
            return super().__torch_dispatch__(func, types, args, kwargs)
        outs = {}
        for rank in self.ranks:
            own = {name: _on_rank(value, rank) for name, value in kwargs.items()} if kwargs else {}
            outs[rank] = func(*[_on_rank(value, rank) for value in args], **own)
        return args[0] if func._schema.is_mutable else _combine_rank_results(outs, None)


@functools.cache
def _only_computes(func: Any) -> bool:
    """True for an operator that draws nothing, sends nothing, and returns new tensors, views or its first argument."""
    if (
        func.namespace not in ("aten", "funrl")
        or func is _aten.split.Tensor
        or any(tag in _SPECIAL for tag in func.tags)
    ):
        return False
    arguments, returns = func._schema.arguments, func._schema.returns
    if func._schema.is_mutable:
        in_place = func._schema.name.endswith("_") and len(returns) == 1
        return in_place and [x.is_write for x in arguments] == [i == 0 for i in range(len(arguments))]
    return func.is_view or not any(x.alias_info for x in returns)


def _on_rank(value: object, rank: int) -> Any:
    """An argument of an operator as one rank has it."""
    if type(value) is LocalTensor:
        return value._local_tensors[rank]
    if isinstance(value, (list, tuple)):
        return type(value)([_on_rank(x, rank) for x in value])
    return _map_to_rank_local_val(value, rank)
