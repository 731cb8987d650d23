"""Importance weights that correct the gap between the sampling engine and the trainer.

With d[t] = old_logp[t] - rollout_logp[t], the log of trainer over engine, clamped to +-20, over the sampled tokens:

| over | ratio | every token has |
|---|---|---|
| token | exp(d[t]) | its own |
| sequence | exp(sum_t d[t]) | its sequence's |
| geometric | exp(mean_t d[t]) | its sequence's |

A sequence is a row, or all rows of an agent's episode: each token that was sampled counts once.
The weights go to `signal.weight`, for terms under `weighted`.

References: truncated, Yao et al., 2025, https://fengyao.notion.site/off-policy-rl
"""

from __future__ import annotations

import torch
from torch import Tensor

from funrl import trees
from funrl.algos.core import Advantage, Signal
from funrl.algos.losses.ratios import LOG_RATIO_BOUND
from funrl.algos.masks import row_or_episode_sums, where_masked
from funrl.algos.metrics import mean_over_tokens
from funrl.batch import Batch, MissingField
from funrl.fields import FIELDS

OVER = ("token", "sequence", "geometric")


def log_gap(batch: Batch, mask_BT: Tensor) -> Tensor:
    """d [B, T] in nats, clamped to +-20; 0 outside the mask."""
    return where_masked(batch.old_logp - batch.rollout_logp, mask_BT).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)


def gap_over(over: str, d_BT: Tensor, mask_BT: Tensor, batch: Batch) -> Tensor:
    """The log-ratio over tokens, sequences or geometric means, on every token [B, T], clamped to +-20."""
    if over == "token":
        return d_BT
    sum_B1 = row_or_episode_sums(d_BT, mask_BT, batch)
    if over == "geometric":
        sum_B1 = sum_B1 / row_or_episode_sums(torch.ones_like(d_BT), mask_BT, batch).clamp_min(1)
    return where_masked(sum_B1.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).expand(d_BT.shape), mask_BT)


def importance_weights(over: str = "token", low: float = 0.0, high: float = 2.0) -> Advantage:
    """Truncated importance weights, w = clip(ratio, low, high), times the existing weights.

    Args:
      over: "token", "sequence" or "geometric".
      low, high: bounds of the ratio trainer / engine.
    Needs: old_logp, rollout_logp [B, T] (nats). Makes: weight.
    Metrics: "rollout_corr/is_mean", "rollout_corr/is_clipped", "rollout_corr/kl" (engine to trainer, k3, nats).

    Raises:
      ValueError: over is unknown, or the bounds are not 0 <= low <= high.

    Warning: TRL's default is the sequence ratio, rejected above 3: `reject_ratio("sequence", 0, 3)` beside this.
    """
    check_bounds(over, low, high)

    def update(signal: Signal, state: object, batch: Batch) -> tuple[Signal, trees.Tree]:
        mask_BT = signal.mask
        d_BT = log_gap(batch, mask_BT).to(signal.x.dtype)
        ratio_BT = gap_over(over, d_BT, mask_BT, batch=batch).exp()
        weight_BT = where_masked(ratio_BT.clamp(low, high), mask_BT)
        metrics = {
            "rollout_corr/is_mean": mean_over_tokens(weight_BT, mask_BT, batch),
            "rollout_corr/is_clipped": mean_over_tokens((weight_BT != ratio_BT).to(d_BT.dtype), mask_BT, batch),
            "rollout_corr/kl": mean_over_tokens(d_BT.exp() - 1 - d_BT, mask_BT, batch),
        }
        if signal.weight is not None:
            weight_BT = weight_BT * where_masked(signal.weight, mask_BT)
        return signal._replace(weight=weight_BT, metrics=signal.metrics | metrics), state

    return Advantage(lambda: (), update)


def normalise_weights() -> Advantage:
    """Divide the weights by their mean over the batch's masked tokens.

    After `importance_weights`, which makes them. Needs: weight, of the signal.

    Warning: verl's mean is over tokens for token weights and over sequences for sequence weights; here over tokens.
    """

    def update(signal: Signal, state: object, batch: Batch) -> tuple[Signal, trees.Tree]:
        if signal.weight is None:
            raise MissingField("weight", FIELDS["weight"])
        mean = mean_over_tokens(signal.weight, signal.mask, batch).value
        return signal._replace(weight=where_masked(signal.weight, signal.mask) / torch.where(mean > 0, mean, 1)), state

    return Advantage(lambda: (), update)


def check_bounds(over: str, low: float, high: float) -> None:
    """Raise ValueError where over is unknown, or the bounds are not 0 <= low <= high."""
    if over not in OVER:
        raise ValueError(f"over is {over!r}; there are {list(OVER)}")
    if not 0 <= low <= high:
        raise ValueError(f"bounds of the ratio are {low} and {high}; they must be 0 <= low <= high")
