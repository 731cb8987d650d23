"""Adapters of low rank in the layout of the decoding step, which adds their products to those of the base.

A call may mix adapters of any ranks: each token has its own, or none. A token's bits are those of a call in which all
tokens have its adapter.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from funrl.compiled_kernels.arguments import check_tensor
from funrl.compiled_kernels.exact.structures import LayerFactors, StepAdapter
from funrl.compiled_kernels.packed import LANES, PackedLinear, pack_linear, round_up, unpack_panels

_SHARED = {"qkv": ("q", "k", "v"), "output": ("o",), "gate_up": ("gate", "up"), "down": ("down",)}
_SECOND = {"q": "q", "k": "k", "v": "v", "o": "output", "gate": "gate", "up": "up", "down": "down"}
Factors = Mapping[str, tuple[Tensor, Tensor]]  # of a layer: A [rank, K] and B [N, rank] of each adapted weight


class AdaptedSizes(NamedTuple):
    """Sizes of the weights that adapters stand on.

    Attributes:
      layers: number of layers.
      head, padded: sizes of heads in the weights, and as the step pads them.
      shapes: of each weight, its outputs and inputs.
      parts: of the sums over the inputs of some weights; those of others are whole.
    """

    layers: int
    head: int
    padded: int
    shapes: Mapping[str, tuple[int, int]]
    parts: Mapping[str, int]


class TokenAdapters(NamedTuple):
    """Adapters of the tokens of a call.

    Attributes:
      adapters: of any ranks.
      number_N: int64, the adapter of each token; -1: none.
    """

    adapters: Sequence[PackedAdapter]
    number_N: Tensor


class PackedAdapter:
    """Factors of all layers in panels.

    Attributes:
      rank, scale: W x + scale B A x.
      dtype, sizes: of the step.
    """

    def __init__(self, layers: Sequence[Factors], scale: float, dtype: torch.dtype, sizes: AdaptedSizes):
        """Pack factors.

        Args:
          layers: of each layer "q", "k", "v", "o", "gate", "up", "down" or some of these, all of one rank.
          scale: a number.
          dtype: of the step.
          sizes: of the step.
        """
        self.rank = next(a.shape[0] for layer in layers for a, _ in layer.values())
        self.scale = scale
        self.dtype = dtype
        self.sizes = sizes
        if len(layers) != sizes.layers:
            raise ValueError(f"there are factors of {len(layers)} layers, the decoder has {sizes.layers}")
        for i, layer in enumerate(layers):
            for name, (a, b) in layer.items():
                outputs, inputs = sizes.shapes[name]
                check_tensor(f"the first factor of {name} of layer {i}", a, a.dtype, (self.rank, inputs))
                check_tensor(f"the second factor of {name} of layer {i}", b, b.dtype, (outputs, self.rank))
        self._layers = [self._pack_layer(layer) for layer in layers]
        pointers = [{name: packed.panels.data_ptr() for name, packed in layer.items()} for layer in self._layers]
        self._pointers = (LayerFactors * len(layers))(*(LayerFactors(**each) for each in pointers))

    def structure(self) -> StepAdapter:
        """The adapter as the step reads it, while this object lives."""
        return StepAdapter(rank=self.rank, scale=self.scale, layer=ctypes.addressof(self._pointers))

    def factors(self) -> Iterator[dict[str, tuple[Tensor, Tensor]]]:
        """The factors of each layer as the step has them, taken out of its layout."""
        for layer in self._layers:
            factors = {}
            for shared, weights in _SHARED.items():
                if f"{shared}_first" not in layer:
                    continue
                first = _unpacked(layer[f"{shared}_first"]).split(round_up(self.rank, LANES))
                own = [name for name in weights if _SECOND[name] in layer]
                for name, a in zip(own, first, strict=True):
                    b = _unpacked(layer[_SECOND[name]])
                    if name in ("q", "k", "v"):
                        b = b.unflatten(0, (-1, self.sizes.padded))[:, : self.sizes.head].flatten(0, 1)
                    factors[name] = a[: self.rank], b
            yield factors

    def _pack_layer(self, layer: Factors) -> dict[str, PackedLinear]:
        packs = {}
        for shared, weights in _SHARED.items():
            own = [name for name in weights if name in layer]
            if not own:
                continue
            first = torch.cat([_padded(layer[name][0], round_up(self.rank, LANES)) for name in own])
            packs[f"{shared}_first"] = pack_linear(first.to(self.dtype), self.sizes.parts.get(own[0], 1))
            for name in own:
                b = layer[name][1].to(self.dtype)
                if name in ("q", "k", "v"):
                    heads = b.unflatten(0, (-1, self.sizes.head)).unbind(0)
                    b = torch.cat([_padded(head, self.sizes.padded) for head in heads])
                packs[_SECOND[name]] = pack_linear(b)
        return packs


def _padded(x: Tensor, rows: int) -> Tensor:
    return torch.cat([x, x.new_zeros(rows - x.shape[0], x.shape[1])])


def _unpacked(packed: PackedLinear) -> Tensor:
    return unpack_panels(packed.panels, packed.outputs, packed.inputs, packed.parts)
