"""Weights of a decoder: their shapes and logical axes, and how they begin."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from funrl import trees
from funrl.models.decoder.config import Config, layers_of
from funrl.models.decoder.layers import Mixer, Mlp

_BEFORE = ("attn_norm", "mlp_norm")
_AFTER = ("attn_out_norm", "mlp_out_norm")
_NORMS = {"pre": _BEFORE, "post": _AFTER, "sandwich": _BEFORE + _AFTER}


def shapes(config: Config) -> trees.Tree:
    """The tree of whole weights, as tensors without memory."""
    D = config.embed
    table = (config.vocab, D)
    outer: dict[str, tuple[int, ...]] = {"embed": table, "norm": (D,)} | ({} if config.tied else {"unembed": table})
    vectors = config.layer_vectors
    further = {"layer_scale": (1,)} if config.scales.layers else {}
    if vectors is not None:
        outer |= vectors.table_shapes(config.vocab, D, config.layers)
    layers = tuple(
        {
            **_empty(dict.fromkeys(_NORMS[config.norm.places], (D,)) | further),
            "attn": _empty(layer.mixer.shapes(D)),
            "mlp": _empty(layer.mlp.shapes(D)),
            **({} if vectors is None else {"vectors": _empty(vectors.shapes(D))}),
        }
        for layer in layers_of(config)
    )
    return {**_empty(outer), "layers": layers}


def axes(config: Config) -> trees.Tree:
    """The logical axes of every weight, a tuple of names per tensor."""
    table = ("vocab", "embed")
    outer: dict[str, tuple[str, ...]] = {"embed": table, "norm": ("norm",)}
    outer |= {} if config.tied else {"unembed": table}
    vectors = config.layer_vectors
    further = {"layer_scale": ("norm",)} if config.scales.layers else {}
    if vectors is not None:
        outer |= vectors.table_axes()
    layers = tuple(
        {
            **dict.fromkeys(_NORMS[config.norm.places], ("norm",)),
            **further,
            "attn": _axes(layer.mixer, config.embed),
            "mlp": _axes(layer.mlp, config.embed),
            **({} if vectors is None else {"vectors": vectors.axes()}),
        }
        for layer in layers_of(config)
    )
    return {**outer, "layers": layers}


def init(config: Config, generator: torch.Generator, dtype: torch.dtype = torch.float32) -> trees.Tree:
    """Random weights, whole: normal with variance 1 / fan-in, norms the identity, biases 0.

    A mixer or an mlp may give other first values of its own. The numbers are drawn in float32, so every dtype begins
    with the same model.
    """
    residual = 1 / math.sqrt(2 * config.layers)  # of each of the 2 L branches that add to the residual stream
    layers = layers_of(config)

    def draw(name: str, x: Tensor) -> Tensor:
        path = name.split("/")
        last = path[-1]
        if len(path) == 4:
            layer = layers[int(path[1])]
            own = (layer.mixer if path[2] == "attn" else layer.mlp).initial(last, tuple(x.shape), generator)
            if own is not None:
                return own.to(dtype)
        if last == "layer_scale":
            return torch.ones(x.shape, dtype=dtype, device=generator.device)
        if last.endswith("norm"):
            return torch.full(x.shape, 1 - config.norm.offset, dtype=dtype, device=generator.device)
        if last.endswith("bias"):
            return torch.zeros(x.shape, dtype=dtype, device=generator.device)
        of_heads = last in ("o", "out")
        fan_in = x[0].numel() if of_heads else x.shape[-1]
        branch = residual if of_heads or last.endswith("down") else 1
        std = 0.02 if last in ("embed", "unembed") else fan_in**-0.5 * branch
        return (torch.randn(x.shape, generator=generator, device=generator.device) * std).to(dtype)

    return trees.map_named(draw, shapes(config))


def unembed(params: trees.Tree) -> Tensor:
    """The matrix from hidden states to logits, [V, D]; this rank's rows of it."""
    return params["unembed"] if "unembed" in params else params["embed"]


def _axes(part: Mixer | Mlp, embed: int) -> dict[str, tuple[str, ...]]:
    """The logical axes of the weights that a part of a layer has."""
    known = part.axes()
    return {name: known[name] for name in part.shapes(embed)}


def _empty(sizes: Mapping[str, tuple[int, ...]]) -> dict[str, Tensor]:
    return {name: torch.empty(shape, device="meta") for name, shape in sizes.items()}
