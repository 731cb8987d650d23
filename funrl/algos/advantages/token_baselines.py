"""Baselines per token: the optimal one over a group, and rewards of an implicit process model."""

from __future__ import annotations

import torch
from torch import Tensor

from funrl import trees
from funrl.algos.advantages.groups import Groups, group_sum, groups_of
from funrl.algos.core import Advantage, Signal, check_rank, stateless
from funrl.algos.masks import where_masked
from funrl.batch import Batch


def optimal_token_baseline(turns: bool = False, raw_tail: bool = False) -> Advantage:
    """Subtract the optimal baseline of each token position from the reward to go, on [B, T].

    A[i, t] = G[i, t] - b[t],  b[t] = sum_i G[i, t] W[i, t] / sum_i W[i, t] over the rows i of the group,
    W[i, t] = sum_{s <= t} w[i, s],  w = 1 - 2 pi + sum_v pi_v^2, the squared norm of the gradient of log pi with
    respect to the logits; times the squared importance weight where a correction has set one. The rows of an agent's
    episode are one row, end to end: W sums over what the agent has sampled so far.

    Args:
      turns: which tokens share a position: the n-th sampled token of each row, skipping tool output (True), or the
        tokens equally far from the row's first sampled one (False). Both are the same without tools.
      raw_tail: True: a token whose position no other row of the group reaches keeps G; False: it gets 0.
    Needs: group [B], old_logp [B, T] (nats), sum_pi_squared [B, T]; uses weights if they are set. The token fields of
      all rows of a group must be on one rank.
    References: OTB, Li et al., 2026, https://arxiv.org/abs/2602.07078

    Warning: raw_tail=True is verl's handle_zero_tail, except that verl finds the tail by counting tokens and cuts it by
    position. A group of one row always gets 0; verl gives its raw return.
    """

    def update(signal: Signal, state: object, batch: Batch) -> tuple[Signal, trees.Tree]:
        check_rank(signal, "token")
        mask_BT = signal.mask
        dtype = signal.x.dtype
        pi_BT = where_masked(batch.old_logp, mask_BT).exp()
        norm_BT = where_masked(1 - 2 * pi_BT + batch.sum_pi_squared, mask_BT).to(dtype)
        if signal.weight is not None:
            norm_BT = norm_BT * where_masked(signal.weight, mask_BT).square()
        across = batch.across
        groups = groups_of(across.own(batch.group))
        sizes_B = across.own(groups_of(batch.group).size)  # where rows are of episodes, of these
        slots_BT = token_slots(batch.mask, turns)
        weight_BT = norm_BT.cumsum(1)
        width = None
        if across.by_row is not None and len(mask_BT):
            unit_B = across.own(torch.arange(len(batch.group), device=mask_BT.device))
            slots_BT = slots_BT + _before(slots_BT.amax(1) + batch.mask.any(1), unit_B)[:, None]
            weight_BT = weight_BT + _before(norm_BT.sum(1), unit_B)[:, None]
            width = int(slots_BT.max()) + 1
        baseline_BT, rows_BT = slot_baseline(signal.x, weight_BT, mask_BT, slot_BT=slots_BT, groups=groups, width=width)
        lonely_BT = signal.x if raw_tail else torch.zeros_like(signal.x)
        compared_BT = torch.where(rows_BT > 1, signal.x - baseline_BT, lonely_BT)
        return signal._replace(x=where_masked(compared_BT, mask_BT & (sizes_B > 1)[:, None])), state

    return Advantage(lambda: (), update, whole_groups=True)


def _before(x_B: Tensor, unit_B: Tensor) -> Tensor:
    """The sum of x over the earlier rows of each row's unit."""
    same_BB = (unit_B[:, None] == unit_B).tril(-1)
    return torch.where(same_BB, x_B, torch.zeros_like(x_B)).sum(1)


