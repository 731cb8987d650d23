"""Weights of a decoder: their shapes and logical axes, and how they begin."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from funrl import trees
from funrl.models.config import Config
from funrl.models.latent_attention import latent_shapes

_BEFORE, _BEHIND = ("attn_norm", "mlp_norm"), ("attn_out_norm", "mlp_out_norm")
_AXES = {
    "embed": ("vocab", "embed"),
    "unembed": ("vocab", "embed"),
    "norm": ("norm",),
    "attn_norm": ("norm",),
    "mlp_norm": ("norm",),
    "attn_out_norm": ("norm",),
    "mlp_out_norm": ("norm",),
    "q": ("heads", "head", "embed"),
    "k": ("kv_heads", "head", "embed"),
    "v": ("kv_heads", "head", "embed"),
    "o": ("embed", "heads", "head"),
    "q_bias": ("heads", "head"),
    "k_bias": ("kv_heads", "head"),
    "v_bias": ("kv_heads", "head"),
    "o_bias": ("norm",),
    "q_norm": ("head",),
    "k_norm": ("head",),
    "q_a": ("latent", "embed"),
    "q_a_norm": ("norm",),
    "q_b": ("heads", "head", "embed"),
    "kv_a": ("latent", "embed"),
    "kv_a_norm": ("norm",),
    "kv_b": ("heads", "head", "embed"),
    "gate": ("mlp", "embed"),
    "up": ("mlp", "embed"),
    "down": ("embed", "mlp"),
    "router": ("router", "embed"),
    "router_bias": ("router",),
    "shared_gate": ("mlp", "embed"),
    "shared_up": ("mlp", "embed"),
    "shared_down": ("embed", "mlp"),
    "expert_gate": ("experts", "mlp", "expert_embed"),
    "expert_up": ("experts", "mlp", "expert_embed"),
    "expert_down": ("experts", "expert_embed", "mlp"),
}


def shapes(config: Config) -> trees.Tree:
    """The tree of whole weights, as tensors without memory."""
    V, D, H, K, N, F_ = config.vocab, config.embed, config.heads, config.kv_heads, config.head, config.mlp
    attn = {"q": (H, N, D), "k": (K, N, D), "v": (K, N, D), "o": (D, H, N)}
    if config.attention_bias:
        attn |= {"q_bias": (H, N), "k_bias": (K, N), "v_bias": (K, N)}
    if config.output_bias:
        attn |= {"o_bias": (D,)}
    if config.qk_norm:
        whole = config.qk_norm_over == "projection"
        attn |= {"q_norm": (H, N) if whole else (N,), "k_norm": (K, N) if whole else (N,)}
    if config.latent is not None:
        attn = latent_shapes(config.latent, H, D)
    norms = {"pre": _BEFORE, "post": _BEHIND, "sandwich": _BEFORE + _BEHIND}[config.norms]
    mlp, moe = {"gate": (F_, D), "up": (F_, D), "down": (D, F_)}, {}
    if config.experts is not None:
        E, M = config.experts.count, config.experts.mlp
        moe = {"router": (E, D), "expert_gate": (E, M, D), "expert_up": (E, M, D), "expert_down": (E, D, M)}
        if config.experts.biased:
            moe["router_bias"] = (E,)
        if shared := config.experts.shared:
            moe |= {"shared_gate": (shared, D), "shared_up": (shared, D), "shared_down": (D, shared)}

    def empty(sizes: dict) -> dict:
        return {k: torch.empty(v, device="meta") for k, v in sizes.items()}

    layers = tuple(
        {
            **empty(dict.fromkeys(norms, (D,))),
            "attn": empty(attn),
            "mlp": empty(moe if config.has_experts(i) else mlp),
        }
        for i in range(config.layers)
    )
    return {**empty({"embed": (V, D), "norm": (D,)} | ({} if config.tied else {"unembed": (V, D)})), "layers": layers}


def axes(config: Config) -> trees.Tree:
    """The logical axes of every weight, a tuple of names per tensor."""
    own = {} if config.qk_norm_over == "head" else {"q_norm": _AXES["q_bias"], "k_norm": _AXES["k_bias"]}
    return trees.map_named(lambda name, _: (_AXES | own)[name.rsplit("/", 1)[-1]], shapes(config))


def init(config: Config, generator: torch.Generator, dtype: torch.dtype = torch.float32) -> trees.Tree:
    """Random weights, whole: normal with variance 1 / fan-in, norms the identity, biases 0.

    The numbers are drawn in float32, so every dtype begins with the same model.
    """
    residual = 1 / math.sqrt(2 * config.layers)  # of each of the 2 L branches that add to the residual stream

    def draw(name: str, x: Tensor) -> Tensor:
        last = name.rsplit("/", 1)[-1]
        if last.endswith("norm"):
            return torch.full(x.shape, 1 - config.norm_offset, dtype=dtype, device=generator.device)
        if last.endswith("bias"):
            return torch.zeros(x.shape, dtype=dtype, device=generator.device)
        fan_in = x[0].numel() if last == "o" else x.shape[-1]
        branch = residual if last == "o" or last.endswith("down") else 1
        std = 0.02 if last in ("embed", "unembed") else fan_in**-0.5 * branch
        return (torch.randn(x.shape, generator=generator, device=generator.device) * std).to(dtype)

    return trees.map_named(draw, shapes(config))


def unembed(params: trees.Tree) -> Tensor:
    """The matrix from hidden states to logits, [V, D]; this rank's rows of it."""
    return params["unembed"] if "unembed" in params else params["embed"]
