"""Dtypes of weights: which are cast for computing or for an engine, and which stay wide.

The bias by which experts are chosen moves in steps that are small beside it, and tells nearly equal scores apart.
"""

from __future__ import annotations

import torch

from funrl import trees

TORCH_DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16}  # as flags name them
WIDE = ("router_bias",)  # last parts of the names of weights that are never narrower than float32


def weight_dtype(name: str, dtype: torch.dtype) -> torch.dtype:
    """The dtype of a weight where weights are in `dtype`."""
    return torch.promote_types(dtype, torch.float32) if name.rsplit("/", 1)[-1] in WIDE else dtype


def weight_dtypes(tree: trees.Tree, dtype: torch.dtype) -> trees.Tree:
    """`weight_dtype` of every leaf of a tree like a model's weights."""
    return trees.map_named(lambda name, _: weight_dtype(name, dtype), tree)


def cast_weights(params: trees.Tree, dtype: torch.dtype) -> trees.Tree:
    """Weights in `dtype`, except weights that stay wide."""
    return trees.map_named(lambda name, x: x.to(weight_dtype(name, dtype)) if x.is_floating_point() else x, params)
