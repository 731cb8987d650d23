"""Pieces that select or count tokens of the batch: clip-cov, kl-cov, the highest entropies; adaptive entropy bonus.

A choice over the whole batch is made once, by an advantage piece at the end of the chain, and passed to the terms as a
field: `selected`, `weight`, `entropy_coefficient` or `prompt_tokens`. Micro-batches and data ranks thus see the same
choice.

    clip-cov: chain(..., select_covariance_between()), off_selected(clipped_surrogate())
    kl-cov:   chain(..., select_highest_covariance()), add(surrogate(), scale(0.1, on_selected(kl_to_old("abs"))))
    80/20:    chain(..., keep_highest_entropy(0.2)),   weighted(clipped_surrogate())

References: clip-cov and kl-cov, Cui et al., 2025, https://arxiv.org/abs/2505.22617; 80/20, Wang et al., 2025,
  https://arxiv.org/abs/2506.01939; adaptive bonus, Skywork, 2025, https://arxiv.org/abs/2505.22312
"""

from __future__ import annotations

import torch
from torch import Tensor

from funrl import trees
from funrl.algos.advantages.groups import group_sum, groups_of
from funrl.algos.core import Advantage, Signal, check_rank
from funrl.algos.losses.ratios import either
from funrl.algos.masks import total, where_masked
from funrl.algos.metrics import Mean, mean_over_tokens
from funrl.batch import TOKEN_INT, Batch


def covariance(advantage_BT: Tensor, logp_BT: Tensor, mask_BT: Tensor, batch: Batch) -> Tensor:
    """(A - mean A)(log pi - mean log pi) per token, means over the mask; 0 outside it."""

    def centred(x_BT: Tensor) -> Tensor:
        return x_BT - mean_over_tokens(x_BT, mask_BT, batch).value

    return where_masked(centred(advantage_BT) * centred(logp_BT), mask_BT)


def top_tokens(x_BT: Tensor, eligible_BT: Tensor, count: Tensor, batch: Batch) -> Tensor:
    """[B, T] bool, the `count` largest x among the eligible; all if there are fewer. Earlier rows and tokens win ties.

    Args:
      count: int64, at least 1.
    """
    x_BT = torch.where(eligible_BT, x_BT, torch.full_like(x_BT, -torch.inf))
    least = batch.across.kth_largest(x_BT, count)
    above_BT = eligible_BT & (x_BT > least)
    tied_BT = eligible_BT & (x_BT == least)
    across = batch.across.rows
    ties_B = across.sums(tied_BT)
    before_B = across.own(ties_B.cumsum(0) - ties_B)
    place_BT = before_B[:, None] + tied_BT.cumsum(1)  # rank of a tie among all ties, from 1
    return above_BT | (tied_BT & (place_BT <= count - total(above_BT, eligible_BT, batch)))


def share_of(mask_BT: Tensor, share: float, batch: Batch) -> Tensor:
    """Number of tokens that make up a share of the mask, rounded down, at least one."""
    return (share * total(mask_BT, mask_BT, batch)).long().clamp_min(1)


def noise(rows_B: Tensor, width: int, draw: Tensor) -> Tensor:
    """Numbers in [0, 1) from an integer hash of (draw, row, column): the same on every device and rank."""
    columns = torch.arange(width, device=draw.device)
    x = rows_B[:, None] * 0x1000000 + columns + draw * 0x9E3779B97F4A7C1
    for factor in (0xBF58476D1CE4E5B, 0x94D049BB133111E):
        x = (x ^ ((x >> 30) & 0x3FFFFFFFF)) * factor
    return ((x >> 11) & 0xFFFFFFFF).to(torch.float64) / 2.0**32


def select_covariance_between(share: float = 0.0002, low: float = 1.0, high: float = 5.0) -> Advantage:
    """Select random tokens whose covariance of advantage and log-probability is in (low, high).

    Put it last in the chain: it reads `signal.x` as advantages. It selects a `share` of all tokens, at least one.

    Args:
      share: of the batch's tokens.
      low, high: in the advantage's unit times nats.
    Needs: old_logp [B, T]. Makes: selected. The state counts the calls.

    Warning: the paper and verl take the covariance with the current log-probabilities of a mini-batch and leave out
    tokens beyond the clip. Here it is with the old log-probabilities of the whole batch; both are the same at the first
    update.
    """

    def update(signal: Signal, draw: Tensor, batch: Batch) -> tuple[Signal, Tensor]:
        check_rank(signal, "token")
        mask_BT = signal.mask
        cov_BT = covariance(signal.x, batch.old_logp, mask_BT, batch=batch)
        eligible_BT = mask_BT & (cov_BT > low) & (cov_BT < high)
        across = batch.across
        rows_B = across.own(torch.arange(len(across.sums(mask_BT)), device=mask_BT.device))
        random_BT = noise(rows_B, mask_BT.shape[1], draw.to(mask_BT.device))
        chosen_BT = top_tokens(random_BT, eligible_BT, share_of(mask_BT, share, batch), batch=batch)
        return _selecting(signal, chosen_BT, batch), draw + 1

    return Advantage(lambda: torch.zeros((), dtype=torch.int64), update)


