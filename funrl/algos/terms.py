"""Policy terms, (logp, batch) -> (loss per token, metrics): importance ratios, the clipped surrogate, entropy.

Terms do not reduce. What lies outside `batch.mask` may be NaN: it reaches neither a value nor a gradient. Ratios clamp
the log-ratio to +-20 before the exponential, and the gradient vanishes where the clamp acts.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from funrl.algos.core import Term, needs, needs_of, sequence_sums, to_own_tokens, where_masked
from funrl.batch import Batch

Ratio = Callable[[Tensor, Batch], Tensor]

LOG_RATIO_BOUND = 20.0


def kept(x_BT: Tensor | None, mask_BT: Tensor) -> Tensor:
    """x on the mask, 0 outside it, with no gradient from outside."""
    if x_BT is None:
        raise ValueError("a field that this piece needs is None in the batch; `needs_of` lists the fields it reads")
    return where_masked(x_BT, mask_BT)


def constant(x_BT: Tensor | None, mask_BT: Tensor) -> Tensor:
    """x on the mask, 0 outside it, without gradient."""
    return kept(None if x_BT is None else x_BT.detach(), mask_BT)


def either(condition_BT: Tensor, yes: float, no: float, like: Tensor) -> Tensor:
    """One of two numbers by a condition, in the dtype of `like`; torch.where of two floats would round to float32."""
    return torch.where(condition_BT, torch.full_like(like, yes), torch.full_like(like, no))


def sequence_sum(x_BT: Tensor, mask_BT: Tensor, segments_BT: Tensor | None) -> Tensor:
    """The sum over the mask of each token's own sequence, given back to every masked token of it; 0 elsewhere."""
    return to_own_tokens(sequence_sums(x_BT, mask_BT, segments_BT), mask_BT, segments_BT)


def sequence_mean(x_BT: Tensor, mask_BT: Tensor, segments_BT: Tensor | None) -> Tensor:
    """The mean over the mask of each token's own sequence, given back to every masked token of it; 0 elsewhere."""
    length_BT = sequence_sum(mask_BT.to(x_BT.dtype), mask_BT, segments_BT)
    return sequence_sum(x_BT, mask_BT, segments_BT) / length_BT.clamp_min(1)


def log_ratio(logp_BT: Tensor, batch: Batch) -> Tensor:
    """log(pi / pi_old) on the mask, 0 outside it. Needs: old_logp."""
    return kept(logp_BT, batch.mask) - constant(batch.old_logp, batch.mask)


def token_ratio() -> Ratio:
    """r_t = pi(t) / pi_old(t), the importance ratio of every token.

    Needs: old_logp [B, T].
    Returns: a ratio, (logp, batch) -> [B, T], 1 outside the mask.
    """

    @needs("old_logp")
    def ratio(logp_BT: Tensor, batch: Batch) -> Tensor:
        return log_ratio(logp_BT, batch).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()

    return ratio


def sequence_ratio(per_token: bool = False) -> Ratio:
    """s = exp(mean_t log(pi(t) / pi_old(t))), the length-normalised ratio of a sequence, on each of its tokens.

    With `per_token` it is GSPO-token's s_t = sg(s) pi(t) / sg(pi(t)): the same value, but a token's ratio moves only
    that token's probability. With an advantage that is the same on all tokens of a sequence the two have equal
    gradients.

    Args:
      per_token: take GSPO-token's form, for advantages that differ by token.
    Needs: old_logp [B, T].
    Returns: a ratio, (logp, batch) -> [B, T], constant over a sequence.
    References: Zheng et al., 2025, https://arxiv.org/abs/2507.18071

    Warning: verl's gspo is the per-token form, and clamps the log-ratio at 10 from above only.
    """

    @needs("old_logp")
    def ratio(logp_BT: Tensor, batch: Batch) -> Tensor:
        mean_BT = sequence_mean(log_ratio(logp_BT, batch), batch.mask, batch.segments)
        if per_token:
            logp_BT = kept(logp_BT, batch.mask)
            mean_BT = mean_BT.detach() + logp_BT - logp_BT.detach()
        return mean_BT.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()

    return ratio


