"""Balance of experts without a loss: an update raises the bias of experts that were chosen too seldom.

Where a router chooses experts by score + bias, the bias b_e of each moves against its load c_e, the number of times
that it was chosen by the tokens of the update (prompts included, padding not),

    b_e <- b_e + rate sign(mean of c - c_e)

It has no gradient and does not change what a chosen expert counts. The loads are those of all micro-batches and ranks,
whole numbers, so the bits depend on no mesh.

References: Wang et al., 2024, https://arxiv.org/abs/2408.15664
"""

from __future__ import annotations

import torch
from torch import Tensor

from funrl import trees

BIAS = "router_bias"  # last part of the name of the weight


def biases_of(params: trees.Tree) -> list[Tensor]:
    """The biases of all layers that have experts, in order, [E] each and whole on every rank."""
    return [x for name, x in trees.named(params) if name.rsplit("/", 1)[-1] == BIAS]


@torch.no_grad()
def move_biases_(params: trees.Tree, counts_LE: Tensor, rate: float) -> None:
    """Move the biases of a model by the load of its experts, in place.

    Args:
      params: a rank's weights, those of a decoder or of one with more around it.
      counts_LE: how often each expert was chosen, over all ranks.
      rate: how far, in units of the scores.
    """
    behind_LE = counts_LE.sum(-1, keepdim=True) - counts_LE.shape[-1] * counts_LE
    for bias_E, behind_E in zip(biases_of(params), behind_LE, strict=True):
        bias_E.add_(behind_E.sign().to(bias_E), alpha=rate)
