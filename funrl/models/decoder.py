"""A decoder-only transformer as pure functions of a tree of weights: all families of `families.py`.

`decoder_model` puts them into a `Model`. Weights are [out, in] with heads as a dim of their own; see
`decoder_weights.py`. The same `apply` trains (whole or packed rows, no cache) and decodes (a cache). It sees local
shards: under tensor parallelism a rank holds its heads, its part of the mlp and its rows of the vocabulary, and each
half of a layer begins and ends with the collectives of `split_residual`.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from funrl import trees
from funrl.compiled_kernels.attention import attention
from funrl.compiled_kernels.norm import rms_norm
from funrl.compiled_kernels.paged_attention import Paging, paged_attention
from funrl.compiled_kernels.rotary import Rotary, frequencies, rotary, rotate
from funrl.mesh.collectives import pbroadcast, psum
from funrl.mesh.mesh import SINGLE, Mesh
from funrl.models.config import Config, LayerKind, ModelError
from funrl.models.decoder_weights import axes, init, shapes, unembed
from funrl.models.experts import mixture
from funrl.models.fsdp import regathering
from funrl.models.latent_attention import latent_attention
from funrl.models.low_rank import Weight, multiply, select_rows, used_by_parts
from funrl.models.model import Inputs, Layer, Model, Output
from funrl.models.names import hf_names
from funrl.models.routing import Load
from funrl.models.sequence_parallel import AXIS, split_attention
from funrl.models.split_residual import enter, leave, own_tokens

_ACTIVATIONS = {"silu": F.silu, "gelu": functools.partial(F.gelu, approximate="tanh")}


class Cache(NamedTuple):
    """Keys and values of the tokens so far, in pages.

    Attributes:
      keys: per layer [pages, tokens of a page, K, N], the key-value heads of this rank; of latent attention what all
        heads make their keys and values of, [pages, tokens of a page, R].
      values: likewise; of latent attention ().
    """

    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]


class Context(NamedTuple):
    """Inputs of a layer besides its weights and hidden states.

    Attributes:
      rope: rotations of the tokens' positions; None: the layer has none.
      attention_mask_BTS: bool, true where token t sees token s; None: every token, or those up to t where `causal`.
      causal: without a mask, token t sees tokens up to t.
      kv_cache: this layer's part of the cache, written in place.
      paging: with `kv_cache`, the places of the tokens of one packed row.
      offsets: where the sequences of one packed row begin and end; None: the mask tells what is seen.
      window: with `offsets` or `paging`, how many tokens back a token sees, itself included; None: all of its sequence.
      form: of attention where a mesh splits the tokens of the row; one of `sequence_parallel.FORMS`.
      real_BT: false at padding, which goes to no expert; None: there is none, or there are no experts.
      routes_BTK: the experts that tokens go to; None: as the router says.
      split: whether the hidden states are a part of the tokens that the rest is of; see `split_residual`.
      blockwise: compute attention by blocks of static shapes, as on XLA.
    """

    rope: Rotary | None
    attention_mask_BTS: Tensor | None
    causal: bool
    kv_cache: tuple[Tensor, ...] | None = None
    paging: Paging | None = None
    offsets: Tensor | None = None
    window: int | None = None
    form: str = "auto"
    real_BT: Tensor | None = None
    routes_BTK: Tensor | None = None
    split: bool = False
    blockwise: bool = False


def decoder_model(config: Config) -> Model:
    """The decoder of these sizes and switches."""
    tree = shapes(config)
    return Model(
        config=config,
        shapes=tree,
        axes=axes(config),
        names=hf_names(tree, config.family),
        init=functools.partial(init, config),
        apply=functools.partial(apply, config),
        unembed=unembed,
        value=None,
        layer=decoder_layer,
        init_cache=functools.partial(init_cache, config),
        rebuild=decoder_model,
        packs=True,
    )


def init_cache(
    config: Config, mesh: Mesh, pages: int, page_tokens: int, dtype: torch.dtype, device: torch.device | None = None
) -> Cache:
    """An empty cache of pages, for this rank's key-value heads, or for all heads of latent attention."""
    local = _kv_count(config.heads // mesh.size("tensor"), config.heads // config.kv_heads)
    shape = (pages, page_tokens, local, config.head)
    if config.latent is not None:
        shape = (pages, page_tokens, config.latent.cached)

    def empty() -> tuple[Tensor, ...]:
        return tuple(torch.zeros(shape, dtype=dtype, device=device or mesh.device) for _ in range(config.layers))

    return Cache(empty(), empty() if config.latent is None else ())


def apply(
    config: Config,
    params: trees.Tree,
    inputs: Inputs,
    mesh: Mesh = SINGLE,
    cache: Cache | None = None,
    layer: Layer | None = None,
) -> Output:
    """A forward pass, as `Model.apply` says.

    Raises:
      ModelError: of a cache and `Inputs.paging` there is only one; or tokens are split that are not packed.
    """
    if (cache is None) != (inputs.paging is None):
        raise ModelError("a cache and the paging of the tokens go together: one of them is missing")
    if (mesh.size(AXIS) > 1 or inputs.split) and inputs.offsets is None:
        raise ModelError(f"on the mesh {mesh} a row's tokens are split: rows are packed, and their inputs have offsets")
    x_BTD = _embed(config, params["embed"], inputs.tokens, mesh, inputs.split)
    contexts = _contexts(config, inputs, x_BTD.dtype)
    layer = layer or decoder_layer
    layers, loads = params["layers"], list[Load]()
    with regathering(layers):
        weights = iter(layers)
        for i in range(config.layers):
            context = contexts[config.kind(i)]
            if inputs.routes is not None and config.has_experts(i):
                context = context._replace(routes_BTK=inputs.routes[:, :, len(loads)])
            if cache is not None:
                context = context._replace(kv_cache=tuple(x[i] for x in cache if x))
            # No name holds a layer's weights longer than the layer takes: they may be gathered for it.
            out = layer(config, mesh, next(weights), x_BTD, context)
            x_BTD, load = out if isinstance(out, tuple) else (out, None)
            if load is not None:
                loads.append(load)
    x_BTD = _norm(config, x_BTD, params["norm"])
    aux = {} if not loads else Load(*map(torch.stack, zip(*loads, strict=True)))._asdict()
    return Output(x_BTD if config.logit_divisor == 1 else x_BTD / config.logit_divisor, cache, aux)


def decoder_layer(
    config: Config, mesh: Mesh, params: trees.Tree, x_BTD: Tensor, context: Context
) -> Tensor | tuple[Tensor, Load]:
    """One layer: x + attention(norm(x)), then the same with the mlp; the norms are where `Config.norms` says.

    Args:
      config, mesh: as in `apply`.
      params: the weights of this layer.
      x_BTD: output of the layer before; where `context.split`, this tensor rank's tokens of it.
      context: positions, mask and cache.

    Returns: its output; where it has experts, their load too.
    """
    h_BTD = _norm(config, x_BTD, params.get("attn_norm"))
    x_BTD = _add(config, x_BTD, _attend(config, mesh, params["attn"], h_BTD, context), params.get("attn_out_norm"))
    h_BTD, mlp = _norm(config, x_BTD, params.get("mlp_norm")), params["mlp"]
    if config.experts is not None and "router" in mlp:
        out_BTD, load = mixture(config.experts, mesh, mlp, h_BTD, context.real_BT, context.routes_BTK, context.split)
        return _add(config, x_BTD, out_BTD, params.get("mlp_out_norm")), load
    h_BTD = enter(h_BTD, mesh, context.split)
    inner_BTF = _ACTIVATIONS[config.activation](multiply(h_BTD, mlp["gate"])) * multiply(h_BTD, mlp["up"])
    out_BTD = leave(multiply(inner_BTF, mlp["down"]), mesh, context.split)
    return _add(config, x_BTD, out_BTD, params.get("mlp_out_norm"))


def _norm(config: Config, x: Tensor, weight: Tensor | None) -> Tensor:
    """A norm over the last dim; None: there is none here."""
    return x if weight is None else rms_norm(x, weight, config.norm_eps, config.norm_offset)


def _add(config: Config, x_BTD: Tensor, branch_BTD: Tensor, out_norm: Tensor | None) -> Tensor:
    """The residual stream with what a branch adds to it."""
    branch_BTD = _norm(config, branch_BTD, out_norm)
    return x_BTD + (branch_BTD if config.residual_scale == 1 else branch_BTD * config.residual_scale)


def _contexts(config: Config, inputs: Inputs, dtype: torch.dtype) -> dict[LayerKind, Context]:
    """The context of each kind of layers, less their caches."""
    tokens_BT, positions, segments, offsets, paging, _, split = inputs
    T, device = tokens_BT.shape[1], tokens_BT.device
    if paging is not None:
        positions = paging.positions_N
    positions = torch.arange(T, device=device) if positions is None else positions
    contexts = {}
    for kind in {config.kind(i) for i in range(config.layers)}:
        rope, window = _rope(config, kind, positions, dtype), kind.window
        if offsets is not None or paging is not None:
            contexts[kind] = Context(rope, None, True, paging=paging, offsets=offsets, window=window, split=split)
        elif segments is None and (window is None or window >= T):
            contexts[kind] = Context(rope, None, T > 1)
        else:
            contexts[kind] = Context(rope, _attention_mask(T, segments, window, device), False)
    if config.experts is None or segments is None:
        return contexts
    return {kind: context._replace(real_BT=segments != 0) for kind, context in contexts.items()}


def _rope(config: Config, kind: LayerKind, positions: Tensor, dtype: torch.dtype) -> Rotary | None:
    """Rotations in layers of a kind."""
    if not kind.rotates:
        return None
    theta, scaling = config.rope_theta, config.rope_scaling
    if kind.window is not None and config.local_rope_theta is not None:
        theta, scaling = config.local_rope_theta, None
    wide = torch.promote_types(dtype, torch.float32)
    amplitude = 1.0 if scaling is None else scaling.amplitude
    return rotary(positions, frequencies(config.rotated, theta, scaling, wide, positions.device), dtype, amplitude)


def _attend(config: Config, mesh: Mesh, params: trees.Tree, h_BTD: Tensor, context: Context) -> Tensor:
    if config.latent is not None:
        out_BTHN = latent_attention(config, config.latent, mesh, params, h_BTD, context)
    else:
        out_BTHN = _attend_heads(config, mesh, params, enter(h_BTD, mesh, context.split), context)
    out_BTD = leave(multiply(out_BTHN.flatten(2), params["o"]), mesh, context.split)
    return out_BTD + params["o_bias"] if config.output_bias else out_BTD


def _attend_heads(config: Config, mesh: Mesh, params: trees.Tree, h_BTD: Tensor, context: Context) -> Tensor:
    """Attention with keys and values of their own, of this rank's heads, [B, T, H, N]."""
    q_BTHN, k_BTKN, v_BTKN = _heads(config, mesh, params, h_BTD)
    if context.rope is not None:
        q_BTHN, k_BTKN = rotate(q_BTHN, context.rope), rotate(k_BTKN, context.rope)
    how: dict[str, Any] = {"scale": config.attention_scale, "cap": config.attention_cap}
    if context.kv_cache is not None and context.paging is not None:
        new, (keys, values) = (q_BTHN[0], k_BTKN[0], v_BTKN[0]), context.kv_cache
        return paged_attention(*new, (keys, values), context.paging, context.window, **how).unsqueeze(0)
    if context.offsets is not None:
        new = (q_BTHN, k_BTKN, v_BTKN, context.offsets)
        how["blockwise"] = context.blockwise
        return split_attention(*new, mesh, context.window, context.form, **how)
    return attention(q_BTHN, k_BTKN, v_BTKN, context.attention_mask_BTS, context.causal, **how)


def _heads(config: Config, mesh: Mesh, params: trees.Tree, h_BTD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values of this rank's heads, [B, T, heads, N] each, not rotated yet."""
    used = _used_kv_heads(config, mesh, params["q"].shape[0], params["k"])
    q_BTHN = _project(h_BTD, params["q"], params.get("q_bias"))
    v_BTKN = _project(h_BTD, *_own_heads(params, "v", used, mesh))
    if config.qk_norm and config.qk_norm_over == "projection":
        q_BTHN = _norm_all_heads(config, mesh, q_BTHN, params["q_norm"], config.heads)
        return q_BTHN, _normed_keys(config, mesh, params, h_BTD, used), v_BTKN
    k_BTKN = _project(h_BTD, *_own_heads(params, "k", used, mesh))
    if config.qk_norm:
        q_BTHN = _norm(config, q_BTHN, pbroadcast(params["q_norm"], mesh, "tensor"))
        k_BTKN = _norm(config, k_BTKN, pbroadcast(params["k_norm"], mesh, "tensor"))
    return q_BTHN, k_BTKN, v_BTKN


def _normed_keys(config: Config, mesh: Mesh, params: trees.Tree, h_BTD: Tensor, used: Tensor | None) -> Tensor:
    """Keys of this rank's heads, normalised together with those of all heads."""
    weight, bias, norm = params["k"], params.get("k_bias"), params["k_norm"]
    if used is not None:  # every rank norms all of them; its gradient is that of those it uses
        weight, norm = used_by_parts(weight, mesh), pbroadcast(norm, mesh, "tensor")
        bias = None if bias is None else pbroadcast(bias, mesh, "tensor")
    k_BTKN = _norm_all_heads(config, mesh, _project(h_BTD, weight, bias), norm, config.kv_heads)
    return k_BTKN if used is None else k_BTKN.index_select(2, used)


def _norm_all_heads(config: Config, mesh: Mesh, x_BTHN: Tensor, weight_HN: Tensor, heads: int) -> Tensor:
    """A norm over all `heads` heads of a token, of which this rank may have a part."""
    if weight_HN.shape[0] == heads:
        return _norm(config, x_BTHN.flatten(2), weight_HN.flatten()).view(x_BTHN.shape)
    wide_BTHN = x_BTHN.to(torch.promote_types(x_BTHN.dtype, torch.float32))
    total_BT11 = psum(wide_BTHN.square().sum((-2, -1), keepdim=True), mesh, "tensor")
    mean_BT11 = pbroadcast(total_BT11, mesh, "tensor") / (heads * config.head)
    weight_HN = weight_HN + config.norm_offset if config.norm_offset else weight_HN
    return (wide_BTHN * torch.rsqrt(mean_BT11 + config.norm_eps)).to(x_BTHN.dtype) * weight_HN


def _project(h_BTD: Tensor, weight: Weight, bias: Tensor | None) -> Tensor:
    """Hidden states to heads [B, T, H, N], by a weight [H, N, D] and a bias [H, N]."""
    return multiply(h_BTD, weight, bias).unflatten(-1, weight.shape[:2])


def _embed(config: Config, w_VD: Tensor, tokens_BT: Tensor, mesh: Mesh, split: bool) -> Tensor:
    found_BTD = _embedding(config, w_VD, tokens_BT, mesh, split)
    # Rounded to the dtype before, as in transformers.
    return found_BTD if config.embed_scale == 1 else found_BTD * found_BTD.new_full((), config.embed_scale)


def _embedding(config: Config, w_VD: Tensor, tokens_BT: Tensor, mesh: Mesh, split: bool) -> Tensor:
    """The rows of the tokens; each rank has some of the table. Where `split`, of this tensor rank's tokens."""
    if w_VD.shape[0] == config.vocab:
        return own_tokens(F.embedding(tokens_BT, w_VD), mesh, split)
    row_BT = tokens_BT - mesh.index("tensor") * w_VD.shape[0]
    mine_BT = (row_BT >= 0) & (row_BT < w_VD.shape[0])
    found_BTD = F.embedding(torch.where(mine_BT, row_BT, 0), w_VD)
    return leave(torch.where(mine_BT.unsqueeze(-1), found_BTD, 0), mesh, split)


def _kv_count(heads: int, group: int) -> int:
    """Number of key-value heads that a rank with `heads` query heads needs, `group` query heads sharing each.

    Where the ranks' borders do not fall on the groups' it is one per query head, so that every rank has as many.
    """
    return 1 if group % heads == 0 else heads // group if heads % group == 0 else heads


def _used_kv_heads(config: Config, mesh: Mesh, heads: int, weight: Weight) -> Tensor | None:
    """Numbers of the key-value heads that this rank's `heads` query heads use, where every rank holds all of them;
    None: it uses those that it holds."""
    if mesh.size("tensor") == 1 or weight.shape[0] != config.kv_heads:
        return None
    group = config.heads // config.kv_heads
    count = _kv_count(heads, group)
    first = mesh.index("tensor") * heads + torch.arange(count, device=weight.device) * (heads // count)
    return torch.div(first, group, rounding_mode="floor")


def _own_heads(params: trees.Tree, name: str, used: Tensor | None, mesh: Mesh) -> tuple[Weight, Tensor | None]:
    """Weight and bias of keys or values: of the used heads, where every rank holds all of them."""
    weight, bias = params[name], params.get(f"{name}_bias")
    if used is None:
        return weight, bias
    # Each rank's gradient reaches the heads it used; their sum is the whole one.
    own = select_rows(used_by_parts(weight, mesh), used)
    return own, None if bias is None else pbroadcast(bias, mesh, "tensor").index_select(0, used)


def _attention_mask(T: int, segments_BT: Tensor | None, window: int | None, device: torch.device) -> Tensor:
    """Bool [B, T, T], the batch dim 1 where rows are alike: the tokens that each token sees."""
    at_T = torch.arange(T, device=device)
    behind_TS = at_T[:, None] - at_T
    mask = behind_TS >= 0
    if window is not None:
        mask = mask & (behind_TS < window)
    if segments_BT is not None:
        # Padding sees padding: its output is never used, and a token that sees nothing has no softmax.
        mask = mask & (segments_BT.unsqueeze(-1) == segments_BT.unsqueeze(-2))
    return mask if mask.dim() == 3 else mask.unsqueeze(0)
