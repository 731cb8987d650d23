"""Triton kernels between the products of a decoding pass: one new token of each of B sequences.

Each kernel replaces several operators, so that a layer takes ten launches. A product may arrive in parts, whose sum it
is ([P, B, N] float32, of `launch_split_product`), or whole ([B, N], by the library); each consumer takes either.

On NVIDIA GPUs from compute capability 9.0 on a kernel is launched while the one before it still runs (programmatic
dependent launch), and waits for it before its first read of a result.
"""

# A kernel is in Triton's language, whose types a checker of Python's does not know.
# pyright: reportGeneralTypeIssues=false, reportArgumentType=false, reportReturnType=false
# pyright: reportCallIssue=false, reportAttributeAccessIssue=false
from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton  # type: ignore[import-not-found]
import triton.language as tl  # type: ignore[import-not-found]
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait  # type: ignore[import-not-found]

from funrl.compiled_kernels.decode_slots import ENDED, LENGTH, SPLIT_TILE, PassForm, SlotState
from funrl.compiled_kernels.exact.dispatch import aligned_on
from funrl.compiled_kernels.float8 import SMALLEST_SCALE

_LEAST_ROWS = 16  # columns of a product of matrices at least
_BLOCK = 128  # terms of a sum at a time
_GATE_BLOCK = 1024


class NormScale(NamedTuple):
    """A root-mean-square norm: x / sqrt(mean(x^2) + eps) * weight."""

    weight_D: Tensor
    eps: float


def row_warps(size: int) -> int:
    """Warps of a program that normalizes a row of this size, in every kernel that does: they add in one order."""
    return 1 if size <= 256 else 4 if size <= 1024 else 8


@functools.cache
def overlaps() -> bool:
    """True if this machine's GPU can launch a kernel before the one before it has ended."""
    return torch.version.hip is None and torch.cuda.is_available() and torch.cuda.get_device_capability()[0] >= 9


def launch_kernel(
    kernel: Any, grid: tuple[int, ...], args: Sequence[Any], constants: dict[str, Any], warps: int = 4
) -> None:
    """Launch a kernel whose last constant is `pdl`; where bits are to be the trainer's, without contracted products."""
    pdl = overlaps()
    options = {"launch_pdl": True} if pdl else {}
    if aligned_on("cuda"):
        options["enable_fp_fusion"] = False
    kernel[grid](*args, **constants, pdl=pdl, num_warps=warps, **options)


@triton.jit
def _summed(x_ptr, offset, stride, inside, parts: tl.constexpr):
    """Numbers of a product, float32: the sum of its parts."""
    x = tl.load(x_ptr + offset, mask=inside, other=0.0).to(tl.float32)
    for part in tl.static_range(1, parts):
        x += tl.load(x_ptr + offset + part * stride, mask=inside, other=0.0)
    return x


@triton.jit
def _add_norm(
    x_ptr,
    branch_ptr,
    bias_ptr,
    weight_ptr,
    out_ptr,
    stride,
    eps,
    numbers: tl.constexpr,
    width: tl.constexpr,
    parts: tl.constexpr,
    biased: tl.constexpr,
    pdl: tl.constexpr,
):
    """Add a branch to one row of the residual stream, and normalize the sum."""
    if pdl:
        gdc_wait()
        gdc_launch_dependents()
    column = tl.arange(0, width)
    inside = column < numbers
    here = tl.program_id(0).to(tl.int64) * numbers + column
    dtype = x_ptr.dtype.element_ty
    branch = _summed(branch_ptr, here, stride, inside, parts).to(dtype)
    if biased:
        branch = (branch.to(tl.float32) + tl.load(bias_ptr + column, mask=inside, other=0.0).to(tl.float32)).to(dtype)
    x = tl.load(x_ptr + here, mask=inside, other=0.0).to(tl.float32) + branch.to(tl.float32)
    x = x.to(dtype)
    tl.store(x_ptr + here, x, mask=inside)
    wide = x.to(tl.float32)
    unit = (wide / tl.sqrt(tl.sum(wide * wide) / numbers + eps)).to(dtype)
    weight = tl.load(weight_ptr + column, mask=inside, other=0.0)
    tl.store(out_ptr + here, (unit.to(tl.float32) * weight.to(tl.float32)).to(dtype), mask=inside)


