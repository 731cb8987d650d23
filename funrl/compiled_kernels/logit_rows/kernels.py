"""Triton kernels that read each logit once; `plain`, beside this file, computes the same in several passes.

The source asks for no compute capability and no size of a warp: NVIDIA and ROCm compile it, and Triton's interpreter
runs it on a CPU where TRITON_INTERPRET=1 stands in the environment before triton is imported.
"""

# A kernel is in Triton's language, whose types a checker of Python's does not know.
# pyright: reportGeneralTypeIssues=false, reportArgumentType=false, reportReturnType=false
from __future__ import annotations

from typing import Any

import triton  # type: ignore[import-not-found]
import triton.language as tl  # type: ignore[import-not-found]
from torch import Tensor

from funrl.compiled_kernels.logit_rows.settings import LogitBlock, RowSettings

# Columns of a program, a power of two: each thread of 256 then holds 8 of them, and with up to four running sums of
# each about 40 registers, far from the limit of any GPU (a CDNA wave of 64 lanes holds half as many). Nothing but the
# last reductions needs shared memory.
_WIDTH = 2048
_WARPS = 8
_LOWEST = tl.constexpr(-1e30)  # below every logit and finite, so that no difference of two is not a number


@triton.jit
def tempered(x, temperature, cap, capped: tl.constexpr):
    """A capped and tempered logit, and the slope of the cap at it.

    tanh z is 1 - 2 / (e^2z + 1), whose absolute error is an ulp of 1.
    """
    y = x.to(tl.float32)
    slope = y * 0.0 + 1.0
    if capped:
        tanh = 1.0 - 2.0 / (tl.exp(2.0 * (y / cap)) + 1.0)
        slope = 1.0 - tanh * tanh
        y = cap * tanh
    return y / temperature, slope


@triton.jit
def _row_sums(
    x_ptr,
    row_ptr,
    sums_ptr,
    picked_ptr,
    first,
    B,
    N,
    temperature,
    cap,
    capped: tl.constexpr,
    entropy: tl.constexpr,
    squared: tl.constexpr,
    width: tl.constexpr,
    picks: tl.constexpr,
):
    """Add a block of columns to the sums of one row.

    Each lane keeps its own maximum, so that lanes meet only after the last column of the block.
    """
    c = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, width)
    top = tl.full([width], _LOWEST, tl.float32)
    total = tl.zeros([width], tl.float32)
    weighted = tl.zeros([width], tl.float32)
    squares = tl.zeros([width], tl.float32)
    for begin in range(0, B, width):
        inside = begin + lanes < B
        x = tl.load(x_ptr + c * B + begin + lanes, mask=inside, other=0.0)
        y, _ = tempered(x, temperature, cap, capped)
        y = tl.where(inside, y, _LOWEST)  # counts as 0, at the latest when lanes meet
        higher = tl.maximum(top, y)
        shift = top - higher
        decay = tl.exp(shift)
        z = y - higher
        e = tl.exp(z)
        if entropy:
            weighted = decay * (weighted + shift * total) + z * e
        if squared:
            squares = decay * decay * squares + e * e
        total = decay * total + e
        top = higher
    sums_ptr += c * (2 + entropy + squared)
    later = first > 0  # what the first block finds in memory counts nothing
    top_before = tl.load(sums_ptr, mask=later, other=_LOWEST)
    total_before = tl.load(sums_ptr + 1, mask=later, other=0.0)
    most = tl.maximum(tl.max(top, 0), top_before)
    shift = top - most
    decay = tl.exp(shift)
    shift_before = top_before - most
    decay_before = tl.exp(shift_before)
    tl.store(sums_ptr, most)
    tl.store(sums_ptr + 1, decay_before * total_before + tl.sum(decay * total, 0))
    if entropy:
        weighted_before = tl.load(sums_ptr + 2, mask=later, other=0.0)
        weighted_before = decay_before * (weighted_before + shift_before * total_before)
        tl.store(sums_ptr + 2, weighted_before + tl.sum(decay * (weighted + shift * total), 0))
    if squared:
        squares_before = tl.load(sums_ptr + 2 + entropy, mask=later, other=0.0)
        squares_before = decay_before * decay_before * squares_before
        tl.store(sums_ptr + 2 + entropy, squares_before + tl.sum(decay * decay * squares, 0))
    for begin in range(0, N, picks):
        n = begin + tl.arange(0, picks)
        column = tl.load(row_ptr + c * N + n, mask=n < N, other=-1) - first
        here = (column >= 0) & (column < B)
        picked_x = tl.load(x_ptr + c * B + column, mask=here, other=0.0)
        picked_y, _ = tempered(picked_x, temperature, cap, capped)
        tl.store(picked_ptr + c * N + n, picked_y, mask=here)


