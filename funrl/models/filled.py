"""Parts of weights that are shorter than those of other ranks, filled with 0s while their layer computes.

Where the ranks do not divide heads, an mlp's inner dim, experts or the vocabulary, the last ranks have less of it. That
is how weights are stored, learned, sent and saved, so nothing of a filling is ever there. A layer computes with parts
that are as long as the first rank's. What is filled adds exactly 0 to every sum: heads and inner numbers meet 0s in the
matrix behind them, no token chooses an expert or has an embedding of them, and `linear_logprob` and the engine leave
out rows behind the vocabulary's end. A gradient reaches the part that is stored.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor

from funrl import trees
from funrl.mesh.rules import Layout


def filled(tree: trees.Tree, layouts: trees.Tree, gathered: Sequence[object] = ()) -> trees.Tree:
    """A rank's parts, each as long in every dim as the longest of all ranks.

    Args:
      tree: parts of the ranks.
      layouts: of the same structure.
      gathered: for each leaf something that is not None where it stays as it is, as it is gathered first; (): none.
    """
    leaves = trees.leaves(tree)
    stays = gathered or (None,) * len(leaves)
    triples = zip(leaves, trees.leaves(layouts), stays, strict=True)
    return trees.fill(tree, [_fill(x, layout) if stay is None else x for x, layout, stay in triples])


def own_part(x: Tensor, shape: tuple[int, ...]) -> Tensor:
    """A part of a shape without what fills it; one that has no more than its own numbers is given that shape."""
    return x.reshape(shape) if x.numel() == math.prod(shape) else x[tuple(slice(n) for n in shape)]


def _fill(x: Tensor, layout: Layout) -> Tensor:
    longest = layout.local_shape()
    if tuple(x.shape) == longest:
        return x
    lacks = [longer - n for n, longer in zip(x.shape, longest, strict=True)]
    return F.pad(x, [n for lack in reversed(lacks) for n in (0, lack)])
