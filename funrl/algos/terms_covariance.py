"""Pieces and terms for the tokens that drive the entropy down: clip-cov, kl-cov, the highest entropies, adaptive bonus.

What is chosen over a whole batch is chosen once, by an advantage piece at the end of the chain, and passed to the terms
as a field: `selected`, `weight` or `entropy_coefficient`. So micro-batches and data ranks see the same choice.

    clip-cov: chain(..., select_covariance_between()), off_selected(clipped_surrogate())
    kl-cov:   chain(..., select_highest_covariance()), add(surrogate(), scale(0.1, on_selected(kl_to_old("abs"))))
    80/20:    chain(..., keep_highest_entropy(0.2)),   weighted(clipped_surrogate())

References: clip-cov and kl-cov, Cui et al., 2025, https://arxiv.org/abs/2505.22617; 80/20, Wang et al., 2025,
  https://arxiv.org/abs/2506.01939; adaptive bonus, Skywork, 2025, https://arxiv.org/abs/2505.22312
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from funrl.algos.core import Advantage, Fraction, Signal, Term, check_rank, needs, needs_of, token_fraction
from funrl.algos.terms import constant, either, kept
from funrl.batch import Batch


def covariance(advantage_BT: Tensor, logp_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """(A - mean A)(log pi - mean log pi) per token, means over the mask; 0 outside it."""
    count = mask_BT.sum().clamp_min(1)
    a_BT, logp_BT = kept(advantage_BT, mask_BT), kept(logp_BT, mask_BT)
    return kept((a_BT - a_BT.sum() / count) * (logp_BT - logp_BT.sum() / count), mask_BT)


def top_tokens(x_BT: Tensor, eligible_BT: Tensor, count: Tensor) -> Tensor:
    """[B, T] bool, the `count` largest x among the eligible; all of them where there are fewer."""
    flat = torch.where(eligible_BT, x_BT, torch.full_like(x_BT, -torch.inf)).flatten()
    rank = torch.empty_like(flat, dtype=torch.int64)
    order = flat.argsort(descending=True, stable=True)
    rank = rank.scatter(0, order, torch.arange(flat.numel(), device=flat.device))
    return (rank < count).view_as(x_BT) & eligible_BT


def share_of(mask_BT: Tensor, share: float) -> Tensor:
    """How many tokens a share of the mask is, rounded down, at least one."""
    return (share * mask_BT.sum().to(torch.float64)).long().clamp_min(1)


def noise(shape: tuple[int, ...], draw: Tensor) -> Tensor:
    """Numbers in [0, 1) from an integer hash of (draw, row, column): the same on every device and in every process."""
    rows, columns = (torch.arange(n, device=draw.device) for n in shape)
    x = rows[:, None] * 0x1000000 + columns + draw * 0x9E3779B97F4A7C1
    for factor in (0xBF58476D1CE4E5B, 0x94D049BB133111E):
        x = (x ^ ((x >> 30) & 0x3FFFFFFFF)) * factor
    return ((x >> 11) & 0xFFFFFFFF).to(torch.float64) / 2.0**32


def select_covariance_between(share: float = 0.0002, low: float = 1.0, high: float = 5.0) -> Advantage:
    """Selects tokens at random among those whose covariance of advantage and log-probability is in (low, high).

    Put it last in the chain: `signal.x` are the advantages. As many are taken as `share` of all tokens, at least one.

    Args:
      share: of the batch's tokens.
      low, high: in the advantage's unit times nats.
    Needs: old_logp [B, T]. Makes: selected. The state counts the draws.

    Warning: the paper and verl take the covariance with the current log-probabilities of a mini-batch and leave out
    tokens beyond the clip; here it is with the old ones of the whole batch, which the first update cannot tell apart.
    """

    def update(signal: Signal, draw: Tensor, batch: Batch) -> tuple[Signal, Tensor]:
        check_rank(signal, "token")
        mask_BT = signal.mask
        cov_BT = covariance(signal.x, constant(batch.old_logp, mask_BT), mask_BT)
        eligible_BT = mask_BT & (cov_BT > low) & (cov_BT < high)
        count = share_of(mask_BT, share)
        chosen_BT = top_tokens(noise(tuple(mask_BT.shape), draw.to(mask_BT.device)), eligible_BT, count)
        return _selecting(signal, chosen_BT), draw + 1

    return Advantage(
        lambda: torch.zeros((), dtype=torch.int64), update, frozenset({"old_logp"}), frozenset({"selected"})
    )


def select_highest_covariance(share: float = 0.0002) -> Advantage:
    """Selects the tokens whose covariance of advantage and log-probability is highest: `share` of all, at least one.

    Put it last in the chain: `signal.x` are the advantages. The warning of `select_covariance_between` holds.

    Args:
      share: of the batch's tokens.
    Needs: old_logp [B, T]. Makes: selected.
    """

    def update(signal: Signal, state: Any, batch: Batch) -> tuple[Signal, Any]:
        check_rank(signal, "token")
        cov_BT = covariance(signal.x, constant(batch.old_logp, signal.mask), signal.mask)
        count = share_of(signal.mask, share)
        return _selecting(signal, top_tokens(cov_BT, signal.mask, count)), state

    return Advantage(lambda: (), update, frozenset({"old_logp"}), frozenset({"selected"}))


def _selecting(signal: Signal, chosen_BT: Tensor) -> Signal:
    share = token_fraction(chosen_BT.to(signal.x.dtype), signal.mask)
    return signal._replace(
        extra=signal.extra | {"selected": chosen_BT}, metrics=signal.metrics | {"actor/selected": share}
    )


def on_selected(term: Term) -> Term:
    """The term's loss on the tokens of `batch.selected`, 0 on the others, which still count in the denominator."""
    return _where_selected(term, True)


