"""Rewards per token from a teacher's log-probabilities."""

from __future__ import annotations

import torch
from torch import Tensor

from funrl.algos.core import Advantage, stateless
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
    Needs: old_logp, teacher_logp [B, T].
    References: Lu and Thinking Machines, 2025, https://thinkingmachines.ai/blog/on-policy-distillation
    """
    estimate = kl_estimate(kind)

    def reward(x: Tensor, batch: Batch) -> Tensor:
        kl_BT = teacher_coef * where_masked(estimate(batch.old_logp, batch.teacher_logp), batch.mask)
        return -kl_BT if x.dim() == 1 else reward_coef * where_masked(x, batch.mask) - kl_BT

    return stateless(reward)


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
