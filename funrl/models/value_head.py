"""A value head: one row that reads a number from a decoder's hidden states, instead of its unembedding."""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F
from torch import Tensor

from funrl import trees
from funrl.mesh.mesh import SINGLE, Mesh
from funrl.models.config import Config, ModelError
from funrl.models.model import Inputs, Layer, Model, Output
from funrl.models.names import Names

HEAD, HEAD_THERE = "value", "score.weight"  # its name among the weights, and in transformers' ForSequenceClassification


def with_value_head(model: Model) -> Model:
    """A critic or a discriminative reward model: `model` with a value head instead of its unembedding.

    Its weights are `{"decoder": ..., "value": [1, D]}`; the head begins at 0.

    Raises:
      ModelError: the model has a value head already.
    """
    if model.value is not None:
        raise ModelError("the model has a value head already")
    shapes = add_head(model.shapes, torch.empty(1, model.config.embed, device="meta"))
    return Model(
        config=model.config,
        shapes=shapes,
        axes=add_head(model.axes, ("value", "norm")),  # one row: whole on every rank, as norms are
        names=_names(model),
        init=functools.partial(_init, model),
        apply=functools.partial(_apply, model),
        unembed=None,
        value=_value,
        layer=model.layer,
        init_cache=model.init_cache,
        rebuild=functools.partial(_rebuild, model),
    )


def add_head(tree: trees.Tree, head) -> trees.Tree:
    """A tree of a decoder's weights (or of their axes or layouts) as that of one with a value head."""
    return {"decoder": {name: part for name, part in tree.items() if name != "unembed"}, "value": head}


def _names(model: Model) -> Names:
    """Names of the decoder's weights and of the head in transformers."""
    named = {f"decoder/{name}": there for name, there in model.names.items() if name != "unembed"}
    return named | {HEAD: (HEAD_THERE, (1, model.config.embed))}


def _init(model: Model, generator: torch.Generator, dtype: torch.dtype = torch.float32) -> trees.Tree:
    params = model.init(generator, dtype)
    return add_head(params, trees.leaves(params)[0].new_zeros(1, model.config.embed))


def _apply(
    model: Model,
    params: trees.Tree,
    inputs: Inputs,
    mesh: Mesh = SINGLE,
    cache: trees.Tree = None,
    layer: Layer | None = None,
) -> Output:
    return model.apply(params["decoder"], inputs, mesh, cache, layer)


def _value(params: trees.Tree, hidden_BTD: Tensor) -> Tensor:
    """[B, T] in float32 or wider."""
    wide = torch.promote_types(hidden_BTD.dtype, torch.float32)
    return F.linear(hidden_BTD.to(wide), params["value"].to(wide)).squeeze(-1)


def _rebuild(model: Model, config: Config) -> Model:
    return with_value_head(model.rebuild(config))
