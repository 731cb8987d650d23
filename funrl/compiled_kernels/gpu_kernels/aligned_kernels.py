"""Triton kernels whose order of sums depends on no batch: a token's bits are the same alone, packed, paged or padded.

    product      K in blocks of 64, in as many parts as K says; parts are added in order
    attention    keys in blocks of 64 from the sequence's first one, 512 to a part; parts are joined in order
    norm         one row, in one block
    logit sums   blocks of 4,096 of the vocabulary, added in order

Training, prompts and decoding differ in how many programs share the work, never in what is added to what. Every product
of matrices has tiles of at least 64 rows, so that Hopper computes all of them by `wgmma` with 16 terms at a time, and
CDNA by `mfma` of 32 x 32; multiplications and additions are not contracted. See He et al., 2025, Defeating
Nondeterminism in LLM Inference, https://thinkingmachines.ai/blog/defeating-nondeterminism-in-llm-inference/
"""

# A kernel is in Triton's language, whose types a checker of Python's does not know.
# pyright: reportGeneralTypeIssues=false, reportArgumentType=false, reportReturnType=false
# pyright: reportCallIssue=false, reportAttributeAccessIssue=false
from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton  # type: ignore[import-not-found]
import triton.language as tl  # type: ignore[import-not-found]
from torch import Tensor

from funrl.compiled_kernels.gpu_kernels.decode_kernels import row_warps
from funrl.compiled_kernels.gpu_kernels.page_kernels import PARTS_BYTES, WIDE_HEAD, _sequence_of_tile

_ROWS = 64  # of a tile of a product, the least that a warp group of Hopper multiplies
_BLOCK = 64  # terms of a product, and keys, at a time
_LEAST_PART = 1024  # terms of a part at least
_MOST_PARTS = 4
_PROGRAMS = 128  # about as many as a GPU has processors
KEYS_PART = 512  # keys of a part
_LOGITS = 4096  # logits that a program sums
_NUMBERS = 1024  # numbers of a program of an elementwise kernel
_ALL = 1 << 30  # tokens of a window that has no end
_LOG2E = tl.constexpr(1.4426950408889634)
_LN2 = tl.constexpr(0.6931471805599453)
_LOWEST = tl.constexpr(-1e30)  # below every logit and finite, so that no difference of two is not a number


class ProductTiles(NamedTuple):
    """Shares of a product between programs; no choice of these changes a bit.

    Attributes:
      rows, outputs: of a tile.
      warps: of a program.
      split: each part has programs of its own, and a second kernel adds the parts.
    """

    rows: int
    outputs: int
    warps: int
    split: bool


@triton.jit
def _part(
    x_ptr,
    w_ptr,
    r,
    c,
    first,
    stop,
    rows,
    outputs,
    inner,
    tile_rows: tl.constexpr,
    tile: tl.constexpr,
    block: tl.constexpr,
    even: tl.constexpr,
):
    """Sums of a tile over the terms from `first` to `stop`; `even`: all blocks are whole."""
    acc = tl.zeros([tile_rows, tile], tl.float32)
    k = tl.arange(0, block)
    x_at = x_ptr + first + r[:, None].to(tl.int64) * inner + k[None, :]
    w_at = w_ptr + first + c[:, None].to(tl.int64) * inner + k[None, :]
    x_mask = (r < rows)[:, None]
    w_mask = (c < outputs)[:, None]
    for begin in range(first, stop, block):
        if even:
            x = tl.load(x_at, mask=x_mask, other=0.0)
            w = tl.load(w_at, mask=w_mask, other=0.0)
        else:
            x = tl.load(x_at, mask=x_mask & (k < stop - begin)[None, :], other=0.0)
            w = tl.load(w_at, mask=w_mask & (k < stop - begin)[None, :], other=0.0)
        acc = tl.dot(x, tl.trans(w), acc, input_precision="ieee")
        x_at += block
        w_at += block
    return acc


