"""Reshard a tree from one layout to another by a `Plan`, in buckets.

A bucket is packed, sent and unpacked. During its transfer the parts that stay on the rank are copied and the next
bucket is packed, so two buckets are staged at a time.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import optree
import torch
import torch.distributed as dist
from torch import Tensor

from funrl import trees
from funrl.mesh import plan as plans
from funrl.mesh.buckets import DIRECT_BYTES, Message, Part, Step, program, starts_together
from funrl.mesh.mesh import AXES, Mesh, MeshError
from funrl.mesh.plan import LeafParts, Plan, plan, shape, slices
from funrl.mesh.rules import Layout
from funrl.processes.heartbeat import entered, left

__all__ = ["BUCKET_BYTES", "Plan", "copied", "export_weights", "plan", "replicated", "reshard", "unshard"]
BUCKET_BYTES = 64 << 20


@dataclass
class Leaf:
    """A leaf that is being resharded.

    Attributes:
      held: its parts on this rank, before and after.
      dtype: of the result.
      original: the caller's tensor; None: this rank has no part of it, or has released it.
      source: this module's own handle of the memory of `original`.
      result: the new local tensor; None: not begun, or this rank gets no part.
      stays: whether the result is `original` itself.
    """

    held: LeafParts
    dtype: torch.dtype
    original: Tensor | None
    source: Tensor | None
    result: Tensor | None = None
    stays: bool = False


class Work(NamedTuple):
    """State of one rank in the middle of a reshard.

    Attributes:
      leaves: in the order of the plan.
      donated: whether originals are emptied once sent, except those whose ids are in `results`.
      results: ids of the originals that are results.
      group: process group of the messages; None: that of the run.
    """

    plan: Plan
    leaves: list[Leaf]
    donated: bool
    results: frozenset[int]
    device: torch.device
    group: Any = None


class PendingStep(NamedTuple):
    """A step in transfer: handles to wait for, buffers that receive its messages, and buffers being sent."""

    step: Step
    received: list[Any]
    arriving: list[Tensor]
    sent: list[Any]
    sending: list[Tensor]


def reshard(
    tree: trees.Tree,
    plan: Plan,
    mesh: Mesh,
    bucket_bytes: int = BUCKET_BYTES,
    donate: bool = False,
    group: object = None,
) -> trees.Tree:
    """Reshard a tree of local tensors to the plan's target layouts. Collective over the ranks of the plan.

    If a leaf's box and dtype stay the same, the result holds the same tensor object. Extra memory besides the result is
    at most `2 * bucket_bytes`, as long as a bucket holds one element from every peer. A rank outside the plan returns
    at once.

    Args:
      tree: this rank's tensors in the plan's source layouts; None on a rank that has none.
      plan: the same on every rank.
      mesh: the source's or the target's mesh, or one over the ranks of both.
      bucket_bytes: bytes that one bucket stages, sending and receiving together.
      donate: the tensors are donated; one that is not in the result is emptied as soon as it is sent.
      group: process group of the messages, over all ranks of the run; None: the run's own.

    Returns: the tree; None on a rank that gets no part of it.

    Raises:
      MeshError: the mesh or a leaf's local shape is not what the plan was made for.
    """
    if mesh.process not in plan.src_ranks and mesh.process not in plan.dst_ranks:
        return None
    work = begin_reshard(tree, plan, mesh, donate=donate)._replace(group=group)
    pending: list[PendingStep] = []
    # Of messages that are started as one group there must be few: see `groups`.
    direct = None if mesh.device.type == "cpu" else max(DIRECT_BYTES, bucket_bytes // 8)
    native = _gathers_natively(plan, mesh)
    donates = donate and plan.src_ranks == plan.dst_ranks  # others that receive do not know it
    steps = program(plan, mesh.process, bucket_bytes, native=native, direct_bytes=direct, donates=donates)
    for step in steps:
        pending.append(_start(work, step, mesh))
        settle(work, step.finished)
        if len(pending) == 2:
            _finish(work, pending.pop(0), mesh)
    while pending:
        _finish(work, pending.pop(0), mesh)
    return finish_reshard(work, mesh)


def copied(tree: trees.Tree, src: trees.Tree, dst: trees.Tree, mesh: Mesh, dtypes: trees.Tree = None) -> trees.Tree:
    """A copy of a tree in other layouts, which shares no memory with it. Collective, like `reshard`.

    Args:
      src, dst: layouts of the tree and of the copy.
      dtypes: of the copy, one or a tree of them; None: as it is.
    """
    dtypes = trees.map(lambda x: x.dtype, tree) if dtypes is None else dtypes
    copy = reshard(tree, _within(mesh, src, dst, dtypes=dtypes), mesh)
    return trees.map(lambda new, old: new.clone() if new is old else new, copy, tree)


def unshard(tree: trees.Tree, layouts: trees.Tree, mesh: Mesh, bucket_bytes: int = BUCKET_BYTES) -> trees.Tree:
    """Gather every leaf whole on every rank. The inverse of `rules.shard`."""
    to_whole = _within(mesh, layouts, replicated(layouts), dtypes=trees.map(lambda x: x.dtype, tree))
    return reshard(tree, to_whole, mesh, bucket_bytes=bucket_bytes)


def replicated(layouts: trees.Tree) -> trees.Tree:
    """The layouts of the same tensors whole on every rank."""
    return trees.map(lambda layout: Layout(layout.shape, ((),) * len(layout.shape), layout.sizes), layouts)


def _within(mesh: Mesh, src: trees.Tree, dst: trees.Tree, dtypes: trees.Tree) -> Plan:
    """The plan between two layouts on the ranks of one mesh."""
    return plan(src, dst, dtypes, src_ranks=mesh.ranks, dst_ranks=mesh.ranks)


def export_weights(
    tree: trees.Tree,
    layouts: trees.Tree,
    mesh: Mesh,
    names: Mapping[str, tuple[str, tuple[int, ...]]],
    to: trees.Tree | None = None,
    bucket_bytes: int = BUCKET_BYTES,
) -> Iterator[tuple[str, Tensor]]:
    """The weights under another program's names, a bucket at a time: never the whole model at once.

    Collective: every rank iterates to the end. What was yielded is let go before the next bucket is made, if the caller
    lets it go. A tensor that is whole in `tree` is yielded as it is, without a copy.

    Args:
      names: leaf name -> (name to yield, shape of the whole tensor there: some neighbouring dims may be one).
      to: layouts to yield, such as those of a tensor-parallel engine; None: whole tensors.
      bucket_bytes: bytes of the results of one bucket; a larger tensor is a bucket by itself.

    Raises:
      KeyError: a leaf has no name.
    """
    target = replicated(layouts) if to is None else to
    leaves = list(zip(trees.named(tree), trees.leaves(layouts), trees.leaves(target), strict=True))
    missing = [name for (name, _), _, _ in leaves if name not in names]
    if missing:
        raise KeyError(f"no name is given for {missing}")
    while leaves:
        nbytes = itertools.accumulate(plans.volume(dst.box(0)) * x.element_size() for (_, x), _, dst in leaves)
        count = max(1, sum(size <= bucket_bytes for size in nbytes))
        local = {name: x for (name, x), _, _ in leaves[:count]}
        src = {name: layout for (name, _), layout, _ in leaves[:count]}
        dst = {name: layout for (name, _), _, layout in leaves[:count]}
        leaves = leaves[count:]
        results = reshard(
            local, _within(mesh, src, dst, dtypes=trees.map(lambda x: x.dtype, local)), mesh, bucket_bytes=bucket_bytes
        )
        del local
        for name, layout in dst.items():
            theirs, whole = names[name]
            yield theirs, results.pop(name).reshape(_merged(layout.shape, layout.local_shape(mesh.rank), whole))


def _merged(shape: tuple[int, ...], local: tuple[int, ...], merged: tuple[int, ...]) -> list[int]:
    """The local shape where neighbouring dims of `shape` have become the single dims of `merged`."""
    sizes = []
    end = 0
    for length in merged:
        begin, end = end, end + 1
        while math.prod(shape[begin:end]) < length:
            end += 1
        sizes.append(math.prod(local[begin:end]))
    return sizes


def begin_reshard(tree: trees.Tree, plan: Plan, mesh: Mesh, donate: bool) -> Work:
    """Check the tree against the plan and do what needs no communication."""
    both = plan.src_ranks, plan.dst_ranks
    if mesh.ranks not in both and not all(rank in mesh.ranks for ranks in both for rank in ranks):
        raise MeshError(f"the plan is from ranks {both[0]} to {both[1]}, the mesh {mesh} is over {mesh.ranks}")
    held = plans.held(plan, mesh.process)
    given = [None] * len(plan.names)
    if mesh.process in plan.src_ranks:
        names = _names(optree.tree_structure(tree))
        given = trees.leaves(tree)
        if names != plan.names:
            lacks = sorted(set(plan.names) - set(names))
            extra = sorted(set(names) - set(plan.names))
            raise MeshError(f"the tree is not the one that was planned: it lacks {lacks} and has in addition {extra}")
        for name, x, has in zip(names, given, held, strict=True):
            if x.shape != shape(has.old):
                raise MeshError(
                    f"{name}: rank {mesh.process} has shape {tuple(x.shape)}, its layout says {shape(has.old)}"
                )
    leaves = []
    for x, dtype, has in zip(given, plan.dtypes, held, strict=True):
        stays = x is not None and x.dtype == dtype and has.old == has.new
        leaves.append(
            Leaf(has, dtype, x, source=None if x is None else x.detach(), result=x if stays else None, stays=stays)
        )
    work = Work(
        plan, leaves, donate, results=frozenset(id(leaf.original) for leaf in leaves if leaf.stays), device=mesh.device
    )
    settle(work, (i for i in range(len(leaves)) if plan.route(i).way in ("alias", "local")))
    return work


def finish_reshard(work: Work, mesh: Mesh) -> trees.Tree:
    """The tree of the results."""
    if mesh.process not in work.plan.dst_ranks:
        return None
    return optree.tree_unflatten(work.plan.structure, [leaf.result for leaf in work.leaves])


@functools.lru_cache(maxsize=64)
def _names(structure: optree.PyTreeSpec) -> tuple[str, ...]:
    return tuple(name for name, _ in trees.named(optree.tree_unflatten(structure, [0] * structure.num_leaves)))


def settle(work: Work, finished: Iterable[int]) -> None:
    """Copy this rank's own parts of leaves whose sends are done, and release their sources."""
    for i in finished:
        leaf = work.leaves[i]
        has = work.leaves[i].held
        if leaf.source is not None and has.stays is not None and not leaf.stays:
            own = leaf.source[has.taken]
            if has.stays == has.new:
                leaf.result = own.to(leaf.dtype, copy=True, memory_format=torch.contiguous_format)
            else:
                _result(work, i)[has.put].copy_(own)
        elif has.new is not None:
            _result(work, i)
        if work.donated and leaf.original is not None and id(leaf.original) not in work.results:
            leaf.original.data = leaf.original.new_empty(0)
        leaf.original = leaf.source = None