def select_highest_covariance(share: float = 0.0002) -> Advantage:
    """Select the `share` of tokens with the highest covariance of advantage and log-probability, at least one.

    Put it last in the chain: it reads `signal.x` as advantages. The warning of `select_covariance_between` applies.

    Args:
      share: of the batch's tokens.
    Needs: old_logp [B, T]. Makes: selected.
    """

    def update(signal: Signal, state: object, batch: Batch) -> tuple[Signal, trees.Tree]:
        check_rank(signal, "token")
        cov_BT = covariance(signal.x, batch.old_logp, signal.mask, batch=batch)
        count = share_of(signal.mask, share, batch)
        return _selecting(signal, top_tokens(cov_BT, signal.mask, count, batch=batch), batch), state

    return Advantage(lambda: (), update)


def _selecting(signal: Signal, chosen_BT: Tensor, batch: Batch) -> Signal:
    share = mean_over_tokens(chosen_BT.to(signal.x.dtype), signal.mask, batch)
    return signal._replace(
        extra=signal.extra | {"selected": chosen_BT}, metrics=signal.metrics | {"actor/selected": share}
    )


def keep_highest_entropy(share: float = 0.2) -> Advantage:
    """Weight 0 on tokens below the (1 - share) quantile of the batch's entropy.

    The quantile interpolates linearly between the two tokens next to it. Use it with `weighted`; a KL term outside of
    `weighted` still sees every token, and the denominator counts all tokens.

    Args:
      share: of the batch's tokens, in (0, 1].
    Needs: old_entropy [B, T]. Makes: weight.

    Raises:
      ValueError: the share is not in (0, 1].

    Warning: TRL takes the entropies of the current policy at each micro-batch; here they are those before the first
    update.
    """
    if not 0 < share <= 1:
        raise ValueError(f"share is {share}: it must be above 0 and at most 1")

    def update(signal: Signal, state: object, batch: Batch) -> tuple[Signal, trees.Tree]:
        mask_BT = signal.mask
        entropy_BT = where_masked(batch.old_entropy, signal.mask)
        known_BT = torch.where(mask_BT, entropy_BT, torch.full_like(entropy_BT, -torch.inf))
        count = total(mask_BT, mask_BT, batch)
        place = (1 - share) * (count - 1).clamp_min(0)  # index of the quantile in ascending order, from 0
        below, above = (
            batch.across.kth_largest(known_BT, (count - number).long()) for number in (place.floor(), place.ceil())
        )
        threshold = torch.where(below == above, below, below + (place - place.floor()).to(below) * (above - below))
        keep_BT = (mask_BT & (entropy_BT >= threshold)).to(signal.x.dtype)
        weight_BT = keep_BT if signal.weight is None else torch.where(keep_BT > 0, signal.weight, keep_BT)
        return signal._replace(weight=weight_BT), state

    return Advantage(lambda: (), update)


def adapt_entropy(
    target: float, step: float = 0.005, start: float = 0.0, low: float = 0.0, high: float = 1.0
) -> Advantage:
    """Steer mean entropy to a target through the coefficient of `adaptive_entropy_bonus`.

    If the batch's mean entropy is at most the target, the coefficient is c, and c then grows by `step`. Otherwise the
    coefficient is 0, and c shrinks by `step`. c stays within [low, high]; it is the state.

    Args:
      target: nats per token.
      step, start, low, high: of the coefficient, in units of the advantage per nat.
    Needs: old_entropy [B, T]. Makes: entropy_coefficient. Metric "actor/entropy_coefficient".

    Warning: TRL uses the entropy of the step before; here it is the entropy of this batch before its first update.
    """

    def update(signal: Signal, c: Tensor, batch: Batch) -> tuple[Signal, Tensor]:
        short = mean_over_tokens(batch.old_entropy, signal.mask, batch).value <= target
        applied = torch.where(short.to(c.device), c, torch.zeros_like(c))
        after = (c + either(short.to(c.device), step, -step, like=c)).clamp(low, high)
        field_BT = where_masked(applied.to(signal.x).expand(signal.mask.shape), signal.mask)
        metrics = signal.metrics | {"actor/entropy_coefficient": Mean(applied, torch.ones_like(applied))}
        return signal._replace(extra=signal.extra | {"entropy_coefficient": field_BT}, metrics=metrics), after

    return Advantage(lambda: torch.tensor(start, dtype=torch.float64), update)


def mark_positives(threshold: float = 0.0) -> Advantage:
    """Mark the unrejected tokens of rows with an outcome above a threshold, for VAPO to imitate.

        sum_losses(..., restrict(reduce(scale(0.1, negative_log_likelihood()), token_mean()), imitated_tokens))

    Args:
      threshold: in units of reward.
    Needs: score [B], as it came. Makes: imitated [B, T]. The signal's x is unchanged.
    References: VAPO, Yue et al., 2025, https://arxiv.org/abs/2504.05118
    """

    def update(signal: Signal, state: object, batch: Batch) -> tuple[Signal, trees.Tree]:
        positive_B = batch.across.own(batch.score > threshold)
        return signal._replace(extra=signal.extra | {"imitated": signal.mask & positive_B[:, None]}), state

    return Advantage(lambda: (), update)


def count_prompt_tokens() -> Advantage:
    """Count the unrejected tokens of each group, for `prompt_mean`. Put it last in the chain.

    Needs: group [B]. Makes: prompt_tokens [B, T]. The signal's x is unchanged.
    """

    def update(signal: Signal, state: object, batch: Batch) -> tuple[Signal, trees.Tree]:
        tokens_B = group_sum(batch.across.sums(signal.mask), groups_of(batch.group))
        tokens_bT = batch.across.own(tokens_B)[:, None].to(TOKEN_INT) * signal.mask
        return signal._replace(extra=signal.extra | {"prompt_tokens": tokens_bT}), state

    return Advantage(lambda: (), update)
