"""Losses, metrics and selection biases of routers, exact over a mini-batch whatever its split.

With E experts in each of L layers, n tokens (prompts included, padding not), f_e = how often expert e was chosen / n,
and P_e = the mean of its probability:

    balance = 1 / L sum_l E sum_e f_e P_e        z = 1 / L sum_l mean over tokens of logsumexp(logits)^2

`balance` is the number of experts that a token takes where all are chosen equally often, as in transformers, which
counts all layers' choices together. f has no gradient and is of all micro-batches and ranks: where a mini-batch has
several micro-batches, its choices are counted in a forward pass of their own before. The losses are then linear in
tokens.

References: Fedus et al., 2021, https://arxiv.org/abs/2101.03961; Zoph et al., 2022, https://arxiv.org/abs/2202.08906
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from funrl import trees
from funrl.algos.metrics import Metric, Sum, divide
from funrl.batch import Batch
from funrl.mesh.collectives import psum
from funrl.mesh.mesh import Mesh
from funrl.models.model import RouterLoad
from funrl.models.placed import Placed
from funrl.trainer.settings.settings import Settings

BIAS = "router_bias"  # last part of the name of the weight
ROUTER_COUNTS = "router/counts"  # of a micro-batch, among its metrics; `load_metrics` makes numbers of their sum


class RouterLosses(NamedTuple):
    """Coefficients of the two losses; and how far an update moves the biases by which experts are chosen."""

    balance: float = 0.0
    z: float = 0.0
    bias_rate: float = 0.0

    @property
    def wanted(self) -> bool:
        """True if there is a loss."""
        return self.balance > 0 or self.z > 0


class Choices(NamedTuple):
    """The choices of a whole mini-batch.

    Attributes:
      counts_LE: how often each expert is chosen; None: as in the one micro-batch of each rank.
      tokens: how many there are.
    """

    counts_LE: Tensor | None
    tokens: Tensor

    @property
    def denominators(self) -> tuple[Tensor, Tensor]:
        """Of the numerators of `router_numerators`."""
        return self.tokens.square(), self.tokens


def token_count(micro_batches: Iterable[Batch], mesh: Mesh) -> Tensor:
    """Number of tokens of a mini-batch that go to experts, over the ranks that have others; float64."""
    total = torch.zeros((), dtype=torch.float64, device=mesh.device)
    for batch in micro_batches:
        segments = batch.get("segments")
        total += batch.tokens.numel() if segments is None else segments.count_nonzero()
    return psum(total, mesh, mesh.row_axes)


def router_numerators(
    losses: RouterLosses, load: RouterLoad, chosen: Choices, mesh: Mesh
) -> tuple[tuple[Tensor, ...], dict[str, Metric]]:
    """Terms of a micro-batch in both losses, times their coefficients; the losses without these as metrics."""
    layers, experts = load.probs_E.shape
    counts = psum(load.counts_E, mesh, mesh.token_axes) if chosen.counts_LE is None else chosen.counts_LE
    balance = _of_all_tokens((counts.to(load.probs_E.dtype) * load.probs_E).sum() * (experts / layers), mesh)
    z = _of_all_tokens(load.z.sum() / layers, mesh)
    squared, tokens = chosen.denominators
    metrics: dict[str, Metric] = {
        "router/balance_loss": Sum(divide(balance.detach(), squared)),
        "router/z_loss": Sum(divide(z.detach(), tokens)),
    }
    return (losses.balance * balance, losses.z * z), metrics


def counts_metric(load: RouterLoad, mesh: Mesh) -> dict[str, Metric]:
    """The choices of a micro-batch, to be summed."""
    return {ROUTER_COUNTS: Sum(_of_all_tokens(load.counts_E.double(), mesh))}


def _of_all_tokens(x: Tensor, mesh: Mesh) -> Tensor:
    """A sum over this rank's tokens as that over all tokens of its rows, as all that is summed over rows is."""
    return psum(x, mesh, tuple(axis for axis in mesh.token_axes if axis not in mesh.row_axes))


def load_metrics(values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Metrics with numbers instead of the summed choices.

    "router/load_max" is the largest load of an expert over the mean of its layer, in the worst layer; "router/entropy"
    that of the choices over the largest possible, the mean of the layers; "router/unused" the share of experts that no
    token chose.
    """
    metrics = dict(values)
    counts_LE = metrics.pop(ROUTER_COUNTS, None)
    if counts_LE is None:
        return metrics
    share_LE = divide(counts_LE, counts_LE.sum(-1, keepdim=True).expand_as(counts_LE))
    experts = counts_LE.shape[-1]
    entropy_L = torch.special.entr(share_LE).sum(-1) / torch.tensor(float(max(experts, 2))).log().item()
    return metrics | {
        "router/load_max": share_LE.max() * experts,
        "router/entropy": entropy_L.mean(),
        "router/unused": (counts_LE == 0).double().mean(),
    }


def router_losses(settings: Settings, placed: Placed) -> RouterLosses:
    """Losses of the routers of a model, if it has some and gives probabilities."""
    routers = placed.model.abilities.routers
    if routers is None or not placed.model.generates:
        return RouterLosses()
    rate = settings.routers.router_bias_rate if routers.biased else 0.0
    return RouterLosses(settings.routers.router_aux_coef, settings.routers.router_z_coef, rate)


def biases_of(params: trees.Tree) -> list[Tensor]:
    """The biases of all layers that have experts, in order, [E] each and whole on every rank."""
    return [x for name, x in trees.named(params) if name.rsplit("/", 1)[-1] == BIAS]


@torch.no_grad()
def move_biases_(params: trees.Tree, counts_LE: Tensor, rate: float) -> None:
    """Move the biases of a model by the load of its experts, in place: balance of experts without a loss.

    Where a router chooses experts by score + bias, the bias b_e of each moves against its load c_e, the number of times
    that it was chosen by the tokens of the update (prompts included, padding not),

        b_e <- b_e + rate sign(mean of c - c_e)

    It has no gradient and does not change what a chosen expert counts. The loads are whole numbers over all
    micro-batches and ranks, so the bits depend on no mesh.

    Reference: Wang et al., 2024, https://arxiv.org/abs/2408.15664

    Args:
      params: a rank's weights, those of a decoder or of one with more around it.
      counts_LE: how often each expert was chosen, over all ranks.
      rate: how far, in units of the scores.
    """
    behind_LE = counts_LE.sum(-1, keepdim=True) - counts_LE.shape[-1] * counts_LE
    for bias_E, behind_E in zip(biases_of(params), behind_LE, strict=True):
        bias_E.add_(behind_E.sign().to(bias_E), alpha=rate)
