"""Softmax attention with grouped key-value heads."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from funrl.compiled_kernels.exact.router import sigmoid
from funrl.compiled_kernels.flash_kernel import FLASH_HEAD


def attention(
    q_BTHN: Tensor,
    k_BSKN: Tensor,
    v_BSKN: Tensor,
    mask_BTS: Tensor | None = None,
    causal: bool = False,
    scale: float | None = None,
    cap: float | None = None,
    sinks_H: Tensor | None = None,
) -> Tensor:
    """softmax(scale q k^T) v, where query head h uses key-value head h // (H / K).

    Args:
      q_BTHN: queries.
      k_BSKN, v_BSKN: keys and values; K divides H.
      mask_BTS: bool, true where token t sees slot s; the batch dim may be 1. Every token must see something.
      causal: token t sees slots up to t; with T == S and no mask.
      scale: None: 1 / sqrt(N).
      cap: logits x become cap tanh(x / cap). Then the whole matrix of weights is made, but by flash-attn.
      sinks_H: logit of each head of a further key, whose value is 0. Then the whole matrix of weights is made.

    Returns: [B, T, H, N].
    """
    B, T, H, N = q_BTHN.shape
    K = k_BSKN.shape[2]
    if sinks_H is not None:
        mask_BTS = _causal_mask(q_BTHN) if causal else mask_BTS
        return _sink_attention(q_BTHN, k_BSKN, v_BSKN, mask_BTS, scale=scale or N**-0.5, sinks_H=sinks_H)
    for_flash = q_BTHN.is_cuda and mask_BTS is None and q_BTHN.element_size() == 2 and N <= FLASH_HEAD
    flash = flash_attention() if for_flash else None
    if flash is not None:
        return flash(q_BTHN, k_BSKN, v_BSKN, softmax_scale=scale, causal=causal, softcap=cap or 0.0)
    if cap is not None:
        return _capped_attention(q_BTHN, k_BSKN, v_BSKN, mask_BTS, causal, scale or N**-0.5, cap)
    k = k_BSKN.transpose(1, 2)
    v = v_BSKN.transpose(1, 2)
    if T == 1 and K < H:
        # One token: the heads that share a key-value head are as good as tokens, and no key is read twice.
        mask = None if mask_BTS is None else mask_BTS.unsqueeze(1)
        return F.scaled_dot_product_attention(q_BTHN.reshape(B, K, H // K, N), k, v, mask, scale=scale).reshape(
            B, 1, H, N
        )
    mask = None if mask_BTS is None else mask_BTS.unsqueeze(1)
    q = q_BTHN.transpose(1, 2)
    if q.is_cuda and K < H and (mask is not None or q.element_size() > 2):
        # CUDA has kernels that need no [T, S] memory for this, but only for as many key-value heads as queries.
        k, v = (x.repeat_interleave(H // K, 1) for x in (k, v))
        K = H
    # By a branch: of models with other counts of heads torch.compile makes one graph, in which K < H is symbolic.
    grouped = {"enable_gqa": True} if K < H else {}
    out = F.scaled_dot_product_attention(q, k, v, mask, is_causal=causal, scale=scale, **grouped)
    return out.transpose(1, 2)


def _capped_attention(q_BTHN, k_BSKN, v_BSKN, mask_BTS, causal: bool, scale: float, cap: float) -> Tensor:
    """Attention by the whole matrix of weights."""
    if causal:
        mask_BTS = _causal_mask(q_BTHN)
    weights, _ = _weights(q_BTHN, k_BSKN, mask_BTS, scale, cap)
    return _joined(torch.matmul(weights.to(v_BSKN.dtype), v_BSKN.transpose(1, 2).unsqueeze(2)))


def _sink_attention(q_BTHN, k_BSKN, v_BSKN, mask_BTS, scale: float, sinks_H) -> Tensor:
    """Attention by the whole matrix of weights, with a further key of each head."""
    K = k_BSKN.shape[2]
    _, logits = _weights(q_BTHN, k_BSKN, None, scale, None)
    seen = logits if mask_BTS is None else logits.masked_fill(~mask_BTS[:, None, None], -math.inf)
    sinks = sinks_H.to(seen.dtype).view(1, K, -1, 1, 1).expand(*seen.shape[:-1], 1)
    weights = torch.cat((seen, sinks), -1).softmax(-1)[..., :-1]
    return _joined(torch.matmul(weights.to(v_BSKN.dtype), v_BSKN.transpose(1, 2).unsqueeze(2)))


def add_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """Attention with a further key of each head, whose value is 0, from attention without it.

    With the normaliser Z = e^lse the result is out Z / (Z + e^sink), and its gradients are those of attention that had
    the second result for its log-sum-exp.

    Args:
      out: [T, H, N].
      lse: logarithms of the normalisers, [T, H], float32 or wider.
      sinks: [H].

    Returns: the result; logarithms of the normalisers with the sinks.
    """
    sinks = sinks.to(lse.dtype)
    share = sigmoid(lse - sinks)
    return (out.to(lse.dtype) * share.unsqueeze(-1)).to(out.dtype), torch.logaddexp(lse, sinks)


def sink_gradient(d_out: Tensor, out: Tensor, total: Tensor, sinks: Tensor) -> Tensor:
    """Gradient [H] of `add_sinks` by the sinks: -sum_t (d_out . out) e^sink / (Z + e^sink).

    Args:
      d_out, out: of the result, [T, H, N].
      total: its second result.
    """
    products = (d_out.to(total.dtype) * out.to(total.dtype)).sum(-1)
    return -(products * (sinks.to(total.dtype) - total).exp()).sum(0).to(sinks.dtype)


def attention_gradients(
    d_out_BTHN: Tensor,
    q_BTHN: Tensor,
    k_BSKN: Tensor,
    v_BSKN: Tensor,
    mask_BTS: Tensor | None,
    scale: float,
    cap: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of `attention` by q, k and v, by the whole matrix of weights, for where there is no autograd.

    With weights P of logits z = cap tanh(x / cap), x = scale q k^T: dz = P (dP - sum P dP), dx = dz (1 - (z / cap)^2).

    Args:
      mask_BTS: as in `attention`; None: causal.
    """
    kv_heads = k_BSKN.shape[2]
    mask_BTS = _causal_mask(q_BTHN) if mask_BTS is None else mask_BTS
    weights, logits = _weights(q_BTHN, k_BSKN, mask_BTS, scale, cap)
    wide = weights.dtype
    d_out, q = (_grouped(x.to(wide), kv_heads) for x in (d_out_BTHN, q_BTHN))
    k, v = (x.to(wide).transpose(1, 2).unsqueeze(2) for x in (k_BSKN, v_BSKN))
    d_weights = torch.matmul(d_out, v.mT)
    d_logits = weights * (d_weights - (weights * d_weights).sum(-1, keepdim=True))
    if cap is not None:
        d_logits = d_logits * (1 - (logits / cap).square())
    d_q = _joined(torch.matmul(d_logits, k) * scale)
    d_k, d_v = (
        torch.matmul(x.mT, y).sum(2).transpose(1, 2) * factor
        for x, y, factor in ((d_logits, q, scale), (weights, d_out, 1))
    )
    return d_q.to(q_BTHN.dtype), d_k.to(k_BSKN.dtype), d_v.to(v_BSKN.dtype)