@triton.jit
def _begin(
    rows_ptr,
    tokens_ptr,
    numbers_ptr,
    table_ptr,
    embed_ptr,
    weight_ptr,
    frequency_ptr,
    x_ptr,
    out_ptr,
    cos_ptr,
    sin_ptr,
    places_ptr,
    ends_ptr,
    offsets_ptr,
    pages_ptr,
    slots,
    stride,
    spare,
    eps,
    amplitude,
    length_row: tl.constexpr,
    ended_row: tl.constexpr,
    page: tl.constexpr,
    pages: tl.constexpr,
    numbers: tl.constexpr,
    width: tl.constexpr,
    head: tl.constexpr,
    half: tl.constexpr,
    pdl: tl.constexpr,
):
    """Place, pages, rotation, embedding and first norm of the last token of one row."""
    if pdl:
        gdc_wait()
        gdc_launch_dependents()
    b = tl.program_id(0).to(tl.int64)
    slot = tl.load(rows_ptr + b)
    running = tl.load(numbers_ptr + ended_row * slots + slot) == 0
    position = tl.where(running, tl.load(numbers_ptr + length_row * slots + slot) - 1, 0)
    number = tl.load(table_ptr + slot * stride + position // page).to(tl.int64)
    tl.store(places_ptr + b, tl.where(running, number, spare) * page + position % page)
    tl.store(ends_ptr + b, (position + 1).to(tl.int32))
    tl.store(offsets_ptr + b, b.to(tl.int32))
    if b == tl.num_programs(0) - 1:
        tl.store(offsets_ptr + b + 1, (b + 1).to(tl.int32))
    for first in range(0, pages, 128):
        index = first + tl.arange(0, 128)
        copied = tl.load(table_ptr + slot * stride + index, mask=index < pages, other=0)
        tl.store(pages_ptr + b * pages + index, copied, mask=index < pages)
    dtype = x_ptr.dtype.element_ty
    turn = tl.arange(0, half)
    turning = turn < head // 2
    angle = position.to(tl.float32) * tl.load(frequency_ptr + turn, mask=turning, other=0.0)
    cos = (tl.cos(angle) * amplitude).to(dtype)
    sin = (tl.sin(angle) * amplitude).to(dtype)
    here = b * head + turn
    tl.store(cos_ptr + here, cos, mask=turning)
    tl.store(cos_ptr + here + head // 2, cos, mask=turning)
    tl.store(sin_ptr + here, -sin, mask=turning)
    tl.store(sin_ptr + here + head // 2, sin, mask=turning)
    column = tl.arange(0, width)
    inside = column < numbers
    x = tl.load(embed_ptr + tl.load(tokens_ptr + slot) * numbers + column, mask=inside, other=0.0)
    tl.store(x_ptr + b * numbers + column, x, mask=inside)
    wide = x.to(tl.float32)
    unit = (wide / tl.sqrt(tl.sum(wide * wide) / numbers + eps)).to(dtype)
    weight = tl.load(weight_ptr + column, mask=inside, other=0.0)
    tl.store(out_ptr + b * numbers + column, (unit.to(tl.float32) * weight.to(tl.float32)).to(dtype), mask=inside)


@triton.jit
def _head(
    x_ptr,
    bias_ptr,
    column,
    inside,
    b,
    i,
    heads,
    stride,
    head: tl.constexpr,
    parts: tl.constexpr,
    biased: tl.constexpr,
    dtype: tl.constexpr,
):
    """Numbers of one head of a product in the order of `column`, float32, rounded as operators of `dtype` round."""
    x = _summed(x_ptr, (b * heads + i) * head + column, stride, inside, parts).to(dtype).to(tl.float32)
    if biased:
        x = (x + tl.load(bias_ptr + i * head + column, mask=inside, other=0.0).to(tl.float32)).to(dtype).to(tl.float32)
    return x


@triton.jit
def _normed(x, root, norm_ptr, column, inside, dtype: tl.constexpr):
    """Numbers of a head over the root of its mean square, in the order of `column`."""
    unit = (x / root).to(dtype).to(tl.float32)
    return (unit * tl.load(norm_ptr + column, mask=inside, other=0.0).to(tl.float32)).to(dtype).to(tl.float32)


@triton.jit
def _heads(
    x_ptr,
    bias_ptr,
    q_norm_ptr,
    k_norm_ptr,
    cos_ptr,
    sin_ptr,
    places_ptr,
    q_ptr,
    keys_ptr,
    values_ptr,
    stride,
    eps,
    queries: tl.constexpr,
    keys: tl.constexpr,
    head: tl.constexpr,
    width: tl.constexpr,
    parts: tl.constexpr,
    biased: tl.constexpr,
    normed: tl.constexpr,
    pdl: tl.constexpr,
):
    """One head of one token: a query is normalized and rotated, a key is written to its page too, a value as it is."""
    if pdl:
        gdc_wait()
        gdc_launch_dependents()
    b = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1)
    heads: tl.constexpr = queries + 2 * keys
    column = tl.arange(0, width)
    inside = column < head
    dtype: tl.constexpr = q_ptr.dtype.element_ty
    place = tl.load(places_ptr + b)
    if i >= queries + keys:
        value = _head(x_ptr, bias_ptr, column, inside, b, i, heads, stride, head, parts, biased, dtype)
        to = (place * keys + i - queries - keys) * head + column
        tl.store(values_ptr + to, value.to(dtype), mask=inside)
    else:
        norm_ptr = k_norm_ptr if i >= queries else q_norm_ptr
        other = (column + head // 2) % head
        x = _head(x_ptr, bias_ptr, column, inside, b, i, heads, stride, head, parts, biased, dtype)
        y = _head(x_ptr, bias_ptr, other, inside, b, i, heads, stride, head, parts, biased, dtype)
        if normed:
            root = tl.sqrt(tl.sum(x * x) / head + eps)
            x = _normed(x, root, norm_ptr, column, inside, dtype)
            y = _normed(y, root, norm_ptr, other, inside, dtype)
        cos = tl.load(cos_ptr + b * head + column, mask=inside, other=0.0).to(tl.float32)
        sin = tl.load(sin_ptr + b * head + column, mask=inside, other=0.0).to(tl.float32)
        turned = (x * cos + y * sin).to(dtype)
        if i >= queries:
            tl.store(keys_ptr + (place * keys + i - queries) * head + column, turned, mask=inside)
        else:
            tl.store(q_ptr + (b * queries + i) * head + column, turned, mask=inside)


@triton.jit
def _gate(x_ptr, out_ptr, stride, numbers: tl.constexpr, block: tl.constexpr, parts: tl.constexpr, pdl: tl.constexpr):
    """silu(gate) * up of some numbers of one token."""
    if pdl:
        gdc_wait()
        gdc_launch_dependents()
    b = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * block + tl.arange(0, block)
    inside = column < numbers
    dtype = out_ptr.dtype.element_ty
    gate = _summed(x_ptr, b * 2 * numbers + column, stride, inside, parts).to(dtype).to(tl.float32)
    up = _summed(x_ptr, (b * 2 + 1) * numbers + column, stride, inside, parts).to(dtype).to(tl.float32)
    active = (gate / (1.0 + tl.exp(-gate))).to(dtype).to(tl.float32)
    tl.store(out_ptr + b * numbers + column, (active * up).to(dtype), mask=inside)


@triton.jit
def _split_product(
    x_ptr,
    w_ptr,
    out_ptr,
    rows,
    outputs,
    inner,
    span,
    count: tl.constexpr,
    tile: tl.constexpr,
    block: tl.constexpr,
    pdl: tl.constexpr,
):
    """Sums of some outputs of all rows over one part of the inner dim."""
    first = tl.program_id(0) * tile + tl.arange(0, tile)
    part = tl.program_id(1)
    k = part * span + tl.arange(0, block)
    stop = tl.minimum((part + 1) * span, inner)
    r = tl.arange(0, count)
    w_at = w_ptr + first[:, None].to(tl.int64) * inner
    # The weight is no result of the kernel before: its first tile is on its way while that one ends.
    w = tl.load(w_at + k[None, :], mask=(first < outputs)[:, None] & (k < stop)[None, :], other=0.0)
    if pdl:
        gdc_wait()
        gdc_launch_dependents()
    acc = tl.zeros([tile, count], tl.float32)
    for _ in range(0, span, block):
        x = tl.load(x_ptr + r[None, :] * inner + k[:, None], mask=(r < rows)[None, :] & (k < stop)[:, None], other=0.0)
        acc = tl.dot(w, x, acc, input_precision="ieee")
        k += block
        w = tl.load(w_at + k[None, :], mask=(first < outputs)[:, None] & (k < stop)[None, :], other=0.0)
    to = (part * rows + r[None, :]) * outputs + first[:, None]
    tl.store(out_ptr + to, acc, mask=(first < outputs)[:, None] & (r < rows)[None, :])


@triton.jit
def _round_rows(
    x_ptr, out_ptr, scale_ptr, largest, smallest, numbers: tl.constexpr, width: tl.constexpr, pdl: tl.constexpr
):
    """Numbers of one row in 8 bits, and their scale."""
    if pdl:
        gdc_wait()
        gdc_launch_dependents()
    b = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, width)
    inside = column < numbers
    x = tl.load(x_ptr + b * numbers + column, mask=inside, other=0.0).to(tl.float32)
    scale = tl.maximum(tl.div_rn(tl.max(tl.abs(x)), largest), smallest)
    tl.store(scale_ptr + b, scale)
    tl.store(out_ptr + b * numbers + column, tl.div_rn(x, scale).to(out_ptr.dtype.element_ty), mask=inside)


def launch_round_rows(x_BK: Tensor, form: torch.dtype) -> tuple[Tensor, Tensor]:
    """Rows in an 8-bit format, and the scale of each, [B] float32; as `float8.round_rows`."""
    B, K = x_BK.shape
    out_BK = torch.empty(B, K, dtype=form, device=x_BK.device)
    scale_B = torch.empty(B, dtype=torch.float32, device=x_BK.device)
    constants = {"numbers": K, "width": triton.next_power_of_2(K)}
    bounds = torch.finfo(form).max, SMALLEST_SCALE
    launch_kernel(_round_rows, (B,), (x_BK, out_BK, scale_B, *bounds), constants, warps=8 if K > 1024 else 4)
    return out_BK, scale_B


def launch_add_norm(x_BD: Tensor, branch: Tensor, bias_D: Tensor | None, norm: NormScale) -> Tensor:
    """Add a product to the residual stream in place; returns the normalized sum [B, D]."""
    B, D = x_BD.shape
    out_BD = torch.empty_like(x_BD)
    tensors = x_BD, branch, x_BD if bias_D is None else bias_D, norm.weight_D, out_BD
    constants = {"numbers": D, "width": triton.next_power_of_2(D), "parts": product_parts(branch)}
    constants |= {"biased": bias_D is not None}
    launch_kernel(_add_norm, (B,), (*tensors, B * D, norm.eps), constants, warps=row_warps(D))
    return out_BD


def product_parts(product: Tensor) -> int:
    """Number of parts of a product, [P, B, N] or [B, N]."""
    return product.shape[0] if product.dim() == 3 else 1


def launch_begin(
    rows_B: Tensor,
    state: SlotState,
    embed_VD: Tensor,
    rope: tuple[Tensor, float],
    norm: NormScale,
    form: PassForm,
) -> tuple[Tensor, ...]:
    """Read the last tokens of the rows of a pass, and embed, normalize and place them.

    Args:
      rows_B: int64 slots.
      state: of all slots.
      embed_VD: the embedding.
      rope: frequencies [N / 2] float32, and the factor of what is turned.
      norm: the first one.
      form: constants of the pass.

    Returns: embeddings; the same after the norm; cosines and sines [B, N], as those of `rotary.Rotary`; places, ends,
      offsets and pages, as in `paged_attention.Paging`.
    """
    frequency, amplitude = rope
    B = len(rows_B)
    D = embed_VD.shape[1]
    half = len(frequency)
    reals = [embed_VD.new_empty(B, size) for size in (D, D, 2 * half, 2 * half)]
    wholes = [rows_B.new_empty(shape, dtype=torch.int32) for shape in ((B,), (B + 1,), (B, form.pages))]
    out = *reals, torch.empty_like(rows_B), *wholes
    given = rows_B, *state, embed_VD, norm.weight_D, frequency, *out
    scalars = state.numbers_CS.stride(0), state.table_SP.stride(0), form.spare, norm.eps, amplitude
    constants = {"length_row": LENGTH, "ended_row": ENDED, "page": form.page, "pages": form.pages, "numbers": D}
    constants |= {"width": triton.next_power_of_2(D), "head": 2 * half, "half": triton.next_power_of_2(half)}
    launch_kernel(_begin, (B,), (*given, *scalars), constants, warps=row_warps(D))
    return out


def launch_heads(
    x: Tensor,
    bias_M: Tensor | None,
    norms: tuple[Tensor, Tensor] | None,
    eps: float,
    rotation: tuple[Tensor, Tensor, Tensor],
    cache: tuple[Tensor, Tensor],
) -> Tensor:
    """Normalize and rotate queries and keys, and write keys and values to their pages; returns the queries [B, H, N].

    Args:
      x: product of the tokens with the stacked weight of queries, keys and values.
      bias_M: likewise stacked; None: there is none.
      norms: weights of the norms of queries and of keys; None: they have none.
      eps: of these.
      rotation: cosines, sines and places of the tokens.
      cache: keys and values, pages [P, page, K, N].
    """
    K, N = cache[0].shape[2:]
    B, M = x.shape[-2:]
    H = M // N - 2 * K
    q_BHN = cache[0].new_empty(B, H, N)
    unused = rotation[0]
    given = x, unused if bias_M is None else bias_M, *(norms or (unused, unused)), *rotation
    constants = {"queries": H, "keys": K, "head": N, "width": triton.next_power_of_2(N), "parts": product_parts(x)}
    constants |= {"biased": bias_M is not None, "normed": norms is not None}
    launch_kernel(_heads, (B, H + 2 * K), (*given, q_BHN, *cache, B * M, eps), constants, warps=row_warps(N))
    return q_BHN


def launch_gate(x: Tensor, dtype: torch.dtype) -> Tensor:
    """silu(gate) * up, [B, F] in `dtype`, of a product [..., 2 F] with the stacked weight of both."""
    B, numbers = x.shape[-2:]
    F = numbers // 2
    out_BF = torch.empty(B, F, dtype=dtype, device=x.device)
    constants = {"numbers": F, "block": _GATE_BLOCK, "parts": product_parts(x)}
    launch_kernel(_gate, (B, triton.cdiv(F, _GATE_BLOCK)), (x, out_BF, B * numbers), constants)
    return out_BF


def launch_split_product(x_BK: Tensor, weight_MK: Tensor, parts: int) -> Tensor:
    """Products of at most `SPLIT_ROWS` rows with a weight, in parts [P, B, M] float32 whose sum they are.

    A row's numbers do not depend on other rows.
    """
    B, K = x_BK.shape
    M = len(weight_MK)
    span = triton.cdiv(triton.cdiv(K, parts), _BLOCK) * _BLOCK
    out_PBM = torch.empty(parts, B, M, dtype=torch.float32, device=x_BK.device)
    constants = {"count": _LEAST_ROWS, "tile": SPLIT_TILE, "block": _BLOCK}
    grid = triton.cdiv(M, SPLIT_TILE), parts
    launch_kernel(_split_product, grid, (x_BK, weight_MK, out_PBM, B, M, K, span), constants)
    return out_PBM
