"""The forward pass of `decode_step` in torch."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from funrl.compiled_kernels.attention import attention_reference
from funrl.compiled_kernels.decode_step import PAGE, PagedKeyValues, StepSizes, rotary_amplitude
from funrl.compiled_kernels.norm import rms_norm
from funrl.compiled_kernels.rotary import frequencies, rotary, rotate


def decode_reference(
    sizes: StepSizes,
    params: Any,
    cache: PagedKeyValues,
    tokens_N: Tensor,
    positions_N: Tensor,
    sequence_N: Tensor,
    tables_SP: Tensor,
    draw_M: Tensor,
) -> Tensor:
    """`PackedDecoder.forward` in torch, in the dtype of the weights and with plain pages.

    Args:
      cache: keys and values [layers, pages, PAGE, K, N], written in place.

    Returns: [M, V] in float32 or wider.
    """
    x_ND = params["embed"][tokens_N]
    wide = torch.promote_types(x_ND.dtype, torch.float32)
    frequency = frequencies(sizes.head, sizes.rope_theta, sizes.rope_scaling, wide)
    rope = rotary(positions_N, frequency, x_ND.dtype, rotary_amplitude(sizes))
    page_N = tables_SP[sequence_N, positions_N // PAGE].long()
    slot_N = positions_N % PAGE
    for index, layer in enumerate(params["layers"]):
        attn = layer["attn"]
        mlp = layer["mlp"]
        h_ND = rms_norm(x_ND, layer["attn_norm"], sizes.norm_eps)
        heads = []
        for name in "qkv":
            bias = attn[f"{name}_bias"].flatten() if f"{name}_bias" in attn else None
            x_NHN = F.linear(h_ND, attn[name].flatten(0, 1), bias).unflatten(1, attn[name].shape[:2])
            if f"{name}_norm" in attn:
                x_NHN = rms_norm(x_NHN, attn[f"{name}_norm"], sizes.norm_eps)
            heads.append(x_NHN if name == "v" else rotate(x_NHN, rope))
        q_NHN, cache.keys[index, page_N, slot_N], cache.values[index, page_N, slot_N] = heads
        mixed = []
        for q_HN, sequence, position in zip(q_NHN, sequence_N.tolist(), positions_N.tolist(), strict=True):
            seen = slice(max(0, position + 1 - (sizes.windows[index] or position + 1)), position + 1)
            k_1SKN, v_1SKN = (x[index, tables_SP[sequence].long()].flatten(0, 1)[None, seen] for x in cache)
            mixed.append(attention_reference(q_HN[None, None], k_1SKN, v_1SKN).flatten())
        out_ND = F.linear(torch.stack(mixed), attn["o"].flatten(1))
        x_ND = x_ND + (out_ND + attn["o_bias"] if "o_bias" in attn else out_ND)
        h_ND = rms_norm(x_ND, layer["mlp_norm"], sizes.norm_eps)
        x_ND = x_ND + F.linear(F.silu(F.linear(h_ND, mlp["gate"])) * F.linear(h_ND, mlp["up"]), mlp["down"])
    h_MD = rms_norm(x_ND[draw_M], params["norm"], sizes.norm_eps)
    return F.linear(h_MD.to(wide), (params["unembed"] if "unembed" in params else params["embed"]).to(wide))