@triton.jit
def _product(
    x_ptr,
    w_ptr,
    bias_ptr,
    out_ptr,
    rows,
    outputs,
    inner,
    span,
    parts,
    tile_rows: tl.constexpr,
    tile: tl.constexpr,
    block: tl.constexpr,
    biased: tl.constexpr,
    even: tl.constexpr,
    split: tl.constexpr,
):
    """A tile of x w^T: the whole sum, or one part of it."""
    row_tiles = tl.cdiv(rows, tile_rows)
    band = 8 * tl.cdiv(outputs, tile)  # of eight tiles of rows, which share weights in the L2
    first_tile = tl.program_id(0) // band * 8
    height = tl.minimum(row_tiles - first_tile, 8)
    place = tl.program_id(0) % band
    r = (first_tile + place % height) * tile_rows + tl.arange(0, tile_rows)
    c = place // height * tile + tl.arange(0, tile)
    inside = (r < rows)[:, None] & (c < outputs)[None, :]
    n = tl.program_id(1) if split else 0
    first = n * span
    stop = tl.minimum(first + span, inner)
    total = _part(x_ptr, w_ptr, r, c, first, stop, rows, outputs, inner, tile_rows, tile, block, even)
    if split:
        to = (n.to(tl.int64) * rows + r[:, None]) * outputs + c[None, :]
        tl.store(out_ptr + to, total, mask=inside)
    else:
        for m in range(1, parts):
            first = m * span
            stop = tl.minimum(first + span, inner)
            total += _part(x_ptr, w_ptr, r, c, first, stop, rows, outputs, inner, tile_rows, tile, block, even)
        if biased:
            total = total.to(out_ptr.dtype.element_ty).to(tl.float32)
            total += tl.load(bias_ptr + c, mask=c < outputs, other=0.0).to(tl.float32)[None, :]
        to = r[:, None].to(tl.int64) * outputs + c[None, :]
        tl.store(out_ptr + to, total.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _add_parts(parts_ptr, bias_ptr, out_ptr, numbers, outputs, parts, block: tl.constexpr, biased: tl.constexpr):
    """Add the parts of a product in order."""
    i = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    inside = i < numbers
    total = tl.load(parts_ptr + i, mask=inside, other=0.0)
    for n in range(1, parts):
        total += tl.load(parts_ptr + n * numbers + i, mask=inside, other=0.0)
    if biased:
        total = total.to(out_ptr.dtype.element_ty).to(tl.float32)
        total += tl.load(bias_ptr + i % outputs, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + i, total.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _join(top, total, acc, its_top, its_total, its_acc):
    """Maxima, sums and weighted values of queries, with those of a further part of their keys."""
    higher = tl.maximum(top, its_top)
    decay = tl.exp2(top - higher)
    its_decay = tl.exp2(its_top - higher)
    return higher, decay * total + its_decay * its_total, decay[:, None] * acc + its_decay[:, None] * its_acc


@triton.jit
def _attend_part(
    q,
    seen_from,
    seen_to,
    k_ptr,
    v_ptr,
    table_ptr,
    first,
    stop,
    kv_heads,
    scale,
    cap,
    page: tl.constexpr,
    block: tl.constexpr,
    size: tl.constexpr,
    width: tl.constexpr,
    capped: tl.constexpr,
):
    """Maxima, sums and weighted values of queries over the keys of one part, from `first`, of a block, to `stop`.

    A block that a query does not see leaves its numbers as they are, so it plays no part who else is in the tile.
    """
    rows: tl.constexpr = q.shape[0]
    column = tl.arange(0, width)
    top = tl.full([rows], _LOWEST, tl.float32)
    total = tl.zeros([rows], tl.float32)
    acc = tl.zeros([rows, width], tl.float32)
    for begin in range(first, stop, block):
        position = begin + tl.arange(0, block)
        if page > 0:
            token = (
                tl.load(table_ptr + position // page, mask=position < stop, other=0).to(tl.int64) * page
                + position % page
            )
        else:
            token = position  # of those behind the pointers
        here = token[:, None] * (kv_heads * size) + column[None, :]
        inside = (position < stop)[:, None] & (column < size)[None, :]
        k = tl.load(k_ptr + here, mask=inside, other=0.0)
        v = tl.load(v_ptr + here, mask=inside, other=0.0)
        x = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        if capped:  # tanh z is 1 - 2 / (e^2z + 1)
            x = cap * (1.0 - 2.0 / (tl.exp(2.0 * (x / cap)) + 1.0))
        seen = (position[None, :] >= seen_from[:, None]) & (position[None, :] <= seen_to[:, None])
        x = tl.where(seen, x * _LOG2E, _LOWEST)
        higher = tl.maximum(top, tl.max(x, 1))
        weights = tl.where(seen, tl.exp2(x - higher[:, None]), 0.0)
        decay = tl.exp2(top - higher)
        total = decay * total + tl.sum(weights, 1)
        acc = decay[:, None] * acc + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        top = higher
    return top, total, acc


@triton.jit
def _attend_parts(
    q,
    position,
    last,
    low,
    begin_part,
    end_part,
    k_ptr,
    v_ptr,
    here,
    table_ptr,
    kv_heads,
    scale,
    cap,
    window,
    part: tl.constexpr,
    page: tl.constexpr,
    block: tl.constexpr,
    size: tl.constexpr,
    width: tl.constexpr,
    capped: tl.constexpr,
    split: tl.constexpr,
):
    """`_attend_part` over some parts, joined in order; with `split` over the only one."""
    rows: tl.constexpr = q.shape[0]
    top = tl.full([rows], _LOWEST, tl.float32)
    total = tl.zeros([rows], tl.float32)
    acc = tl.zeros([rows, width], tl.float32)
    for n in range(begin_part, end_part):
        its_top, its_total, its_acc = _attend_part(
            q,
            position - window + 1,
            position,
            k_ptr + here,
            v_ptr + here,
            table_ptr,
            tl.maximum(n * part, low // block * block),
            tl.minimum(n * part + part, last),
            kv_heads,
            scale,
            cap,
            page,
            block,
            size,
            width,
            capped,
        )
        if split:
            top = its_top
            total = its_total
            acc = its_acc
        else:
            top, total, acc = _join(top, total, acc, its_top, its_total, its_acc)
    return top, total, acc


@triton.jit
def _attend(
    q_ptr,
    k_ptr,
    v_ptr,
    table_ptr,
    offsets_ptr,
    ends_ptr,
    out_ptr,
    lse_ptr,
    sums_ptr,
    queries,
    sequences,
    pages,
    kv_heads,
    scale,
    cap,
    window,
    part: tl.constexpr,
    tokens: tl.constexpr,
    page: tl.constexpr,
    block: tl.constexpr,
    group: tl.constexpr,
    heads: tl.constexpr,
    size: tl.constexpr,
    width: tl.constexpr,
    capped: tl.constexpr,
    split: tl.constexpr,
):
    """Neighbouring tokens of one sequence, by the query heads of one key-value head: over all parts, or over one.

    Keys are in pages, or (page 0) as the queries, which are then all tokens of their sequences.
    """
    tile = tl.program_id(0)
    kv_head = tl.program_id(1)
    s = _sequence_of_tile(offsets_ptr, sequences, tile, tokens)
    begin = tl.load(offsets_ptr + s)
    stop = tl.load(offsets_ptr + s + 1)
    first_token = begin + (tile - begin // tokens - s) * tokens
    if first_token < stop:
        end = tl.load(ends_ptr + s) if page > 0 else stop - begin
        r = tl.arange(0, tokens * heads)
        t = first_token + r // heads
        member = r % heads
        column = tl.arange(0, width)
        held = (t < stop) & (member < group)
        head = t.to(tl.int64) * (kv_heads * group) + kv_head * group + member
        place = head[:, None] * size + column[None, :]
        inside = held[:, None] & (column < size)[None, :]
        q = tl.load(q_ptr + place, mask=inside, other=0.0)
        position = end - stop + t
        last = end - stop + tl.minimum(first_token + tokens, stop)
        low = tl.maximum(end - stop + first_token - window + 1, 0)
        table = table_ptr + s.to(tl.int64) * pages
        here = (kv_head if page > 0 else begin.to(tl.int64) * kv_heads + kv_head) * size
        begin_part = tl.program_id(2) if split else low // part
        end_part = begin_part + 1 if split else tl.cdiv(last, part)
        if (begin_part * part < last) & (end_part * part > low):
            top, total, acc = _attend_parts(
                q,
                position,
                last,
                low,
                begin_part,
                end_part,
                k_ptr,
                v_ptr,
                here,
                table,
                kv_heads,
                scale,
                cap,
                window,
                part,
                page,
                block,
                size,
                width,
                capped,
                split,
            )
            if split:
                to = head * tl.num_programs(2) + begin_part
                tl.store(sums_ptr + 2 * to, top, mask=held)
                tl.store(sums_ptr + 2 * to + 1, total, mask=held)
                tl.store(out_ptr + to[:, None] * size + column[None, :], acc, mask=inside)
            else:
                total = tl.where(held, total, 1.0)
                tl.store(out_ptr + place, (acc / total[:, None]).to(out_ptr.dtype.element_ty), mask=inside)
                lse = top * _LN2 + tl.log(total)
                tl.store(lse_ptr + (kv_head * group + member).to(tl.int64) * queries + t, lse, mask=held)


@triton.jit
def _join_parts(
    partial_ptr,
    sums_ptr,
    ends_ptr,
    out_ptr,
    lse_ptr,
    queries,
    parts,
    window,
    part: tl.constexpr,
    heads: tl.constexpr,
    width_heads: tl.constexpr,
    size: tl.constexpr,
    width: tl.constexpr,
):
    """Join the parts of one decoded token in order, by all of its heads."""
    t = tl.program_id(0).to(tl.int64)
    h = tl.arange(0, width_heads)
    held = h < heads
    end = tl.load(ends_ptr + t)
    column = tl.arange(0, width)
    inside = held[:, None] & (column < size)[None, :]
    top = tl.full([width_heads], _LOWEST, tl.float32)
    total = tl.zeros([width_heads], tl.float32)
    acc = tl.zeros([width_heads, width], tl.float32)
    for n in range(tl.maximum(end - window, 0) // part, tl.cdiv(end, part)):
        entry = (t * heads + h) * parts + n
        its_top = tl.load(sums_ptr + 2 * entry, mask=held, other=0.0)
        its_total = tl.load(sums_ptr + 2 * entry + 1, mask=held, other=1.0)
        its_acc = tl.load(partial_ptr + entry[:, None] * size + column[None, :], mask=inside, other=0.0)
        top, total, acc = _join(top, total, acc, its_top, its_total, its_acc)
    place = (t * heads + h)[:, None] * size + column[None, :]
    tl.store(out_ptr + place, (acc / total[:, None]).to(out_ptr.dtype.element_ty), mask=inside)
    tl.store(lse_ptr + h.to(tl.int64) * queries + t, top * _LN2 + tl.log(total), mask=held)


@triton.jit
def _norm(
    x_ptr,
    weight_ptr,
    out_ptr,
    rows,
    eps,
    offset,
    numbers: tl.constexpr,
    width: tl.constexpr,
    count: tl.constexpr,
    shifted: tl.constexpr,
):
    """Normalize some rows, one by one: sums are those of the decoding pass's kernels, which have a row each."""
    column = tl.arange(0, width)
    inside = column < numbers
    dtype = x_ptr.dtype.element_ty
    weight = tl.load(weight_ptr + column, mask=inside, other=0.0).to(tl.float32)
    first = tl.program_id(0).to(tl.int64) * count
    for row in range(first, tl.minimum(first + count, rows)):
        here = row * numbers + column
        x = tl.load(x_ptr + here, mask=inside, other=0.0).to(tl.float32)
        unit = x / tl.sqrt(tl.sum(x * x) / numbers + eps)
        out = unit * (offset + weight) if shifted else unit.to(dtype).to(tl.float32) * weight
        tl.store(out_ptr + here, out.to(dtype), mask=inside)


@triton.jit
def _norm_backward(
    grad_ptr,
    x_ptr,
    weight_ptr,
    d_x_ptr,
    d_weight_ptr,
    rows,
    eps,
    offset,
    numbers: tl.constexpr,
    width: tl.constexpr,
    count: tl.constexpr,
):
    """Gradients of some rows, and this program's sum of those of the weight."""
    column = tl.arange(0, width)
    there = column < numbers
    weight = offset + tl.load(weight_ptr + column, mask=there, other=0.0).to(tl.float32)
    d_weight = tl.zeros([width], tl.float32)
    for first in range(tl.program_id(0) * count, rows, tl.num_programs(0) * count):
        r = first + tl.arange(0, count).to(tl.int64)
        inside = (r < rows)[:, None] & there[None, :]
        here = r[:, None] * numbers + column[None, :]
        x = tl.load(x_ptr + here, mask=inside, other=0.0).to(tl.float32)
        grad = tl.load(grad_ptr + here, mask=inside, other=0.0).to(tl.float32)
        scale = 1.0 / tl.sqrt(tl.sum(x * x, 1) / numbers + eps)
        unit = x * scale[:, None]
        along = grad * weight[None, :]
        d_x = scale[:, None] * (along - unit * (tl.sum(along * unit, 1) / numbers)[:, None])
        tl.store(d_x_ptr + here, d_x.to(d_x_ptr.dtype.element_ty), mask=inside)
        d_weight += tl.sum(grad * unit, 0)
    tl.store(d_weight_ptr + tl.program_id(0).to(tl.int64) * numbers + column, d_weight, mask=there)


@triton.jit
def _rotate(
    x_ptr,
    cos_ptr,
    sin_ptr,
    out_ptr,
    count,
    turns,
    sign,
    heads: tl.constexpr,
    size: tl.constexpr,
    turned: tl.constexpr,
    block: tl.constexpr,
):
    """Turn some numbers of heads, each pair by the angle of its position."""
    i = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    inside = i < count
    column = i % size
    turning = inside & (column < turned)
    x = tl.load(x_ptr + i, mask=inside, other=0.0).to(tl.float32)
    other = i - column + (column + turned // 2) % turned
    y = tl.load(x_ptr + other, mask=turning, other=0.0).to(tl.float32)
    angle = i // (heads * size) % turns * turned + column
    cos = tl.load(cos_ptr + angle, mask=turning, other=1.0).to(tl.float32)
    sin = tl.load(sin_ptr + angle, mask=turning, other=0.0).to(tl.float32)
    tl.store(out_ptr + i, (x * cos + sign * (y * sin)).to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _activation(x, kind: tl.constexpr):
    """silu, gelu by tanh, or gelu; and the derivative."""
    if kind == 0:
        value = x / (1.0 + tl.exp(-x))
        share = 1.0 / (1.0 + tl.exp(-x))
        slope = share * (1.0 + x * (1.0 - share))
    elif kind == 1:
        inner = 1.5957691216057308 * (x + 0.044715 * x * x * x)  # twice the argument of tanh
        share = 1.0 / (1.0 + tl.exp(-inner))
        value = x * share
        slope = share + x * share * (1.0 - share) * (1.5957691216057308 * (1.0 + 0.134145 * x * x))
    else:
        share = 0.5 * (1.0 + tl.erf(x * 0.7071067811865476))
        value = x * share
        slope = share + x * (0.3989422804014327 * tl.exp(-0.5 * x * x))
    return value, slope


@triton.jit
def _gate(gate_ptr, up_ptr, out_ptr, count, kind: tl.constexpr, block: tl.constexpr):
    """activation(gate) * up, rounded after the activation too."""
    i = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    inside = i < count
    dtype = out_ptr.dtype.element_ty
    active, _ = _activation(tl.load(gate_ptr + i, mask=inside, other=0.0).to(tl.float32), kind)
    up = tl.load(up_ptr + i, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + i, (active.to(dtype).to(tl.float32) * up).to(dtype), mask=inside)


@triton.jit
def _gate_backward(grad_ptr, gate_ptr, up_ptr, d_gate_ptr, d_up_ptr, count, kind: tl.constexpr, block: tl.constexpr):
    """Gradients of `_gate`."""
    i = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    inside = i < count
    dtype = d_up_ptr.dtype.element_ty
    grad = tl.load(grad_ptr + i, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + i, mask=inside, other=0.0).to(tl.float32)
    active, slope = _activation(tl.load(gate_ptr + i, mask=inside, other=0.0).to(tl.float32), kind)
    tl.store(d_gate_ptr + i, (grad * up * slope).to(dtype), mask=inside)
    tl.store(d_up_ptr + i, (grad * active.to(dtype).to(tl.float32)).to(dtype), mask=inside)


@triton.jit
def _logit_sums(x_ptr, top_ptr, sums_ptr, columns, temperature, sums: tl.constexpr, block: tl.constexpr):
    """With z = (x - top) / temperature: sums of e^z, z e^z and e^2z over one block of one row."""
    row = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * block + tl.arange(0, block)
    x = tl.load(x_ptr + row * columns + c, mask=c < columns, other=float("-inf"))
    z = (x - tl.load(top_ptr + row)) / temperature
    e = tl.where(c < columns, tl.exp(z), 0.0)
    to = sums_ptr + (row * tl.num_programs(1) + tl.program_id(1)) * sums
    tl.store(to, tl.sum(e.to(tl.float64)))
    if sums > 1:
        tl.store(to + 1, tl.sum(tl.where(e == 0, 0.0, z * e).to(tl.float64)))
        tl.store(to + 2, tl.sum((e * e).to(tl.float64)))


@triton.jit
def _add_blocks(sums_ptr, out_ptr, blocks, sums: tl.constexpr):
    """Add the sums of the blocks of one row in order."""
    row = tl.program_id(0).to(tl.int64)
    j = tl.program_id(1)
    total = tl.zeros([], tl.float64)
    for b in range(blocks):
        total += tl.load(sums_ptr + (row * blocks + b) * sums + j)
    tl.store(out_ptr + row * 3 + j, total)


def parts_of_terms(inner: int, wide: bool = False) -> int:
    """Number of parts of the sums of a product, whatever it is stacked with; 1 of logits, whose outputs are many."""
    return 1 if wide else max(1, min(_MOST_PARTS, inner // _LEAST_PART))


def product_tiles(rows: int, outputs: int, parts: int) -> ProductTiles:
    """Shares of a product between programs."""
    if rows > _ROWS:
        tiles = triton.cdiv(rows, 2 * _ROWS) * triton.cdiv(outputs, 2 * _ROWS)
        return ProductTiles(2 * _ROWS, 2 * _ROWS, 8, parts > 1 and tiles < _PROGRAMS)
    tile = 2 * _ROWS
    while tile > _ROWS // 2 and triton.cdiv(outputs, tile) * parts < _PROGRAMS:
        tile //= 2
    return ProductTiles(_ROWS, tile, 4, parts > 1)


def launch_product(x_MK: Tensor, weight_NK: Tensor, bias_N: Tensor | None, wide: bool) -> Tensor:
    """x weight^T + bias, in the dtype of x, rounded before the bias too; with `wide` in float32."""
    product = launch_product_parts(x_MK, weight_NK, bias_N, wide)
    if product.dim() == 2:
        return product
    parts, M, N = product.shape
    out_MN = x_MK.new_empty(M, N, dtype=torch.float32 if wide else None)
    bias = x_MK if bias_N is None else bias_N.contiguous()
    form = {"block": _NUMBERS, "biased": bias_N is not None}
    _launch(_add_parts, (triton.cdiv(M * N, _NUMBERS),), (product, bias, out_MN, M * N, N, parts), form)
    return out_MN


def launch_product_parts(x_MK: Tensor, weight_NK: Tensor, bias_N: Tensor | None = None, wide: bool = False) -> Tensor:
    """`launch_product`, or of few rows its parts [P, M, N] float32, which have no bias yet and are added in order."""
    M, K = x_MK.shape
    N = len(weight_NK)
    if not M:
        return x_MK.new_empty(M, N, dtype=torch.float32 if wide else None)
    x_MK, weight_NK = x_MK.contiguous(), weight_NK.contiguous()
    parts = parts_of_terms(K, wide)
    span = triton.cdiv(triton.cdiv(K, parts), _BLOCK) * _BLOCK
    tiles = product_tiles(M, N, parts)
    grid = triton.cdiv(M, tiles.rows) * triton.cdiv(N, tiles.outputs), parts if tiles.split else 1
    biased = bias_N is not None and not tiles.split
    bias = x_MK if bias_N is None else bias_N.contiguous()
    shape = (parts, M, N) if tiles.split else (M, N)
    target = x_MK.new_empty(shape, dtype=torch.float32 if tiles.split or wide else None)
    form = {"tile_rows": tiles.rows, "tile": tiles.outputs, "block": _BLOCK, "split": tiles.split}
    numbers = M, N, K, span, parts
    stages = 4 if x_MK.element_size() == 2 and torch.version.hip is None else 2  # CDNA has 64 KB for them
    _launch(
        _product,
        grid,
        (x_MK, weight_NK, bias, target, *numbers),
        form | {"biased": biased, "even": K % _BLOCK == 0},
        tiles.warps,
        stages,
    )
    return target


def launch_attention(
    inputs: Sequence[Tensor],
    offsets: Tensor,
    paged: tuple[Tensor, Tensor] | None,
    options: tuple[int, float, float],
    longest: int,
) -> tuple[Tensor, Tensor]:
    """Causal attention of sequences that stand end to end, over keys and values beside them or in pages.

    Args:
      inputs: queries [T, H, N]; keys and values [T, K, N], or pages [P, page, K, N].
      offsets: [S + 1], where the queries of each sequence begin and end; after the last one there may be padding.
      paged: pages and tokens of each sequence, table_SP and ends_S; None: the keys are not in pages.
      options: window, scale and cap, as `packed.AttentionOptions`.
      longest: the most queries of a sequence; 1 with pages: all have one, and offsets count them.

    Returns: [T, H, N], 0 at padding; the logarithm of each query's normaliser, [H, T] float32.
    """
    q, keys, values = (x.contiguous() for x in inputs)
    T, H, N = q.shape
    K = keys.shape[-2]
    group = H // K
    heads = triton.next_power_of_2(group)
    width = max(16, triton.next_power_of_2(N))
    if heads > _ROWS:
        raise ValueError(f"{group} query heads share keys, kernels of a fixed order take up to {_ROWS}")
    tokens = _ROWS // heads
    S = len(offsets) - 1
    window, scale, cap = options
    table, ends = (offsets, offsets) if paged is None else (paged[0].contiguous(), paged[1])
    page = 0 if paged is None else keys.shape[1]
    pages = 0 if paged is None else table.shape[1]
    out = torch.zeros_like(q)
    lse = q.new_zeros(H, T, dtype=torch.float32)
    numbers = K, scale or N**-0.5, cap or 1.0, window or _ALL
    form: dict[str, Any] = {"part": KEYS_PART, "tokens": tokens, "page": page, "group": group}
    form |= {"heads": heads, "size": N, "width": width, "capped": bool(cap)}
    wide = width > WIDE_HEAD
    form |= {"block": _BLOCK // 2} if wide else {"block": _BLOCK}
    warps = 8 if wide and torch.version.hip is None else 4
    stages = 1 if wide or q.element_size() > 2 else 2
    if not T or not S:
        return out, lse
    if paged is None or longest > 1:
        tensors = q, keys, values, table, offsets, ends, out, lse, lse
        grid = T // tokens + S, K
        _launch(_attend, grid, (*tensors, T, S, pages, *numbers), form | {"split": False}, warps, stages)
        return out, lse
    parts = triton.cdiv(pages * page, KEYS_PART)
    most = min(S, max(1, PARTS_BYTES // (4 * H * parts * (N + 2))))
    sums = torch.empty(most, H, parts, 2, dtype=torch.float32, device=q.device)
    partial = torch.empty(most, H, parts, N, dtype=torch.float32, device=q.device)
    joined = {"part": KEYS_PART, "heads": H, "width_heads": triton.next_power_of_2(H), "size": N, "width": width}
    for low in range(0, S, most):
        count = min(most, S - low)
        some = slice(low, low + count)
        tensors = q[some], keys, values, table[some], offsets, ends[some], partial, lse, sums
        grid = count // tokens + count, K, parts
        _launch(_attend, grid, (*tensors, T, count, pages, *numbers), form | {"split": True}, warps, stages)
        results = partial, sums, ends[some], out[some], lse[:, low:]
        _launch(_join_parts, (count,), (*results, T, parts, numbers[-1]), joined)
    return out, lse


def launch_norm(x: Tensor, weight_D: Tensor, eps: float, offset: float) -> Tensor:
    """`rms_norm` of rows."""
    x = x.contiguous()
    out = torch.empty_like(x)
    D = x.shape[-1]
    rows = x.numel() // max(D, 1)
    width = triton.next_power_of_2(D)
    form = {"numbers": D, "width": width, "count": 8 if row_warps(D) == 1 else 1, "shifted": offset != 0}
    tensors = x, weight_D.contiguous(), out
    _launch(_norm, (triton.cdiv(rows, form["count"]),), (*tensors, rows, eps, float(offset)), form, row_warps(D))
    return out


def launch_norm_backward(grad: Tensor, x: Tensor, weight_D: Tensor, eps: float, offset: float) -> tuple[Tensor, Tensor]:
    """Gradients of `launch_norm` by x and weight."""
    x, grad = x.contiguous(), grad.contiguous()
    d_x = torch.empty_like(x)
    D = x.shape[-1]
    rows = x.numel() // max(D, 1)
    width = triton.next_power_of_2(D)
    form = {"numbers": D, "width": width, "count": max(1, _NUMBERS // width)}
    programs = max(1, min(2 * _PROGRAMS, triton.cdiv(rows, form["count"])))
    d_weight = torch.empty(programs, D, dtype=torch.float32, device=x.device)
    tensors = grad, x, weight_D.contiguous(), d_x, d_weight
    _launch(_norm_backward, (programs,), (*tensors, rows, eps, float(offset)), form, 8 if width > _NUMBERS else 4)
    return d_x, d_weight.sum(0).to(weight_D.dtype)


def launch_rotate(x: Tensor, cos: Tensor, sin: Tensor, sign: int) -> Tensor:
    """`rotate` of heads [..., H, N]; with sign -1 back."""
    x = x.contiguous()
    out = torch.empty_like(x)
    H, N = x.shape[-2:]
    turned = cos.shape[-1]
    tensors = x, cos.contiguous(), sin.contiguous(), out
    numbers = x.numel(), max(1, cos.numel() // turned), float(sign)
    form = {"heads": H, "size": N, "turned": turned, "block": _NUMBERS}
    _launch(_rotate, (triton.cdiv(x.numel(), _NUMBERS),), (*tensors, *numbers), form)
    return out


def launch_gated(gate: Tensor, up: Tensor, activation: int) -> Tensor:
    """`gated`; activations are in the order of `exact.gate`."""
    gate, up = gate.contiguous(), up.contiguous()
    out = torch.empty_like(gate)
    form = {"kind": activation, "block": _NUMBERS}
    _launch(_gate, (triton.cdiv(out.numel(), _NUMBERS),), (gate, up, out, out.numel()), form)
    return out


def launch_gated_backward(grad: Tensor, gate: Tensor, up: Tensor, activation: int) -> tuple[Tensor, Tensor]:
    """Gradients of `launch_gated` by gate and up."""
    grad, gate, up = (x.contiguous() for x in (grad, gate, up))
    d_gate, d_up = torch.empty_like(gate), torch.empty_like(up)
    form = {"kind": activation, "block": _NUMBERS}
    tensors = grad, gate, up, d_gate, d_up
    _launch(_gate_backward, (triton.cdiv(up.numel(), _NUMBERS),), (*tensors, up.numel()), form)
    return d_gate, d_up


def launch_logit_sums(logits_TV: Tensor, top_T: Tensor, temperature: float, more: bool) -> Tensor:
    """Sums of e^z, z e^z and e^2z of each row, z = (logit - top) / temperature: [T, 3] float64; 0 unless `more`."""
    logits_TV = logits_TV.contiguous()
    T, V = logits_TV.shape
    blocks = triton.cdiv(V, _LOGITS)
    out_T3 = torch.zeros(T, 3, dtype=torch.float64, device=logits_TV.device)
    sums = 3 if more else 1
    if T:
        parts = out_T3.new_empty(T, blocks, sums)
        form = {"sums": sums, "block": _LOGITS}
        _launch(_logit_sums, (T, blocks), (logits_TV, top_T.contiguous(), parts, V, float(temperature)), form, 8)
        _launch(_add_blocks, (T, sums), (parts, out_T3, blocks), {"sums": sums}, 1)
    return out_T3


def _launch(
    kernel: Any, grid: tuple[int, ...], args: tuple[Any, ...], form: dict[str, Any], warps: int = 4, stages: int = 2
) -> None:
    """Launch a kernel whose multiplications and additions are not contracted, so that all round in the same places."""
    if all(grid):
        kernel[grid](*args, **form, num_warps=warps, num_stages=stages, enable_fp_fusion=False)
