"""Triton kernels of attention over pages, where the device alone knows how long each sequence is.

Decoding splits a sequence into parts of a fixed length, so that one long sequence occupies many processors and what a
row gets depends on nothing but its own tokens (Dao et al., 2023, Flash-Decoding; the online softmax is that of
arXiv:2205.14135). Prompts are computed in tiles of tokens.

The source asks for no compute capability and no size of a warp: NVIDIA and ROCm compile it, and Triton's interpreter
runs it on a CPU where TRITON_INTERPRET=1 stands in the environment before triton is imported.
"""

# A kernel is in Triton's language, whose types a checker of Python's does not know.
# pyright: reportGeneralTypeIssues=false, reportArgumentType=false, reportReturnType=false
# pyright: reportCallIssue=false, reportAttributeAccessIssue=false
from __future__ import annotations

from typing import NamedTuple

import torch
import triton  # type: ignore[import-not-found]
import triton.language as tl  # type: ignore[import-not-found]
from torch import Tensor

PART = 512  # tokens of a sequence that a program of the decoding kernel attends to
_BLOCK = 64  # keys at a time
_TILE = 64  # queries of a program times the query heads that share their keys
_LEAST = 16  # rows of a product of matrices at least
_WARPS = 4
PARTS_BYTES = 1 << 28  # of the parts of sequences that are computed together
WIDE_HEAD = 128  # numbers of a head above which less is held at a time
_ALL = 1 << 30  # tokens of a window that has no end
_LOG2E = tl.constexpr(1.4426950408889634)
_LOWEST = tl.constexpr(-1e30)  # below every logit and finite, so that no difference of two is not a number


class PageOptions(NamedTuple):
    """Attention over pages beside its tensors.

    Attributes:
      scale: of the products.
      window: tokens that a token sees at most, itself included; 0: all.
      cap: logits x become cap tanh(x / cap); 0: they stay.
    """

    scale: float
    window: int = 0
    cap: float = 0.0


@triton.jit
def _write(
    k_ptr, v_ptr, keys_ptr, values_ptr, places_ptr, k_stride, v_stride, numbers: tl.constexpr, width: tl.constexpr
):
    """Key and value of one token."""
    n = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, width)
    inside = column < numbers
    to = tl.load(places_ptr + n) * numbers + column
    tl.store(keys_ptr + to, tl.load(k_ptr + n * k_stride + column, mask=inside), mask=inside)
    tl.store(values_ptr + to, tl.load(v_ptr + n * v_stride + column, mask=inside), mask=inside)


@triton.jit
def _logits(q, k, scale, cap, capped: tl.constexpr):
    """Logits in units of log 2; tanh z is 1 - 2 / (e^2z + 1)."""
    x = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
    if capped:
        x = cap * (1.0 - 2.0 / (tl.exp(2.0 * (x / cap)) + 1.0))
    return x * _LOG2E


