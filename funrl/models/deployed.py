"""Weights as they are outside of training: adapters are merged for files, and apart for an engine that adds them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

from torch import Tensor

from funrl import trees
from funrl.mesh.mesh import Mesh
from funrl.mesh.reshard import export_weights
from funrl.mesh.rules import Layout, whole_layout
from funrl.models.lora import factored, trained_part
from funrl.models.low_rank import merged
from funrl.models.model import Model
from funrl.models.nf4_base import whole_weights_of
from funrl.models.placed import Placed


class DeviceWeights(NamedTuple):
    """Weights of a model on the devices that train it.

    Attributes:
      model: without adapters.
      shapes: a tree like the weights.
      mesh: the devices.
      stored: the layout of each weight by its name.
      weight: name -> this rank's part; merged weights are made when they are asked for, and not kept.
      merged: names of the weights that are made.
    """

    model: Model
    shapes: trees.Tree
    mesh: Mesh
    stored: Mapping[str, Layout]
    weight: Callable[[str], Tensor]
    merged: frozenset[str] = frozenset()

    def tree(self) -> trees.Tree:
        """All of this rank's parts, in a tree whose tensors are nobody else's where they are made."""
        return trees.from_named(self.shapes, ((name, self.weight(name)) for name in self.stored))

    def exported(self, names: Mapping[str, tuple[str, tuple[int, ...]]]) -> Iterator[tuple[str, Tensor]]:
        """Whole weights under other names, one after the other, as `export_weights` gives them.

        The merged weights of one layer at a time are held.
        """
        for part in self._parts():
            layouts = {name: self.stored[name] for name in part}
            yield from export_weights({name: self.weight(name) for name in part}, layouts, self.mesh, names=names)

    def _parts(self) -> list[list[str]]:
        if not self.merged:
            return [list(self.stored)]
        parts: dict[str, list[str]] = {}
        for name in self.stored:
            parts.setdefault(name.rpartition("layers/")[2].partition("/")[0], []).append(name)
        return list(parts.values())


def deployed(placed: Placed, params: trees.Tree, merge: bool = True) -> DeviceWeights:
    """The weights of a model as files and an engine have them.

    Merging needs no message: a rank's part of a weight is the product of its parts of the two factors.

    Weights that are stored in 4 bits are whole in the result, unless the model has them in 4 bits and no adapters.

    Args:
      params: this rank's shards of all weights, in the layouts `placed.stored`.
      merge: adapters are merged; else the result has what learns alone, for an engine that has the rest.
    """
    model = placed.model
    plain = dict(trees.named(params))
    mesh = placed.mesh
    whole = whole_weights_of(plain, placed.dtype)
    if model.adapters is None:
        return DeviceWeights(model, model.shapes, mesh, dict(trees.named(placed.stored)), weight=whole)
    if not merge:
        own = trained_part(model, model.shapes)
        stored = dict(trees.named(trained_part(model, placed.stored)))
        return DeviceWeights(model.adapters.plain, own, mesh, stored, weight=plain.__getitem__)
    factors = factored(model, params, placed.dtype)
    without = model.adapters.plain
    layouts = dict(trees.named(placed.stored))  # of weights in 4 bits there is none: one rank has all of them
    shapes = trees.named(without.shapes)
    stored = {name: layouts.get(name) or whole_layout(x.shape, mesh) for name, x in shapes}

    def weight(name: str) -> Tensor:
        return merged(factors[name]) if name in factors else whole(name).detach()

    return DeviceWeights(without, without.shapes, mesh, stored, weight=weight, merged=frozenset(factors))
