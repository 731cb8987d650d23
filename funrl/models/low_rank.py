"""Weights of products: plain, in 8 or 4 bits, or with two thin factors, whose product is never made whole, added."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from funrl.compiled_kernels.exact.low_rank import ThinFactors, low_rank_linear
from funrl.compiled_kernels.float8 import RowScaled, float8_linear
from funrl.compiled_kernels.grouped_linear import grouped_linear
from funrl.compiled_kernels.linear import linear
from funrl.compiled_kernels.nf4 import Nf4Weight, nf4_linear
from funrl.mesh.collectives import pbroadcast
from funrl.mesh.mesh import Mesh


class LowRank(NamedTuple):
    """The weight W + scale b a, where W has no gradient; a rank's part.

    Attributes:
      weight: W, [*out, *in]; of several adapters, each for some tokens, W with those before this one. Of experts
        [E, out, in].
      a: [rank, *in]; of experts [E, rank, in].
      b: [*out, rank]; of experts [E, out, rank].
      scale: a number.
      tokens: [N, 1] bool, the tokens of [1, N, in] that meet the factors; the others meet W alone. None: all.
    """

    weight: Weight
    a: Tensor
    b: Tensor
    scale: float
    tokens: Tensor | None = None

    @property
    def shape(self) -> torch.Size:
        return self.weight.shape

    @property
    def device(self) -> torch.device:
        return self.weight.device

    def to(self, dtype: torch.dtype) -> LowRank:
        """The same in another dtype."""
        weight = self.weight if isinstance(self.weight, RowScaled) else self.weight.to(dtype)
        return self._replace(weight=weight, a=self.a.to(dtype), b=self.b.to(dtype))

    @property
    def factors(self) -> ThinFactors:
        """The factors as matrices."""
        return ThinFactors(self.a.flatten(1), self.b.flatten(0, -2), self.scale)

    @property
    def plain(self) -> Tensor:
        """W without any factors."""
        return self.weight if isinstance(self.weight, Tensor) else self.weight.plain


Weight = Tensor | RowScaled | Nf4Weight | LowRank


def multiply(x: Tensor, weight: Weight, bias: Tensor | None = None) -> Tensor:
    """W x + bias, for x [..., in] whose last dim is all of the weight's in dims as one; [..., out], likewise one."""
    bias = None if bias is None else bias.flatten()
    if isinstance(weight, Tensor):
        return linear(x, weight.reshape(-1, x.shape[-1]), bias)
    if isinstance(weight, RowScaled):
        return float8_linear(x, weight, bias)
    if isinstance(weight, Nf4Weight):
        return nf4_linear(x, weight, bias)
    if isinstance(weight.weight, Tensor) and weight.tokens is None:
        return low_rank_linear(x, weight.weight.reshape(-1, x.shape[-1]), weight.factors, bias)
    return add_factors(multiply(x, weight.weight, bias), linear(x, weight.a.flatten(1)), weight)


def add_factors(out: Tensor, inner: Tensor, weight: LowRank) -> Tensor:
    """Products with the weight of a `LowRank`, for its tokens with those of its factors added; `inner` is a x."""
    added = out + linear(weight.scale * inner, weight.b.flatten(0, -2))
    return added if weight.tokens is None else torch.where(weight.tokens, added, out)


def grouped_factors(x: Tensor, weight: LowRank, ends: Tensor) -> Tensor:
    """Add-on of the experts' factors to products with rows [M, in] that are sorted by expert; [M, out].

    Args:
      ends: as in `grouped_linear`.
    """
    return grouped_linear(weight.scale * grouped_linear(x, weight.a, ends), weight.b, ends)


def used_by_parts(weight: Weight, mesh: Mesh) -> Weight:
    """A weight that all tensor ranks hold and each uses a part of: its gradient is the sum of theirs."""
    if isinstance(weight, Tensor):
        return pbroadcast(weight, mesh, "tensor")
    if isinstance(weight, RowScaled | Nf4Weight):  # which have no gradient
        return weight
    return weight._replace(b=pbroadcast(weight.b, mesh, "tensor"))


def select_rows(weight: Weight, rows: Tensor) -> Weight:
    """Some rows of the first out dim."""
    if isinstance(weight, Tensor):
        return weight.index_select(0, rows)
    if isinstance(weight, RowScaled | Nf4Weight):
        return weight.rows(rows)
    return weight._replace(weight=select_rows(weight.weight, rows), b=weight.b.index_select(0, rows))


def merged(weight: LowRank) -> Tensor:
    """W + scale b a of all tokens, added in the widest dtype of the three, in that of W."""
    plain = weight.plain
    wide = torch.promote_types(plain.dtype, weight.b.dtype)
    product = torch.bmm if weight.a.ndim == weight.b.ndim == 3 else functools.partial(torch.tensordot, dims=1)
    added = product(weight.b.to(wide), weight.a.to(wide))
    return plain.to(wide).add(added, alpha=weight.scale).to(plain.dtype)


def computed_merged(weight: Weight, compute: Callable[[Tensor], Tensor]) -> Tensor:
    """`compute(w)`, [N, ...], of N tokens with the merged weight that each of them has."""
    if not isinstance(weight, LowRank):
        return compute(weight if isinstance(weight, Tensor) else weight.plain)
    own = compute(merged(weight))
    if weight.tokens is None:
        return own
    others = computed_merged(weight.weight, compute)
    return torch.where(weight.tokens.view(-1, *(1,) * (own.ndim - 1)), own, others)
