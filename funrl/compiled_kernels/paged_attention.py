"""Attention of the new tokens of many sequences to keys and values that stand in pages.

A page holds a fixed number of neighbouring tokens of one sequence. All new keys and values are written before any token
attends, so a sequence may use pages that another one fills in the same pass. One opaque operator, so that no graph
depends on lengths.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from funrl.compiled_kernels.attention import attention, attention_reference

CAPPED_QUERIES = 256  # new tokens of a sequence at a time where logits are capped


class Paging(NamedTuple):
    """Places of the new tokens of a pass; N tokens of S sequences, in their order.

    Attributes:
      places_N: int64, page times page length plus offset, where each token's key and value go.
      positions_N: int64, of each token in its sequence.
      table_SP: int64 pages of each sequence in order; those behind its last token are any.
      offsets_S1: [S + 1] int32, where the new tokens of each sequence begin and end.
      ends_S: int32, tokens of each sequence, the new ones included.
      groups_G5: int64, on the CPU: sequences with equally many new tokens and about as many pages, computed together.
        First token, first sequence, sequences, new tokens of each, pages that are read of each.
    """

    places_N: Tensor
    positions_N: Tensor
    table_SP: Tensor
    offsets_S1: Tensor
    ends_S: Tensor
    groups_G5: Tensor


def paging_of(
    counts: Sequence[int],
    ends: Sequence[int],
    table_SP: Tensor,
    page_tokens: int,
    device: torch.device | str = "cpu",
) -> Paging:
    """Places of a pass. Sequences that stand together with equal counts and `read_pages` are one group.

    Args:
      counts: new tokens of each sequence, at least 1.
      ends: tokens of each sequence, the new ones included.
      table_SP: pages of each sequence, on the CPU.
      page_tokens: of a page.
    """
    table, counts_S, ends_S = table_SP.long(), torch.tensor(counts), torch.tensor(ends)
    offsets_S1 = torch.cat([counts_S.new_zeros(1), counts_S.cumsum(0)])
    numbers_N = torch.repeat_interleave(torch.arange(len(counts)), counts_S)
    positions_N = torch.arange(len(numbers_N)) + (ends_S - counts_S - offsets_S1[:-1])[numbers_N]
    places_N = table[numbers_N, positions_N // page_tokens] * page_tokens + positions_N % page_tokens
    groups, low, first = [], 0, 0
    kinds = [(count, read_pages(end, page_tokens)) for count, end in zip(counts, ends, strict=True)]
    for high in range(1, len(kinds) + 1):
        if high == len(kinds) or kinds[high] != kinds[low]:
            count, pages = kinds[low]
            groups.append((first, low, high - low, count, min(pages, table.shape[1])))
            low, first = high, first + (high - low) * count
    on = functools.partial(torch.Tensor.to, device=device, non_blocking=True)
    return Paging(
        on(places_N), on(positions_N), on(table), on(offsets_S1.int()), on(ends_S.int()), torch.tensor(groups)
    )


def read_pages(tokens: int, page_tokens: int) -> int:
    """Pages that attention reads of a sequence: those that it has, or up to a quarter more.

    There are few such numbers, so that sequences of about one length are computed together.
    """
    pages = -(-tokens // page_tokens)
    step = 1 << max(0, pages.bit_length() - 3)
    return -(-pages // step) * step


def paged_attention(
    q_NHD: Tensor,
    k_NKD: Tensor,
    v_NKD: Tensor,
    cache: tuple[Tensor, Tensor],
    paging: Paging,
    window: int | None = None,
    scale: float | None = None,
    cap: float | None = None,
) -> Tensor:
    """softmax(scale q k^T) v, where a token sees itself and the tokens before it in its own sequence.

    On CUDA and ROCm 16-bit tensors go to torch's variable-length kernel, which knows no cap; everything else is
    gathered group by group.
    Without a gradient.

    Args:
      q_NHD, k_NKD, v_NKD: of the new tokens; K divides H, query head h uses key-value head h // (H / K).
      cache: keys and values, pages [P, page, K, D]; the new ones are written to it, in place.
      paging: places of the tokens.
      window: how many tokens a token sees at most, itself included; None: all.
      scale: None: 1 / sqrt(D).
      cap: logits x become cap tanh(x / cap) before the softmax; None: they stay.

    Returns: [N, H, D].
    """
    return _paged_attention(q_NHD, k_NKD, v_NKD, *cache, *paging, window or 0, scale or 0.0, cap or 0.0)


def paged_attention_reference(
    q_NHD: Tensor,
    k_NKD: Tensor,
    v_NKD: Tensor,
    cache: tuple[Tensor, Tensor],
    paging: Paging,
    window: int | None = None,
    scale: float | None = None,
    cap: float | None = None,
) -> Tensor:
    """`paged_attention`, sequence by sequence, with the whole matrix of weights."""
    outs, page = [], cache[0].shape[1]
    for new, x in zip((k_NKD, v_NKD), cache, strict=True):
        for row, place in zip(new, paging.places_N.tolist(), strict=True):
            x[place // page, place % page] = row
    for s, end in enumerate(paging.ends_S.tolist()):
        begin, stop = paging.offsets_S1[s : s + 2].tolist()
        keys, values = (x[paging.table_SP[s]].flatten(0, 1)[None, :end] for x in cache)
        behind_TS = torch.arange(end - (stop - begin), end)[:, None] - torch.arange(end)
        seen = (behind_TS >= 0) & (behind_TS < (window or end))
        outs.append(attention_reference(q_NHD[None, begin:stop], keys, values, seen[None], scale=scale, cap=cap)[0])
    return torch.cat(outs)


@torch.library.custom_op("funrl::paged_attention", mutates_args=("keys", "values"))
def _paged_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    keys: Tensor,
    values: Tensor,
    places: Tensor,
    positions: Tensor,
    table: Tensor,
    offsets: Tensor,
    ends: Tensor,
    groups: Tensor,
    window: int,
    scale: float = 0.0,
    cap: float = 0.0,
) -> Tensor:
    for new, x in ((k, keys), (v, values)):
        x.view(-1, *x.shape[2:]).index_copy_(0, places, new)
    kernel = _paged_kernel() if q.is_cuda and q.element_size() == 2 and not cap else None
    if kernel is not None:
        return _by_kernel(kernel, q, keys, values, table, offsets, ends, groups, window, scale)
    out, page = torch.empty_like(q), keys.shape[1]
    for first, low, rows, count, pages in groups.tolist():
        part = slice(first, first + rows * count)
        pages_RP = table[low : low + rows, :pages]
        k_RSKD, v_RSKD = (x[pages_RP].flatten(1, 2) for x in (keys, values))
        q_RTHD, at_RT, out_RTHD = (x[part].view(rows, count, *x.shape[1:]) for x in (q, positions, out))
        for begin in range(0, count, CAPPED_QUERIES if cap else count):
            tokens = slice(begin, begin + CAPPED_QUERIES if cap else count)
            behind_RTS = at_RT[:, tokens, None] - torch.arange(pages * page, device=q.device)
            seen_RTS = behind_RTS >= 0
            if window:
                seen_RTS &= behind_RTS < window
            out_RTHD[:, tokens] = attention(
                q_RTHD[:, tokens], k_RSKD, v_RSKD, seen_RTS, scale=scale or None, cap=cap or None
            )
    return out


@_paged_attention.register_fake
def _(q, k, v, keys, values, places, positions, table, offsets, ends, groups, window, scale=0.0, cap=0.0):
    return torch.empty_like(q)


def _by_kernel(kernel: Callable, q, keys, values, table, offsets, ends, groups, window: int, scale: float) -> Tensor:
    most_new, most = (int(x) for x in (groups[:, 3].max(), groups[:, 4].max() * keys.shape[1]))
    return kernel(
        q, keys, values, offsets, None, most_new, most, window_size=(window - 1 if window else -1, 0),
        scale=scale or None, enable_gqa=True, seqused_k=ends, block_table=table.int(), num_splits=1,
    )  # fmt: skip


@functools.cache
def _paged_kernel() -> Callable | None:
    """Variable-length attention over pages of this torch, from 2.12 on."""
    from torch.nn.attention.varlen import varlen_attn

    return varlen_attn if "block_table" in inspect.signature(varlen_attn).parameters else None


def paged_flops(q: Tensor, groups: Tensor, page_tokens: int) -> int:
    """FLOPs of the two products of `paged_attention`, over the pages that are read."""
    pairs = int((groups[:, 2] * groups[:, 3] * groups[:, 4]).sum()) * page_tokens
    return 4 * q.shape[1] * q.shape[2] * pairs


def paged_bytes(q: Tensor, keys: Tensor, groups: Tensor) -> int:
    """Bytes of `paged_attention` that are read or written: the new tokens', and the pages of each sequence once."""
    pages = int((groups[:, 2] * groups[:, 4]).sum())
    return 4 * q.nbytes + 2 * pages * keys[0].nbytes
