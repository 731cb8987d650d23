"""Configuration of torch's memory allocator on a GPU."""

from __future__ import annotations

import os
from collections.abc import Mapping

VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")


def expand_segments(expand: bool = True, environment: Mapping[str, str] = os.environ) -> bool:
    """Choose whether the allocator grows its segments in place, instead of adding segments of fixed sizes.

    Micro-batches have many sizes. In fixed segments each new size leaves gaps that no other size fits in. A variable of
    `VARIABLES`, which torch reads when it is imported, takes precedence. ROCm keeps its default.

    Args:
      expand: False where something needs fixed segments, such as vLLM's sleep mode, whose memory pool refuses others.
      environment: of this process.

    Returns: True if the allocator was configured.
    """
    import torch

    if torch.version.hip is not None or any(environment.get(name) for name in VARIABLES):
        return False
    torch._C._accelerator_setAllocatorSettings(f"expandable_segments:{expand}")
    return True