def pack_message(work: Work, step: Step, message: Message) -> Tensor:
    """The parts of a message in one tensor: the leaf's own memory if its one part is contiguous, else a flat copy."""
    parts = [_source(work, part) for part in message.parts]
    if len(parts) == 1 and parts[0].is_contiguous() and parts[0].dtype == step.dtype:
        return parts[0]
    flat = _flat(work, step, message)
    for place, part in zip(_places(flat, parts), parts, strict=True):
        place.copy_(part)
    return flat


def room(work: Work, step: Step, message: Message) -> Tensor:
    """Memory for a message to arrive in: the result's own if its one part is contiguous, else a flat tensor."""
    if len(message.parts) == 1:
        target = _target(work, message.parts[0])
        if target.is_contiguous():
            return target
    return _flat(work, step, message)


def unpack(work: Work, message: Message, arrived: Tensor) -> None:
    """Put arrived parts into the results, unless they are there already."""
    parts = [_target(work, part) for part in message.parts]
    if len(parts) > 1 or parts[0].data_ptr() != arrived.data_ptr():
        for place, part in zip(_places(arrived.view(-1), parts), parts, strict=True):
            part.copy_(place)


def _source(work: Work, part: Part) -> Tensor:
    leaf = work.leaves[part.leaf]
    if leaf.source is None or leaf.held.old is None:  # it has arrived here, and is relayed
        return _target(work, part)
    return leaf.source[slices(part.box, leaf.held.old)]


