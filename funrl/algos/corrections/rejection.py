"""Rejection of tokens and rows where engine and trainer differ too much, or which were truncated.

A row stands for all rows of its agent's episode: they stay or go together.

The ratios are those of `funrl.algos.corrections.importance`. Rejected tokens leave `signal.mask`: they are in no
numerator and in no denominator, and later pieces of the chain do not see them. With `in_denominator` they get a weight
of 0 instead: terms under `weighted` learn nothing from them, the denominator counts them, and terms outside of
`weighted`, such as a KL to the reference, still see them.

References: masked (IcePop), Ling Team, 2025, https://arxiv.org/abs/2510.18855
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from funrl import trees
from funrl.algos.advantages.groups import group_max, groups_of
from funrl.algos.core import CARRIED, Advantage, Signal, check_rank
from funrl.algos.corrections.importance import check_bounds, gap_over, log_gap
from funrl.algos.masks import row_or_episode_sums, total, where_masked
from funrl.algos.metrics import mean_over_tokens
from funrl.batch import Batch


def reject_ratio(over: str = "token", low: float = 0.5, high: float = 5.0, in_denominator: bool = False) -> Advantage:
    """Drop tokens, or with "sequence" and "geometric" rows, with a ratio outside [low, high].

    This is rejection by k1, with bounds on the ratio trainer / engine. Over tokens and together with
    `importance_weights("token", 0, high)` it is masked importance sampling (IcePop).

    Args:
      over: "token", "sequence" or "geometric".
      low, high: bounds of the ratio trainer / engine.
      in_denominator: leave rejected tokens in the mask, with a weight of 0.
    Needs: old_logp, rollout_logp [B, T] (nats). Metric: "rollout_corr/rejected", the share of rejected tokens.

    Raises:
      ValueError: over is unknown, or the bounds are not 0 <= low <= high.

    Warning: verl documents these bounds and applies them to the inverse ratio; its rejected tokens still count in the
    denominator of token-mean (`in_denominator=True`), but not in its bypass mode.
    """
    check_bounds(over, low, high)

    def within(d_BT: Tensor, mask_BT: Tensor, batch: Batch) -> Tensor:
        ratio_BT = gap_over(over, d_BT, mask_BT, batch=batch).exp()
        return (ratio_BT >= low) & (ratio_BT <= high)

    return _rejection(within, in_denominator)


def reject_divergence(
    kind: str = "k3", over: str = "mean", high: float = 0.01, in_denominator: bool = False
) -> Advantage:
    """Drop tokens or rows whose divergence between engine and trainer exceeds a bound.

    k2 = d^2 / 2, k3 = exp(d) - 1 - d, both of KL(engine || trainer) and never below 0. binary is the KL of the choice
    "this token or another": p log(p / q) + (1 - p) log((1 - p) / (1 - q)) with p = engine(t), q = trainer(t), each
    clamped to 1e-6 from 0 and 1.

    Args:
      kind: "k2", "k3" or "binary"; for k1, which bounds the ratio, see `reject_ratio`.
      over: "token"; or the "sum", "mean" or "max" over the tokens of a row, which rejects the whole row.
      high: bound, in nats, at least 0.
      in_denominator: leave rejected tokens in the mask, with a weight of 0.
    Needs: old_logp, rollout_logp [B, T] (nats). Metric: "rollout_corr/rejected", the share of rejected tokens.

    Raises:
      ValueError: kind or over is unknown, or the bound is below 0.
    References: binary, over the mean: FlashREINFORCE, Hu et al., 2026, https://github.com/yifanzhang-pro/FlashREINFORCE
    """
    if kind not in _DIVERGENCES or over not in ("token", "sum", "mean", "max"):
        raise ValueError(
            f"reject_divergence({kind!r}, {over!r}): kind is k2, k3 or binary, over is token, sum, mean or max"
        )
    if high < 0:
        raise ValueError(f"reject_divergence(high={high}): the bound must be at least 0")

    def within(d_BT: Tensor, mask_BT: Tensor, batch: Batch) -> Tensor:
        k_BT = _DIVERGENCES[kind](d_BT, batch)
        if over == "token":
            return k_BT <= high
        if over == "max":
            beyond_B1 = row_or_episode_sums((k_BT > high).to(k_BT.dtype), mask_BT, batch)
            return (beyond_B1 == 0).expand(k_BT.shape)
        sum_B1 = row_or_episode_sums(k_BT, mask_BT, batch)
        bound_B1 = high * row_or_episode_sums(torch.ones_like(k_BT), mask_BT, batch) if over == "mean" else high
        return (sum_B1 <= bound_B1).expand(k_BT.shape)

    return _rejection(within, in_denominator)


def _binary_divergence(d_BT: Tensor, batch: Batch) -> Tensor:
    p_BT, q_BT = (x.to(d_BT.dtype).exp().clamp(1e-6, 1 - 1e-6) for x in (batch.rollout_logp, batch.old_logp))
    return p_BT * (p_BT / q_BT).log() + (1 - p_BT) * (torch.log1p(-p_BT) - torch.log1p(-q_BT))


_DIVERGENCES: dict[str, Callable[[Tensor, Batch], Tensor]] = {
    "k2": lambda d_BT, batch: 0.5 * d_BT.square(),
    "k3": lambda d_BT, batch: d_BT.expm1() - d_BT,
    "binary": _binary_divergence,
}


def reject_second_moment(high: float = 0.04, harmful: bool = False) -> Advantage:
    """Drop the tokens with the largest log-ratio d to the engine until mean d^2 is at most a bound.

    d is `log_gap`: it is large where tokens are stale, that is, sampled by weights that are some updates old. Tokens of
    equal d^2 stay or go together. If all tokens are beyond the bound, all go.

    Args:
      high: bound of the mean of d^2, in squared nats, at least 0.
      harmful: count and reject only the tokens that the update would move further in the same direction: ratio above 1
        and x > 0, or below 1 and x < 0. Put the piece after `to_tokens` then.
    Needs: old_logp, rollout_logp [B, T] (nats). Metric: "rollout_corr/rejected", the share of rejected tokens.

    Raises:
      ValueError: the bound is below 0.
    References: M2PO, Zheng et al., 2025, https://arxiv.org/abs/2510.01161

    Warning: AReaL takes all tokens, as here by default. The authors' code takes the tokens that are harmful under the
    current policy of each update, and clips them at a threshold that keeps the mean of the clipped d^2 within the
    bound.
    """
    if high < 0:
        raise ValueError(f"reject_second_moment(high={high}): the bound must be at least 0")

    def update(signal: Signal, state: object, batch: Batch) -> tuple[Signal, trees.Tree]:
        d_BT = log_gap(batch, signal.mask).to(signal.x.dtype)
        counted_BT = signal.mask
        if harmful:
            check_rank(signal, "token")
            counted_BT = counted_BT & (d_BT * where_masked(signal.x, signal.mask) > 0)
        moment_BT = d_BT.square()
        most = _largest_kept(moment_BT, counted_BT, high, batch=batch)
        return _rejected(signal, ~(counted_BT & (moment_BT > most)), False, batch=batch), state

    return Advantage(lambda: (), update)


def _largest_kept(moment_BT: Tensor, counted_BT: Tensor, high: float, batch: Batch) -> Tensor:
    """The largest number v such that the counted moments up to v have a mean of at most `high`; -1 if there is none.

    Non-negative floats are ordered as their bits, so v is searched bit by bit.
    """

    def fit(kept_BT: Tensor) -> Tensor:
        return total(moment_BT.double() - high, kept_BT, batch).to(moment_BT.device) <= 0

    if not torch.compiler.is_compiling() and fit(counted_BT):  # fresh rows: nothing to reject
        return moment_BT.new_full((), torch.inf)
    whole, places = (torch.int64, 62) if moment_BT.dtype == torch.float64 else (torch.int32, 30)
    bits = torch.zeros((), dtype=whole, device=moment_BT.device)
    for place in range(places, -1, -1):
        more = bits | (1 << place)
        bits = torch.where(fit(counted_BT & (moment_BT <= more.view(moment_BT.dtype))), more, bits)
    none = ~fit(counted_BT & (moment_BT <= 0))
    return torch.where(none, moment_BT.new_full((), -1.0), bits.view(moment_BT.dtype))


def keep_best(threshold: float = 0.0) -> Advantage:
    """Drop rows that are not the best of their group or not above a threshold; the rest get x = 1.

    Rows that tie for the best all stay, and so does the only row of a group: imitation needs no comparison.

    Args:
      threshold: in units of reward; a group whose best row is not above it is rejected as a whole.
    Needs: group [B]. Metric: "rollout_corr/rejected", the share of rejected tokens.
    References: RAFT++, Xiong et al., 2025, https://arxiv.org/abs/2504.11343
    """

    def update(signal: Signal, state: object, batch: Batch) -> tuple[Signal, trees.Tree]:
        check_rank(signal, "row")
        best_B = (signal.x == group_max(signal.x, groups_of(batch.group))) & (signal.x > threshold)
        signal = signal._replace(x=best_B.to(signal.x.dtype))
        return _rejected(signal, batch.across.own(best_B)[:, None], False, batch=batch), state

    return Advantage(lambda: (), update)


def mask_truncated(in_denominator: bool = False) -> Advantage:
    """Drop truncated rows; they still count in group statistics.

    Args:
      in_denominator: leave their tokens in the mask, with a weight of 0.
    Needs: truncated [B].
    References: DAPO's overlong filtering, Yu et al., 2025, https://arxiv.org/abs/2503.14476; TRL's
      mask_truncated_completions.
    """

    def update(signal: Signal, state: object, batch: Batch) -> tuple[Signal, trees.Tree]:
        after = signal.mask & ~batch.across.own(batch.truncated)[:, None]
        return _without(signal, after, in_denominator), state

    return Advantage(lambda: (), update)


def _rejection(within: Callable[[Tensor, Tensor, Batch], Tensor], in_denominator: bool) -> Advantage:
    def update(signal: Signal, state: object, batch: Batch) -> tuple[Signal, trees.Tree]:
        d_BT = log_gap(batch, signal.mask).to(signal.x.dtype)
        return _rejected(signal, within(d_BT, signal.mask, batch), in_denominator, batch=batch), state

    return Advantage(lambda: (), update)


def _rejected(signal: Signal, kept_BT: Tensor, in_denominator: bool, batch: Batch) -> Signal:
    """The signal restricted to the kept tokens, with the share of rejected tokens as a metric."""
    after = signal.mask & kept_BT
    rejected = mean_over_tokens((~after).to(signal.x.dtype), signal.mask, batch)
    signal = signal._replace(metrics=signal.metrics | {"rollout_corr/rejected": rejected})
    return _without(signal, after, in_denominator)


def _without(signal: Signal, mask_BT: Tensor, in_denominator: bool) -> Signal:
    """The signal on a smaller mask, with fields per token set to 0 outside it; or with weights of 0 instead."""
    if in_denominator:
        weight_BT = torch.ones_like(mask_BT, dtype=signal.x.dtype) if signal.weight is None else signal.weight
        return signal._replace(weight=where_masked(weight_BT, mask_BT))
    per_token = {name: getattr(signal, name) for name in CARRIED}
    per_token |= {"x": signal.x} if signal.x.dim() == 2 else {}
    kept = {name: where_masked(z, mask_BT) for name, z in per_token.items() if z is not None}
    return signal._replace(mask=mask_BT, **kept)
