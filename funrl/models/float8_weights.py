"""Weights of a decoder's layers in 8 bits, for an engine that computes without gradients."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from funrl import trees
from funrl.compiled_kernels.float8 import FLOAT8, RowScaled, can_quantize, float8_format, float8_problem, quantize_rows
from funrl.mesh.mesh import Mesh
from funrl.models.lora import PROJECTIONS, out_dims
from funrl.models.model import Model


def quantize_layers(params: trees.Tree) -> trees.Tree:
    """The layers of a tree of weights with their projections as `RowScaled`; other leaves are the same tensors."""
    return trees.map_named(quantize_leaf, {"layers": params["layers"]})["layers"]


def quantize_leaf(name: str, x: Tensor) -> Tensor | RowScaled:
    """A weight of that name in 8 bits if it is a projection of a layer; else the same tensor."""
    form = float8_format(x.device.type)
    if isinstance(form, str) or not _is_quantized(name, x.shape):
        return x
    return quantize_rows(x.detach(), _out_dims_of(name, x.shape), form)


def quantized_bytes(layouts: trees.Tree) -> float:
    """Bytes of the projections in 8 bits, with their scales, on a rank that holds weights in these layouts."""
    nbytes = 0
    for name, layout in trees.named(layouts):
        shape = layout.local_shape(0)
        if _is_quantized(name, shape):
            rows = math.prod(shape[: _out_dims_of(name, shape)])
            nbytes += rows * torch.float32.itemsize + math.prod(shape) * FLOAT8.itemsize
    return float(nbytes)


def quantizes_all(model: Model) -> bool:
    """True if all projections of a model's layers have sizes of products in 8 bits."""
    named = ((name, tuple(x.shape)) for name, x in trees.named({"layers": model.shapes["layers"]}))
    return all(_is_quantized(*pair) for pair in named if pair[0].rsplit("/", 1)[-1] in PROJECTIONS)


def float8_model_problem(model: Model, mesh: Mesh, dtype: torch.dtype) -> str | None:
    """Reason why a model cannot generate with weights in 8 bits; None: it can.

    Args:
      mesh: to generate on.
      dtype: of activations.
    """
    if model.abilities.choices:
        return "products of experts are not taken in 8 bits"
    if mesh.size("expert") > 1:
        return f"ranks of ep share no weights in 8 bits, and the mesh is {mesh}"
    if not any(_is_quantized(name, tuple(x.shape)) for name, x in trees.named(model.shapes)):
        return f"no layer has a projection of {', '.join(PROJECTIONS)} whose sizes 16 divides"
    return float8_problem(mesh.device, dtype)


def _is_quantized(name: str, shape: Sequence[int]) -> bool:
    return (
        name.startswith("layers/")
        and name.rsplit("/", 1)[-1] in PROJECTIONS
        and can_quantize(tuple(shape), _out_dims_of(name, shape))
    )


def _out_dims_of(name: str, shape: Sequence[int]) -> int:
    return out_dims(name.rsplit("/", 1)[-1], len(shape))
