"""A decoder-only transformer as pure functions of a tree of weights: Llama, Qwen2 and Qwen3.

Weights are [out, in] with the heads kept apart; `axes` names their dims. The same `apply` trains (whole or packed rows,
no cache) and decodes (a cache). It sees local shards: under tensor parallelism a rank holds its heads, its part of the
mlp and its rows of the vocabulary, and each half of a layer begins with `pbroadcast` and ends with `psum`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from funrl import trees
from funrl.compiled_kernels.attention import attention
from funrl.compiled_kernels.norm import rms_norm
from funrl.compiled_kernels.rotary import Rotary, frequencies, rotary, rotate
from funrl.mesh.collectives import pbroadcast, psum
from funrl.mesh.mesh import Mesh, single
from funrl.models.config import Config, ModelError
from funrl.models.fsdp import regathering

SINGLE = single()


class Cache(NamedTuple):
    """Keys and values of the tokens so far; slot s of a row holds the token at position s."""

    keys: tuple[Tensor, ...]  # per layer [B, S, K, N], the key-value heads of this rank
    values: tuple[Tensor, ...]


class View(NamedTuple):
    """What the tokens of one layer see."""

    mask_BTS: Tensor | None  # bool; None: everything, or up to themselves where `causal`
    causal: bool


def shapes(config: Config) -> trees.Tree:
    """The whole tree of weights as tensors without memory."""
    V, D, H, K, N, F_ = config.vocab, config.embed, config.heads, config.kv_heads, config.head, config.mlp
    attn = {"q": (H, N, D), "k": (K, N, D), "v": (K, N, D), "o": (D, H, N)}
    if config.attention_bias:
        attn |= {"q_bias": (H, N), "k_bias": (K, N), "v_bias": (K, N)}
    if config.output_bias:
        attn |= {"o_bias": (D,)}
    if config.qk_norm:
        attn |= {"q_norm": (N,), "k_norm": (N,)}
    mlp = {"gate": (F_, D), "up": (F_, D), "down": (D, F_)}

    def empty(sizes: dict) -> dict:
        return {k: torch.empty(v, device="meta") for k, v in sizes.items()}

    layers = tuple(
        {**empty({"attn_norm": (D,), "mlp_norm": (D,)}), "attn": empty(attn), "mlp": empty(mlp)}
        for _ in range(config.layers)
    )
    return {**empty({"embed": (V, D), "norm": (D,)} | ({} if config.tied else {"unembed": (V, D)})), "layers": layers}


_AXES = {
    "embed": ("vocab", "embed"),
    "unembed": ("vocab", "embed"),
    "norm": ("norm",),
    "attn_norm": ("norm",),
    "mlp_norm": ("norm",),
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
    "gate": ("mlp", "embed"),
    "up": ("mlp", "embed"),
    "down": ("embed", "mlp"),
}


def axes(config: Config) -> trees.Tree:
    """The logical axes of every weight, a tuple of names per tensor."""
    return trees.map_named(lambda name, _: _AXES[name.rsplit("/", 1)[-1]], shapes(config))


def init(config: Config, generator: torch.Generator, dtype: torch.dtype = torch.float32) -> trees.Tree:
    """Random weights, whole: normal with variance 1 / fan-in, norms 1, biases 0.

    The numbers are drawn in float32, so every dtype begins with the same model.
    """
    residual = 1 / math.sqrt(2 * config.layers)  # what each of the 2 L residual branches adds is made smaller

    def draw(name: str, x: Tensor) -> Tensor:
        last = name.rsplit("/", 1)[-1]
        if last.endswith("norm"):
            return torch.ones(x.shape, dtype=dtype, device=generator.device)
        if last.endswith("bias"):
            return torch.zeros(x.shape, dtype=dtype, device=generator.device)
        fan_in = {"o": config.heads * config.head, "down": config.mlp}.get(last, config.embed)
        std = 0.02 if last in ("embed", "unembed") else fan_in**-0.5 * (residual if last in ("o", "down") else 1)
        return (torch.randn(x.shape, generator=generator, device=generator.device) * std).to(dtype)

    return trees.map_named(draw, shapes(config))


def unembed(params: trees.Tree) -> Tensor:
    """The matrix from hidden states to logits, [V, D]; this rank's rows of it."""
    return params["unembed"] if "unembed" in params else params["embed"]


