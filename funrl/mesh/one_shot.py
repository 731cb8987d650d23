"""Sums of small tensors over the GPUs of one node in one kernel, by torch's symmetric memory, while an engine decodes.

Each rank copies its part to memory that all ranks of the group map, and adds up all parts in the order of the ranks;
CUDA graphs capture it. Where a group has no such memory, or a tensor is larger, `collectives.psum` goes to NCCL. It has
been tried on no GPU by this project: a small sum of each dtype is compared with NCCL's before the first use.
"""

from __future__ import annotations

import torch
from torch import Tensor

MOST_BYTES = 1 << 18  # of a tensor; for more, ranks that each read all parts send too much
ONE_SHOT_DTYPES = (torch.bfloat16, torch.float32)
_ALIGNED = 16  # bytes that the kernel reads at a time
_buffers: dict[str, Tensor] = {}  # by name of the group: this rank's part of its memory


def one_shot_problem(device: torch.device, ranks: int, node: int) -> str | None:
    """Reason why ranks cannot share memory; None: they can try.

    Args:
      device: of this rank.
      ranks: of the group.
      node: of these, on this machine.
    """
    if device.type != "cuda" or torch.version.hip is not None:
        return "symmetric memory is for NVIDIA's GPUs"
    if node < ranks:
        return "the ranks are on several machines"
    gpus = range(torch.cuda.device_count())
    if not all(torch.cuda.can_device_access_peer(a, b) for a in gpus for b in gpus if a != b):
        return "GPUs do not reach each other's memory"
    return None


def has_buffer(group: str) -> bool:
    """True if the memory of a group is mapped."""
    return group in _buffers


def map_buffer(group: str, device: torch.device) -> str | None:
    """Map the memory of a group's ranks. Collective over the group.

    Returns: the reason why this rank could not; None: it is mapped.
    """
    try:
        import torch.distributed._symmetric_memory as symmetric  # takes long, and only here

        buffer = symmetric.empty(MOST_BYTES, dtype=torch.uint8, device=device)
        symmetric.rendezvous(buffer, group)  # type: ignore[arg-type]
    except (RuntimeError, AttributeError, ImportError) as error:  # of a build or a driver without it
        return str(error)
    _buffers[group] = buffer
    return None


def unmap_buffer(group: str) -> None:
    """Forget the memory of a group, whose sums NCCL takes then."""
    _buffers.pop(group, None)


def sums_at_once(x: Tensor, group: str) -> bool:
    """True if `one_shot_sum` takes a tensor: where nothing learns, of at most `MOST_BYTES`."""
    if group not in _buffers or not torch.is_inference_mode_enabled():
        return False
    nbytes = x.numel() * x.element_size()
    return x.dtype in ONE_SHOT_DTYPES and 0 < nbytes <= MOST_BYTES and nbytes % _ALIGNED == 0


@torch.library.custom_op("funrl::one_shot_sum", mutates_args=())
def one_shot_sum(x: Tensor, group: str) -> Tensor:
    """The sum over a group that `sums_at_once`; the same bits on all of its ranks."""
    flat = x.contiguous().view(-1)
    part = _buffers[group].view(x.dtype)[: flat.numel()]
    part.copy_(flat)
    return torch.ops.symm_mem.one_shot_all_reduce(part, "sum", group).view(x.shape)


@one_shot_sum.register_fake
def _(x, group):
    return torch.empty_like(x, memory_format=torch.contiguous_format)
