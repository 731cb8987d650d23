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
from funrl.mesh.mesh import Mesh, MeshError, combinations, members
from funrl.mesh.plan import Box, Message, Part, Plan, Step, plan

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


class Flight(NamedTuple):
    """A step on its way: what to wait for, where the messages arrive, and the memory that is being sent."""

    step: Step
    received: list[Any]
    arriving: list[Tensor]
    sent: list[Any]
    sending: list[Tensor]


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
    flying: list[Flight] = []
    for step in plans.program(plan, mesh.rank, bucket_bytes):
        flying.append(_start(work, step, mesh))
        settle(work, step.finished)
        if len(flying) == 2:
            _land(work, flying.pop(0))
    while flying:
        _land(work, flying.pop(0))
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
        if work.results[i] is not leaf.original:
            old, new = route.src.box(work.rank), route.dst.box(work.rank)
            both = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(old, new, strict=True))
            if all(high > low for low, high in both):
                _result(work, i)[_slices(both, new)].copy_(leaf.source[_slices(both, old)])
            else:
                _result(work, i)
        work.leaves[i] = None
        if work.donate and id(leaf.original) not in kept:
            leaf.original.data = leaf.original.new_empty(0)


def pack(work: Work, step: Step, message: Message) -> Tensor:
    """The message's parts in one tensor: the leaf's own memory where one part lies in one run, else a flat copy."""
    parts = [_source(work, part) for part in message.parts]
    if len(parts) == 1 and parts[0].is_contiguous() and parts[0].dtype == step.dtype:
        return parts[0]
    flat = _flat(work, step, message)
    for place, part in zip(_places(flat, parts), parts, strict=True):
        place.copy_(part)
    return flat


def room(work: Work, step: Step, message: Message) -> Tensor:
    """Where the message arrives: in the result itself where its one part lies in one run, else in a flat tensor."""
    if len(message.parts) == 1:
        target = _target(work, message.parts[0])
        if target.is_contiguous():
            return target
    return _flat(work, step, message)


def unpack(work: Work, message: Message, arrived: Tensor) -> None:
    """Puts what has arrived where it belongs, if it is not there already."""
    parts = [_target(work, part) for part in message.parts]
    if len(parts) > 1 or parts[0].data_ptr() != arrived.data_ptr():
        for place, part in zip(_places(arrived.view(-1), parts), parts, strict=True):
            part.copy_(place)


def _source(work: Work, part: Part) -> Tensor:
    leaf = work.leaves[part.leaf]
    assert leaf is not None
    return leaf.source[_slices(part.box, work.plan.route(part.leaf).src.box(work.rank))]


def _target(work: Work, part: Part) -> Tensor:
    return _result(work, part.leaf)[_slices(part.box, work.plan.route(part.leaf).dst.box(work.rank))]


def _result(work: Work, leaf: int) -> Tensor:
    """The leaf's result, made when the first part of it is there."""
    if work.results[leaf] is None:
        shape = work.plan.route(leaf).dst.local_shape(work.rank)
        work.results[leaf] = torch.empty(shape, dtype=work.plan.dtypes[leaf], device=work.device)
    return work.results[leaf]


def _flat(work: Work, step: Step, message: Message) -> Tensor:
    elements = sum(plans.volume(box) for _, box in message.parts)
    return torch.empty(elements, dtype=step.dtype, device=work.device)


def _places(flat: Tensor, parts: list[Tensor]) -> list[Tensor]:
    """Views of the flat tensor, one after the other, in the shapes of the parts."""
    pieces = flat.split([part.numel() for part in parts])
    return [piece.view(part.shape) for piece, part in zip(pieces, parts, strict=True)]


def _slices(box: Box, inside: Box) -> tuple[slice, ...]:
    return tuple(slice(low - start, high - start) for (low, high), (start, _) in zip(box, inside, strict=True))


def _start(work: Work, step: Step, mesh: Mesh) -> Flight:
    """Packs a step's messages and starts to send and receive them. What goes to several ranks is packed once."""
    packed: dict[tuple[Part, ...], Tensor] = {}
    for message in step.sends:
        if message.parts not in packed:
            packed[message.parts] = pack(work, step, message)
    if step.way == "gather" and _gathers_natively(mesh):
        return _start_gather(step, packed, mesh)
    arriving = [room(work, step, message) for message in step.receives]
    if mesh.device.type == "cpu":
        received = [dist.irecv(x, m.peer, tag=m.tag) for m, x in zip(step.receives, arriving, strict=True)]
        sent = [dist.isend(packed[m.parts], m.peer, tag=m.tag) for m in step.sends]
    else:
        operations = [dist.P2POp(dist.irecv, x, m.peer) for m, x in zip(step.receives, arriving, strict=True)]
        operations += [dist.P2POp(dist.isend, packed[m.parts], m.peer) for m in step.sends]
        together = _Together(dist.batch_isend_irecv(operations) if operations else [])
        received, sent = [together] * len(step.receives), [together] * len(step.sends)
    return Flight(step, received, arriving, sent, list(packed.values()))


class _Together(NamedTuple):
    """Operations that the backend started as one."""

    works: list[Any]

    def wait(self) -> None:
        for work in self.works:
            work.wait()


def _gathers_natively(mesh: Mesh) -> bool:
    """Whether a gather is the backend's all-gather. Gloo's takes twice as long as its own sends and receives."""
    return mesh.device.type != "cpu"


def _start_gather(step: Step, packed: dict[tuple[Part, ...], Tensor], mesh: Mesh) -> Flight:
    """The same by all-gathers, one for each message that a rank sends to all others."""
    group, wholes, works = _group(mesh, step.ranks), [], []
    for x in packed.values():
        wholes.append(torch.empty(len(step.ranks), x.numel(), dtype=x.dtype, device=x.device))
        works.append(group._allgather_base(wholes[-1], x.reshape(-1)))
    seen: dict[int, int] = {}
    received, arriving = [], []
    for message in step.receives:
        at = seen[message.peer] = seen.get(message.peer, -1) + 1
        received.append(works[at])
        arriving.append(wholes[at][step.ranks.index(message.peer)])
    return Flight(step, received, arriving, [], list(packed.values()))


def _group(mesh: Mesh, ranks: tuple[int, ...]) -> Any:
    """The mesh's process group of just these ranks."""
    for axes in combinations(mesh.sizes):
        if list(ranks) in members(mesh.sizes, axes):
            return mesh.group(axes)
    raise MeshError(f"the mesh {mesh} has no group of the ranks {ranks}")


def _land(work: Work, flight: Flight) -> None:
    """Waits for a step's messages, unpacking each as it comes."""
    for message, handle, arrived in zip(flight.step.receives, flight.received, flight.arriving, strict=True):
        _wait(handle, work.rank, message.peer)
        unpack(work, message, arrived)
    for handle, message in zip(flight.sent, flight.step.sends, strict=False):
        _wait(handle, work.rank, message.peer)


def _wait(handle: Any, rank: int, peer: int) -> None:
    try:
        handle.wait()
    except RuntimeError as error:
        raise MeshError(f"rank {rank} was exchanging weights with rank {peer}, which is gone: {error}") from error
