"""The weight of demonstrations relative to the policy's own rows, over the steps of a run."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from funrl import trees
from funrl.algos.core import Advantage, Signal, check_rank
from funrl.algos.masks import where_masked
from funrl.algos.metrics import Mean
from funrl.batch import Batch


def weigh_demonstrations(peak: float = 0.9, valley: float = 0.05, warmup: int = 0, decay: int = 200) -> Advantage:
    """Weight demonstration tokens by mu and the policy's own tokens by 1 - mu, times any weights set before.

    In step n, from 0: mu = peak n / warmup while n < warmup; then it falls from `peak` to `valley` along half a cosine
    over `decay` steps, and stays there. Put it last in the chain: it sets x to 0 on demonstrations.

        sum_losses(restrict(reduce(weighted(clipped_surrogate()), token_mean()), sampled_tokens),
                   restrict(reduce(weighted(uncertain_likelihood()), token_mean()), demonstrated_tokens))

    Args:
      peak, valley: bounds of mu, from 0 to 1.
      warmup, decay: steps, at least 0.
    Needs: demonstration [B, T]. Makes: weight. The state counts the steps. Metric: "actor/imitation_weight".

    Raises:
      ValueError: a weight is not from 0 to 1, or a number of steps is below 0.
    References: CHORD, Zhang et al., 2025, https://arxiv.org/abs/2508.11408
    """
    if not (0 <= peak <= 1 and 0 <= valley <= 1) or warmup < 0 or decay < 0:
        raise ValueError(
            f"weigh_demonstrations(peak={peak}, valley={valley}, warmup={warmup}, decay={decay}): weights are from 0 "
            "to 1, and steps at least 0"
        )

    def share(step: Tensor) -> Tensor:
        rising = peak * step / max(warmup, 1)
        done = ((step - warmup) / max(decay, 1)).clamp(0, 1) if decay else torch.ones_like(step)
        falling = valley + (peak - valley) * (1 + (math.pi * done).cos()) / 2
        return torch.where(step < warmup, rising, falling)

    def update(signal: Signal, step: Tensor, batch: Batch) -> tuple[Signal, trees.Tree]:
        check_rank(signal, "token")
        given_BT = batch.demonstration
        mu = share(step.double())
        weight_BT = torch.where(given_BT, mu.to(signal.x), (1 - mu).to(signal.x))
        if signal.weight is not None:
            weight_BT = weight_BT * where_masked(signal.weight, signal.mask)
        return signal._replace(
            x=where_masked(signal.x, signal.mask & ~given_BT),
            weight=where_masked(weight_BT, signal.mask),
            metrics=signal.metrics | {"actor/imitation_weight": Mean(mu, torch.ones_like(mu))},
        ), step + 1

    return Advantage(lambda: torch.zeros((), dtype=torch.int64), update)
