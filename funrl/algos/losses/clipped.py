"""PPO's clipped surrogate, as a function of arrays and as a term; the entropy bonus."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from funrl.algos.losses.ratios import Ratio, log_ratio, or_token_ratio
from funrl.algos.terms import Term
from funrl.batch import Batch


class ClippedSurrogate(NamedTuple):
    """A clipped surrogate, per token.

    Attributes:
      loss: in the advantage's unit.
      clipped: 1 where the clip is active.
      dual_clipped: 1 where the dual clip is active.
    """

    loss: Tensor
    clipped: Tensor
    dual_clipped: Tensor


def clipped_surrogate_loss(
    ratio: Tensor,
    advantage: Tensor,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
    delta: float | None = None,
) -> ClippedSurrogate:
    """L = -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A), elementwise; the arguments are `clipped_surrogate`'s.

    Example:
      >>> clipped_surrogate_loss(torch.tensor([1.5, 0.5]), torch.tensor([1.0, 1.0])).loss.tolist()
      [-1.2000000476837158, -0.5]
    """
    open_loss = -advantage * (ratio if delta is None else ratio.clamp(max=delta))
    clipped_loss = -advantage * ratio.clamp(1 - clip_low, 1 + clip_high)
    loss = torch.maximum(open_loss, clipped_loss)
    clipped = (clipped_loss > open_loss).to(loss.dtype)
    if dual_clip is None:
        return ClippedSurrogate(loss, clipped, torch.zeros_like(loss))
    bound = -dual_clip * advantage
    dual_clipped = ((advantage < 0) & (loss > bound)).to(loss.dtype)
    return ClippedSurrogate(torch.where(advantage < 0, torch.minimum(loss, bound), loss), clipped, dual_clipped)


def clipped_surrogate(
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
    ratio: Ratio | None = None,
    delta: float | None = None,
) -> Term:
    """PPO's pessimistic bound, L = -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A), per token.

    With `dual_clip`, L is at most -dual_clip A where A < 0. With `delta`, the unclipped r is replaced by min(r, delta).

    Args:
      clip_low, clip_high: how far the ratio may fall below and rise above 1.
      dual_clip: the ratio above which the loss of a negative advantage stops growing, > 1; None: no dual clip.
      ratio: how the ratio is taken, None is `token_ratio()`; `sequence_ratio()` makes this GSPO.
      delta: upper bound of the unclipped ratio, > 1 + clip_high; the two-sided clip of INTELLECT-2. None: none.
    Needs: old_logp, advantage [B, T].
    Returns: a term; loss [B, T] in the advantage's unit; metrics "actor/pg_clipfrac" (the clip is active),
      "actor/pg_clipfrac_lower" (the dual clip is active), "actor/ppo_kl" (nats, log pi_old - log pi).

    Raises:
      ValueError: clip_low or clip_high is below 0, dual_clip is not above 1, or delta not above 1 + clip_high.
    References: Schulman et al., 2017, https://arxiv.org/abs/1707.06347; dual clip, Ye et al., 2019,
      https://arxiv.org/abs/1912.09729; delta, Prime Intellect, 2025, https://arxiv.org/abs/2505.07291

    Warning: verl always applies the dual clip (3.0); TRL never does; its delta is the same as here.
    """
    if clip_low < 0 or clip_high < 0:
        raise ValueError(f"clip_low is {clip_low} and clip_high is {clip_high}: both must be at least 0")
    if dual_clip is not None and dual_clip <= 1:
        raise ValueError(f"dual_clip is {dual_clip}: it must be above 1, or None for no dual clip")
    if delta is not None and delta <= 1 + clip_high:
        raise ValueError(f"delta is {delta}: it must be above 1 + clip_high = {1 + clip_high}, or None for no bound")
    ratio = or_token_ratio(ratio)

    def term(logp_BT: Tensor, batch: Batch):
        r_BT = ratio(logp_BT, batch)
        out = clipped_surrogate_loss(
            r_BT, batch.advantage, clip_low, clip_high=clip_high, dual_clip=dual_clip, delta=delta
        )
        return out.loss, {
            "actor/pg_clipfrac": out.clipped,
            "actor/pg_clipfrac_lower": out.dual_clipped,
            "actor/ppo_kl": -log_ratio(logp_BT, batch),
        }

    return term


def entropy_bonus(entropy_coef: float = 0.01) -> Term:
    """-entropy_coef H(pi), against collapse.

    Args:
      entropy_coef: in units of the advantage per nat.
    Needs: entropy [B, T], of the policy that is being trained, differentiable.
    Returns: a term; loss [B, T]; metric "actor/entropy" (nats).
    References: Mnih et al., 2016, https://arxiv.org/abs/1602.01783
    """
    return lambda logp_BT, batch: (-entropy_coef * batch.entropy, {"actor/entropy": batch.entropy})


def adaptive_entropy_bonus() -> Term:
    """-c H(pi) with the coefficient c that `adapt_entropy` has set.

    Needs: entropy [B, T] (differentiable), entropy_coefficient [B, T].
    Returns: a term; loss [B, T]; metric "actor/entropy" (nats).
    """
    return lambda logp_BT, batch: (-batch.entropy_coefficient * batch.entropy, {"actor/entropy": batch.entropy})
