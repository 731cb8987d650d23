"""Sizes of a cache: free memory where none is given, tokens of a page and of a pass."""

from __future__ import annotations

import os

import torch

from funrl.mesh.launch import local_ranks
from funrl.mesh.mesh import Mesh

FREE_SHARE = 0.5  # of the free memory


def free_bytes(mesh: Mesh) -> int:
    """Free memory of this rank's device; ranks on a CPU share the machine's evenly.

    On a GPU it is what the device has free and what torch's allocator holds without using it, such as the cache and the
    activations of the step before, which the device counts as taken.
    """
    if mesh.device.type == "cuda":
        unused = torch.cuda.memory_reserved(mesh.device) - torch.cuda.memory_allocated(mesh.device)
        return torch.cuda.mem_get_info(mesh.device)[0] + unused
    try:
        with open("/proc/meminfo") as lines:
            free = next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration):  # not Linux
        free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
    return free // local_ranks(mesh.world)


def page_tokens(device: str) -> int:
    """Tokens of a page. Kernels on a GPU need 256."""
    return 16 if device == "cpu" else 256


def pass_tokens(device: str) -> int:
    """Bound on the new tokens of a pass, so that decoding does not wait long for prompts."""
    return 1024 if device == "cpu" else 8192
