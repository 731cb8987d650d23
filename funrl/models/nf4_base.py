"""A frozen base in 4 bits: a model whose tree has codes and scales instead of the projections of its layers.

`with_nf4` gives a model that computes with the weights that these stand for, one matrix at a time. Embedding,
unembedding, norms, biases, routers and matrices whose rows are no blocks of 64 numbers stay as they are.

References: Dettmers et al., 2023, https://arxiv.org/abs/2305.14314
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from funrl import trees
from funrl.compiled_kernels.nf4 import (
    NF4_BLOCK,
    NF4_CODES,
    NF4_SCALES,
    can_quantize_nf4,
    quantize_nf4,
    weight_of,
    with_records,
)
from funrl.mesh.mesh import SINGLE, Mesh
from funrl.models.lora import PROJECTIONS, out_dims, plain_name
from funrl.models.model import Apply, Inputs, Layer, LayerContext, Model, ModelConfig, Output


def with_nf4(model: Model) -> Model:
    """`model` with "q_codes" and "q_scales" instead of the weight "q" of a layer, and so for all its projections.

    `adapters.plain` of the result is the model without adapters whose weights are whole.
    """
    layer = _with_nf4_layer(model.layer)
    reason = "it computes whole weights, and those of the base are in 4 bits"
    return dataclasses.replace(
        model,
        shapes=_replaced(model.shapes, _part_shapes),
        axes=_replaced(model.axes, _part_axes, model.shapes),
        init=functools.partial(_init, model),
        apply=_applied(model.apply, layer),
        layer=layer,
        rebuild=functools.partial(_rebuild, model),
        abilities=model.abilities._replace(compiled_step=reason),
        whole=model,
    )


def nf4_model_problem(model: Model) -> str | None:
    """Reason why a model has no base in 4 bits; None: it has."""
    if model.abilities.choices:
        return "matrices of experts, most of the model, are not stored in 4 bits"
    if not any(is_stored_in_4_bits(name, tuple(x.shape)) for name, x in trees.named(model.shapes)):
        return f"no layer has a projection of {', '.join(PROJECTIONS)} whose rows are blocks of {NF4_BLOCK} numbers"
    return None


def is_stored_in_4_bits(name: str, shape: tuple[int, ...]) -> bool:
    """True of a projection of a decoder's layer whose rows are blocks of 64 numbers."""
    short = plain_name(name)
    leaf = short.rsplit("/", 1)[-1]
    return short.startswith("layers/") and leaf in PROJECTIONS and can_quantize_nf4(shape, out_dims(leaf, len(shape)))


def quantized(named: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Weights by name, of those that are stored in 4 bits codes and scales; one whole matrix at a time is read."""
    for name, x in named:
        if not is_stored_in_4_bits(name, tuple(x.shape)):
            yield name, x
            continue
        weight = quantize_nf4(x.detach(), out_dims(name.rsplit("/", 1)[-1], x.ndim))
        yield name + NF4_CODES, weight.codes
        yield name + NF4_SCALES, weight.scales


def whole_weights_of(params: Mapping[str, Tensor], dtype: torch.dtype) -> Callable[[str], Tensor]:
    """A function: name -> the weight, of codes and scales that which they stand for, in a dtype; made each time."""

    def weight(name: str) -> Tensor:
        stored = weight_of(params, name, dtype)
        return stored if isinstance(stored, Tensor) else stored.plain

    return weight


def _with_nf4_layer(layer: Layer) -> Layer:
    """The function of a layer that multiplies by weights in 4 bits."""

    def stored(config: ModelConfig, mesh: Mesh, params: trees.Tree, x_BTD: Tensor, context: LayerContext) -> Tensor:
        parts = {
            name: with_records(part, x_BTD.dtype) if isinstance(part, dict) else part for name, part in params.items()
        }
        return layer(config, mesh, parts, x_BTD, context)

    return stored


def _replaced(tree: trees.Tree, split: Callable, shapes: trees.Tree = None, name: str = "") -> Any:
    """A tree like a model's weights with `split(name, leaf)`, codes and scales, instead of leaves in 4 bits.

    Args:
      shapes: of the whole weights; None: the tree has them.
    """
    whole = tree if shapes is None else shapes
    if isinstance(whole, dict):
        parts: dict[str, Any] = {}
        for key, inside in whole.items():
            path = f"{name}/{key}" if name else key
            if isinstance(inside, Tensor) and is_stored_in_4_bits(path, tuple(inside.shape)):
                parts[key + NF4_CODES], parts[key + NF4_SCALES] = split(key, tree[key])
            else:
                parts[key] = _replaced(tree[key], split, inside, path)
        return parts
    if isinstance(whole, tuple):
        pairs = zip(tree, whole, strict=True)
        return tuple(_replaced(x, split, inside, f"{name}/{i}") for i, (x, inside) in enumerate(pairs))
    return tree


def _part_shapes(name: str, x: Tensor) -> tuple[Tensor, Tensor]:
    out = x.shape[: out_dims(name, x.ndim)]
    codes = torch.empty(*x.shape[:-1], x.shape[-1] // 2, dtype=torch.uint8, device="meta")
    return codes, torch.empty(*out, x[(0,) * len(out)].numel() // NF4_BLOCK, device="meta")


def _part_axes(name: str, axes: tuple[str, ...]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    return axes, axes[: out_dims(name, len(axes)) + 1]


def _init(model: Model, generator: torch.Generator, dtype: torch.dtype = torch.float32) -> trees.Tree:
    with_parts = _replaced(model.shapes, _part_shapes)
    return trees.from_named(with_parts, quantized(trees.named(model.init(generator, dtype))))


def _applied(apply: Apply, own_layer: Layer) -> Apply:
    """`Model.apply` with another layer by default."""

    def applied(
        params: trees.Tree,
        inputs: Inputs,
        mesh: Mesh = SINGLE,
        cache: trees.Tree = None,
        layer: Layer | None = None,
    ) -> Output:
        return apply(params, inputs, mesh, cache, layer or own_layer)

    return applied


def _rebuild(model: Model, config: ModelConfig) -> Model:
    return with_nf4(model.rebuild(config))