@triton.jit
def _d_logit(y, facts_ptr, entropy: tl.constexpr, squared: tl.constexpr):
    """Gradient of a tempered logit that is not picked."""
    logp = y - tl.load(facts_ptr)
    p = tl.exp(logp)
    factor = logp * 0.0 - tl.load(facts_ptr + 1)
    if entropy:
        factor -= tl.load(facts_ptr + 3) * (logp + tl.load(facts_ptr + 2))
    if squared:
        factor += 2.0 * tl.load(facts_ptr + 5) * (p - tl.load(facts_ptr + 4))
    return p * factor


@triton.jit
def _d_logits(
    x_ptr,
    row_ptr,
    grad_ptr,
    facts_ptr,
    out_ptr,
    first,
    B,
    stride,
    N,
    temperature,
    cap,
    capped: tl.constexpr,
    entropy: tl.constexpr,
    squared: tl.constexpr,
    width: tl.constexpr,
):
    """Gradients of some logits of one row of a block."""
    c = tl.program_id(0).to(tl.int64)
    facts_ptr += c * 6
    begin = tl.program_id(1) * width
    column = begin + tl.arange(0, width)
    x = tl.load(x_ptr + c * B + column, mask=column < B, other=0.0)
    y, slope = tempered(x, temperature, cap, capped)
    d = _d_logit(y, facts_ptr, entropy, squared)
    for n in range(0, N):  # a token may be picked twice
        picked = tl.load(row_ptr + c * N + n) - first
        if (picked >= begin) & (picked < begin + width):
            d += tl.where(column == picked, tl.load(grad_ptr + c * N + n), 0.0)
    tl.store(out_ptr + c * stride + column, d * slope, mask=column < B)


def launch_row_sums(block: LogitBlock, sums_CS: Tensor, picked_CN: Tensor, settings: RowSettings) -> None:
    """Add a block of columns to the running sums of rows, by one read of its logits.

    Args: those of `funrl.compiled_kernels.logit_rows.operators.add_row_sums_`.
    """
    temperature, cap, entropy, squared = settings
    x_CB, row_CN, first = block
    C, B = x_CB.shape
    N = row_CN.shape[1]
    assert sums_CS.is_contiguous() and picked_CN.is_contiguous(), "rows of sums stand end to end"
    if C:
        tensors = x_CB.contiguous(), row_CN.contiguous(), sums_CS, picked_CN
        width, picks = widths(B, N)
        flags = bool(cap), entropy, squared, width, picks
        run_kernel(_row_sums, (C,), tensors, (first, B, N, temperature, cap or 1.0), flags)


def launch_gradients(
    out_CB: Tensor, block: LogitBlock, grad_CN: Tensor, facts_C6: Tensor, settings: RowSettings
) -> None:
    """Write the gradient of a block of logits to `out_CB`, which shares no memory with it, by one read and one write.

    Args: those of `funrl.compiled_kernels.logit_rows.operators.logit_gradients`.
    """
    temperature, cap, entropy, squared = settings
    x_CB, row_CN, first = block
    C, B = x_CB.shape
    N = row_CN.shape[1]
    assert out_CB.stride(1) == 1, "columns of gradients stand side by side"
    if C:
        tensors = *(x.contiguous() for x in (x_CB, row_CN, grad_CN, facts_C6)), out_CB
        width, _ = widths(B, N)
        numbers = first, B, out_CB.stride(0), N, temperature, cap or 1.0
        run_kernel(_d_logits, (C, triton.cdiv(B, width)), tensors, numbers, (bool(cap), entropy, squared, width))


def run_kernel(kernel: Any, programs: tuple[int, ...], tensors: tuple, numbers: tuple, flags: tuple) -> None:
    """Run a kernel of one of these files."""
    kernel[programs](*tensors, *numbers, *flags, num_warps=_WARPS)


def widths(V: int, N: int) -> tuple[int, int]:
    """Columns of a program, and picked columns at a time."""
    return min(_WIDTH, triton.next_power_of_2(V)), min(_WIDTH, triton.next_power_of_2(max(1, N)))
