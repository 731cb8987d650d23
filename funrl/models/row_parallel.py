"""Products whose sums tensor ranks share: a rank holds some columns of the weight and the numbers that meet them."""

from __future__ import annotations

import functools
import logging

from torch import Tensor

from funrl.compiled_kernels.exact.dispatch import computes_exactly
from funrl.compiled_kernels.linear import linear_in_parts
from funrl.compiled_kernels.packed import FIXED_PARTS, parts_of
from funrl.mesh.mesh import Mesh
from funrl.models.low_rank import LowRank, Weight, multiply
from funrl.models.split_residual import leave

log = logging.getLogger(__name__)


def multiply_and_sum(x: Tensor, weight: Weight, mesh: Mesh, split: bool) -> Tensor:
    """The sum over tensor ranks of `multiply`, as `split_residual.leave` gives it.

    On a CPU sums are taken in eight fixed parts and a binary tree over these, so that their bits are the same on 1, 2, 4
    and 8 tensor ranks, where these divide the sum's terms.

    Args:
      x: [..., columns of this rank].
      weight: this rank's columns.
      split: as in `leave`.
    """
    ranks = mesh.size("tensor")
    if isinstance(weight, LowRank) or not computes_exactly(x, weight):
        return leave(multiply(x, weight), mesh, split)
    terms = x.shape[-1] * ranks
    parts = parts_of(terms)
    if parts % ranks:
        _say_that_ranks_do_not_divide(terms, ranks)
        return leave(multiply(x, weight), mesh, split)
    w_NK = weight.reshape(-1, x.shape[-1])
    if ranks == 1:
        return linear_in_parts(x, w_NK, parts)
    return leave(linear_in_parts(x, w_NK, parts // ranks, wide=True), mesh, split, pairwise=True).to(x.dtype)


@functools.cache
def _say_that_ranks_do_not_divide(terms: int, ranks: int) -> None:
    log.warning(
        "sums over %d terms do not divide into %d equal parts for %d tensor ranks: engine and trainer differ by "
        "rounding unless both have as many",
        terms,
        FIXED_PARTS,
        ranks,
    )
