"""LoRA: adapters of low rank that learn beside weights that stay as they are.

`with_lora` gives a model whose layers have two thin factors beside each adapted weight W, and computes with
W + alpha / rank B A. The tree of its weights has two parts: the base, which is frozen, and what learns, which are the
factors and the value head where there is one. `trained_part` takes the latter out of a tree, `on_base` joins the two.

References: Hu et al., 2021, https://arxiv.org/abs/2106.09685
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from funrl import trees
from funrl.compiled_kernels.nf4 import weight_of, with_records
from funrl.mesh.collectives import pbroadcast
from funrl.mesh.mesh import SINGLE, Mesh
from funrl.models.errors import ModelError
from funrl.models.low_rank import LowRank
from funrl.models.model import Adapt, Adapters, Inputs, Layer, LayerContext, Lora, Model, ModelConfig, Output
from funrl.models.value_head import HEAD, HEAD_BIAS

# behind the name of a weight, those of its factors
FIRST = "_lora_a"
SECOND = "_lora_b"
PROJECTIONS = ("q", "k", "v", "o", "gate", "up", "down")
OF_SOME = ("q_a", "q_b", "kv_a", "kv_b", "shared_gate", "shared_up", "shared_down", "qkvz", "ba", "out")  # families
OF_TOWERS = ("qkv", "query", "key", "value", "proj", "gate_proj", "up_proj", "down_proj", "first", "second")  # by name
ROUTED = ("router", "expert_gate", "expert_up", "expert_down")  # each expert has factors of its own
BY_EXPERT = ROUTED[1:]
# Split over tensor ranks by their in dims: they have one out dim, others one in dim.
SUMMED = ("o", "down", "shared_down", "out", "expert_down")
SUMMED_LATER = ("shared_down", "expert_down")  # of these, what is multiplied by B has not been summed over tensor ranks
REPLICATED = ("q_a", "kv_a", "router")  # the same on all tensor ranks, as are their gradients


def with_lora(model: Model, lora: Lora) -> Model:
    """`model` with factors A [rank, *in] and B [*out, rank] beside each adapted weight [*out, *in].

    Those of experts [E, out, in] are A [E, rank, in] and B [E, out, rank].

    A begins uniform within 1 / sqrt(fan-in), as in PEFT, and B at 0: at first the model computes what `model` does.

    Raises:
      ModelError: it has adapters already, or is transformers' own code.
    """
    if model.adapters is not None:
        raise ModelError("the model has adapters already")
    if model.abilities.code:
        raise ModelError(f"{model.abilities.code} is transformers' own code, which takes no adapters")
    layer = _with_low_rank(model.layer, scale_of(lora))
    seen = set(lora.targets).intersection(OF_TOWERS)
    adapt = functools.partial(_with_own_factors, scale=scale_of(lora)) if seen else None
    shapes = _with_factors(model.shapes, lora.targets, functools.partial(_factor_shapes, lora.rank))
    return dataclasses.replace(
        model,
        shapes=shapes,
        axes=_with_factors(model.axes, lora.targets, _factor_axes),
        init=functools.partial(_init, model, lora),
        apply=functools.partial(_apply, model, layer, adapt),
        layer=layer,
        rebuild=functools.partial(_rebuild, model, lora),
        abilities=model.abilities._replace(compiled_step="it computes a base, and adapters that are loaded beside it"),
        adapters=Adapters(lora, model),
    )


def full_rank(model: Model, targets: Collection[str]) -> int:
    """The highest rank that an adapted matrix of a model can have."""
    named = ((name.rsplit("/", 1)[-1], x.shape) for name, x in trees.named(model.shapes))
    named = ((name, shape[1:] if name in BY_EXPERT else shape) for name, shape in named if name in targets)
    splits = ((shape, out_dims(name, len(shape))) for name, shape in named)
    return max((min(math.prod(shape[:out]), math.prod(shape[out:])) for shape, out in splits), default=0)


def added_adapters(model: Model) -> Lora | None:
    """The adapters of a model that an engine can add to the base: of dense layers. None: it has others, or none."""
    if model.adapters is None or set(model.adapters.lora.targets).intersection((*OF_TOWERS, *ROUTED)):
        return None
    return model.adapters.lora


def is_trained(name: str) -> bool:
    """True of the name of a weight that learns, in the tree of a model with adapters."""
    return name in (HEAD, HEAD_BIAS) or name.endswith((FIRST, SECOND))


def plain_name(name: str) -> str:
    """Name of a decoder's weight, without what a value head puts before it."""
    return name.removeprefix("decoder/")


