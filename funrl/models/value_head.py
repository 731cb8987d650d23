"""A value head: a number for each of a decoder's hidden states, instead of its unembedding."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from funrl import trees
from funrl.mesh.mesh import SINGLE, Mesh
from funrl.models.errors import ModelError
from funrl.models.model import Inputs, Layer, Model, ModelConfig, Output

# names of its weights
HEAD = "value"
HEAD_BIAS = "value_bias"
HEADS = (HEAD, HEAD_BIAS)


def with_value_head(model: Model, labels: int = 1, bias: bool = False) -> Model:
    """A critic or a discriminative reward model: `model` with a value head instead of its unembedding.

    Its weights are `{"decoder": ..., "value": [labels, D]}`, and `"value_bias": [labels]` where there is a bias; the
    head begins at 0.

    Args:
      labels: rows of the head. Of one the value is its number; of two it is the second less the first, the log odds of
        the second label, as token classifiers are trained to tell right steps from wrong ones.
      bias: whether the head has one, as token classifiers of transformers do.

    Raises:
      ModelError: the model has a value head already, or there would be more than two labels.
    """
    if model.value is not None:
        raise ModelError("the model has a value head already")
    if labels not in (1, 2):
        raise ModelError(f"a value head has one label or two, not {labels}")
    shapes = {HEAD: (labels, model.config.embed)} | ({HEAD_BIAS: (labels,)} if bias else {})
    meta = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
    axes = {HEAD: ("value", "norm"), HEAD_BIAS: ("value",)}  # whole on every rank, as norms are
    return Model(
        config=model.config,
        shapes=_with_head(model.shapes, meta),
        axes=_with_head(model.axes, {name: axes[name] for name in shapes}),
        init=functools.partial(_init, model, shapes),
        apply=functools.partial(_apply, model),
        unembed=None,
        value=_value,
        layer=model.layer,
        init_cache=model.init_cache,
        rebuild=functools.partial(_rebuild, model, labels, bias),
        abilities=model.abilities._replace(compiled_step="a model with a value head does not decode"),
        owned=model.owned,
    )


def is_token_classifier(model: Model) -> bool:
    """True of a model whose value head is one of transformers' token classifiers, with a bias or two labels."""
    return model.value is not None and (HEAD_BIAS in model.shapes or len(model.shapes[HEAD]) > 1)


def _with_head(tree: trees.Tree, head: dict[str, Any]) -> trees.Tree:
    """A tree of a decoder's weights (or of their axes) as that of one with a value head."""
    return {"decoder": {name: part for name, part in tree.items() if name != "unembed"}, **head}


def _init(
    model: Model,
    shapes: dict[str, tuple[int, ...]],
    generator: torch.Generator,
    dtype: torch.dtype = torch.float32,
) -> trees.Tree:
    params = model.init(generator, dtype)
    like = trees.leaves(params)[0]
    return _with_head(params, {name: like.new_zeros(shape) for name, shape in shapes.items()})


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
    bias = params.get(HEAD_BIAS)
    logits = F.linear(hidden_BTD.to(wide), params[HEAD].to(wide), None if bias is None else bias.to(wide))
    return logits[..., -1] - logits[..., 0] if logits.shape[-1] == 2 else logits.squeeze(-1)


def _rebuild(model: Model, labels: int, bias: bool, config: ModelConfig) -> Model:
    return with_value_head(model.rebuild(config), labels, bias)