def off_selected(term: Term) -> Term:
    """The term's loss, 0 on the tokens of `batch.selected`, which still count in the denominator."""
    return _where_selected(term, False)


def _where_selected(term: Term, wanted: bool) -> Term:
    @needs("selected", *needs_of(term))
    def chosen(logp_BT: Tensor, batch: Batch):
        loss_BT, metrics = term(logp_BT, batch)
        take_BT = constant(batch.selected, batch.mask) == wanted
        return torch.where(take_BT, loss_BT, torch.zeros_like(loss_BT)), metrics

    return chosen


def keep_highest_entropy(share: float = 0.2) -> Advantage:
    """Weight 0 on all tokens but those of the highest entropy: at or above the (1 - share) quantile of the batch.

    The quantile interpolates linearly between the two tokens next to it. Use it with `weighted`; a KL term outside of
    `weighted` still sees every token, and the denominator counts them all.

    Args:
      share: of the batch's tokens, in (0, 1].
    Needs: old_entropy [B, T]. Makes: weight.
    Raises:
      ValueError: the share is not in (0, 1].

    Warning: TRL takes the entropies of the current policy at each micro-batch; these are those before the first update.
    """
    if not 0 < share <= 1:
        raise ValueError(f"share is {share}: it must be above 0 and at most 1")

    def update(signal: Signal, state: Any, batch: Batch) -> tuple[Signal, Any]:
        mask_BT, entropy_BT = signal.mask, constant(batch.old_entropy, signal.mask)
        ascending = torch.where(mask_BT, entropy_BT, torch.full_like(entropy_BT, torch.inf)).flatten().sort().values
        place = (1 - share) * (mask_BT.sum() - 1).clamp_min(0).to(torch.float64)
        below, above = ascending.take(torch.stack((place.floor(), place.ceil())).long()).unbind()
        threshold = torch.where(below == above, below, below + (place - place.floor()).to(below) * (above - below))
        keep_BT = (mask_BT & (entropy_BT >= threshold)).to(signal.x.dtype)
        weight_BT = keep_BT if signal.weight is None else torch.where(keep_BT > 0, signal.weight, keep_BT)
        return signal._replace(weight=weight_BT), state

    return Advantage(lambda: (), update, frozenset({"old_entropy"}), frozenset({"weight"}))


def adapt_entropy(
    target: float, step: float = 0.005, start: float = 0.0, low: float = 0.0, high: float = 1.0
) -> Advantage:
    """Steers the mean entropy to a target by the coefficient of `adaptive_entropy_bonus`.

    The coefficient of a batch is c where the batch's mean entropy is at most the target and 0 where it is above; then
    c grows by `step` in the first case and shrinks by it in the second, within [low, high]. c is the state.

    Args:
      target: nats per token.
      step, start, low, high: of the coefficient, in units of the advantage per nat.
    Needs: old_entropy [B, T]. Makes: entropy_coefficient. Metric "actor/entropy_coefficient".

    Warning: TRL decides by the entropy of the step before; this is the entropy of this batch, before its first update.
    """

    def update(signal: Signal, c: Tensor, batch: Batch) -> tuple[Signal, Tensor]:
        short = token_fraction(constant(batch.old_entropy, signal.mask), signal.mask).value <= target
        applied = torch.where(short.to(c.device), c, torch.zeros_like(c))
        after = (c + either(short.to(c.device), step, -step, c)).clamp(low, high)
        field_BT = kept(applied.to(signal.x).expand(signal.mask.shape), signal.mask)
        metrics = signal.metrics | {"actor/entropy_coefficient": Fraction(applied, torch.ones_like(applied))}
        return signal._replace(extra=signal.extra | {"entropy_coefficient": field_BT}, metrics=metrics), after

    def init() -> Tensor:
        return torch.tensor(start, dtype=torch.float64)

    return Advantage(init, update, frozenset({"old_entropy"}), frozenset({"entropy_coefficient"}))


def adaptive_entropy_bonus() -> Term:
    """-c H(pi) with the coefficient c that `adapt_entropy` has set.

    Needs: entropy [B, T] (differentiable), entropy_coefficient [B, T].
    Returns: a term; loss [B, T]; metric "actor/entropy" (nats).
    """

    @needs("entropy", "entropy_coefficient")
    def term(logp_BT: Tensor, batch: Batch):
        entropy_BT = kept(batch.entropy, batch.mask)
        loss_BT = -constant(batch.entropy_coefficient, batch.mask) * entropy_BT
        return loss_BT, {"actor/entropy": entropy_BT.detach()}

    return term
