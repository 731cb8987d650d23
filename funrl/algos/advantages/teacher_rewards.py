"""Rewards per token from a teacher's log-probabilities."""

from __future__ import annotations

import torch
from torch import Tensor

from funrl import trees
from funrl.algos.core import Advantage, Signal, stateless
from funrl.algos.losses.kl import kl_estimate
from funrl.algos.masks import where_masked
from funrl.batch import Batch


def teacher_advantage(kind: str = "k1", reward_coef: float = 1.0, teacher_coef: float = 1.0) -> Advantage:
    """Replace the reward by -KL(pi_old || pi_teacher) per token.

    If `signal.x` is already [B, T], it is added. Outcomes [B] are dropped, including all changes by earlier pieces: to
    learn from scores too, put `to_last_token` or `to_tokens` before.

    Args:
      kind: the estimator of the KL, as in `funrl.algos.kl`.
      reward_coef, teacher_coef: factors of a signal that is added, and of the teacher's.
    Needs: old_logp, teacher_logp [B, T]; and, for a teacher with another tokenizer, teacher_span: the KL is then
      estimated from both log-probabilities of a span, and all of its tokens get it. A token in no span gets 0.
    References: Lu and Thinking Machines, 2025, https://thinkingmachines.ai/blog/on-policy-distillation
    """
    estimate = kl_estimate(kind)

    def update(signal: Signal, state: object, batch: Batch) -> tuple[Signal, trees.Tree]:
        logps = [where_masked(x, batch.mask) for x in (batch.old_logp, batch.teacher_logp)]
        span_BT = batch.get("teacher_span")
        if span_BT is not None:  # sums have the tokens that earlier pieces took off the signal's mask
            logps = [span_sums(x, span_BT) for x in logps]
        x = -teacher_coef * where_masked(estimate(*logps), signal.mask)
        if signal.x.dim() == 2:
            x = x + reward_coef * where_masked(signal.x, signal.mask)
        return signal._replace(x=x), state

    return Advantage(lambda: (), update)


def span_sums(x_BT: Tensor, span_BT: Tensor) -> Tensor:
    """Sums over the tokens of each span, at each of them; 0 in no span.

    Args:
      x_BT: 0 outside of the mask.
      span_BT: place of the last token of each token's span; -1: in none.
    """
    inside_BT = span_BT >= 0
    place_BT = span_BT.clamp_min(0).long()
    sum_BT = torch.zeros_like(x_BT, dtype=torch.float64).scatter_add(
        1, place_BT, torch.where(inside_BT, x_BT, 0).double()
    )
    return torch.where(inside_BT, sum_BT.gather(1, place_BT), 0).to(x_BT.dtype)


def weigh_early_tokens(gamma: float = 0.5) -> Advantage:
    """Multiply each token's advantage by 1 + gamma (1 - the share of the row's |advantage| before it).

    The first sampled token of a row has the factor 1 + gamma, and one after which nothing is left has almost 1. The
    rows of an agent's episode are one row, end to end.

    Args:
      gamma: at least 0; 0 changes nothing.
    Needs: a signal per token, as `teacher_advantage` makes it.

    Raises:
      ValueError: gamma is below 0.
    References: Xie et al., 2026, https://arxiv.org/abs/2606.22600, where the advantage is the teacher's log-probability
      less the policy's.
    """
    if gamma < 0:
        raise ValueError(f"weigh_early_tokens(gamma={gamma}): give a number from 0")

    def weigh(x_BT: Tensor, batch: Batch) -> Tensor:
        x_BT = where_masked(x_BT, batch.mask)
        size_BT = x_BT.double().abs()
        total_B = batch.across.own(batch.across.sums(size_BT))
        before_BT = size_BT.cumsum(1) - size_BT + sum_of_earlier_rows(size_BT, batch)[:, None]
        share_BT = before_BT / total_B[:, None].clamp_min(torch.finfo(torch.float64).tiny)
        return x_BT * (1 + gamma * (1 - share_BT)).to(x_BT.dtype)

    return stateless(weigh, per="token")


def sum_of_earlier_rows(x_BT: Tensor, batch: Batch) -> Tensor:
    """[B] float64, the sum of x over the earlier rows of each row's unit; 0 where each row is a unit."""
    across = batch.across
    if across.by_row is None:
        return x_BT.new_zeros(len(x_BT), dtype=torch.float64)
    unit_B = across.own(torch.arange(len(batch.length), device=x_BT.device))
    sum_R, unit_R = (across.rows.sums(x) for x in (x_BT, unit_B[:, None]))  # of all rows, on every rank
    order = unit_R.argsort(stable=True)
    running = sum_R[order].cumsum(0) - sum_R[order]
    first = torch.searchsorted(unit_R[order].contiguous(), unit_R[order].contiguous())
    before_R = torch.empty_like(sum_R)
    before_R[order] = running - running[first]
    return across.rows.own(before_R)
