"""Multi-head latent attention: the keys and values of all heads are made of one small vector a token.

    c_t = norm(A h_t) [R]        k_t = rotate(A' h_t) [N'], the same for all heads
    key of head i = (B_i c_t, k_t)        value of head i = B'_i c_t        query of head i = (q_i, rotate(q'_i))

The cache holds (c_t, k_t), R + N' numbers a token for all heads, on every tensor rank. Training makes keys and values
of each head and attends as all models do; a cache is attended to by `latent_paged_attention`.

Under tensor parallelism a rank has some of the heads. What all ranks compute alike, A h and what comes before it, is
computed outside of `enter`: its gradient is whole on each, once those of all heads are summed. Where the residual
stream is split it is computed of a rank's own tokens, and of these only the small vectors are gathered.

References: DeepSeek-AI, 2024, https://arxiv.org/abs/2405.04434
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from funrl import trees
from funrl.compiled_kernels.attention import attention
from funrl.compiled_kernels.latent_paged_attention import latent_paged_attention
from funrl.compiled_kernels.norm import rms_norm
from funrl.compiled_kernels.rotary import Rotary, rotate
from funrl.mesh.mesh import Mesh
from funrl.models.config import Config, Latent
from funrl.models.low_rank import LowRank, merged, multiply
from funrl.models.sequence_parallel import split_attention
from funrl.models.split_residual import enter

NORM_EPS = 1e-6  # of the norms inside, whatever config.json says of the others


def latent_shapes(latent: Latent, heads: int, embed: int) -> dict[str, tuple[int, ...]]:
    """Shapes of the whole weights of a layer's attention."""
    query = (heads, latent.nope + latent.rope)
    shapes: dict[str, tuple[int, ...]] = {"q": (*query, embed)}
    if latent.q_rank is not None:
        shapes = {"q_a": (latent.q_rank, embed), "q_a_norm": (latent.q_rank,), "q_b": (*query, latent.q_rank)}
    return shapes | {
        "kv_a": (latent.kv_rank + latent.rope, embed),
        "kv_a_norm": (latent.kv_rank,),
        "kv_b": (heads, latent.nope + latent.value, latent.kv_rank),
        "o": (embed, heads, latent.value),
    }


def latent_attention(
    config: Config, latent: Latent, mesh: Mesh, params: trees.Tree, h_BTD: Tensor, context: Any
) -> Tensor:
    """Attention of this rank's heads, [B, T, H, value].

    Args:
      params: by the names of `latent_shapes`; this rank's heads.
      h_BTD: normalised hidden states, the same on every tensor rank and not yet broadcast to them; where
        `context.split`, this rank's tokens of them.
      context: as in `decoder.Context`.
    """
    q_BTHN = _queries(latent, mesh, params, h_BTD, context)
    latent_BTR = _latent(latent, mesh, params, h_BTD, context)
    scale = config.attention_scale or config.head**-0.5
    if context.kv_cache is not None and context.paging is not None:
        up = params["kv_b"]
        up_HMR = merged(up) if isinstance(up, LowRank) else up
        new = (q_BTHN[0], latent_BTR[0], up_HMR, context.kv_cache[0])
        return latent_paged_attention(*new, context.paging, latent.value, scale).unsqueeze(0)
    k_BTHN, v_BTHN = _keys_values(latent, params, latent_BTR)
    # Kernels want heads of one size; 0s change no product.
    q, k, v = (F.pad(x, (0, latent.width - x.shape[-1])) for x in (q_BTHN, k_BTHN, v_BTHN))
    if context.offsets is not None:
        how = {"scale": scale, "blockwise": context.blockwise}
        out_BTHN = split_attention(q, k, v, context.offsets, mesh, None, context.form, **how)
    else:
        out_BTHN = attention(q, k, v, context.attention_mask_BTS, context.causal, scale=scale)
    return out_BTHN[..., : latent.value]


def _queries(latent: Latent, mesh: Mesh, params: trees.Tree, h_BTD: Tensor, context: Any) -> Tensor:
    """[B, T, H, nope + rope] of this rank's heads."""
    from_BTR, weight = h_BTD, params["q_b" if latent.q_rank is not None else "q"]
    if latent.q_rank is not None:
        from_BTR = rms_norm(multiply(h_BTD, params["q_a"]), params["q_a_norm"], NORM_EPS)
    q_BTHN = multiply(enter(from_BTR, mesh, context.split), weight).unflatten(-1, weight.shape[:2])
    plain, turning = q_BTHN.split((latent.nope, latent.rope), -1)
    return torch.cat((plain, _turned(latent, turning, context.rope)), -1)


def _latent(latent: Latent, mesh: Mesh, params: trees.Tree, h_BTD: Tensor, context: Any) -> Tensor:
    """Origin of keys and values, [B, T, kv_rank + rope]; the part of the keys that turns is rotated already."""
    plain, turning = multiply(h_BTD, params["kv_a"]).split((latent.kv_rank, latent.rope), -1)
    both_BTR = torch.cat((rms_norm(plain, params["kv_a_norm"], NORM_EPS), turning), -1)
    plain, turning = enter(both_BTR, mesh, context.split).split((latent.kv_rank, latent.rope), -1)
    return torch.cat((plain, _turned(latent, turning.unsqueeze(-2), context.rope).squeeze(-2)), -1)


def _keys_values(latent: Latent, params: trees.Tree, latent_BTR: Tensor) -> tuple[Tensor, Tensor]:
    """Keys [B, T, H, nope + rope] and values [B, T, H, value] of this rank's heads."""
    plain, turned = latent_BTR.split((latent.kv_rank, latent.rope), -1)
    both_BTHN = multiply(plain, params["kv_b"]).unflatten(-1, params["kv_b"].shape[:2])
    k_BTHN, v_BTHN = both_BTHN.split((latent.nope, latent.value), -1)
    turned = turned.unsqueeze(-2).expand(*k_BTHN.shape[:-1], latent.rope)
    return torch.cat((k_BTHN, turned), -1), v_BTHN


def _turned(latent: Latent, x: Tensor, rope: Rotary) -> Tensor:
    """Heads [..., rope] rotated; of neighbouring pairs, the first of all come first then."""
    if latent.interleaved:
        x = x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
    return rotate(x, rope)
