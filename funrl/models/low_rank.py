"""Products with a weight that has a product of two thin factors added to it, which is never made whole."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from funrl.compiled_kernels.linear import linear
from funrl.mesh.collectives import pbroadcast
from funrl.mesh.mesh import Mesh


class LowRank(NamedTuple):
    """The weight W + scale b a, of which W has no gradient; a rank's part.

    Attributes:
      weight: W, [*out, *in].
      a: [rank, *in].
      b: [*out, rank].
      scale: a number.
    """

    weight: Tensor
    a: Tensor
    b: Tensor
    scale: float

    @property
    def shape(self) -> torch.Size:
        return self.weight.shape

    @property
    def device(self) -> torch.device:
        return self.weight.device


Weight = Tensor | LowRank


def multiply(x: Tensor, weight: Weight, bias: Tensor | None = None) -> Tensor:
    """W x + bias, for x [..., in] whose last dim is all of the weight's in dims as one; [..., out], likewise one."""
    bias = None if bias is None else bias.flatten()
    if isinstance(weight, Tensor):
        return linear(x, weight.reshape(-1, x.shape[-1]), bias)
    inner = weight.scale * linear(x, weight.a.flatten(1))
    return linear(x, weight.weight.reshape(-1, x.shape[-1]), bias) + linear(inner, weight.b.flatten(0, -2))


def used_by_parts(weight: Weight, mesh: Mesh) -> Weight:
    """A weight that all tensor ranks hold and each uses a part of: its gradient is the sum of theirs."""
    if isinstance(weight, Tensor):
        return pbroadcast(weight, mesh, "tensor")
    return weight._replace(b=pbroadcast(weight.b, mesh, "tensor"))


def select_rows(weight: Weight, rows: Tensor) -> Weight:
    """Some rows of the first out dim."""
    if isinstance(weight, Tensor):
        return weight.index_select(0, rows)
    return weight._replace(weight=weight.weight.index_select(0, rows), b=weight.b.index_select(0, rows))


def merged(weight: LowRank) -> Tensor:
    """W + scale b a, added in the widest dtype of the three, in that of W."""
    wide = torch.promote_types(weight.weight.dtype, weight.b.dtype)
    added = torch.tensordot(weight.b.to(wide), weight.a.to(wide), 1)
    return weight.weight.to(wide).add(added, alpha=weight.scale).to(weight.weight.dtype)