def trained_part(model: Model, tree: trees.Tree) -> trees.Tree:
    """The part that learns of a tree like the model's weights: all of it where there are no adapters."""
    return tree if model.adapters is None else _trained(tree)


def decoder_of(tree: trees.Tree) -> trees.Tree:
    """The decoder's part of a tree like the weights of a model that may have a value head."""
    return tree.get("decoder", tree)


def on_base(model: Model, base: trees.Tree, own: trees.Tree) -> trees.Tree:
    """The tree of a model's weights.

    Args:
      model: with adapters; or without, which has all its weights from the base.
      base: a decoder's weights; it may lack the unembedding.
      own: what learns; None or {} where nothing does.
    """
    here = {name: base[name] for name in decoder_of(model.shapes)}
    return _joined(here if model.value is None else {"decoder": here}, own or {})


def first_trained(
    model: Model,
    layouts: trees.Tree,
    mesh: Mesh,
    generator: torch.Generator,
    dtype: torch.dtype,
    given: Mapping[str, Tensor] | None = None,
) -> trees.Tree:
    """This rank's part of what learns before the first step: the same numbers on every mesh.

    Args:
      model: with adapters.
      layouts: of what learns.
      generator: on the CPU; the numbers are drawn in float32.
      given: this rank's part of weights that the run begins with: a value head, or adapters of another run.
    """

    def first(name: str, x: Tensor, layout: Any) -> Tensor:
        if given is not None and name in given:
            return given[name].detach().to(mesh.device, dtype, copy=True)
        box = layout.box(mesh.rank)
        whole = _first(name, x, generator)
        part = whole[tuple(slice(low, high) for low, high in box)]
        return part.to(mesh.device, dtype, copy=True).contiguous()

    return trees.map_named(first, trained_part(model, model.shapes), layouts)


def merged_weights(model: Model) -> frozenset[str]:
    """Names of the weights, in the model without adapters, that adapters are merged in; none where there are none."""
    return frozenset(name.removesuffix(FIRST) for name, _ in trees.named(model.shapes) if name.endswith(FIRST))


def factored(model: Model, params: trees.Tree, dtype: torch.dtype) -> Mapping[str, LowRank]:
    """The adapted weights of a model with adapters, by their names in the model without.

    Args:
      params: the tree of its weights, a rank's shards as they are stored: the factors are split as the weight is, but
        along their rank, which no rule splits.
      dtype: of weights that are stored in 4 bits.
    """
    weights = dict(trees.named(params))
    scale = scale_of(model.lora)
    names = merged_weights(model)
    return {
        name: LowRank(weight_of(weights, name, dtype), weights[name + FIRST], weights[name + SECOND], scale=scale)
        for name in names
    }


def factors_of_layers(params: trees.Tree) -> list[dict[str, tuple[Tensor, Tensor]]]:
    """Factors of each layer as matrices, A [rank, in] and B [out, rank] by the name of the weight in its layer.

    Args:
      params: a tree with them, such as the part that learns.
    """
    layers = []
    for parts in params["layers"]:
        weights = {name: x for part in parts.values() if isinstance(part, dict) for name, x in part.items()}
        firsts = {name.removesuffix(FIRST): x for name, x in weights.items() if name.endswith(FIRST)}
        layers.append({name: (a.flatten(1), weights[name + SECOND].flatten(0, -2)) for name, a in firsts.items()})
    return layers