def _target(work: Work, part: Part) -> Tensor:
    new = work.leaves[part.leaf].held.new
    assert new is not None
    return _result(work, part.leaf)[slices(part.box, new)]


def _result(work: Work, i: int) -> Tensor:
    """The leaf's result, made when the first part of it is there."""
    leaf = work.leaves[i]
    if leaf.result is None:
        leaf.result = torch.empty(shape(leaf.held.new), dtype=leaf.dtype, device=work.device)
    return leaf.result


def _flat(work: Work, step: Step, message: Message) -> Tensor:
    elements = sum(plans.volume(box) for _, box in message.parts)
    return torch.empty(elements, dtype=step.dtype, device=work.device)


def _places(flat: Tensor, parts: list[Tensor]) -> list[Tensor]:
    """Views of the flat tensor, one after the other, in the shapes of the parts."""
    pieces = flat.split([part.numel() for part in parts])
    return [piece.view(part.shape) for piece, part in zip(pieces, parts, strict=True)]


def _start(work: Work, step: Step, mesh: Mesh) -> PendingStep:
    """Pack a step's messages and start sending and receiving. A part for several ranks is packed once."""
    if step.gather:
        return _start_gather(work, step, mesh)
    packed: dict[tuple[Part, ...], Tensor] = {}
    for message in step.sends:
        if message.parts not in packed:
            packed[message.parts] = pack_message(work, step, message)
    arriving = [room(work, step, message) for message in step.receives]
    received, sent = _post(work, step, arriving, [packed[message.parts] for message in step.sends], mesh)
    return PendingStep(step, received, arriving, sent=sent, sending=list(packed.values()))


