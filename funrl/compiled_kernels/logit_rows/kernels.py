"""Triton kernels that read each logit once; `plain`, beside this file, computes the same in several passes.

The source asks for no compute capability and no size of a warp: NVIDIA and ROCm compile it, and Triton's interpreter
runs it on a CPU where TRITON_INTERPRET=1 stands in the environment before triton is imported.
"""

# A kernel is in Triton's language, whose types a checker of Python's does not know.
# pyright: reportGeneralTypeIssues=false, reportArgumentType=false, reportReturnType=false
from __future__ import annotations

from typing import Any

import torch
import triton  # type: ignore[import-not-found]
import triton.language as tl  # type: ignore[import-not-found]
from torch import Tensor

from funrl.compiled_kernels.logit_rows.settings import RowSettings

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
    V,
    N,
    temperature,
    cap,
    capped: tl.constexpr,
    entropy: tl.constexpr,
    squared: tl.constexpr,
    width: tl.constexpr,
    picks: tl.constexpr,
):
    """Sums of one row. Each lane keeps its own maximum, so that lanes meet only after the last column."""
    c = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, width)
    top = tl.full([width], _LOWEST, tl.float32)
    total = tl.zeros([width], tl.float32)
    weighted = tl.zeros([width], tl.float32)
    squares = tl.zeros([width], tl.float32)
    for begin in range(0, V, width):
        inside = begin + lanes < V
        x = tl.load(x_ptr + c * V + begin + lanes, mask=inside, other=0.0)
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
    most = tl.max(top, 0)
    shift = top - most
    decay = tl.exp(shift)
    sums_ptr += c * (2 + entropy + squared)
    tl.store(sums_ptr, most)
    tl.store(sums_ptr + 1, tl.sum(decay * total, 0))
    if entropy:
        tl.store(sums_ptr + 2, tl.sum(decay * (weighted + shift * total), 0))
    if squared:
        tl.store(sums_ptr + 2 + entropy, tl.sum(decay * decay * squares, 0))
    for begin in range(0, N, picks):
        n = begin + tl.arange(0, picks)
        column = tl.load(row_ptr + c * N + n, mask=n < N, other=0)
        picked_x = tl.load(x_ptr + c * V + column, mask=n < N, other=0.0)
        picked_y, _ = tempered(picked_x, temperature, cap, capped)
        tl.store(picked_ptr + c * N + n, picked_y - most, mask=n < N)


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
    at_picked_ptr,
    V,
    N,
    temperature,
    cap,
    capped: tl.constexpr,
    entropy: tl.constexpr,
    squared: tl.constexpr,
    width: tl.constexpr,
    picks: tl.constexpr,
):
    """Gradients of some logits of one row as if none were picked, and by its first program those of picked ones."""
    c = tl.program_id(0).to(tl.int64)
    facts_ptr += c * 6
    column = tl.program_id(1) * width + tl.arange(0, width)
    x = tl.load(x_ptr + c * V + column, mask=column < V, other=0.0)
    y, slope = tempered(x, temperature, cap, capped)
    tl.store(out_ptr + c * V + column, _d_logit(y, facts_ptr, entropy, squared) * slope, mask=column < V)
    if tl.program_id(1) == 0:
        for begin in range(0, N, picks):
            n = begin + tl.arange(0, picks)
            picked = tl.load(row_ptr + c * N + n, mask=n < N, other=0)
            picked_x = tl.load(x_ptr + c * V + picked, mask=n < N, other=0.0)
            picked_y, picked_slope = tempered(picked_x, temperature, cap, capped)
            picked_d = _d_logit(picked_y, facts_ptr, entropy, squared)
            for other in range(0, N):  # a token may be picked twice
                same = picked == tl.load(row_ptr + c * N + other)
                picked_d += tl.where(same, tl.load(grad_ptr + c * N + other), 0.0)
            tl.store(at_picked_ptr + c * N + n, picked_d * picked_slope, mask=n < N)


def launch_row_sums(x_CV: Tensor, row_CN: Tensor, settings: RowSettings) -> tuple[Tensor, Tensor]:
    """Sums over the columns of logits, by one read of them.

    Args: those of `funrl.compiled_kernels.logit_rows.operators.logit_row_sums`.

    Returns: [C, S] float32 of z = logit / temperature, capped, and its maximum m: m, sum e^(z - m), and those wanted of
      sum (z - m) e^(z - m) and sum e^2(z - m); [C, N] z - m of the picked columns.
    """
    temperature, cap, entropy, squared = settings
    scale = temperature, cap or 1.0
    C, V = x_CV.shape
    N = row_CN.shape[1]
    sums_CS = torch.empty(C, 2 + entropy + squared, dtype=torch.float32, device=x_CV.device)
    picked_CN = torch.empty(C, N, dtype=torch.float32, device=x_CV.device)
    if C:
        tensors = x_CV.contiguous(), row_CN.contiguous(), sums_CS, picked_CN
        flags = bool(cap), entropy, squared, *widths(V, N)
        run_kernel(_row_sums, (C,), tensors, (V, N, *scale), flags)
    return sums_CS, picked_CN


def launch_gradients(
    out_CV: Tensor, x_CV: Tensor, row_CN: Tensor, grad_CN: Tensor, facts_C6: Tensor, settings: RowSettings
) -> None:
    """Write the gradient of logits to `out_CV`, which shares no memory with them, by one read and one write.

    Args: those of `funrl.compiled_kernels.logit_rows.operators.logit_gradients`.
    """
    temperature, cap, entropy, squared = settings
    scale = temperature, cap or 1.0
    C, V = x_CV.shape
    N = row_CN.shape[1]
    assert out_CV.is_contiguous(), "rows of gradients stand end to end"
    at_picked_CN = torch.empty(C, N, dtype=out_CV.dtype, device=x_CV.device)
    if C:
        inputs = (x.contiguous() for x in (x_CV, row_CN, grad_CN, facts_C6))
        tensors = *inputs, out_CV, at_picked_CN
        width, picks = widths(V, N)
        flags = bool(cap), entropy, squared, width, picks
        run_kernel(_d_logits, (C, triton.cdiv(V, width)), tensors, (V, N, *scale), flags)
        out_CV.scatter_(1, row_CN, at_picked_CN)  # of a token that is picked twice the two are equal


def run_kernel(kernel: Any, programs: tuple[int, ...], tensors: tuple, numbers: tuple, flags: tuple) -> None:
    """Run a kernel of one of these files."""
    kernel[programs](*tensors, *numbers, *flags, num_warps=_WARPS)


def widths(V: int, N: int) -> tuple[int, int]:
    """Columns of a program, and picked columns at a time."""
    return min(_WIDTH, triton.next_power_of_2(V)), min(_WIDTH, triton.next_power_of_2(max(1, N)))