def factor_of(layers: Sequence[Mapping[str, tuple[Tensor, Tensor]]], name: str) -> Tensor:
    """The factor of a name in the tree of weights, such as layers/0/attn/q_lora_a, among those of all layers."""
    _, layer, _, leaf = name.split("/")
    a, b = layers[int(layer)][leaf.removesuffix(FIRST).removesuffix(SECOND)]
    return a if leaf.endswith(FIRST) else b


class Adapter(NamedTuple):
    """An adapter apart from the model that it stands on.

    Attributes:
      factors: this rank's, a tree like the part of the weights that learns.
      scale: of their product.
    """

    factors: trees.Tree
    scale: float


def with_adapters(params: trees.Tree, adapters: Sequence[tuple[Adapter, Tensor | None]]) -> trees.Tree:
    """Weights of a model without adapters, with the factors of some beside them, each for its own tokens.

    Args:
      params: the model's weights.
      adapters: with the tokens that meet each of them, as `LowRank.tokens` has them.
    """
    layers = list(params["layers"])
    for (factors, scale), tokens in adapters:
        layers = [_with_factors_of(*pair, scale, tokens) for pair in zip(layers, factors["layers"], strict=True)]
    return {**params, "layers": tuple(layers)}


def scale_of(lora: Lora) -> float:
    """The factor of B A x."""
    return lora.alpha / lora.rank


def _with_factors_of(
    layer: Mapping[str, Any], own: Mapping[str, Any], scale: float, tokens: Tensor | None
) -> dict[str, Any]:
    """A layer's weights, with their factors in `own`."""
    parts = dict(layer)
    for part, factors in own.items():
        weights: dict[str, Any] = with_records(parts[part], next(iter(factors.values())).dtype)
        for name, a in factors.items():
            if name.endswith(FIRST):
                weight = name.removesuffix(FIRST)
                weights[weight] = LowRank(weights[weight], a, factors[weight + SECOND], scale, tokens)
        parts[part] = weights
    return parts


def _with_low_rank(layer: Layer, scale: float) -> Layer:
    """The function of a layer that multiplies by adapted weights."""

    def adapted(config: ModelConfig, mesh: Mesh, params: trees.Tree, x_BTD: Tensor, context: LayerContext) -> Tensor:
        parts = {
            name: _low_rank(part, mesh, scale, split=context.split) if isinstance(part, dict) else part
            for name, part in params.items()
        }
        return layer(config, mesh, parts, x_BTD, context)

    return adapted


def _with_own_factors(part: Mapping[str, Any], scale: float) -> dict[str, Any]:
    """Weights of a part that every tensor rank computes whole, the adapted ones with their factors."""
    weights = {name: x for name, x in part.items() if not name.endswith((FIRST, SECOND))}
    factors = {name: (part[name + FIRST], part[name + SECOND]) for name in weights if name + FIRST in part}
    return weights | {name: LowRank(weights[name], *pair, scale=scale) for name, pair in factors.items()}


def _low_rank(part: Mapping[str, Tensor], mesh: Mesh, scale: float, split: bool) -> dict[str, Any]:
    """Weights of a part of a layer, the adapted ones with their factors.

    The factor that is the same on all tensor ranks is used by each for its part of the other one, or where the residual
    stream is `split` for its tokens: its gradient is their sum. But B of a sum over tensor ranks meets the whole sum,
    unless experts make it, whose results are summed later.
    """
    weights: dict[str, Any] = {name: x for name, x in part.items() if not is_trained(name)}
    for name, x in part.items():
        if name.endswith(FIRST):
            weight = name.removesuffix(FIRST)
            a = x
            b = part[name.removesuffix(FIRST) + SECOND]
            if weight in SUMMED:
                if split or weight in SUMMED_LATER:
                    b = pbroadcast(b, mesh, "tensor")
            elif split or weight not in REPLICATED:
                a = pbroadcast(a, mesh, "tensor")
            weights[weight] = LowRank(weights[weight], a, b, scale=scale)
    return weights


