"""Takes a tree from one layout to another as a `Plan` says, in buckets: the only effect of resharding.

A bucket is packed, sent and unpacked. While it is on its way the parts that stay on the rank are copied and the next
bucket is packed, so two buckets are staged at a time.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from funrl import trees
from funrl.mesh import plan as plans
from funrl.mesh.mesh import AXES, Mesh, MeshError, combinations, members
from funrl.mesh.plan import Box, Part, Plan, Step, plan

__all__ = ["BUCKET_BYTES", "Plan", "plan", "reshard", "unshard"]
BUCKET_BYTES = 64 << 20


class Leaf(NamedTuple):
    """A leaf on its way: `original` is the caller's object, `source` this module's own handle of its memory."""

    original: Tensor
    source: Tensor


class Work(NamedTuple):
    """What one rank holds in the middle of a reshard, by leaf number; a source that is used up is None."""

    plan: Plan
    rank: int
    leaves: list[Leaf | None]
    results: list[Any]
    donate: bool
    device: torch.device


def reshard(
    tree: trees.Tree, plan: Plan, mesh: Mesh, bucket_bytes: int = BUCKET_BYTES, donate: bool = False
) -> trees.Tree:
    """The tree of local tensors in the plan's target layouts. Collective: every rank calls it with the same plan.

    Where a leaf's box and dtype stay the same the result holds the very same tensor object. Extra memory beside the
    result is at most `2 * bucket_bytes`, as long as a bucket holds one element from every peer.

    Args:
      tree: this rank's tensors in the plan's source layouts.
      bucket_bytes: bytes that one bucket stages, sending and receiving together.
      donate: the caller gives the tensors up; those that are not in the result are emptied as soon as they are sent.

    Raises:
      MeshError: the mesh or a leaf's local shape is not what the plan was made for.
    """
    work = begin(tree, plan, mesh, donate)
    flying: list[tuple[Step, Tensor, Any]] = []
    for step in plans.program(plan, mesh.rank, bucket_bytes):
        outgoing = pack(work, step)
        incoming = _empty(step, step.receives, work.device)
        flying.append((step, incoming, _send(step, outgoing, incoming, mesh)))
        del outgoing
        settle(work, step.finished)
        if len(flying) == 2:
            _land(work, *flying.pop(0))
    for flight in flying:
        _land(work, *flight)
    return trees.fill(tree, work.results)


def unshard(tree: trees.Tree, layouts: trees.Tree, mesh: Mesh, bucket_bytes: int = BUCKET_BYTES) -> trees.Tree:
    """Every leaf whole on every rank. The inverse of `rules.shard`."""
    whole = trees.map(lambda lay: plans.Layout(lay.shape, ((),) * len(lay.shape), lay.sizes), layouts)
    return reshard(tree, plan(layouts, whole, trees.map(lambda x: x.dtype, tree)), mesh, bucket_bytes)


def begin(tree: trees.Tree, plan: Plan, mesh: Mesh, donate: bool) -> Work:
    """Checks the tree against the plan and does what needs no communication."""
    if mesh.world != plan.world:
        raise MeshError(f"the plan is for {plan.world} devices, the mesh {mesh} has {mesh.world}")
    named = trees.named(tree)
    if tuple(name for name, _ in named) != plan.names:
        given = {name for name, _ in named}
        lacks, extra = sorted(set(plan.names) - given), sorted(given - set(plan.names))
        raise MeshError(f"the tree is not the one that was planned: it lacks {lacks} and has in addition {extra}")
    for i, (name, x) in enumerate(named):
        expected = plan.route(i).src.local_shape(mesh.rank)
        if tuple(x.shape) != expected:
            raise MeshError(f"{name}: rank {mesh.rank} has shape {tuple(x.shape)}, its layout says {expected}")
    leaves: list[Leaf | None] = [Leaf(x, x.detach()) for _, x in named]
    work = Work(plan, mesh.rank, leaves, [None] * len(leaves), donate, mesh.device)
    for i, (_, x) in enumerate(named):
        route = plan.route(i)
        if x.dtype == plan.dtypes[i] and route.src.box(mesh.rank) == route.dst.box(mesh.rank):
            work.results[i] = x
    settle(work, (i for i in range(len(leaves)) if plan.route(i).way in ("alias", "local")))
    return work


def settle(work: Work, finished: Iterable[int]) -> None:
    """Copies what stays on the rank of leaves that need not be sent any more, and lets their sources go."""
    kept = {id(x) for x in work.results if x is not None} if work.donate else set()
    for i in finished:
        leaf, route = work.leaves[i], work.plan.route(i)
        assert leaf is not None
        if work.results[i] is not leaf.original and route.way != "gather":
            old, new = route.src.box(work.rank), route.dst.box(work.rank)
            both = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(old, new, strict=True))
            if all(high > low for low, high in both):
                _result(work, i)[_slices(both, new)].copy_(leaf.source[_slices(both, old)])
            else:
                _result(work, i)
        work.leaves[i] = None
        if work.donate and id(leaf.original) not in kept:
            leaf.original.data = leaf.original.new_empty(0)


def pack(work: Work, step: Step) -> Tensor:
    """The step's outgoing bytes in one flat tensor."""
    flat = _empty(step, step.sends, work.device)
    at = 0
    for leaf, box in _each(step.sends):
        held = work.leaves[leaf]
        assert held is not None
        at = _view(flat, at, box, held.source[_slices(box, work.plan.route(leaf).src.box(work.rank))], into_flat=True)
    return flat