@triton.jit
def _attend(
    q,
    seen_from,
    seen_to,
    k_ptr,
    v_ptr,
    table_ptr,
    first,
    stop,
    kv_head,
    kv_heads,
    scale,
    cap,
    page: tl.constexpr,
    block: tl.constexpr,
    size: tl.constexpr,
    width: tl.constexpr,
    capped: tl.constexpr,
):
    """Maxima, sums and weighted values of queries q [rows, width] over the keys from `first`, of a block, to `stop`.

    Query r sees the keys from seen_from[r] to seen_to[r], the last one included.
    """
    rows: tl.constexpr = q.shape[0]
    column = tl.arange(0, width)
    top = tl.full([rows], _LOWEST, tl.float32)
    total = tl.zeros([rows], tl.float32)
    acc = tl.zeros([rows, width], tl.float32)
    for begin in range(first, stop, block):
        position = begin + tl.arange(0, block)
        number = tl.load(table_ptr + begin // page).to(tl.int64)
        token = number * page + begin % page + tl.arange(0, block)
        here = (token[:, None] * kv_heads + kv_head) * size + column[None, :]
        inside = (position < stop)[:, None] & (column < size)[None, :]
        k = tl.load(k_ptr + here, mask=inside, other=0.0)
        v = tl.load(v_ptr + here, mask=inside, other=0.0)
        x = _logits(q, k, scale, cap, capped)
        seen = (position[None, :] >= seen_from[:, None]) & (position[None, :] <= seen_to[:, None])
        x = tl.where(seen, x, _LOWEST)
        higher = tl.maximum(top, tl.max(x, 1))
        weights = tl.where(seen, tl.exp2(x - higher[:, None]), 0.0)
        decay = tl.exp2(top - higher)
        total = decay * total + tl.sum(weights, 1)
        acc = decay[:, None] * acc + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        top = higher
    return top, total, acc


@triton.jit
def _decode_parts(
    q_ptr,
    k_ptr,
    v_ptr,
    table_ptr,
    offsets_ptr,
    ends_ptr,
    sums_ptr,
    values_ptr,
    pages,
    kv_heads,
    scale,
    cap,
    window,
    part: tl.constexpr,
    page: tl.constexpr,
    block: tl.constexpr,
    group: tl.constexpr,
    rows: tl.constexpr,
    size: tl.constexpr,
    width: tl.constexpr,
    capped: tl.constexpr,
):
    """One part of one sequence, by the query heads of one key-value head."""
    b = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1)
    n = tl.program_id(2)
    token = tl.load(offsets_ptr + b).to(tl.int64)
    end = tl.load(ends_ptr + b)
    low = tl.maximum(end - window, 0)
    begin = n * part
    stop = tl.minimum(begin + part, end)
    if (tl.load(offsets_ptr + b + 1) - token == 1) & (begin < end) & (stop > low):
        r = tl.arange(0, rows)
        column = tl.arange(0, width)
        held = (r < group)[:, None] & (column < size)[None, :]
        its_head = (token * kv_heads + kv_head) * group + r
        q = tl.load(q_ptr + its_head[:, None] * size + column[None, :], mask=held, other=0.0)
        none = r * 0
        first = tl.maximum(begin, low // block * block)
        top, total, acc = _attend(
            q,
            none + low,
            none + end - 1,
            k_ptr,
            v_ptr,
            table_ptr + b * pages,
            first,
            stop,
            kv_head,
            kv_heads,
            scale,
            cap,
            page,
            block,
            size,
            width,
            capped,
        )
        to = ((b * kv_heads + kv_head) * group + r) * tl.num_programs(2) + n
        tl.store(sums_ptr + 2 * to, top, mask=r < group)
        tl.store(sums_ptr + 2 * to + 1, total, mask=r < group)
        tl.store(values_ptr + to[:, None] * size + column[None, :], acc, mask=held)


@triton.jit
def _join_parts(
    sums_ptr,
    values_ptr,
    sinks_ptr,
    offsets_ptr,
    ends_ptr,
    out_ptr,
    parts,
    window,
    part: tl.constexpr,
    size: tl.constexpr,
    width: tl.constexpr,
    sinks: tl.constexpr,
):
    """Join the parts of one query in their order."""
    b = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1)
    head = b * tl.num_programs(1) + h
    token = tl.load(offsets_ptr + b).to(tl.int64)
    if tl.load(offsets_ptr + b + 1) - token != 1:
        return
    end = tl.load(ends_ptr + b)
    column = tl.arange(0, width)
    top = tl.full([], _LOWEST, tl.float32)
    total = tl.zeros([], tl.float32)
    if sinks:
        top = tl.load(sinks_ptr + h).to(tl.float32) * _LOG2E
        total += 1.0
    acc = tl.zeros([width], tl.float32)
    for n in range(tl.maximum(end - window, 0) // part, tl.cdiv(end, part)):
        entry = head * parts + n
        its_top = tl.load(sums_ptr + 2 * entry)
        higher = tl.maximum(top, its_top)
        decay = tl.exp2(top - higher)
        its_decay = tl.exp2(its_top - higher)
        total = decay * total + its_decay * tl.load(sums_ptr + 2 * entry + 1)
        acc = decay * acc + its_decay * tl.load(values_ptr + entry * size + column, mask=column < size, other=0.0)
        top = higher
    place = (token * tl.num_programs(1) + h) * size + column
    tl.store(out_ptr + place, (acc / total).to(out_ptr.dtype.element_ty), mask=column < size)


@triton.jit
def _sequence_of_tile(offsets_ptr, sequences, tile, tokens: tl.constexpr):
    """The last sequence s where offsets[s] // tokens + s <= tile: each has room for a tile that is not full."""
    s = 0
    above = sequences
    while above - s > 1:
        middle = (s + above) // 2
        if tl.load(offsets_ptr + middle) // tokens + middle <= tile:
            s = middle
        else:
            above = middle
    return s


@triton.jit
def _with_sinks(top, total, acc, sink_ptrs, held):
    """Sums and weighted values with a further key for each query, whose value is 0."""
    sink = tl.load(sink_ptrs, mask=held, other=0.0).to(tl.float32) * _LOG2E
    higher = tl.maximum(top, sink)
    decay = tl.exp2(top - higher)
    return decay * total + tl.exp2(sink - higher), decay[:, None] * acc


@triton.jit
def _prompt_tiles(
    q_ptr,
    k_ptr,
    v_ptr,
    table_ptr,
    offsets_ptr,
    ends_ptr,
    sinks_ptr,
    out_ptr,
    sequences,
    pages,
    kv_heads,
    scale,
    cap,
    window,
    tokens: tl.constexpr,
    page: tl.constexpr,
    block: tl.constexpr,
    group: tl.constexpr,
    heads: tl.constexpr,
    size: tl.constexpr,
    width: tl.constexpr,
    capped: tl.constexpr,
    sinks: tl.constexpr,
):
    """Some neighbouring new tokens of one sequence, by the query heads of one key-value head.

    Sequences with one new token are those of `_decode_parts`.
    """
    tile = tl.program_id(0)
    kv_head = tl.program_id(1)
    s = _sequence_of_tile(offsets_ptr, sequences, tile, tokens)
    begin = tl.load(offsets_ptr + s)
    stop = tl.load(offsets_ptr + s + 1)
    first_token = begin + (tile - begin // tokens - s) * tokens
    if (first_token < stop) & (stop - begin > 1):
        end = tl.load(ends_ptr + s)
        r = tl.arange(0, tokens * heads)
        t = first_token + r // heads
        member = r % heads
        column = tl.arange(0, width)
        held = (t < stop) & (member < group)
        place = ((t.to(tl.int64) * kv_heads + kv_head) * group + member)[:, None] * size + column[None, :]
        inside = held[:, None] & (column < size)[None, :]
        q = tl.load(q_ptr + place, mask=inside, other=0.0)
        position = end - stop + t
        last = end - stop + tl.minimum(first_token + tokens, stop)
        low = tl.maximum(end - stop + first_token - window + 1, 0)
        top, total, acc = _attend(
            q,
            position - window + 1,
            position,
            k_ptr,
            v_ptr,
            table_ptr + s.to(tl.int64) * pages,
            low // block * block,
            last,
            kv_head,
            kv_heads,
            scale,
            cap,
            page,
            block,
            size,
            width,
            capped,
        )
        if sinks:
            total, acc = _with_sinks(top, total, acc, sinks_ptr + kv_head * group + member, member < group)
        out = acc / tl.where(held, total, 1.0)[:, None]
        tl.store(out_ptr + place, out.to(out_ptr.dtype.element_ty), mask=inside)


def write_pages(k_NKD: Tensor, v_NKD: Tensor, cache: tuple[Tensor, Tensor], places_N: Tensor) -> None:
    """Write keys and values of new tokens to their places in the pages, by one kernel.

    Args:
      k_NKD, v_NKD: of the new tokens, in the dtype of the cache.
      cache: keys and values, pages [P, page, K, D].
      places_N: page times page length plus offset of each token.
    """
    k_NM, v_NM = (x.flatten(1) for x in (k_NKD, v_NKD))
    N, numbers = k_NM.shape
    if N:
        k_NM, v_NM = (x if x.stride(1) == 1 else x.contiguous() for x in (k_NM, v_NM))
        strides = k_NM.stride(0), v_NM.stride(0)
        width = triton.next_power_of_2(numbers)
        _write[(N,)](k_NM, v_NM, *cache, places_N, *strides, numbers, width, num_warps=_WARPS)


def attend_pages(
    q_NHD: Tensor,
    cache: tuple[Tensor, Tensor],
    places: tuple[Tensor, Tensor, Tensor],
    counts: tuple[int, int],
    options: PageOptions,
    sinks_H: Tensor | None = None,
) -> Tensor:
    """`paged_attention` of new tokens whose keys and values stand in the cache already; [N, H, D].

    Args:
      q_NHD: queries of the new tokens.
      cache: keys and values, pages [P, page, K, D]; `page` is a multiple of 16.
      places: table_SP, offsets_S1 and ends_S of `Paging`.
      counts: the least and the most new tokens of a sequence.
      options: scale, window and cap.
      sinks_H: as in `paged_attention`.
    """
    out_NHD = torch.empty_like(q_NHD, memory_format=torch.contiguous_format)
    given = q_NHD.contiguous(), *cache, places[0].contiguous(), *places[1:]
    least, most = counts
    if least == 1:
        _decode(out_NHD, *given, options, sinks_H)
    if most > 1:
        _prompts(out_NHD, *given, options, sinks_H)
    return out_NHD


def _decode(out, q, keys, values, table, offsets, ends, options: PageOptions, sinks: Tensor | None) -> None:
    """Attention of the sequences with one new token, of some at a time, so that their parts take few bytes."""
    sizes = _Sizes.of(q, keys)
    S, P = table.shape
    H, D = q.shape[1:]
    K = keys.shape[2]
    window = options.window or _ALL
    parts = triton.cdiv(P * sizes.page, PART)
    most = min(S, max(1, PARTS_BYTES // (4 * H * parts * (D + 2))))
    sums = torch.empty(most, H, parts, 2, dtype=torch.float32, device=q.device)
    partial = torch.empty(most, H, parts, D, dtype=torch.float32, device=q.device)
    numbers = P, K, options.scale, options.cap or 1.0, window
    heads = sizes.group, max(_LEAST, sizes.heads), D, sizes.width
    flags = PART, sizes.page, sizes.block, *heads, bool(options.cap)
    for low in range(0, S, most):
        some = slice(low, low + most)
        its_table, its_ends = table[some], ends[some]
        its_offsets = offsets[low : low + len(its_ends) + 1]
        tensors = q, keys, values, its_table, its_offsets, its_ends, sums, partial
        _decode_parts[len(its_ends), K, parts](*tensors, *numbers, *flags, num_warps=_WARPS, num_stages=sizes.stages)
        joined = sums, partial, sums if sinks is None else sinks, its_offsets, its_ends, out
        its_flags = PART, D, sizes.width, sinks is not None
        _join_parts[len(its_ends), H](*joined, parts, window, *its_flags, num_warps=1)


def _prompts(out, q, keys, values, table, offsets, ends, options: PageOptions, sinks: Tensor | None) -> None:
    """Attention of the sequences with more new tokens."""
    sizes = _Sizes.of(q, keys)
    S, P = table.shape
    N, _, D = q.shape
    K = keys.shape[2]
    tokens = max(1, _TILE // sizes.heads)
    tensors = q, keys, values, table, offsets, ends, q if sinks is None else sinks, out
    numbers = S, P, K, options.scale, options.cap or 1.0, options.window or _ALL
    heads = sizes.group, sizes.heads, D, sizes.width
    flags = tokens, sizes.page, sizes.block, *heads, bool(options.cap), sinks is not None
    _prompt_tiles[N // tokens + S, K](*tensors, *numbers, *flags, num_warps=_WARPS, num_stages=sizes.stages)


class _Sizes(NamedTuple):
    """Constants of a kernel.

    Attributes:
      page, block: tokens of a page, and keys at a time.
      group: query heads that share keys.
      heads, width: head count and head size, rounded up to powers of two.
      stages: blocks of keys in shared memory; fewer for wide heads, as GPUs other than Hopper hold no more.
    """

    page: int
    block: int
    group: int
    heads: int
    width: int
    stages: int

    @classmethod
    def of(cls, q: Tensor, keys: Tensor) -> _Sizes:
        page, K = keys.shape[1:3]
        group = q.shape[1] // K
        width = max(_LEAST, triton.next_power_of_2(q.shape[2]))
        wide = width > WIDE_HEAD
        block = min(_BLOCK // 2 if wide else _BLOCK, page & -page)
        return cls(page, block, group, triton.next_power_of_2(group), width, 1 if wide else 2)
