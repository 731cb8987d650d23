"""Softmax attention with grouped key-value heads."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor


def attention(q_BTHN: Tensor, k_BSKN: Tensor, v_BSKN: Tensor, mask_BTS: Tensor | None = None, causal: bool = False):
    """softmax(q k^T / sqrt(N)) v, where query head h uses key-value head h // (H / K).

    Args:
      q_BTHN: queries.
      k_BSKN, v_BSKN: keys and values; K divides H.
      mask_BTS: bool, true where token t sees slot s; the batch dim may be 1. Every token must see something.
      causal: token t sees slots up to t; with T == S and no mask.

    Returns: [B, T, H, N].
    """
    B, T, H, N = q_BTHN.shape
    K = k_BSKN.shape[2]
    flash = flash_attention() if q_BTHN.is_cuda and mask_BTS is None and q_BTHN.element_size() == 2 else None
    if flash is not None:
        return flash(q_BTHN, k_BSKN, v_BSKN, causal=causal)
    k, v = k_BSKN.transpose(1, 2), v_BSKN.transpose(1, 2)
    if T == 1 and K < H:
        # One token: the heads that share a key-value head are as good as tokens, and no key is read twice.
        mask = None if mask_BTS is None else mask_BTS.unsqueeze(1)
        return F.scaled_dot_product_attention(q_BTHN.reshape(B, K, H // K, N), k, v, mask).reshape(B, 1, H, N)
    mask = None if mask_BTS is None else mask_BTS.unsqueeze(1)
    q = q_BTHN.transpose(1, 2)
    if q.is_cuda and K < H and (mask is not None or q.element_size() > 2):
        # CUDA has kernels that need no [T, S] memory for this, but only for as many key-value heads as queries.
        k, v, K = k.repeat_interleave(H // K, 1), v.repeat_interleave(H // K, 1), H
    out = F.scaled_dot_product_attention(q, k, v, mask, is_causal=causal, enable_gqa=K < H)
    return out.transpose(1, 2)


def attention_reference(
    q_BTHN: Tensor, k_BSKN: Tensor, v_BSKN: Tensor, mask_BTS: Tensor | None = None, causal: bool = False
) -> Tensor:
    """`attention` with the whole matrix of weights."""
    B, T, H, N = q_BTHN.shape
    S, K = k_BSKN.shape[1:3]
    q_BTKGN = q_BTHN.reshape(B, T, K, H // K, N)
    logits = torch.einsum("btkgn,bskn->bkgts", q_BTKGN, k_BSKN) / math.sqrt(N)
    if causal:
        mask_BTS = torch.ones(T, S, dtype=torch.bool, device=q_BTHN.device).tril().unsqueeze(0)
    if mask_BTS is not None:
        logits = logits.masked_fill(~mask_BTS[:, None, None], -math.inf)
    return torch.einsum("bkgts,bskn->btkgn", logits.softmax(-1), v_BSKN).reshape(B, T, H, N)


_FLASH: list[Callable | None] = []  # flash-attn's function, once it has been looked for


def flash_attention() -> Callable | None:
    """flash-attn's function where the package is installed. A compiler is to take what it returns as a constant."""
    if not _FLASH:
        try:
            from flash_attn import flash_attn_func  # type: ignore[import-not-found]
        except ImportError:
            flash_attn_func = None
        _FLASH.append(flash_attn_func)
    return _FLASH[0]
