"""A decoder-only transformer as pure functions of a tree of weights.

`decoder_model` puts them into a `Model`. A layer is a record of a mixer and an mlp, which `layers.py` describes; this
file has what is around them: embeddings, norms, the residual stream and the loop. Weights are [out, in] with heads as a
dim of their own; see `weights.py`. The same `apply` trains (whole or packed rows, no cache) and decodes (a cache). It
sees local shards: under tensor parallelism a rank holds its heads, its part of the mlp and its rows of the vocabulary,
and each half of a layer begins and ends with the collectives of `split_residual`.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from funrl import trees
from funrl.compiled_kernels.mutual_attention import group_numbers
from funrl.compiled_kernels.norm import rms_norm
from funrl.mesh.collectives import own_shard, pbroadcast
from funrl.mesh.mesh import SINGLE, Mesh
from funrl.models.decoder.attention import Attention
from funrl.models.decoder.compiled_step import aligned_problem, exact_sums, step_sizes
from funrl.models.decoder.config import Config, cost_of, layers_of
from funrl.models.decoder.layers import CacheShapes, Context, DecoderLayer, KeysValues, LayerOutput, Norm
from funrl.models.decoder.sequence_parallel import AXIS
from funrl.models.decoder.weights import axes, init, shapes, unembed
from funrl.models.errors import ModelError
from funrl.models.fsdp import regathering
from funrl.models.model import Abilities, Inputs, Layer, Model, Output, RouterLoad, Routers
from funrl.models.split_residual import leave, own_tokens

LayerCaches = tuple[tuple[Tensor, ...], ...]  # tensors of each layer's mixer


def decoder_model(config: Config) -> Model:
    """The decoder of these sizes and switches."""
    layers = layers_of(config)
    pages = all(layer.mixer.cache_shapes(1, 1) is not None for layer in layers)
    return Model(
        config=config,
        shapes=shapes(config),
        axes=axes(config),
        init=functools.partial(init, config),
        apply=functools.partial(apply, config),
        unembed=unembed,
        value=None,
        layer=decoder_layer,
        init_cache=_InitCache(config) if pages else None,
        rebuild=decoder_model,
        abilities=_abilities(config, layers),
    )


def _abilities(config: Config, layers: Sequence[DecoderLayer]) -> Abilities:
    routed = tuple(i for i, layer in enumerate(layers) if layer.mlp.routed)
    experts = config.mlp.experts
    heads = {layer.mixer.paged for layer in layers}
    return Abilities(
        cost=cost_of(config),
        compiled_step=step_sizes(config),
        routers=None if experts is None else Routers(experts.count, experts.per_token, routed, biased=experts.biased),
        heads=config.attention.heads,
        logit_cap=config.scales.logit_cap,
        paged_kernel=heads.pop() if len(heads) == 1 else None,
        exact_sums=exact_sums(config),
        aligned=aligned_problem(config),
        layer_kinds=_layer_kinds(config, layers),
        shares_prefixes=all(type(layer.mixer) is Attention and not layer.mlp.routed for layer in layers),
    )


def _layer_kinds(config: Config, layers: Sequence[DecoderLayer]) -> tuple[int, ...]:
    """For each layer the number of its kind; a layer that others attend to is a kind by itself."""
    lender = config.attention.lender
    lenders = {lender(i) for i in range(len(layers))}
    keys = [(layer, lender(i), i if i in lenders else None) for i, layer in enumerate(layers)]
    numbers = {key: number for number, key in enumerate(dict.fromkeys(keys))}
    return tuple(numbers[key] for key in keys)


class CacheForm(NamedTuple):
    """Page count, tokens per page, cell count, and the dtype of pages."""

    pages: int
    page_tokens: int
    cells: int
    dtype: torch.dtype


class Cache(NamedTuple):
    """Cache of the tokens so far.

    Attributes:
      pages: [pages, page_tokens, ...] of each layer.
      cells: [cells, ...] of each layer: what a sequence has of a fixed size.
    """

    pages: LayerCaches
    cells: LayerCaches


def empty_cache(config: Config, mesh: Mesh, sizes: CacheForm, device: torch.device) -> Cache:
    """An empty cache, of this rank's heads.

    Raises:
      ModelError: a layer's mixer cannot decode with a cache.
    """
    wide = torch.promote_types(sizes.dtype, torch.float32)

    def shapes_of(layer: DecoderLayer) -> CacheShapes:
        cache_shapes = layer.mixer.cache_shapes(sizes.page_tokens, mesh.size("tensor"))
        if cache_shapes is None:
            raise ModelError(f"{type(layer.mixer).__name__} has no cache: the model cannot decode with one")
        return cache_shapes

    def empty(count: int, shapes: Sequence[tuple[int, ...]], dtype: torch.dtype) -> tuple[Tensor, ...]:
        return tuple(torch.zeros((count, *shape), dtype=dtype, device=device) for shape in shapes)

    layers = [shapes_of(layer) for layer in layers_of(config)]
    return Cache(
        tuple(empty(sizes.pages, layer.pages, sizes.dtype) for layer in layers),
        tuple(empty(sizes.cells, layer.cells, wide) for layer in layers),
    )


class _InitCache(NamedTuple):
    """`Model.init_cache` of a decoder; a record, so that a model can be sent to another process."""

    config: Config

    def __call__(
        self,
        mesh: Mesh,
        pages: int,
        page_tokens: int,
        dtype: torch.dtype,
        device: torch.device | None = None,
        cells: int = 0,
    ) -> Cache:
        form = CacheForm(pages, page_tokens, cells, dtype)
        return empty_cache(self.config, mesh, form, device or mesh.device)


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
    inputs = _of_distinct(inputs)
    x_BTD = _embed(config, params["embed"], inputs.tokens, mesh=mesh, split=inputs.split)
    x_BTD = _with_inserted(x_BTD, inputs, mesh, 0)
    vectors_BTLP = _layer_vectors(config, params, inputs, x_BTD, mesh)
    kinds = layers_of(config)
    contexts = _contexts(kinds, inputs, x_BTD.dtype)
    run = layer or decoder_layer
    layers = params["layers"]
    loads: list[RouterLoad] = []
    lent: dict[int, KeysValues] = {}
    with regathering(layers):
        weights = iter(layers)
        for i, kind in enumerate(kinds):
            context = contexts[id(kind)]
            if inputs.routes is not None and kind.mlp.routed:
                context = context._replace(routes_BTK=inputs.routes[:, :, len(loads)])
            lender = config.attention.lender(i)
            if lender is not None:
                context = context._replace(keys_values=lent[lender])
            if vectors_BTLP is not None:
                context = context._replace(vectors_BTP=vectors_BTLP[:, :, i])
            if cache is not None:
                there = i if lender is None else lender
                context = context._replace(kv_cache=cache.pages[there] + cache.cells[there])
            # No name holds a layer's weights longer than the layer takes: they may be gathered for it.
            out = run(config, mesh, next(weights), x_BTD, context)
            out = out if isinstance(out, LayerOutput) else LayerOutput(out)
            x_BTD = out.hidden_BTD
            if out.lent is not None:
                lent[i] = out.lent
            if out.load is not None:
                loads.append(out.load)
            del out
            x_BTD = _with_inserted(x_BTD, inputs, mesh, i + 1)
    x_BTD = _norm(config, x_BTD, params["norm"])
    x_BTD = x_BTD if inputs.prefixes is None else inputs.prefixes.spread(x_BTD)
    aux = {} if not loads else RouterLoad(*map(torch.stack, zip(*loads, strict=True)))._asdict()
    return Output(x_BTD if config.scales.logit_divisor == 1 else x_BTD / config.scales.logit_divisor, cache, aux)


def decoder_layer(
    config: Config, mesh: Mesh, params: trees.Tree, x_BTD: Tensor, context: Context
) -> Tensor | LayerOutput:
    """One layer: x + mixer(norm(x)), then the same with the mlp; the norms are where `NormConfig.places` says.

    What the layer's own vectors add comes behind these, and its factor at the end.

    Args:
      config, mesh: as in `apply`.
      params: the weights of this layer.
      x_BTD: output of the layer before; where `context.split`, this tensor rank's tokens of it.
      context: the mixer, the mlp, positions, mask and cache.

    Returns: its output; where it has experts, or lends keys and values, these too.
    """
    mixer, mlp = context.layer
    h_BTD = _norm(config, x_BTD, params.get("attn_norm"))
    # No name holds what the mixer adds while the mlp computes: it is as large as the hidden states.
    out_BTD = mixer.apply(params["attn"], h_BTD, mesh, context)
    out_BTD, lent = out_BTD if isinstance(out_BTD, tuple) else (out_BTD, None)
    x_BTD = _add(config, x_BTD, out_BTD, params.get("attn_out_norm"))
    del out_BTD
    h_BTD = _norm(config, x_BTD, params.get("mlp_norm"))
    out_BTD, load = mlp.apply(params["mlp"], h_BTD, mesh, context._replace(stream_BTD=x_BTD))
    x_BTD = _add(config, x_BTD, out_BTD, params.get("mlp_out_norm"))
    if config.layer_vectors is not None and context.vectors_BTP is not None:
        norm = Norm(config.norm.eps, config.norm.offset)
        x_BTD = x_BTD + config.layer_vectors.apply(params["vectors"], x_BTD, context.vectors_BTP, norm)
    if config.scales.layers:
        x_BTD = x_BTD * params["layer_scale"].detach()
    return x_BTD if load is None and lent is None else LayerOutput(x_BTD, load, lent)


def _of_distinct(inputs: Inputs) -> Inputs:
    """The inputs of the tokens that layers compute."""
    prefixes = inputs.prefixes
    if prefixes is None:
        return inputs
    fields = {"tokens": inputs.tokens, "positions": inputs.positions, "segments": inputs.segments}
    return inputs._replace(**{name: x if x is None else prefixes.narrow(x) for name, x in fields.items()})


def _norm(config: Config, x: Tensor, weight: Tensor | None) -> Tensor:
    """A norm over the last dim; None: there is none here."""
    return x if weight is None else rms_norm(x, weight, config.norm.eps, offset=config.norm.offset)


def _add(config: Config, x_BTD: Tensor, branch_BTD: Tensor, out_norm: Tensor | None) -> Tensor:
    """The residual stream with what a branch adds to it."""
    branch_BTD = _norm(config, branch_BTD, out_norm)
    return x_BTD + (branch_BTD if config.scales.residual == 1 else branch_BTD * config.scales.residual)


def _contexts(layers: Sequence[DecoderLayer], inputs: Inputs, dtype: torch.dtype) -> dict[int, Context]:
    """The context of each distinct layer, by its id, less its cache."""
    T = inputs.tokens.shape[1]
    device = inputs.tokens.device
    segments = inputs.segments
    packed = inputs.offsets is not None or inputs.paging is not None
    positions = inputs.positions if inputs.paging is None else inputs.paging.positions_N
    if positions is None:
        positions = torch.arange(T, device=device)
    distinct = {id(layer): layer for layer in layers}
    # Layers share rotations and masks: each is made once.
    axial = inputs.axial_positions
    kinds = {layer.mixer.rope for layer in distinct.values()}
    ropes = {rope: rope and rope.rotations(positions, dtype, axial) for rope in kinds}
    contexts = {}
    masks: dict[int | None, Tensor] = {}
    for number, layer in distinct.items():
        window = layer.mixer.window
        context = Context(layer, ropes[layer.mixer.rope], segments_BT=segments, split=inputs.split)
        context = context._replace(row_bound=inputs.row_bound)
        if packed:
            context = context._replace(offsets=inputs.offsets, paging=inputs.paging, cells_S=inputs.cells_S)
            contexts[number] = context._replace(mutual_RM=inputs.mutual_RM, prefixes=inputs.prefixes)
        elif segments is None and inputs.mutual_RM is None and (window is None or window >= T):
            contexts[number] = context._replace(causal=T > 1)
        else:
            if window not in masks:
                masks[window] = _attention_mask(inputs, window, device=device)
            contexts[number] = context._replace(attention_mask_BTS=masks[window], causal=False)
    return contexts


def _layer_vectors(config: Config, params: trees.Tree, inputs: Inputs, x_BTD: Tensor, mesh: Mesh) -> Tensor | None:
    """The vectors that layers have of their own, [B, T, L, P] of this rank's tokens; None: they have none."""
    if config.layer_vectors is None:
        return None
    rows_BTX = _embedding(config, params["embed_per_layer"], inputs.tokens, mesh=mesh, split=inputs.split)
    norm = Norm(config.norm.eps, config.norm.offset)
    return config.layer_vectors.make(params, rows_BTX, x_BTD, norm)


