"""Attention to later tokens of a group, beside causal attention: the tokens of a picture see one another.

The keys that a token sees are those of causal attention and the later tokens of its own group. So the matrix of weights
that is made is that of a group, for any number of tokens in the row.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from funrl.compiled_kernels.attention import attention
from funrl.compiled_kernels.exact.registration import operator
from funrl.compiled_kernels.packed import AttentionOptions
from funrl.compiled_kernels.paged_attention import Paging

_WEIGHTS = 1 << 24  # numbers in the matrices that are made at once; those of one group may be more


@operator("funrl::add_later")
def add_later(qkv: Sequence[Tensor], out: Tensor, lse: Tensor, places: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Attention to earlier and later keys, from attention to the earlier ones.

    The gradients of causal attention with both results in place of its own are those of its part of the keys.

    Args:
      qkv: queries, keys and values of T tokens, [T, H, N] and twice [T, K, N].
      out: [T, H, N], of causal attention.
      lse: logarithms of its normalisers, [H, T], float32 or wider.
      places: [R, M] int64, the tokens of each group in ascending order; each sees the later ones of its group.
      scale: factor of q k^T; 0: 1 / sqrt(N).

    Returns: the result; logarithms of the normalisers with the later keys.
    """
    q, k, v = qkv
    out = out.clone()
    lse = lse.clone()
    kv_heads = k.shape[1]
    for part in _parts(places, q.shape[1]):
        logits, _, _ = _later(q, k, part, scale, lse.dtype)
        earlier = _of_groups(lse.T, part, kv_heads)
        total = torch.logaddexp(earlier, logits.logsumexp(-1))
        weights = (logits - total.unsqueeze(-1)).exp()
        result = _of_groups(out, part, kv_heads).to(lse.dtype) * (earlier - total).exp().unsqueeze(-1)
        result = result + weights @ _of_groups(v, part, kv_heads).to(lse.dtype)
        out[part.flatten()] = _tokens(result).to(out.dtype)
        lse[:, part.flatten()] = _tokens(total).T
    return out, lse


