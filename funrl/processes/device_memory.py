"""Memory of a GPU: its allocator, and copies to and from the host."""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping

import torch

VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
PINNED_FOR = ("cuda",)  # types of devices that read pinned memory by themselves


def expand_segments(expand: bool = True, environment: Mapping[str, str] = os.environ) -> bool:
    """Choose whether the allocator grows its segments in place, instead of adding segments of fixed sizes.

    Micro-batches have many sizes. In fixed segments each new size leaves gaps that no other size fits in. A variable of
    `VARIABLES`, which torch reads when it is imported, takes precedence. ROCm keeps its default.

    Args:
      expand: False where something needs fixed segments, such as vLLM's sleep mode, whose memory pool refuses others.
      environment: of this process.

    Returns: True if the allocator was configured.
    """
    if torch.version.hip is not None or any(environment.get(name) for name in VARIABLES):
        return False
    torch._C._accelerator_setAllocatorSettings(f"expandable_segments:{expand}")
    return True


def copy_to_device(x: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A tensor on a device, in the order of the device's work: the host does not wait for the copy."""
    if x.is_cpu:
        if device.type == "cpu":
            return x
        if device.type in PINNED_FOR:
            x = x.pin_memory()  # a copy from other memory waits for all work before it
    return x.to(device, non_blocking=True)


def copy_to_host(x: torch.Tensor) -> torch.Tensor:
    """A tensor on the host; where it is on a device its numbers are there once the device's work has come so far."""
    if x.device.type == "cpu":
        return x
    here = torch.empty(x.shape, dtype=x.dtype, pin_memory=x.device.type in PINNED_FOR)
    return here.copy_(x, non_blocking=True)


@functools.cache
def copy_stream(device: torch.device) -> torch.cuda.Stream:
    """The stream of a GPU on which tensors leave it and come back."""
    return torch.cuda.Stream(device)


def wait_for_copies() -> None:
    """Wait until all tensors that were leaving the GPU are on the host."""
    if torch.cuda.is_initialized():
        copy_stream(torch.device("cuda", torch.cuda.current_device())).synchronize()
