"""Patches of weights: only numbers whose bits have changed since a version that the receiver has.

A patch goes with a checksum of the patched numbers, so that a patch that is lost, or of another version than the
receiver's, is noticed. A message of a reshard becomes

    count | checksum | count indices of 4 bytes | count numbers

or, where that has more bytes than the message, -1 | checksum | all numbers.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from funrl import trees
from funrl.mesh.buckets import DIRECT_BYTES, Message, Step, program
from funrl.mesh.mesh import Mesh
from funrl.mesh.plan import Plan
from funrl.mesh.reshard import BUCKET_BYTES, Work, begin_reshard, exchange, finish_reshard, pack_message, unpack

INDEX_BYTES = 4
INDEXED = 1 << 31  # numbers of a tensor: indices of this many do not fit, and CUDA does not look for them
PATCH_BUCKET_BYTES = 4 * BUCKET_BYTES  # of the numbers that are patched in a step; few of them are staged
# Patches are sent if they have fewer bytes than this share of the weights.
LARGEST_SHARE = 0.2
BIT_TYPES = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
CHECKSUM_PIECE = 1 << 20  # numbers that are added to a checksum at a time
HEADER = 16  # bytes
MOST_LOST = 2  # patches in a row, after which no others are sent


class PatchedShards(NamedTuple):
    """Shards of weights after patches have come.

    Attributes:
      tree: this rank's shards; None on a rank that only sends.
      intact: whether all checksums agree; always true on a rank that only sends.
      sent: bytes that this rank has sent.
    """

    tree: trees.Tree
    intact: bool
    sent: int


class LostPatches:
    """Count of patches in a row that did not give a receiver the sender's weights.

    Attributes:
      count: of them.

    Example:
      >>> lost = LostPatches()
      >>> [lost.add(intact) != "" for intact in (True, False, True, False, False)], lost.ended
      ([False, False, False, False, True], True)
    """

    def __init__(self) -> None:
        """Begin with none."""
        self.count = 0

    @property
    def ended(self) -> bool:
        """True if no further patches are to be sent."""
        return self.count >= MOST_LOST

    def add(self, intact: bool) -> str:
        """Count a patch that has been applied; returns a remark where it is the last one."""
        self.count = 0 if intact else self.count + 1
        if not self.ended:
            return ""
        return (
            f"{MOST_LOST} patches of weights in a row did not give an engine the trainer's weights, so that all were "
            "sent; from now on no patches are"
        )


def changed_bytes(tree: trees.Tree, base: trees.Tree) -> tuple[int, int]:
    """Count the numbers whose bits differ between two trees of the same dtypes, and the bytes of patches of them."""
    changed = nbytes = 0
    for new, old in zip(trees.leaves(tree), trees.leaves(base), strict=True):
        count = int((bits_of(new) != bits_of(old)).sum())
        changed += count
        nbytes += count * (INDEX_BYTES + new.element_size())
    return changed, nbytes


def reshard_patches(tree: trees.Tree, base: trees.Tree, plan: Plan, mesh: Mesh, group: object = None) -> PatchedShards:
    """Reshard a tree between different ranks by patches of a base. Collective over the ranks of the plan.

    Args:
      tree: this rank's shards in the plan's source layouts and dtypes; None on a rank that has none.
      base: shards of the version to patch, in the layouts that this rank has; None: it has none, and nothing is intact.
      plan, mesh, group: as in `reshard`.
    """
    work = begin_reshard(tree, plan, mesh, donate=False)._replace(group=group)
    before = begin_reshard(base if tree is not None else None, plan, mesh, donate=False)
    if mesh.process in plan.dst_ranks:
        _begin_results(work, before, base)
    intact = True
    sent = 0
    direct = None if mesh.device.type == "cpu" else max(DIRECT_BYTES, PATCH_BUCKET_BYTES // 8)
    for step in program(plan, mesh.process, PATCH_BUCKET_BYTES, direct_bytes=direct):
        patches: dict[tuple, Tensor] = {}
        for message in step.sends:
            if message.parts not in patches:
                patches[message.parts] = encode_patch(_packed(work, step, message), _packed(before, step, message))
        sending = [patches[message.parts] for message in step.sends]
        lengths = [torch.tensor([x.numel()], device=mesh.device) for x in sending]
        arriving = [torch.empty(1, dtype=torch.int64, device=mesh.device) for _ in step.receives]
        exchange(work, _tagged(step, 0), arriving, lengths, mesh)
        counts = torch.cat(arriving).tolist() if arriving else []
        arrived = [torch.empty(count, dtype=torch.uint8, device=mesh.device) for count in counts]
        exchange(work, _tagged(step, 1), arrived, sending, mesh)
        sent += sum(x.numel() for x in sending)
        for message, patch in zip(step.receives, arrived, strict=True):
            patched, agrees = apply_patch(_packed(before, step, message), patch)
            unpack(work, message, patched)
            intact &= agrees
    return PatchedShards(finish_reshard(work, mesh), intact, sent)


def _begin_results(work: Work, before: Work, base: trees.Tree) -> None:
    """Give the leaves of a rank that receives their memory, and those of the base its shards."""
    shards: Sequence[Tensor | None] = [None] * len(work.leaves) if base is None else trees.leaves(base)
    for leaf, old, shard in zip(work.leaves, before.leaves, shards, strict=True):
        shape = [high - low for low, high in leaf.held.new or ()]
        leaf.result = torch.zeros(shape, dtype=leaf.dtype, device=work.device)
        old.result = torch.zeros_like(leaf.result) if shard is None else shard.detach()


def _packed(work: Work, step: Step, message: Message) -> Tensor:
    return pack_message(work, step, message).reshape(-1)


def _tagged(step: Step, number: int) -> Step:
    """The step with tags of its own for the `number`-th of two exchanges."""
    sends, receives = (
        tuple(message._replace(tag=2 * message.tag + number) for message in messages)
        for messages in (step.sends, step.receives)
    )
    return step._replace(sends=sends, receives=receives)


def encode_patch(new: Tensor, old: Tensor) -> Tensor:
    """Bytes of a patch that makes one flat tensor of another."""
    own = bits_of(new)
    changed = (own != bits_of(old)).nonzero().view(-1) if len(own) < INDEXED else None
    if changed is None or len(changed) * (INDEX_BYTES + new.element_size()) >= new.nbytes:
        parts = [_as_bytes(own)]
        count = -1
    else:
        count = len(changed)
        parts = [_as_bytes(changed.int()), _as_bytes(own[changed])]
    header = torch.stack([torch.tensor(count, device=new.device), checksum(new)])
    return torch.cat([_as_bytes(header), *parts])


def apply_patch(old: Tensor, patch: Tensor) -> tuple[Tensor, bool]:
    """The patched copy of a flat tensor, and whether its checksum is that of the patch."""
    count, expected = patch[:HEADER].view(torch.int64).tolist()
    own = bits_of(old)
    body = patch[HEADER:]
    if count < 0:
        new = body.clone().view(own.dtype)
    else:
        end = INDEX_BYTES * count
        new = own.clone()
        new[body[:end].clone().view(torch.int32).long()] = body[end:].clone().view(own.dtype)
    patched = new.view(old.dtype)
    return patched, int(checksum(patched)) == expected


def checksum(x: Tensor) -> Tensor:
    """Sum of the bits of all numbers, each times an odd random number of its own, modulo 2^64: an int64 scalar."""
    own = bits_of(x.reshape(-1))
    keys = _keys(CHECKSUM_PIECE, x.device)
    total = torch.zeros((), dtype=torch.int64, device=x.device)
    for number, piece in enumerate(own.split(CHECKSUM_PIECE)):
        total += (piece * keys[: len(piece)]).sum() * (2 * number + 1)
    return total


def bits_of(x: Tensor) -> Tensor:
    """The bits of numbers as integers."""
    return x.detach().contiguous().view(BIT_TYPES[x.element_size()])


def _as_bytes(x: Tensor) -> Tensor:
    """The bytes of a tensor."""
    return x.contiguous().view(-1).view(torch.uint8)


@functools.lru_cache(maxsize=4)
def _keys(count: int, device: torch.device) -> Tensor:
    numbers = np.random.PCG64(0).random_raw(count) | 1
    return torch.from_numpy(numbers.view(np.int64)).to(device)