def _post(
    work: Work, step: Step, arriving: list[Tensor], sending: list[Tensor], mesh: Mesh
) -> tuple[list[Any], list[Any]]:
    """Start receiving and sending a step's messages; returns handles of each."""
    received: list[Any] = [None] * len(step.receives)
    sent: list[Any] = [None] * len(step.sends)
    if mesh.device.type == "cpu":
        for i, (message, x) in enumerate(zip(step.receives, arriving, strict=True)):
            with _blaming(mesh.process, message.peer):
                received[i] = dist.irecv(x, message.peer, group=work.group, tag=message.tag)
        for i, (message, x) in enumerate(zip(step.sends, sending, strict=True)):
            with _blaming(mesh.process, message.peer):
                sent[i] = dist.isend(x, message.peer, group=work.group, tag=message.tag)
        return received, sent
    for receives, sends in starts_together(step, mesh.process):
        operations = [dist.P2POp(dist.irecv, arriving[i], step.receives[i].peer, work.group) for i in receives]
        operations += [dist.P2POp(dist.isend, sending[i], step.sends[i].peer, work.group) for i in sends]
        together = _Batch(dist.batch_isend_irecv(operations))
        for i in receives:
            received[i] = together
        for i in sends:
            sent[i] = together
    return received, sent


def exchange(work: Work, step: Step, arriving: list[Tensor], sending: list[Tensor], mesh: Mesh) -> None:
    """Exchange tensors of other sizes than a step's messages, and wait for them."""
    received, sent = _post(work, step, arriving, sending, mesh)
    _wait(received, step.receives, mesh)
    _wait(sent, step.sends, mesh)