def clipped_surrogate(
    low: float = 0.2,
    high: float = 0.2,
    dual: float | None = None,
    ratio: Ratio | None = None,
    delta: float | None = None,
) -> Term:
    """PPO's pessimistic bound, L = -min(r A, clip(r, 1 - low, 1 + high) A), per token.

    With `dual`, L is at most -dual A where A < 0; with `delta`, the r outside the clip is min(r, delta).

    Args:
      low, high: how far the ratio may fall below and rise above 1.
      dual: the ratio at which the loss of a negative advantage stops growing, > 1; None: it does not stop.
      ratio: how the ratio is taken, None is `token_ratio()`; `sequence_ratio()` makes this GSPO.
      delta: upper bound of the unclipped ratio, > 1 + high; the two-sided clip of INTELLECT-2. None: none.
    Needs: old_logp, advantage [B, T].
    Returns: a term; loss [B, T] in the advantage's unit; metrics "actor/pg_clipfrac" (the clip decides the loss),
      "actor/pg_clipfrac_lower" (the dual clip does), "actor/ppo_kl" (nats, log pi_old - log pi).
    Raises:
      ValueError: low or high is below 0, dual is not above 1, or delta not above 1 + high.
    References: Schulman et al., 2017, https://arxiv.org/abs/1707.06347; dual clip, Ye et al., 2019,
      https://arxiv.org/abs/1912.09729; delta, Prime Intellect, 2025, https://arxiv.org/abs/2505.07291

    Warning: verl always applies the dual clip (3.0); TRL never does, and its delta is this one.
    """
    if low < 0 or high < 0:
        raise ValueError(f"low is {low} and high is {high}: how far a ratio may move must be at least 0")
    if dual is not None and dual <= 1:
        raise ValueError(f"dual is {dual}: the dual clip must be above 1, or None for no dual clip")
    if delta is not None and delta <= 1 + high:
        raise ValueError(f"delta is {delta}: it must be above 1 + high = {1 + high}, or None for no bound")
    ratio = ratio or token_ratio()

    @needs("old_logp", "advantage", *needs_of(ratio))
    def term(logp_BT: Tensor, batch: Batch):
        a_BT = constant(batch.advantage, batch.mask)
        r_BT = ratio(logp_BT, batch)
        open_BT = -a_BT * (r_BT if delta is None else r_BT.clamp(max=delta))
        clipped_BT = -a_BT * r_BT.clamp(1 - low, 1 + high)
        loss_BT = torch.maximum(open_BT, clipped_BT)
        lower_BT = torch.zeros_like(a_BT)
        if dual is not None:
            bounded_BT = torch.minimum(loss_BT, -dual * a_BT)
            lower_BT = ((a_BT < 0) & (loss_BT > -dual * a_BT)).to(a_BT.dtype)
            loss_BT = torch.where(a_BT < 0, bounded_BT, loss_BT)
        return loss_BT, {
            "actor/pg_clipfrac": (clipped_BT > open_BT).to(a_BT.dtype),
            "actor/pg_clipfrac_lower": lower_BT,
            "actor/ppo_kl": -log_ratio(logp_BT, batch).detach(),
        }

    return term


def entropy_bonus(coefficient: float = 0.01) -> Term:
    """-coefficient H(pi), which keeps the policy from collapsing.

    Args:
      coefficient: in units of the advantage per nat.
    Needs: entropy [B, T], of the policy that is being trained, differentiable.
    Returns: a term; loss [B, T]; metric "actor/entropy" (nats).
    References: Mnih et al., 2016, https://arxiv.org/abs/1602.01783
    """

    @needs("entropy")
    def term(logp_BT: Tensor, batch: Batch):
        entropy_BT = kept(batch.entropy, batch.mask)
        return -coefficient * entropy_BT, {"actor/entropy": entropy_BT.detach()}

    return term