def _embed(config: Config, w_VD: Tensor, tokens_BT: Tensor, mesh: Mesh, split: bool) -> Tensor:
    x_BTD = _embedding(config, w_VD, tokens_BT, mesh=mesh, split=split)
    # Rounded to the dtype before, as in transformers.
    return x_BTD if config.scales.embed == 1 else x_BTD * x_BTD.new_full((), config.scales.embed)


def _embedding(config: Config, w_VD: Tensor, tokens_BT: Tensor, mesh: Mesh, split: bool) -> Tensor:
    """The rows of the tokens; each rank has some of the table. Where `split`, of this tensor rank's tokens."""
    if w_VD.shape[0] == config.vocab:
        return own_tokens(F.embedding(tokens_BT, w_VD), mesh, split)
    row_BT = tokens_BT - mesh.index("tensor") * w_VD.shape[0]
    mine_BT = (row_BT >= 0) & (row_BT < w_VD.shape[0])
    rows_BTD = F.embedding(torch.where(mine_BT, row_BT, 0), w_VD)
    return leave(torch.where(mine_BT.unsqueeze(-1), rows_BTD, 0), mesh, split)


def _with_inserted(x_BTD: Tensor, inputs: Inputs, mesh: Mesh, layers: int) -> Tensor:
    """Hidden states of this rank's tokens behind some layers, with what `Inputs.inserted` has for them there."""
    if inputs.inserted is None or inputs.inserted_at is None or layers >= len(inputs.inserted):
        return x_BTD
    rows_MD = inputs.inserted[layers].to(x_BTD.dtype)
    at_BT = inputs.inserted_at
    if inputs.split:  # tensor ranks have parts of their gradient
        rows_MD = pbroadcast(rows_MD, mesh, "tensor")
        at_BT = own_shard(at_BT, mesh, "tensor", dim=1)
    rows_BTD = F.embedding(at_BT.clamp_min(0), rows_MD)
    return torch.where((at_BT >= 0).unsqueeze(-1), rows_BTD if layers == 0 else x_BTD + rows_BTD, x_BTD)


def _attention_mask(inputs: Inputs, window: int | None, device: torch.device) -> Tensor:
    """Bool [B, T, T], the batch dim 1 where rows are equal: the tokens that each token sees."""
    B, T = inputs.tokens.shape
    segments_BT = inputs.segments
    position_T = torch.arange(T, device=device)
    distance_TS = position_T[:, None] - position_T
    mask = distance_TS >= 0
    if inputs.mutual_RM is not None:
        groups_BT = group_numbers(inputs.mutual_RM, B * T).view(B, T)
        mask = mask | ((groups_BT.unsqueeze(-1) == groups_BT.unsqueeze(-2)) & (groups_BT > 0).unsqueeze(-1))
    if window is not None:
        mask = mask & (distance_TS < window)
    if segments_BT is not None:
        # Padding sees padding: its output is never used, and a token that sees nothing has no softmax.
        mask = mask & (segments_BT.unsqueeze(-1) == segments_BT.unsqueeze(-2))
    return mask if mask.dim() == 3 else mask.unsqueeze(0)
