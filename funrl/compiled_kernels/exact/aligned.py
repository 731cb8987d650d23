"""The Triton kernels of a fixed order of sums, imported where they are used."""

from __future__ import annotations

from typing import Any


def aligned_kernels() -> Any:
    """The module of the kernels, which needs triton."""
    from funrl.compiled_kernels.gpu_kernels import aligned_kernels

    return aligned_kernels
