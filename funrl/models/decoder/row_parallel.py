"""Products whose sums tensor ranks share: a rank holds some columns of the weight and the numbers that meet them."""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence

import torch
from torch import Tensor

from funrl.compiled_kernels.arguments import FIXED_PARTS
from funrl.compiled_kernels.exact.dispatch import computes_exactly
from funrl.compiled_kernels.exact.low_rank import low_rank_linear
from funrl.compiled_kernels.float8 import RowScaled
from funrl.compiled_kernels.linear import linear_in_parts
from funrl.compiled_kernels.nf4 import Nf4Weight
from funrl.compiled_kernels.packed import parts_of
from funrl.mesh.mesh import Mesh
from funrl.models.low_rank import LowRank, Weight, add_factors, multiply
from funrl.models.split_residual import leave

log = logging.getLogger(__name__)


def multiply_and_sum(x: Tensor, weight: Weight, mesh: Mesh, split: bool) -> Tensor:
    """The sum over tensor ranks of W x, as `split_residual.leave` gives it.

    On a CPU sums are taken in eight fixed parts and a binary tree over these, so that their bits are the same on 1, 2,
    4 and 8 tensor ranks, where these divide the sum's terms.

    Args:
      x: [..., columns of this rank].
      weight: this rank's columns; of `LowRank` those of W and of the first factors, and the whole second factors.
      split: as in `leave`.
    """
    if not isinstance(weight, LowRank):
        return _sums(x, [weight], mesh, split)[0]
    if mesh.size("tensor") == 1 and isinstance(weight.weight, Tensor) and weight.tokens is None:
        plain = weight.weight.reshape(-1, x.shape[-1])
        return low_rank_linear(x, plain, weight.factors, parts=parts_of(x.shape[-1]))
    adapters: list[LowRank] = []
    inside: Weight = weight
    while isinstance(inside, LowRank):
        adapters.insert(0, inside)
        inside = inside.weight
    out, *inners = _sums(x, [inside, *(adapter.a.flatten(1) for adapter in adapters)], mesh, split)
    for adapter, inner in zip(adapters, inners, strict=True):
        out = add_factors(out, inner, adapter)
    return out


def _sums(x: Tensor, weights: Sequence[Tensor | RowScaled | Nf4Weight], mesh: Mesh, split: bool) -> list[Tensor]:
    """Products with several weights, summed over tensor ranks in one collective."""
    ranks = mesh.size("tensor")
    terms = x.shape[-1] * ranks
    plain = [weight.reshape(-1, x.shape[-1]) for weight in weights if isinstance(weight, Tensor)]
    exact = len(plain) == len(weights) and computes_exactly(x, *plain)
    parts = parts_of(terms) if exact else ranks
    if exact and parts % ranks:
        _say_that_ranks_do_not_divide(terms, ranks)
        exact = False
    if exact:
        products = [linear_in_parts(x, weight, parts // ranks, wide=ranks > 1) for weight in plain]
    else:
        products = [multiply(x, weight) for weight in weights]
    if ranks == 1:
        return products
    joined = products[0] if len(products) == 1 else torch.cat(products, -1)
    summed = leave(joined, mesh, split, pairwise=exact).to(x.dtype)
    return [summed] if len(products) == 1 else list(summed.split([y.shape[-1] for y in products], -1))


def fixed_parts(columns: int, mesh: Mesh) -> int | None:
    """Number of fixed parts of a sum over the columns of all tensor ranks that one rank has.

    None: the ranks do not divide the parts, which is said.

    Args:
      columns: of each rank.
    """
    ranks = mesh.size("tensor")
    parts = parts_of(columns * ranks)
    if parts % ranks:
        _say_that_ranks_do_not_divide(columns * ranks, ranks)
        return None
    return parts // ranks


@functools.cache
def _say_that_ranks_do_not_divide(terms: int, ranks: int) -> None:
    log.warning(
        "sums over %d terms do not divide into %d equal parts for %d tensor ranks: engine and trainer differ by "
        "rounding unless both have as many",
        terms,
        FIXED_PARTS,
        ranks,
    )
