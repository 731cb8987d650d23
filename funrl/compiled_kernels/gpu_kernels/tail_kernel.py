"""A Triton kernel that zeroes the rows after an end which only the device knows, and touches no other row."""

# A kernel is in Triton's language, whose types a checker of Python's does not know.
# pyright: reportGeneralTypeIssues=false, reportArgumentType=false, reportReturnType=false
from __future__ import annotations

import triton  # type: ignore[import-not-found]
import triton.language as tl  # type: ignore[import-not-found]
from torch import Tensor

_WIDTH = 1024  # numbers of a row at a time
_PROGRAMS = 264  # two for each processor of an H200; each takes every 264th row


@triton.jit
def _zero_tail(x_ptr, ends_ptr, groups, rows, numbers, width: tl.constexpr):
    """Zero every `num_programs`th row after the last end."""
    end = tl.load(ends_ptr + groups - 1).to(tl.int64)
    zeros = tl.zeros([width], x_ptr.dtype.element_ty)
    for row in range(end + tl.program_id(0), rows, tl.num_programs(0)):
        for begin in range(0, numbers, width):
            column = begin + tl.arange(0, width)
            tl.store(x_ptr + row * numbers + column, zeros, mask=column < numbers)


def launch_zero_tail(x_RN: Tensor, ends_E: Tensor) -> None:
    """Zero the rows of a contiguous matrix after the last of some ends, in place. The host waits for nothing."""
    R, N = x_RN.shape
    if R and N and len(ends_E):
        width = min(_WIDTH, triton.next_power_of_2(N))
        _zero_tail[(min(R, _PROGRAMS),)](x_RN, ends_E, len(ends_E), R, N, width=width)