class _Batch(NamedTuple):
    """Operations that the backend started as one."""

    works: list[Any]

    def wait(self) -> None:
        for work in self.works:
            work.wait()


def _finish(work: Work, pending: PendingStep, mesh: Mesh) -> None:
    """Wait for a step's messages, and unpack each when it arrives."""
    if pending.step.gather:
        pending.received[0].wait()
        unpack_gather(work, pending.step, pending.arriving[0])
        return
    for message, handle, arrived in zip(pending.step.receives, pending.received, pending.arriving, strict=True):
        _wait([handle], [message], mesh)
        unpack(work, message, arrived)
    _wait(pending.sent, pending.step.sends, mesh)


def _wait(handles: Sequence[Any], messages: Sequence[Message], mesh: Mesh) -> None:
    """Wait for messages. Raises: MeshError, which names a rank that has failed."""
    for message, handle in zip(messages, handles, strict=True):
        entered(f"an exchange with rank {message.peer}")
        with _blaming(mesh.process, message.peer):
            handle.wait()
        left()


@contextlib.contextmanager
def _blaming(rank: int, peer: int) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise MeshError(f"rank {rank} was exchanging weights with rank {peer}, which has failed: {error}") from error


def _gathers_natively(plan: Plan, mesh: Mesh) -> bool:
    """True if gathers use the backend's all-gather: it is faster than messages and the mesh has the groups.

    Gloo's all-gather takes two to four times as long as its own messages between the same ranks.
    """
    if mesh.device.type == "cpu":
        return False
    sizes = tuple(mesh.sizes[axis] for axis in AXES)
    gathers = [route for route in plan.routes if route.way == "gather"]
    return mesh.ranks == plan.src_ranks and all(route.src.sizes == sizes for route in gathers)


def _start_gather(work: Work, step: Step, mesh: Mesh) -> PendingStep:
    """Start one all-gather of all parts of a step."""
    own = pack_message(work, step, Message(mesh.process, 0, step.gather))
    whole = torch.empty(len(step.ranks), own.numel(), dtype=own.dtype, device=own.device)
    handle = mesh.group(step.axes)._allgather_base(whole.view(-1), own.view(-1))
    return PendingStep(step, [handle], [whole], sent=[], sending=[own])


def unpack_gather(work: Work, step: Step, whole: Tensor) -> None:
    """Put the rows of an all-gather, one from each rank, side by side in the results."""
    offset = 0
    for leaf, box in step.gather:
        route = work.plan.route(leaf)
        old = work.leaves[leaf].held.old or ()
        elements = plans.volume(box)
        # The result is a grid of blocks: each of its dims is the parts of axes gathered there, outermost first, and the
        # dim of a block. The rows have the same parts in front, but in the order of the mesh.
        splits = [[split for split in own if split.axis in route.axes] for own in route.src.splits]
        dims = [part for dim, own in enumerate(splits) for part in (*own, dim)]
        lengths = [old[part][1] - old[part][0] if isinstance(part, int) else part.size for part in dims]
        parts = [split for axis in route.axes for own in splits for split in own if split.axis == axis]
        order = [*parts, *range(len(old))]
        target = _result(work, leaf).view(lengths).permute([dims.index(part) for part in order])
        rows = whole[:, offset : offset + elements].reshape([*(split.size for split in parts), *shape(box)])
        target[(..., *slices(box, old))].copy_(rows)
        offset += elements
