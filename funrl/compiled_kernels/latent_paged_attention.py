"""Attention of new tokens to latent vectors in pages, from which all heads make their keys and values.

With few new tokens the heads' matrices are multiplied into queries and results instead: each query then meets the
latent vectors themselves, and neither keys nor values are made,

    q k^T = q (B c)^T = (q B) c^T        sum_s p_s v_s = sum_s p_s B' c_s = B' (sum_s p_s c_s)

With many, such as those of a prompt, keys and values of a sequence are made once for all of them. Where there are the
C++ functions of the decoding step, all queries meet the latent vectors, also those of a trainer: `LatentAttention` has
the same bits then.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from funrl.compiled_kernels.attention import attention, attention_reference
from funrl.compiled_kernels.exact.dispatch import computes_exactly
from funrl.compiled_kernels.exact.registration import operator
from funrl.compiled_kernels.grouped_linear import head_products
from funrl.compiled_kernels.packed import AttentionOptions, PagedKeys, page_attention
from funrl.compiled_kernels.paged_attention import Paging


def latent_paged_attention(
    q_NHD: Tensor, latent_NL: Tensor, up_HMR: Tensor, cache_PTL: Tensor, paging: Paging, value: int, scale: float
) -> Tensor:
    """softmax(scale q k^T) v, where a token sees itself and the tokens before it in its own sequence.

    Without a gradient.

    Args:
      q_NHD: of the new tokens, the last L - R numbers of each head rotated.
      latent_NL: of the new tokens: R numbers that keys and values are made of, and L - R of a key for all heads.
      up_HMR: M = D - (L - R) rows for the rest of a head's key, and `value` for its value.
      cache_PTL: pages of latent vectors; the new ones are written to it, in place.
      paging: places of the tokens.
      value: size of a head's value.
      scale: factor of q k^T.

    Returns: [N, H, value].
    """
    return _latent_paged_attention(q_NHD, latent_NL, up_HMR, cache_PTL, *paging, value, scale)


def latent_paged_attention_reference(
    q_NHD: Tensor, latent_NL: Tensor, up_HMR: Tensor, cache_PTL: Tensor, paging: Paging, value: int, scale: float
) -> Tensor:
    """`latent_paged_attention`, sequence by sequence, with keys and values and the whole matrix of weights."""
    outs = []
    page = cache_PTL.shape[1]
    rank = up_HMR.shape[2]
    for row, place in zip(latent_NL, paging.places_N.tolist(), strict=True):
        cache_PTL[place // page, place % page] = row
    for s, end in enumerate(paging.ends_S.tolist()):
        begin, stop = paging.offsets_S1[s : s + 2].tolist()
        latent_SL = cache_PTL[paging.table_SP[s]].flatten(0, 1)[:end]
        expanded_SHM = torch.einsum("sr,hmr->shm", latent_SL[:, :rank], up_HMR)
        keys, values = expanded_SHM.split((up_HMR.shape[1] - value, value), -1)
        shared = latent_SL[:, None, rank:].expand(-1, len(up_HMR), -1)
        seen_TS = torch.arange(end - (stop - begin), end)[:, None] >= torch.arange(end)
        keys = torch.cat((keys, shared), -1)
        logits = torch.einsum("thn,shn->hts", q_NHD[begin:stop], keys) * scale
        weights = logits.masked_fill(~seen_TS, -torch.inf).softmax(-1)
        outs.append(torch.einsum("hts,shv->thv", weights, values))
    return torch.cat(outs)


def static_latent_paged_attention(
    q_NHD: Tensor, latent_NL: Tensor, up_HMR: Tensor, cache_PTL: Tensor, paging: Paging, scale: float
) -> Tensor:
    """`latent_paged_attention` of equally many tokens of each row of `paging.table_SP`, whose pages are all read.

    It is made of core operators, for programs that are traced, as `static_paged_attention` is. Queries meet the latent
    vectors themselves.
    """
    rows, pages = paging.table_SP.shape
    _, _, rank = up_HMR.shape
    plain = q_NHD.shape[2] - (latent_NL.shape[1] - rank)  # numbers of a head that are not rotated
    cache_PTL.view(-1, cache_PTL.shape[2]).index_copy_(0, paging.places_N, latent_NL)
    wide = torch.promote_types(q_NHD.dtype, torch.float32)
    to_keys_HMR, to_values_HVR = up_HMR.to(wide).split((plain, up_HMR.shape[1] - plain), 1)
    keys_RS1L = cache_PTL[paging.table_SP.long()].flatten(1, 2).unsqueeze(2).to(wide)
    q_RTHD = q_NHD.unflatten(0, (rows, -1)).to(wide)
    to_latent_RTHL = torch.einsum("rthm,hml->rthl", q_RTHD[..., :plain], to_keys_HMR)
    q_RTHL = torch.cat((to_latent_RTHL, q_RTHD[..., plain:]), -1)
    seen_RTS = paging.positions_N.view(rows, -1, 1) >= torch.arange(pages * cache_PTL.shape[1], device=q_NHD.device)
    out_RTHL = attention_reference(q_RTHL, keys_RS1L, keys_RS1L, seen_RTS, scale=scale)
    out_RTHV = torch.einsum("rthl,hvl->rthv", out_RTHL[..., :rank], to_values_HVR)
    return out_RTHV.flatten(0, 1).to(q_NHD.dtype)


# Flat arguments, here and in the fake: torch.library takes tensors and numbers, no records.
@operator("funrl::latent_paged_attention", mutates_args=("cache",))
def _latent_paged_attention(
    q: Tensor,
    latent: Tensor,
    up: Tensor,
    cache: Tensor,
    places: Tensor,
    positions: Tensor,
    table: Tensor,
    offsets: Tensor,
    ends: Tensor,
    groups: Tensor,
    value: int,
    scale: float,
) -> Tensor:
    cache.view(-1, cache.shape[2]).index_copy_(0, places, latent)
    if computes_exactly(q, up, cache):
        vectors = cache.unsqueeze(2)
        paged = PagedKeys(vectors, vectors, table, ends)
        options = AttentionOptions(scale=scale)
        return attend_through_latent(q, up, value, lambda x: page_attention(x, paged, offsets, options)[0])
    out = q.new_empty(*q.shape[:2], value)
    page = cache.shape[1]
    for first, low, rows, count, pages in groups.tolist():
        part = slice(first, first + rows * count)
        positions_RT, q_RTHD = (x[part].unflatten(0, (rows, count)) for x in (positions, q))
        latent_RSL = cache[table[low : low + rows, :pages]].flatten(1, 2)
        seen_RTS = positions_RT.unsqueeze(-1) >= torch.arange(pages * page, device=q.device)
        if absorbs(count, up, cache.shape[2], value):
            result = _absorbed(q_RTHD, latent_RSL, up, seen_RTS, value, scale)
        else:  # one sequence at a time: their keys and values are large
            each = zip(q_RTHD.split(1), latent_RSL.split(1), seen_RTS.split(1), strict=True)
            result = torch.cat([_expanded(*sequence, up, value, scale) for sequence in each])
        out[part] = result.flatten(0, 1)
    return out


def attend_through_latent(q_NHD: Tensor, up_HMR: Tensor, value: int, attend: Callable[[Tensor], Tensor]) -> Tensor:
    """Attention by queries that meet latent vectors, where `computes_exactly`; differentiable as `attend` is.

    Args:
      q_NHD, up_HMR, value: as in `latent_paged_attention`.
      attend: from queries [N, H, L] to results of the same shape; the first R elements are used.

    Returns: [N, H, value].
    """
    _, rows, rank = up_HMR.shape
    plain = rows - value
    to_latent = head_products(q_NHD[..., :plain], up_HMR, 0, plain, True)
    out = attend(torch.cat((to_latent, q_NHD[..., plain:]), -1))
    return head_products(out[..., :rank], up_HMR, plain, rows, False)


@_latent_paged_attention.register_fake
def _(q, latent, up, cache, places, positions, table, offsets, ends, groups, value, scale):
    return q.new_empty(*q.shape[:2], value)


def absorbs(count: int, up_HMR: Tensor, cached: int, value: int) -> bool:
    """True if attending in latent space is cheaper than making keys and values, for `count` new tokens of a sequence.

    Args:
      cached: L.
      value: as in `latent_paged_attention`.
    """
    _, rows, rank = up_HMR.shape
    return 2 * count * (cached - _width(rows, rank, cached, value)) < rank * rows


def _width(rows: int, rank: int, cached: int, value: int) -> int:
    """Size of a head, as keys and values are made: the larger of them."""
    return max(rows - value + cached - rank, value)


def _absorbed(q_RTHD: Tensor, latent_RSL: Tensor, up_HMR: Tensor, seen_RTS: Tensor, value: int, scale: float) -> Tensor:
    rows, count, heads, _ = q_RTHD.shape
    _, M, rank = up_HMR.shape
    to_keys_HMR, to_values_HVR = up_HMR.split((M - value, value), 1)
    plain_RTHM, turned_RTHN = q_RTHD.split((M - value, q_RTHD.shape[3] - M + value), -1)
    q_RTHL = torch.cat((torch.einsum("rthm,hml->rthl", plain_RTHM, to_keys_HMR), turned_RTHN), -1)
    # One key for all heads: they are as good as tokens.
    seen = seen_RTS if count == 1 else seen_RTS.repeat_interleave(heads, 1)
    keys = latent_RSL.unsqueeze(2)
    out = attention(q_RTHL.reshape(rows, count * heads, 1, -1), keys, keys, seen, scale=scale)
    out_RTHR = out.view(rows, count, heads, -1)[..., :rank]
    return torch.einsum("rthl,hvl->rthv", out_RTHR, to_values_HVR)


def _expanded(q_1THD: Tensor, latent_1SL: Tensor, seen_1TS: Tensor, up_HMR: Tensor, value: int, scale: float) -> Tensor:
    heads, M, rank = up_HMR.shape
    expanded_1SHM = F.linear(latent_1SL[..., :rank], up_HMR.flatten(0, 1)).unflatten(-1, (heads, M))
    keys, values = expanded_1SHM.split((M - value, value), -1)
    shared = latent_1SL[:, :, None, rank:].expand(-1, -1, heads, -1)
    keys = torch.cat((keys, shared), -1)
    width = _width(M, rank, latent_1SL.shape[2], value)
    q, k, v = (F.pad(x, (0, width - x.shape[-1])) for x in (q_1THD, keys, values))
    return attention(q, k, v, seen_1TS, scale=scale)[..., :value]


def latent_paged_flops(up: Tensor, cache: Tensor, groups: Tensor, value: int) -> int:
    """FLOPs of `latent_paged_attention`, over the pages that are read."""
    heads, M, rank = up.shape
    cached = cache.shape[2]
    total = 0
    for _, _, rows, count, pages in groups.tolist():
        tokens = pages * cache.shape[1]
        if absorbs(count, up, cached, value):
            total += rows * count * heads * (4 * cached * tokens + 2 * M * rank)
        else:
            total += rows * heads * tokens * (4 * count * _width(M, rank, cached, value) + 2 * M * rank)
    return total


def latent_paged_bytes(q: Tensor, latent: Tensor, up: Tensor, cache: Tensor, groups: Tensor) -> int:
    """Bytes that `latent_paged_attention` reads or writes.

    They are those of the new tokens, the matrices, and the pages of each sequence once.
    """
    pages = int((groups[:, 2] * groups[:, 4]).sum())
    return 2 * (q.nbytes + latent.nbytes) + up.nbytes + pages * cache[0].nbytes