def token_slots(mask_BT: Tensor, turns: bool) -> Tensor:
    """[B, T] int64, the position of a token in the completion; 0 outside the mask.

    Args:
      mask_BT: the sampled tokens, before corrections: a rejected token keeps its position.
    """
    if turns:
        return where_masked(mask_BT.cumsum(1) - 1, mask_BT)
    position = torch.arange(mask_BT.shape[1], device=mask_BT.device)
    first_B1 = torch.where(mask_BT, position, mask_BT.shape[1]).amin(1, keepdim=True)
    return where_masked(position - first_B1, mask_BT)


def slot_baseline(
    return_BT: Tensor, weight_BT: Tensor, mask_BT: Tensor, slot_BT: Tensor, groups: Groups, width: int | None = None
) -> tuple[Tensor, Tensor]:
    """The weighted mean of the returns of all tokens in one slot of one group, and the number of those tokens, [B, T].

    The mean of equal returns is exactly their value: the minimum is subtracted before the sum.

    Args:
      width: above every slot; None: T.
    """
    T = width or mask_BT.shape[1]
    flat = (groups.index[:, None] * T + slot_BT).flatten()

    def total(x_BT: Tensor) -> Tensor:
        return x_BT.new_zeros(groups.count * T).scatter_add_(0, flat, where_masked(x_BT, mask_BT).flatten())

    held_BT = torch.where(mask_BT, return_BT, torch.inf)
    least = held_BT.new_full((groups.count * T,), torch.inf).scatter_reduce_(0, flat, held_BT.flatten(), "amin")
    weight = total(weight_BT)
    above = total((return_BT - least[flat].view_as(return_BT)) * weight_BT) / torch.where(weight > 0, weight, 1)
    rows = total(torch.ones_like(return_BT))
    return (least + above)[flat].view_as(return_BT), rows[flat].view_as(return_BT)


def implicit_rewards(beta: float = 0.05, coefficient: float = 1.0) -> Advantage:
    """Add an implicit process model's rewards, less the group's leave-one-out mean, on [B, T].

    q[i, t] = beta (log pi_implicit - log pi_ref) at token t,  x[i, t] += c (q[i, t] - mean_{j != i} mean_t q[j, t]).

    Args:
      beta: reward per nat.
      coefficient: c, relative to an outcome reward of weight 1.
    Needs: implicit_logp, ref_logp [B, T] (nats), group [B]. A row that is alone in its group gets no process reward.
    References: PRIME, Cui et al., 2025, https://arxiv.org/abs/2502.01456
    """

    def add_rewards(x_BT: Tensor, batch: Batch) -> Tensor:
        groups = groups_of(batch.group)
        mask_BT = batch.mask
        own = batch.across.own
        q_BT = where_masked(beta * (batch.implicit_logp - batch.ref_logp), mask_BT).to(x_BT.dtype)
        mean_B = (batch.across.sums(q_BT) / batch.across.sums(mask_BT).clamp_min(1)).to(x_BT.dtype)
        others_B = (group_sum(mean_B, groups) - mean_B) / (groups.size - 1).clamp_min(1)
        process_BT = where_masked(q_BT - own(others_B)[:, None], mask_BT & own(groups.size > 1)[:, None])
        return where_masked(x_BT, mask_BT) + coefficient * process_BT

    return stateless(add_rewards, per="token")


def label_outcomes() -> Advantage:
    """Set `batch.label` to the raw score, on all sampled tokens, rejected ones included.

    `implicit_reward_loss` learns from it.

    Needs: score [B] in 0 to 1. Makes: label [B, T]. The signal's x is unchanged.

    Raises:
      ValueError: in a run, a score is not in 0 to 1.
    """

    def update(signal: Signal, state: object, batch: Batch) -> tuple[Signal, trees.Tree]:
        score_B = batch.score
        if not torch.compiler.is_compiling() and not bool(((score_B >= 0) & (score_B <= 1)).all()):
            raise ValueError(
                f"scores are from {score_B.min().item():g} to {score_B.max().item():g}: label_outcomes() needs "
                "scores from 0 to 1, since the implicit reward model learns them as probabilities; rescale the "
                "reward function"
            )
        label_BT = where_masked(batch.across.own(score_B)[:, None].expand(batch.mask.shape), batch.mask)
        return signal._replace(extra=signal.extra | {"label": label_BT}), state

    return Advantage(lambda: (), update, whole_groups=True)
