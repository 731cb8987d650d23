"""Layers with the numbers of a model's own layer: compiled or rematerialized ones."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from funrl.models.model import Layer


@dataclass(frozen=True)
class EquivalentLayer:
    """Layer with the numbers of a model's own one, computed in another way.

    Attributes:
      original: the model's layer.
      compute: the same, compiled or rematerialized.
    """

    original: Layer
    compute: Layer

    def __call__(self, *args: Any) -> Any:
        """The layer's result."""
        return self.compute(*args)


def computes_as(layer: Layer, original: Layer) -> bool:
    """True if a layer is the original one, or `compile_layer` has made it of that; not of one that wraps it."""
    return layer is original or (isinstance(layer, EquivalentLayer) and layer.original is original)