def _with_factors(tree: trees.Tree, targets: tuple[str, ...], factors: Callable[[str, Any], tuple]) -> trees.Tree:
    """A tree like a model's weights with two leaves, `factors(name, leaf)`, beside each that is adapted."""

    def extended(part: object) -> Any:
        if isinstance(part, tuple) and all(isinstance(x, dict) for x in part):
            return tuple(map(extended, part))
        if not isinstance(part, dict):
            return part
        weights = {name: extended(x) for name, x in part.items()}
        for name in targets:
            if name in part:
                weights[name + FIRST], weights[name + SECOND] = factors(name, part[name])
        return weights

    return {name: extended(x) for name, x in tree.items()}


def _factor_shapes(rank: int, name: str, x: Tensor) -> tuple[Tensor, Tensor]:
    if name in BY_EXPERT:
        E, N, K = x.shape
        return torch.empty(E, rank, K, device="meta"), torch.empty(E, N, rank, device="meta")
    out = out_dims(name, x.ndim)
    return torch.empty(rank, *x.shape[out:], device="meta"), torch.empty(*x.shape[:out], rank, device="meta")


def _factor_axes(name: str, axes: tuple[str, ...]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    if name in BY_EXPERT:
        experts, rows, columns = axes
        return (experts, "rank", columns), (experts, rows, "rank")
    out = out_dims(name, len(axes))
    return ("rank", *axes[out:]), (*axes[:out], "rank")


def out_dims(name: str, dims: int) -> int:
    """Number of out dims of a weight of a projection, which come before its in dims."""
    return 1 if name in SUMMED else dims - 1


def _first(name: str, x: Tensor, generator: torch.Generator) -> Tensor:
    """A whole weight that learns, before the first step."""
    if not name.endswith(FIRST):
        return torch.zeros(x.shape)
    weight = name.rsplit("/", 1)[-1].removesuffix(FIRST)
    fan_in = x.shape[2:] if weight in BY_EXPERT else x.shape[1:]
    bound = math.prod(fan_in) ** -0.5  # kaiming_uniform_(a=sqrt(5)) of [rank, fan-in]
    return (2 * torch.rand(x.shape, generator=generator) - 1) * bound


def _init(model: Model, lora: Lora, generator: torch.Generator, dtype: torch.dtype = torch.float32) -> trees.Tree:
    def factors(name: str, x: Tensor) -> tuple[Tensor, Tensor]:
        a, b = _factor_shapes(lora.rank, name, x)
        first = _first(name + FIRST, a, generator)
        second = _first(name + SECOND, b, generator)
        return first.to(x.device, dtype), second.to(x.device, dtype)

    return _with_factors(model.init(generator, dtype), lora.targets, factors)


def _apply(
    model: Model,
    own_layer: Layer,
    adapt: Adapt | None,
    params: trees.Tree,
    inputs: Inputs,
    mesh: Mesh = SINGLE,
    cache: trees.Tree = None,
    layer: Layer | None = None,
) -> Output:
    return model.apply(params, inputs._replace(adapt=adapt), mesh, cache, layer or own_layer)


def _rebuild(model: Model, lora: Lora, config: ModelConfig) -> Model:
    return with_lora(model.rebuild(config), lora)


def _trained(tree: object, name: str = "") -> Any:
    """The leaves of nested dicts and tuples that are trained; dicts without any are left out."""
    if isinstance(tree, dict):
        parts = {key: _trained(x, f"{name}/{key}" if name else key) for key, x in tree.items()}
        return {key: x for key, x in parts.items() if x is not None} or (None if name else {})
    if isinstance(tree, tuple):
        return tuple(_trained(x, f"{name}/{i}") or {} for i, x in enumerate(tree))
    return tree if is_trained(name) else None


def _joined(one: Any, other: Any) -> Any:
    """Nested dicts and tuples with the leaves of both."""
    if isinstance(one, tuple):
        return tuple(_joined(*pair) for pair in zip(one, other, strict=True)) if other else one
    if not isinstance(one, dict):
        return one
    return {**other, **{key: _joined(x, other.get(key, {})) for key, x in one.items()}}
