"""Checks of what the C++ functions are given: they trust dtypes, shapes and addresses.

An operator calls these before it takes an address. Indices in tensors are checked by the functions themselves, which
return the number of what does not fit.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from funrl.compiled_kernels.kernel_library import KernelError

FIXED_PARTS = 8  # of the terms of a sum that ranks may share
KERNEL_DTYPES = "float32, bfloat16 and float64"
BITS = {torch.float32: 32, torch.bfloat16: 16, torch.float64: 64}
_REAL_BITS = {torch.float32: 32, torch.float64: 64}


def real_of(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which the kernels compute with numbers of a dtype."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def kernel_bits(name: str, x: Tensor, dims: int | None = None, least: int = 0, wide: bool = False) -> int:
    """Bits of a number of x.

    Args:
      name: of x in messages.
      x: an argument of a C++ function.
      dims: number of dims that x must have; None: any.
      least: number of dims that x must have at least.
      wide: the function takes float32 and float64 only.

    Raises:
      KernelError: the kernels do not take its dtype or device.
      ValueError: it has another number of dims.
    """
    known = _REAL_BITS if wide else BITS
    if x.dtype not in known or not x.is_cpu:
        dtypes = "float32 and float64" if wide else KERNEL_DTYPES
        raise KernelError(f"{name} is {x.dtype} on {x.device}, the C++ kernels take {dtypes} on the CPU")
    if x.ndim < least or (dims is not None and x.ndim != dims):
        raise ValueError(f"{name} is {list(x.shape)}, it must have {dims or f'at least {least}'} dims")
    return known[x.dtype]


def check_tensor(name: str, x: Tensor, dtype: torch.dtype, shape: Sequence[int]) -> None:
    """Require a dtype and a shape.

    Args:
      name: of x in messages.
      x: an argument of a C++ function.
      dtype: that it must have.
      shape: that it must have, a tuple.

    Raises:
      ValueError: it has another dtype or shape, or is not on the CPU.
    """
    if x.dtype != dtype or x.shape != shape or not x.is_cpu:
        needed = f"{dtype} {list(shape)} on cpu"
        raise ValueError(f"{name} is {x.dtype} {list(x.shape)} on {x.device}, it must be {needed}")


def check_parts(parts: int, terms: int) -> None:
    """Require a number of equal parts of some terms whose sums a binary tree adds.

    Raises:
      ValueError: it is not a power of two up to 8, does not divide the terms, or there are none.
    """
    if parts not in (1, 2, 4, FIXED_PARTS) or terms < 1 or terms % parts:
        raise ValueError(f"there are {parts} parts of {terms} terms, they must be 1, 2, 4 or 8 that divide at least 1")
