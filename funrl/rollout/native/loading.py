"""Weights and adapters as the native engine takes them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from funrl import trees
from funrl.mesh.mesh import Mesh
from funrl.mesh.rules import GENERATE, layouts
from funrl.models.errors import ModelError
from funrl.models.filled import filled, own_part
from funrl.models.lora import trained_part, with_lora
from funrl.models.model import Lora, Model
from funrl.models.weight_dtypes import weight_dtype
from funrl.rollout.engine import WeightSpec


def own_parts(spec: WeightSpec, named: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """This rank's shards as they were loaded; some are filled or have merged dims."""
    placed = dict(trees.named(spec.layouts))
    yield from ((name, own_part(x, placed[name].local_shape(spec.mesh.rank))) for name, x in named)


def shards(spec: WeightSpec, named_weights: Iterable[tuple[str, Tensor]]) -> trees.Tree:
    """This rank's shards in the engine's dtype and on its device, as long as those of other ranks.

    What is so already is not copied.

    Raises:
      KeyError: a name is missing, unknown, or given twice.
      ModelError: a shape is not that of this rank's shard.
    """
    mesh = spec.mesh
    params = trees.from_named(spec.layouts, named_weights)
    for (name, x), layout in zip(trees.named(params), trees.leaves(spec.layouts), strict=True):
        if tuple(x.shape) != layout.local_shape(mesh.rank):
            expected = list(layout.local_shape(mesh.rank))
            raise ModelError(f"{name} has shape {list(x.shape)}, rank {mesh.rank} holds {expected}")
    own = trees.map_named(lambda name, x: x.detach().to(mesh.device, weight_dtype(name, spec.dtype)), params)
    return filled(own, spec.layouts)


def in_form(spec: WeightSpec, tree: trees.Tree) -> trees.Tree:
    """A tree of this rank's shards in the dtype and on the device of an engine that is to take them; as `shards`."""
    return trees.map_named(lambda name, x: x.to(spec.mesh.device, weight_dtype(name, spec.dtype)), tree)


def native_weights(model: Model, mesh: Mesh, dtype: torch.dtype) -> WeightSpec:
    """The form in which a native engine takes the weights of a model; this process need not be in its mesh."""
    names = {name: (name, tuple(x.shape)) for name, x in trees.named(model.shapes)}
    return WeightSpec(names, layouts(model.shapes, model.axes, GENERATE, sizes=mesh.sizes), mesh, dtype=dtype)


def spec_of_adapter(model: Model, weights: WeightSpec, lora: Lora) -> WeightSpec:
    """The form in which an engine takes the factors of an adapter.

    Args:
      model: without adapters.
      weights: of the engine.

    Raises:
      ModelError: the model takes no adapters, or has none of the targets.
    """
    model = model.whole or model
    adapted = with_lora(model, lora)
    if not set(lora.targets).intersection(name.rsplit("/", 1)[-1] for name, _ in trees.named(model.shapes)):
        raise ModelError(f"an adapter of {', '.join(sorted(lora.targets))}, none of which the model has")
    shapes = trained_part(adapted, adapted.shapes)
    placed = trained_part(adapted, layouts(adapted.shapes, adapted.axes, GENERATE, sizes=weights.mesh.sizes))
    names = {name: (name, tuple(x.shape)) for name, x in trees.named(shapes)}
    return WeightSpec(names, placed, weights.mesh, dtype=weights.dtype, adapters=True, float8=weights.float8)
