"""Corrections for the gap between the engine that sampled and the trainer: importance weights and rejection.

With d[t] = old_logp[t] - rollout_logp[t], the log of trainer over engine, clamped to +-20, over the sampled tokens:

| over | ratio | every token has |
|---|---|---|
| token | exp(d[t]) | its own |
| sequence | exp(sum_t d[t]) | its row's |
| geometric | exp(mean_t d[t]) | its row's |

The weights go to `signal.weight`, for terms under `weighted`. What is rejected leaves `signal.mask`: it is in no
numerator, and in no denominator either. Pieces later in the chain see only the tokens that are left; `corrected` in
`compose` puts corrections first.

References: truncated, Yao et al., 2025, https://fengyao.notion.site/off-policy-rl; masked (IcePop), Ling Team, 2025,
  https://arxiv.org/abs/2510.18855
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from funrl.algos.core import Advantage, Fraction, Signal, sequence_sums, token_fraction, where_masked
from funrl.batch import Batch

BOUND = 20.0
OVER = ("token", "sequence", "geometric")


def log_gap(batch: Batch, mask_BT: Tensor) -> Tensor:
    """d [B, T] in nats, clamped to +-20; 0 outside the mask."""
    assert batch.old_logp is not None and batch.rollout_logp is not None
    return where_masked(batch.old_logp - batch.rollout_logp, mask_BT).clamp(-BOUND, BOUND)


def gap_over(over: str, d_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """The log-ratio over tokens, sequences or geometric means, on every token [B, T], clamped to +-20."""
    if over == "token":
        return d_BT
    sum_B1 = sequence_sums(d_BT, mask_BT)
    if over == "geometric":
        sum_B1 = sum_B1 / mask_BT.sum(1, keepdim=True).clamp_min(1)
    return where_masked(sum_B1.clamp(-BOUND, BOUND).expand(d_BT.shape), mask_BT)


def importance_weights(over: str = "token", low: float = 0.0, high: float = 2.0) -> Advantage:
    """Truncated importance weights, w = clip(ratio, low, high), times the weights that are already there.

    Args:
      over: "token", "sequence" or "geometric".
      low, high: bounds of the ratio trainer / engine.
    Needs: old_logp, rollout_logp [B, T] (nats). Makes: weight.
    Metrics: "rollout_corr/is_mean", "rollout_corr/is_clipped", "rollout_corr/kl" (engine to trainer, k3, nats).
    Raises:
      ValueError: over is unknown, or the bounds are not 0 <= low <= high.

    Warning: TRL's default is the sequence ratio, rejected above 3: `reject_ratio("sequence", 0, 3)` beside this.
    """
    _check(over, low, high)

    def update(signal: Signal, state: Any, batch: Batch) -> tuple[Signal, Any]:
        mask_BT = signal.mask
        d_BT = log_gap(batch, mask_BT).to(signal.x.dtype)
        ratio_BT = gap_over(over, d_BT, mask_BT).exp()
        weight_BT = where_masked(ratio_BT.clamp(low, high), mask_BT)
        metrics = {
            "rollout_corr/is_mean": token_fraction(weight_BT, mask_BT),
            "rollout_corr/is_clipped": token_fraction((weight_BT != ratio_BT).to(d_BT.dtype), mask_BT),
            "rollout_corr/kl": token_fraction(d_BT.exp() - 1 - d_BT, mask_BT),
        }
        if signal.weight is not None:
            weight_BT = weight_BT * where_masked(signal.weight, mask_BT)
        return signal._replace(weight=weight_BT, metrics=signal.metrics | metrics), state

    return Advantage(lambda: (), update, frozenset({"old_logp", "rollout_logp"}), frozenset({"weight"}))


def normalise_weights() -> Advantage:
    """Divides the weights by their mean over the masked tokens of the batch, so that they do not shrink the step.

    After `importance_weights`, which makes them; a chain in another order is refused. Needs: weight, of the signal.

    Warning: verl's mean is over tokens for token weights and over sequences for sequence weights; here over tokens.
    """

    def update(signal: Signal, state: Any, batch: Batch) -> tuple[Signal, Any]:
        if signal.weight is None:
            raise ValueError("normalise_weights comes after importance_weights: there are no weights yet")
        mean = token_fraction(signal.weight, signal.mask).value
        return signal._replace(weight=where_masked(signal.weight, signal.mask) / torch.where(mean > 0, mean, 1)), state

    return Advantage(lambda: (), update, frozenset({"weight"}))


def reject_ratio(over: str = "token", low: float = 0.5, high: float = 5.0) -> Advantage:
    """Takes out the tokens, or with "sequence" and "geometric" the rows, whose ratio is not in [low, high].

    Rejection by k1 is this, with the bounds on the ratio trainer / engine. Over tokens and beside
    `importance_weights("token", 0, high)` it is masked importance sampling (IcePop).

    Args:
      over: "token", "sequence" or "geometric".
      low, high: bounds of the ratio trainer / engine.
    Needs: old_logp, rollout_logp [B, T] (nats). Metric: "rollout_corr/rejected", the share of tokens taken out.
    Raises:
      ValueError: over is unknown, or the bounds are not 0 <= low <= high.

    Warning: verl documents these bounds and applies them to the inverse ratio; its rejected tokens still count in the
    denominator of token-mean.
    """
    _check(over, low, high)

    def keep(d_BT: Tensor, mask_BT: Tensor) -> Tensor:
        ratio_BT = gap_over(over, d_BT, mask_BT).exp()
        return (ratio_BT >= low) & (ratio_BT <= high)

    return _rejection(keep)


def reject_divergence(kind: str = "k3", over: str = "mean", high: float = 0.01) -> Advantage:
    """Takes out the tokens or rows whose divergence between engine and trainer is above a bound.

    k2 = d^2 / 2, k3 = exp(d) - 1 - d, both of KL(engine || trainer) and never below 0.

    Args:
      kind: "k2" or "k3"; for k1, a bound of the ratio, see `reject_ratio`.
      over: "token"; or of a row the "sum", the "mean" or the "max" over its tokens, which rejects the whole row.
      high: bound, in nats.
    Needs: old_logp, rollout_logp [B, T] (nats). Metric: "rollout_corr/rejected", the share of tokens taken out.
    Raises:
      ValueError: kind or over is unknown.
    """
    if kind not in ("k2", "k3") or over not in ("token", "sum", "mean", "max"):
        raise ValueError(f"reject_divergence({kind!r}, {over!r}): kind is k2 or k3, over is token, sum, mean or max")

    def keep(d_BT: Tensor, mask_BT: Tensor) -> Tensor:
        k_BT = 0.5 * d_BT.square() if kind == "k2" else d_BT.expm1() - d_BT
        if over == "token":
            return k_BT <= high
        if over == "max":
            return (k_BT <= high).all(1, keepdim=True).expand(k_BT.shape)
        sum_B1 = sequence_sums(k_BT, mask_BT)
        bound_B1 = high * mask_BT.sum(1, keepdim=True) if over == "mean" else high
        return (sum_B1 <= bound_B1).expand(k_BT.shape)

    return _rejection(keep)


def mask_truncated() -> Advantage:
    """Takes out the rows that ran into the length limit; before a group's statistics they still count in them.

    Needs: truncated [B].
    References: DAPO's overlong filtering, Yu et al., 2025, https://arxiv.org/abs/2503.14476; TRL's
      mask_truncated_completions.
    """

    def update(signal: Signal, state: Any, batch: Batch) -> tuple[Signal, Any]:
        assert batch.truncated is not None
        return _without(signal, signal.mask & ~batch.truncated[:, None]), state

    return Advantage(lambda: (), update, frozenset({"truncated"}))


def _rejection(keep: Any) -> Advantage:
    def update(signal: Signal, state: Any, batch: Batch) -> tuple[Signal, Any]:
        d_BT = log_gap(batch, signal.mask).to(signal.x.dtype)
        after = signal.mask & keep(d_BT, signal.mask)
        rejected = Fraction((signal.mask & ~after).sum().to(d_BT.dtype), signal.mask.sum().to(d_BT.dtype))
        signal = signal._replace(metrics=signal.metrics | {"rollout_corr/rejected": rejected})
        return _without(signal, after), state

    return Advantage(lambda: (), update, frozenset({"old_logp", "rollout_logp"}))


def _without(signal: Signal, mask_BT: Tensor) -> Signal:
    """The signal on a smaller mask: what is per token is 0 outside it."""
    per_token = {name: getattr(signal, name) for name in ("returns", "weight")}
    per_token |= {"x": signal.x} if signal.x.dim() == 2 else {}
    kept = {name: where_masked(z, mask_BT) for name, z in per_token.items() if z is not None}
    return signal._replace(mask=mask_BT, **kept)


def _check(over: str, low: float, high: float) -> None:
    if over not in OVER:
        raise ValueError(f"over is {over!r}; there are {list(OVER)}")
    if not 0 <= low <= high:
        raise ValueError(f"bounds of the ratio are {low} and {high}; they must be 0 <= low <= high")