def unpack(work: Work, step: Step, flat: Tensor) -> None:
    """Puts a step's incoming bytes where they belong."""
    at = 0
    for leaf, box in _each(step.receives):
        part = _result(work, leaf)[_slices(box, work.plan.route(leaf).dst.box(work.rank))]
        at = _view(flat, at, box, part, into_flat=False)


def _result(work: Work, leaf: int) -> Tensor:
    """The leaf's result, made when the first part of it is there."""
    if work.results[leaf] is None:
        shape = work.plan.route(leaf).dst.local_shape(work.rank)
        work.results[leaf] = torch.empty(shape, dtype=work.plan.dtypes[leaf], device=work.device)
    return work.results[leaf]


def _view(flat: Tensor, at: int, box: Box, part: Tensor, into_flat: bool) -> int:
    """Copies a part to or from its place in the flat buffer; returns where the next one begins."""
    place = flat[at : at + part.numel()].view(part.shape)
    place.copy_(part) if into_flat else part.copy_(place)
    return at + part.numel()


def _each(lists: tuple[tuple[Part, ...], ...]) -> Iterable[Part]:
    return (part for parts in lists for part in parts)


def _slices(box: Box, inside: Box) -> tuple[slice, ...]:
    return tuple(slice(low - start, high - start) for (low, high), (start, _) in zip(box, inside, strict=True))


def _lengths(lists: tuple[tuple[Part, ...], ...]) -> list[int]:
    return [sum(plans.volume(box) for _, box in parts) for parts in lists]


def _empty(step: Step, lists: tuple[tuple[Part, ...], ...], device: torch.device) -> Tensor:
    return torch.empty(sum(_lengths(lists)), dtype=step.dtype, device=device)


def _send(step: Step, outgoing: Tensor, incoming: Tensor, mesh: Mesh) -> Any:
    """Starts the step's collective."""
    if step.way == "gather":
        return _group(mesh, step.ranks)._allgather_base(incoming, outgoing)
    splits = _lengths(step.receives), _lengths(step.sends)
    return dist.all_to_all_single(incoming, outgoing, *splits, group=mesh.group(AXES), async_op=True)


def _group(mesh: Mesh, ranks: tuple[int, ...]) -> Any:
    """The mesh's process group of just these ranks."""
    for axes in combinations(mesh.sizes):
        if list(ranks) in members(mesh.sizes, axes):
            return mesh.group(axes)
    raise MeshError(f"the mesh {mesh} has no group of the ranks {ranks}")


def _land(work: Work, step: Step, incoming: Tensor, handle: Any) -> None:
    handle.wait()
    unpack(work, step, incoming)