@operator("funrl::later_gradients")
def later_gradients(
    d_out: Tensor, qkv: Sequence[Tensor], out: Tensor, lse: Tensor, places: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of `add_later` by queries, keys and values, through the later keys.

    Args:
      d_out: of its first result.
      qkv, places, scale: its arguments.
      out, lse: its results.
    """
    q, k, v = qkv
    d_q, d_k, d_v = (torch.zeros_like(x) for x in qkv)
    kv_heads = k.shape[1]
    for part in _parts(places, q.shape[1]):
        logits, q_part, k_part = _later(q, k, part, scale, lse.dtype)
        d_part, out_part, v_part = (_of_groups(x, part, kv_heads).to(lse.dtype) for x in (d_out, out, v))
        weights = (logits - _of_groups(lse.T, part, kv_heads).unsqueeze(-1)).exp()
        d_weights = d_part @ v_part.mT - (d_part * out_part).sum(-1, keepdim=True)
        d_logits = weights * d_weights * (scale or q.shape[-1] ** -0.5)
        tokens = part.flatten()
        d_q[tokens] = _tokens(d_logits @ k_part).to(q.dtype)
        d_k[tokens] = _tokens((d_logits.mT @ q_part).sum(2, keepdim=True)).to(k.dtype)
        d_v[tokens] = _tokens((weights.mT @ d_part).sum(2, keepdim=True)).to(v.dtype)
    return d_q, d_k, d_v


@add_later.register_fake
def _(qkv, out, lse, places, scale):
    return torch.empty_like(out), torch.empty_like(lse)


@later_gradients.register_fake
def _(d_out, qkv, out, lse, places, scale):
    q, k, v = qkv
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


def group_numbers(places_RM: Tensor, tokens: int) -> Tensor:
    """Number of each of T tokens' group from 1 on, int64 [T]; 0: it has none."""
    groups_R1 = torch.arange(1, len(places_RM) + 1, device=places_RM.device).unsqueeze(1)
    return groups_R1.new_zeros(tokens).scatter(0, places_RM.flatten(), groups_R1.expand_as(places_RM).flatten())


def mutual_mask(places_RM: Tensor, tokens: int) -> Tensor:
    """Bool [T, T], true where two tokens are of one group, of T `tokens`."""
    group_T = group_numbers(places_RM, tokens)
    return (group_T.unsqueeze(-1) == group_T) & (group_T > 0)


def mutual_paged_attention(
    q_NHD: Tensor,
    out_NHD: Tensor,
    cache: tuple[Tensor, Tensor],
    paging: Paging,
    places_RM: Tensor,
    options: AttentionOptions,
) -> Tensor:
    """Results of `paged_attention`, with those of groups of tokens that see one another too.

    The keys of a group's sequence are gathered, and its queries are computed anew: only prompts have groups.

    Args:
      q_NHD: queries of the pass.
      out_NHD: results without later keys; they are replaced in place.
      cache: keys and values, the new ones included.
      paging: places of the tokens.
      places_RM: the tokens of each group in the pass; each token is in a group.
      options: of `paged_attention`.
    """
    pages = (paging.table_SP, paging.offsets_S1, paging.positions_N)
    _add_later_in_pages(q_NHD, out_NHD, cache, pages, places_RM, [float(x) for x in options])
    return out_NHD


@operator("funrl::add_later_in_pages", mutates_args=("out",))
def _add_later_in_pages(
    q: Tensor,
    out: Tensor,
    cache: Sequence[Tensor],
    pages: Sequence[Tensor],
    places: Tensor,
    options: Sequence[float],
) -> None:
    table, offsets, positions = pages
    window, scale, cap = options
    sequences_R = torch.searchsorted(offsets.long(), places[:, 0].contiguous(), right=True) - 1
    numbers_S = torch.arange(table.shape[1] * cache[0].shape[1], device=q.device)
    for sequence, places_M in zip(sequences_R, places, strict=True):
        own_P = table[sequence].long()
        k_1SKD, v_1SKD = (x[own_P].flatten(0, 1).unsqueeze(0) for x in cache)
        positions_M1 = positions[places_M].unsqueeze(-1)
        seen_MS = (numbers_S <= positions_M1[-1]).expand(len(places_M), -1)
        if window:
            seen_MS = seen_MS & (positions_M1 - numbers_S < window)
        queries = q[places_M].unsqueeze(0)
        seen_1MS = seen_MS.unsqueeze(0)
        out[places_M] = attention(queries, k_1SKD, v_1SKD, seen_1MS, scale=scale or None, cap=cap or None)[0]


@_add_later_in_pages.register_fake
def _(q, out, cache, pages, places, options):
    return None


def _parts(places: Tensor, heads: int) -> tuple[Tensor, ...]:
    """The groups, some at a time."""
    return places.split(max(1, _WEIGHTS // (heads * places.shape[1] ** 2)))


def _of_groups(x: Tensor, places: Tensor, kv_heads: int) -> Tensor:
    """[R, K, H / K, M, ...] of [T, H, ...], or of [T, K, ...]: one each."""
    return x[places].unflatten(2, (kv_heads, -1)).movedim(1, 3)


def _tokens(x: Tensor) -> Tensor:
    """The inverse of `_of_groups`: [R M, H, ...]."""
    return x.movedim(3, 1).flatten(2, 3).flatten(0, 1)


def _later(q: Tensor, k: Tensor, places: Tensor, scale: float, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Logits [R, K, H / K, M, M] of later keys, -inf elsewhere; queries and keys."""
    queries, keys = (_of_groups(x, places, k.shape[1]).to(dtype) for x in (q, k))
    M = places.shape[1]
    earlier = torch.ones(M, M, dtype=torch.bool, device=q.device).tril()
    logits = (queries @ keys.mT) * (scale or q.shape[-1] ** -0.5)
    return logits.masked_fill(earlier, -math.inf), queries, keys
