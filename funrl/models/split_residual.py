"""Residual stream of packed rows, split over the mesh axis `tensor`.

Between the halves of a layer each tensor rank holds a contiguous part of the tokens. What is computed of single tokens
there (embedding, norms, biases behind sums, residual additions) is then done, and kept for the backward pass, once and
not by every tensor rank. Within a half a rank has all tokens and its part of the weights, as it has without the split.

| residual stream | a half begins with | and ends with |
|---|---|---|
| whole on every tensor rank | `pbroadcast`: nothing, going back a sum | `psum`: a sum, going back nothing |
| split | `all_gather`, going back `psum_scatter` | `psum_scatter`, going back `all_gather` |

A ring's sum is a scattered sum and a gather, so the bytes are the same. The gradients of weights that work on split
tokens are those of a rank's tokens: `rules.SPLIT_RESIDUAL` says which, and they are summed once a step.

References: Korthikanti et al., 2022, https://arxiv.org/abs/2205.05198
"""

from __future__ import annotations

from torch import Tensor

from funrl.mesh.collectives import (
    all_gather,
    gather_replicated,
    own_shard,
    pbroadcast,
    psum,
    psum_pairwise,
    psum_scatter,
    psum_scatter_pairwise,
)
from funrl.mesh.mesh import Mesh


def enter(x_BTD: Tensor, mesh: Mesh, split: bool) -> Tensor:
    """All tokens of the stream, which a half of a layer begins with; the tensor ranks have parts of their gradient."""
    return all_gather(x_BTD, mesh, "tensor", dim=1) if split else pbroadcast(x_BTD, mesh, "tensor")


def leave(x_BTD: Tensor, mesh: Mesh, split: bool, pairwise: bool = False) -> Tensor:
    """The sum of what the tensor ranks have made of all tokens: of those that a rank has of the stream.

    Args:
      pairwise: take it by a binary tree over the ranks.
    """
    if not split:
        return (psum_pairwise if pairwise else psum)(x_BTD, mesh, "tensor")
    # One packed row; its strides are those of any other: a compiled layer asks for them.
    scatter = psum_scatter_pairwise if pairwise else psum_scatter
    return scatter(x_BTD, mesh, "tensor", dim=1).flatten(0, 1).unsqueeze(0)


def own_tokens(x_BTD: Tensor, mesh: Mesh, split: bool) -> Tensor:
    """This rank's tokens of what is the same on all tensor ranks."""
    return own_shard(x_BTD, mesh, "tensor", dim=1) if split else x_BTD


def all_tokens(x_BTD: Tensor, mesh: Mesh, split: bool) -> Tensor:
    """All tokens, for a use that is the same on every tensor rank."""
    return gather_replicated(x_BTD, mesh, "tensor", dim=1) if split else x_BTD
