"""Losses of one preference, elementwise: (chosen, rejected) -> loss, each the implicit reward of a completion.

Rewards are in nats before beta: log pi/pi_ref, or log pi, of a whole completion or per token; d = chosen - rejected,
s the logistic function. beta is 1 / nats. See `funrl.algos.losses.preference` for which reward goes with which loss.

Warning: TRL ignores label smoothing silently in sigmoid, hinge and nca; here only the losses that use it take it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid


class PairLoss(NamedTuple):
    """The loss of a pair: (chosen reward, rejected reward) -> loss, elementwise.

    Attributes:
      beta: the scale of the rewards, in 1 / nats; rewards are reported times beta.
      of: (chosen reward, rejected reward) -> loss.
    """

    beta: float
    of: Callable[[Tensor, Tensor], Tensor]

    def __call__(self, chosen: Tensor, rejected: Tensor) -> Tensor:
        return self.of(chosen, rejected)


def check_beta(beta: float) -> float:
    """beta, or ValueError where it is not above 0."""
    if beta <= 0:
        raise ValueError(f"beta is {beta}: it must be above 0")
    return beta


def smoothed(logit: Tensor, smoothing: float) -> Tensor:
    """-(1 - eps) log s(logit) - eps log s(-logit)."""
    return -(1 - smoothing) * logsigmoid(logit) - smoothing * logsigmoid(-logit)


def sigmoid_pairs(beta: float = 0.1, smoothing: float = 0.0, margin: float = 0.0) -> PairLoss:
    """DPO; with `smoothing` cDPO; with `margin` and per-token likelihoods SimPO (its gamma).

    -(1 - smoothing) log s(beta d - margin) - smoothing log s(-(beta d - margin)), d = chosen - rejected.

    Args:
      smoothing: probability that a label is wrong, in [0, 1/2).
      margin: the target for beta d.
    References: DPO, Rafailov et al., 2023, https://arxiv.org/abs/2305.18290; cDPO, Mitchell, 2023
    """
    check_beta(beta)
    return PairLoss(beta, lambda chosen, rejected: smoothed(beta * (chosen - rejected) - margin, smoothing))


def hinge_pairs(beta: float = 0.1) -> PairLoss:
    """SLiC's and RSO's hinge.

    max(0, 1 - beta d), d = chosen - rejected.

    References: SLiC, https://arxiv.org/abs/2305.10425; RSO, https://arxiv.org/abs/2309.06657
    """
    check_beta(beta)
    return PairLoss(beta, lambda chosen, rejected: torch.relu(1 - beta * (chosen - rejected)))


def ipo_pairs(beta: float = 0.1) -> PairLoss:
    """IPO's square, for per-token rewards, as in its authors' code and TRL.

    (d - 1 / (2 beta))^2, d = chosen - rejected.

    References: IPO, https://arxiv.org/abs/2310.12036
    """
    check_beta(beta)
    return PairLoss(beta, lambda chosen, rejected: (chosen - rejected - 1 / (2 * beta)).square())


def robust_pairs(beta: float = 0.1, smoothing: float = 0.1) -> PairLoss:
    """DPO made unbiased for labels that are wrong with probability `smoothing` < 1/2.

    (-(1 - smoothing) log s(beta d) + smoothing log s(-beta d)) / (1 - 2 smoothing), d = chosen - rejected.

    References: https://arxiv.org/abs/2403.00409
    """
    check_beta(beta)
    if not 0 <= smoothing < 0.5:
        raise ValueError(f"smoothing is {smoothing}: it must be at least 0 and below 1/2")

    def loss(chosen: Tensor, rejected: Tensor) -> Tensor:
        logit = beta * (chosen - rejected)
        return ((1 - smoothing) * -logsigmoid(logit) - smoothing * -logsigmoid(-logit)) / (1 - 2 * smoothing)

    return PairLoss(beta, loss)


def exo_pairs(beta: float = 0.1, smoothing: float = 1e-3) -> PairLoss:
    """EXO's reverse divergence; `smoothing` in (0, 1) is the target probability of the rejected completion.

    p log(p / (1 - smoothing)) + (1 - p) log((1 - p) / smoothing), p = s(beta (chosen - rejected)).

    References: EXO, https://arxiv.org/abs/2402.00856
    """
    check_beta(beta)
    if not 0 < smoothing < 1:
        raise ValueError(f"smoothing is {smoothing}: it must be in (0, 1)")

    def loss(chosen: Tensor, rejected: Tensor) -> Tensor:
        logit = beta * (chosen - rejected)
        wins = torch.sigmoid(logit) * (logsigmoid(logit) - math.log1p(-smoothing))
        return wins + torch.sigmoid(-logit) * (logsigmoid(-logit) - math.log(smoothing))

    return PairLoss(beta, loss)


def nca_pairs(beta: float = 0.1) -> PairLoss:
    """NCA, which keeps the likelihood of the chosen completion from falling.

    -log s(beta chosen) - (log s(-beta chosen) + log s(-beta rejected)) / 2.

    References: NCA, https://arxiv.org/abs/2402.05369
    """
    check_beta(beta)

    def loss(chosen: Tensor, rejected: Tensor) -> Tensor:
        return -logsigmoid(beta * chosen) - 0.5 * (logsigmoid(-beta * chosen) + logsigmoid(-beta * rejected))

    return PairLoss(beta, loss)


def bco_pairs(beta: float = 0.1) -> PairLoss:
    """BCO on pairs, without its running mean of rewards, as TRL's bco_pair.

    -log s(beta chosen) - log s(-beta rejected).

    References: BCO, https://arxiv.org/abs/2404.04656
    """
    check_beta(beta)
    return PairLoss(beta, lambda chosen, rejected: -logsigmoid(beta * chosen) - logsigmoid(-beta * rejected))


def sppo_pairs(beta: float = 0.1) -> PairLoss:
    """SPPO with win rates of 1 and 0.

    (chosen - 1 / (2 beta))^2 + (rejected + 1 / (2 beta))^2.

    References: SPPO-hard, https://arxiv.org/abs/2405.00675
    """
    check_beta(beta)
    half = 1 / (2 * beta)
    return PairLoss(beta, lambda chosen, rejected: (chosen - half).square() + (rejected + half).square())


def apo_zero_pairs(beta: float = 0.1) -> PairLoss:
    """APO for chosen completions better than the policy's: chosen up, rejected down.

    1 - s(beta chosen) + s(beta rejected).

    References: APO, https://arxiv.org/abs/2408.06266
    """
    check_beta(beta)
    return PairLoss(beta, lambda chosen, rejected: 1 - torch.sigmoid(beta * chosen) + torch.sigmoid(beta * rejected))


def apo_down_pairs(beta: float = 0.1) -> PairLoss:
    """APO for chosen completions worse than the policy's: both down, rejected further.

    s(beta chosen) + 1 - s(beta d), d = chosen - rejected.

    References: APO, https://arxiv.org/abs/2408.06266
    """
    check_beta(beta)
    return PairLoss(
        beta, lambda chosen, rejected: torch.sigmoid(beta * chosen) + 1 - torch.sigmoid(beta * (chosen - rejected))
    )


def discopop_pairs(beta: float = 0.1, tau: float = 0.05) -> PairLoss:
    """DiscoPOP's log-ratio modulated blend; exp(-beta d) is clamped to exp(20).

    -(1 - g) log s(beta d) + g exp(-beta d), g = s(beta d / tau), d = chosen - rejected.

    Args:
      tau: width of the blend's transition, in units of beta d.
    References: https://arxiv.org/abs/2406.08414
    """
    check_beta(beta)

    def loss(chosen: Tensor, rejected: Tensor) -> Tensor:
        logit = beta * (chosen - rejected)
        blend = torch.sigmoid(logit / tau)
        return (1 - blend) * -logsigmoid(logit) + blend * (-logit).clamp(max=20).exp()

    return PairLoss(beta, loss)