def init_cache(
    config: Config, mesh: Mesh, rows: int, length: int, dtype: torch.dtype, device: torch.device | None = None
) -> Cache:
    """An empty cache for `rows` sequences of up to `length` tokens, for this rank's key-value heads."""
    local = _kv_count(config.heads // mesh.size("tensor"), config.heads // config.kv_heads)
    shape = (rows, length, local, config.head)

    def empty() -> tuple[Tensor, ...]:
        return tuple(torch.zeros(shape, dtype=dtype, device=device or mesh.device) for _ in range(config.layers))

    return Cache(empty(), empty())


def cache_rows(cache: Cache, rows: Tensor) -> Cache:
    """The given rows of a cache, copied."""
    return trees.map(lambda x: x.index_select(0, rows), cache)


def cache_prefix(cache: Cache, length: int) -> Cache:
    """A view of the first `length` slots; what is written to it is written to `cache`."""
    return trees.map(lambda x: x[:, :length], cache)


def apply(
    config: Config,
    params: trees.Tree,
    tokens_BT: Tensor,
    positions: Tensor | None = None,
    segments: Tensor | None = None,
    cache: Cache | None = None,
    mesh: Mesh = SINGLE,
    layer: Callable | None = None,
) -> tuple[Tensor, Cache | None]:
    """Hidden states after the last norm.

    Args:
      config: sizes and switches.
      params: this rank's shards of the weights, or what `fsdp.gathered` makes of them.
      tokens_BT: token ids, int64.
      positions: [B, T] or [T] int64; None: 0, 1, 2, ...
      segments: [B, T] int64, which sequence of a packed row; tokens see their own sequence only. 0 is padding.
        None: every row is one sequence. Not with a cache.
      cache: keys and values are written at slot == position, in place: the caller gives the cache up for the returned
        one. A token sees the slots up to its position, so what lies beyond (padding of a shorter row) is overwritten
        before it is ever seen. `positions=None` fills an empty cache, and is quicker.
      mesh: the axis sizes; weights are shards over "tensor".
      layer: a replacement of `decoder_layer`, such as a compiled one.

    Returns: hidden [B, T, D] in the dtype of the weights, the same on every tensor rank; the cache.
    """
    if cache is not None and segments is not None:
        raise ModelError("packed segments and a cache exclude each other: a cache has one sequence a row")
    T = tokens_BT.shape[1]
    x_BTD = _embed(config, params["embed"], tokens_BT, mesh)
    where = torch.arange(T, device=tokens_BT.device) if positions is None else positions
    wide = torch.promote_types(x_BTD.dtype, torch.float32)
    frequency = frequencies(config.head, config.rope_theta, config.rope_scaling, wide, tokens_BT.device)
    turn = rotary(where, frequency, x_BTD.dtype)
    slots = None if cache is None or positions is None else positions.expand(tokens_BT.shape)
    length = T if cache is None or slots is None else cache.keys[0].shape[1]
    views = {w: _view(T, length, slots, segments, w, tokens_BT.device) for w in set(config.windows or (None,))}
    layer = layer or decoder_layer
    layers = params["layers"]
    with regathering(layers):
        weights = iter(layers)
        for i in range(config.layers):
            kept = None if cache is None else (cache.keys[i], cache.values[i])
            # No name holds a layer's weights longer than the layer takes: they may be gathered for it.
            x_BTD = layer(config, mesh, next(weights), x_BTD, turn, views[config.window(i)], kept, slots)
    return rms_norm(x_BTD, params["norm"], config.norm_eps), cache


def decoder_layer(
    config: Config,
    mesh: Mesh,
    params: trees.Tree,
    x_BTD: Tensor,
    turn: Rotary,
    view: View,
    kept: tuple[Tensor, Tensor] | None,
    slots_BT: Tensor | None,
) -> Tensor:
    """One layer: x + attention(norm(x)), then the same with the mlp.

    Args:
      config, mesh: as in `apply`.
      params: the weights of this layer.
      x_BTD: what the layer before gave.
      turn: rotary turns of the tokens' positions.
      view: what the tokens see.
      kept: this layer's keys and values [B, S, K, N], written in place.
      slots_BT: where in `kept` the tokens go; None: they are its first ones.
    """
    h_BTD = pbroadcast(rms_norm(x_BTD, params["attn_norm"], config.norm_eps), mesh, "tensor")
    x_BTD = x_BTD + _attend(config, mesh, params["attn"], h_BTD, turn, view, kept, slots_BT)
    h_BTD = pbroadcast(rms_norm(x_BTD, params["mlp_norm"], config.norm_eps), mesh, "tensor")
    mlp = params["mlp"]
    inner_BTF = F.silu(F.linear(h_BTD, mlp["gate"])) * F.linear(h_BTD, mlp["up"])
    return x_BTD + psum(F.linear(inner_BTF, mlp["down"]), mesh, "tensor")


def _attend(config, mesh, params, h_BTD, turn, view, kept, slots_BT) -> Tensor:
    heads = params["q"].shape[0]
    q_BTHN = _project(h_BTD, params["q"], params.get("q_bias"))
    k_BTKN = _project(h_BTD, *_kv_heads(config, mesh, heads, params["k"], params.get("k_bias")))
    v_BTKN = _project(h_BTD, *_kv_heads(config, mesh, heads, params["v"], params.get("v_bias")))
    if config.qk_norm:
        q_BTHN = rms_norm(q_BTHN, pbroadcast(params["q_norm"], mesh, "tensor"), config.norm_eps)
        k_BTKN = rms_norm(k_BTKN, pbroadcast(params["k_norm"], mesh, "tensor"), config.norm_eps)
    q_BTHN, k_BTKN = rotate(q_BTHN, turn), rotate(k_BTKN, turn)
    if kept is not None:
        k_BTKN, v_BTKN = _keep(kept, k_BTKN, v_BTKN, slots_BT)
    out_BTHN = attention(q_BTHN, k_BTKN, v_BTKN, view.mask_BTS, view.causal)
    out_BTD = psum(F.linear(out_BTHN.flatten(2), params["o"].flatten(1)), mesh, "tensor")
    return out_BTD + params["o_bias"] if config.output_bias else out_BTD


def _project(h_BTD: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    out = F.linear(h_BTD, weight.flatten(0, 1), None if bias is None else bias.flatten())
    return out.unflatten(-1, weight.shape[:2])


def _keep(kept: tuple[Tensor, Tensor], k_BTKN: Tensor, v_BTKN: Tensor, slots_BT: Tensor | None):
    """Writes new keys and values; returns those to attend to."""
    keys, values = kept
    if slots_BT is None:  # an empty cache: what is new is all there is
        keys[:, : k_BTKN.shape[1]] = k_BTKN
        values[:, : v_BTKN.shape[1]] = v_BTKN
        return k_BTKN, v_BTKN
    rows_B1 = torch.arange(slots_BT.shape[0], device=slots_BT.device).unsqueeze(1)
    keys[rows_B1, slots_BT] = k_BTKN
    values[rows_B1, slots_BT] = v_BTKN
    return keys, values


def _embed(config: Config, w_VD: Tensor, tokens_BT: Tensor, mesh: Mesh) -> Tensor:
    if w_VD.shape[0] == config.vocab:
        return F.embedding(tokens_BT, w_VD)
    row_BT = tokens_BT - mesh.index("tensor") * w_VD.shape[0]
    mine_BT = (row_BT >= 0) & (row_BT < w_VD.shape[0])
    found_BTD = F.embedding(torch.where(mine_BT, row_BT, 0), w_VD)
    return psum(torch.where(mine_BT.unsqueeze(-1), found_BTD, 0), mesh, "tensor")


def _kv_count(heads: int, group: int) -> int:
    """How many key-value heads a rank with `heads` query heads needs, `group` query heads sharing each.

    Where the ranks' borders do not fall on the groups' it is one per query head, so that every rank has as many.
    """
    return 1 if group % heads == 0 else heads // group if heads % group == 0 else heads


def _kv_heads(
    config: Config, mesh: Mesh, heads: int, weight: Tensor, bias: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """The key-value heads that this rank's query heads use, where every rank holds all of them."""
    if mesh.size("tensor") == 1 or weight.shape[0] != config.kv_heads:
        return weight, bias
    group = config.heads // config.kv_heads
    count = _kv_count(heads, group)
    first = mesh.index("tensor") * heads + torch.arange(count, device=weight.device) * (heads // count)
    used = torch.div(first, group, rounding_mode="floor")
    # Each rank's gradient reaches the heads it used; their sum is the whole one.
    own = pbroadcast(weight, mesh, "tensor").index_select(0, used)
    return own, None if bias is None else pbroadcast(bias, mesh, "tensor").index_select(0, used)


def _view(T: int, S: int, slots_BT: Tensor | None, segments_BT: Tensor | None, window: int | None, device) -> View:
    """Which of S slots each of T tokens sees."""
    if slots_BT is None and segments_BT is None and (window is None or window >= T):
        return View(None, T > 1)
    slot_S = torch.arange(S, device=device)
    last = (slot_S if slots_BT is None else slots_BT).unsqueeze(-1)
    mask = slot_S <= last
    if window is not None:
        mask = mask & (slot_S > last - window)
    if segments_BT is not None:
        # Padding sees padding: its output is never used, and a token that sees nothing has no softmax.
        mask = mask & (segments_BT.unsqueeze(-1) == segments_BT.unsqueeze(-2))
    return View(mask if mask.dim() == 3 else mask.unsqueeze(0), False)