def _weights(q_BTHN, k_BSKN, mask_BTS, scale: float, cap: float | None) -> tuple[Tensor, Tensor]:
    """Weights and logits [B, K, H / K, T, S] in float32 or wider; soft-capped before anything is masked."""
    wide = torch.promote_types(q_BTHN.dtype, torch.float32)
    logits = torch.matmul(_grouped(q_BTHN, k_BSKN.shape[2]), k_BSKN.permute(0, 2, 3, 1).unsqueeze(2)).to(wide) * scale
    logits = logits if cap is None else torch.tanh(logits / cap) * cap
    seen = logits if mask_BTS is None else logits.masked_fill(~mask_BTS[:, None, None], -math.inf)
    return seen.softmax(-1), logits


def _causal_mask(q_BTHN: Tensor) -> Tensor:
    T = q_BTHN.shape[1]
    return torch.ones(1, T, T, dtype=torch.bool, device=q_BTHN.device).tril()


def _grouped(x_BTHN: Tensor, kv_heads: int) -> Tensor:
    """[B, K, H / K, T, N]: the heads that share a key-value head together."""
    return x_BTHN.unflatten(2, (kv_heads, -1)).permute(0, 2, 3, 1, 4)


def _joined(x_BKGTN: Tensor) -> Tensor:
    """The inverse of `_grouped`."""
    return x_BKGTN.permute(0, 3, 1, 2, 4).flatten(2, 3)


def attention_reference(
    q_BTHN: Tensor,
    k_BSKN: Tensor,
    v_BSKN: Tensor,
    mask_BTS: Tensor | None = None,
    causal: bool = False,
    scale: float | None = None,
    cap: float | None = None,
    sinks_H: Tensor | None = None,
) -> Tensor:
    """`attention` with the whole matrix of weights."""
    B, T, H, N = q_BTHN.shape
    S, K = k_BSKN.shape[1:3]
    q_BTKGN = q_BTHN.reshape(B, T, K, H // K, N)
    logits = torch.einsum("btkgn,bskn->bkgts", q_BTKGN, k_BSKN) * (scale or 1 / math.sqrt(N))
    if cap is not None:
        logits = cap * (logits / cap).tanh()
    if causal:
        mask_BTS = torch.ones(T, S, dtype=torch.bool, device=q_BTHN.device).tril().unsqueeze(0)
    if mask_BTS is not None:
        logits = logits.masked_fill(~mask_BTS[:, None, None], -math.inf)
    if sinks_H is not None:
        sinks = sinks_H.view(K, H // K, 1, 1).expand(B, -1, -1, T, -1)
        logits = torch.cat((logits, sinks), -1)
    weights = logits.softmax(-1)[..., :S]
    return torch.einsum("bkgts,bskn->btkgn", weights, v_BSKN).reshape(B, T, H, N)


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
