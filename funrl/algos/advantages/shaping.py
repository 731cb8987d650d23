"""Shaping of rewards: which tokens get an outcome, and bonuses and penalties before the advantages."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from funrl import trees
from funrl.algos.core import Advantage, Signal, chain, check_rank, stateless
from funrl.algos.losses.kl import kl_estimate
from funrl.algos.masks import in_order, where_masked
from funrl.algos.metrics import Mean, mean_over_tokens
from funrl.batch import Batch


def to_tokens() -> Advantage:
    """Give each sampled token its row's number: [B] -> [B, T]."""

    def spread(x_B: Tensor, batch: Batch) -> Tensor:
        return where_masked(batch.across.own(x_B)[:, None].expand(batch.mask.shape), batch.mask)

    return stateless(spread, per="row")


def to_last_token() -> Advantage:
    """Put outcomes [B] on the last sampled token, and add `token_reward`: [B, T].

    Adds batch.token_reward [B, T] if it is given. A row without sampled tokens gets no reward.
    """

    def place(x_B: Tensor, batch: Batch) -> Tensor:
        x_b1 = batch.across.own(x_B)[:, None]
        reward_BT = batch.get("token_reward")
        at_end_BT = torch.where(last_of(batch.mask), x_b1, torch.zeros_like(x_b1))
        return at_end_BT if reward_BT is None else at_end_BT + where_masked(reward_BT, batch.mask)

    return stateless(place, per="row")


def last_of(mask_BT: Tensor) -> Tensor:
    """[B, T] bool, true on the last true position of each row."""
    position = torch.arange(mask_BT.shape[1], device=mask_BT.device)
    last_B1 = torch.where(mask_BT, position, position.new_full((), -1)).amax(1, keepdim=True)
    return position == last_B1


class Controller(NamedTuple):
    """The coefficient of the KL penalty, as a state.

    Attributes:
      init: () -> coefficient, 0-dim float64, in reward per nat.
      update: (coefficient, KL in nats, rows) -> the next coefficient.
    """

    init: Callable[[], Tensor]
    update: Callable[[Tensor, Tensor, int], Tensor]


def fixed_kl(kl_coef: float) -> Controller:
    """Constant coefficient, in reward per nat."""
    return Controller(lambda: torch.tensor(kl_coef, dtype=torch.float64), lambda beta, kl, rows: beta)


def adaptive_kl(kl_coef: float, kl_target: float, horizon: float = 10_000) -> Controller:
    """Coefficient that steers the KL to a target: beta *= 1 + clip(KL / target - 1, -0.2, 0.2) rows / horizon.

    Args:
      kl_coef: initial coefficient, in reward per nat.
      kl_target: KL in nats per token.
      horizon: rows.

    Raises:
      ValueError: kl_target or horizon is not above 0.
    References: Ziegler et al., 2019, https://arxiv.org/abs/1909.08593. There the KL is that of a whole sequence; here,
      as in verl, it is the mean over tokens, then over rows.
    """
    if kl_target <= 0 or horizon <= 0:
        raise ValueError(f"adaptive_kl(kl_target={kl_target}, horizon={horizon}): both must be above 0")

    def update(beta: Tensor, kl: Tensor, rows: int) -> Tensor:
        return beta * (1 + (kl / kl_target - 1).clamp(-0.2, 0.2) * rows / horizon)

    return Controller(lambda: torch.tensor(kl_coef, dtype=torch.float64), update)


def kl_in_reward(controller: Controller, kind: str = "k1") -> Advantage:
    """Subtract beta KL(old || ref) from the rewards: per token on [B, T], summed over the row on [B].

    x[t] - beta kl(old_logp[t], ref_logp[t]), or x - beta sum_t kl. The state is beta; the controller updates it after
    the batch.

    Args:
      controller: `fixed_kl(...)` or `adaptive_kl(...)`.
      kind: the estimator of the KL, as in `funrl.algos.losses.kl`.
    Needs: old_logp, ref_logp [B, T].
    Metrics: "actor/reward_kl_penalty" in nats per token, "actor/reward_kl_penalty_coeff".
    """
    estimate = kl_estimate(kind)

    def update(signal: Signal, beta: Tensor, batch: Batch) -> tuple[Signal, Tensor]:
        mask_BT = signal.mask
        dtype = signal.x.dtype
        old_BT = where_masked(batch.old_logp, mask_BT)
        ref_BT = where_masked(batch.ref_logp, mask_BT)
        kl_BT = where_masked(estimate(old_BT, ref_BT), mask_BT).to(dtype)
        kl_B = batch.across.sums(kl_BT)
        lengths_B = batch.across.sums(mask_BT)
        kl = in_order(kl_B / lengths_B.clamp_min(1)) / (lengths_B > 0).sum().clamp_min(1)
        penalty = kl_B.to(dtype) if signal.x.dim() == 1 else kl_BT
        metrics = {
            "actor/reward_kl_penalty": mean_over_tokens(kl_BT, mask_BT, batch),
            "actor/reward_kl_penalty_coeff": Mean(beta, torch.ones_like(beta)),
        }
        after = controller.update(beta, kl.to(beta), len(lengths_B))
        return signal._replace(x=signal.x - beta.to(penalty) * penalty, metrics=signal.metrics | metrics), after

    return Advantage(controller.init, update)


def clip_reward(low: float, high: float) -> Advantage:
    """Clip to [low, high], on [B] or [B, T]."""
    if low > high:
        raise ValueError(f"clip_reward({low}, {high}): low is above high")
    return stateless(lambda x, batch: x.clamp(low, high))


def overlong_penalty(limit: int, buffer: int, factor: float = 1.0) -> Advantage:
    """Penalise the last `buffer` tokens before the length limit, on [B].

    x + min(0, -factor (length - (limit - buffer)) / buffer), where length is the number of sampled tokens, including
    tokens that a correction has rejected.

    Args:
      limit: the longest completion allowed, tokens.
      buffer: number of tokens over which the penalty grows, > 0.
      factor: the penalty at the limit, in units of reward.

    Raises:
      ValueError: the buffer is not above 0, or longer than the limit.
    References: DAPO, Yu et al., 2025, https://arxiv.org/abs/2503.14476

    Warning: verl counts the tokens of tools too; TRL's soft overlong punishment is this one with factor 1, and -1
    beyond the limit.
    """
    if not 0 < buffer <= limit:
        raise ValueError(f"overlong_penalty: buffer {buffer} must be above 0 and at most the limit {limit}")

    def update(signal: Signal, state: object, batch: Batch) -> tuple[Signal, trees.Tree]:
        check_rank(signal, "row")
        beyond_B = (batch.across.sums(batch.mask) - (limit - buffer)).clamp_min(0)
        return signal._replace(x=signal.x - factor * beyond_B.to(signal.x.dtype) / buffer), state

    return Advantage(lambda: (), update)


def stop_properly(coefficient: float) -> Advantage:
    """Scale or replace the scores of truncated completions, on [B].

    Args:
      coefficient: from 0 to 1, a factor of the score; below 0, it replaces the score.
    Needs: truncated [B].
    References: ProRL, Liu et al., 2025, https://arxiv.org/abs/2505.24864, as in OpenRLHF.
    """
    if coefficient > 1:
        raise ValueError(f"stop_properly({coefficient}): give a factor from 0 to 1, or a reward below 0")

    def punish(x_B: Tensor, batch: Batch) -> Tensor:
        instead_B = coefficient * x_B if coefficient >= 0 else torch.full_like(x_B, coefficient)
        return torch.where(batch.truncated, instead_B, x_B)

    return stateless(punish, per="row")


def running_normalise(eps: float = 1e-8) -> Advantage:
    """Standardise by all rows seen so far, this batch included, on [B]: (x - mean) / sqrt(var + eps).

    The state is (rows, mean, sum of squared deviations) in float64, carried from step to step and merged batch by batch
    without loss (Chan et al., 1983). The variance has the denominator n.

    Args:
      eps: in the squared unit of the score.
    """

    def update(signal: Signal, state: tuple[Tensor, Tensor, Tensor], batch: Batch):
        rows, mean, squares = state
        x_B = signal.x.to(mean)
        new = x_B.numel()
        new_mean = x_B.mean()
        total = rows + new
        step = new_mean - mean
        mean = mean + step * new / total
        squares = squares + (x_B - new_mean).square().sum() + step.square() * rows * new / total
        scaled_B = (x_B - mean) / (squares / total + eps).sqrt()
        return signal._replace(x=scaled_B.to(signal.x)), (total, mean, squares)

    return Advantage(lambda: (torch.zeros((), dtype=torch.float64),) * 3, update)


def token_rewards(kl: Controller | None = None, kind: str = "k1") -> Advantage:
    """`to_last_token`, then `kl_in_reward` if there is a controller.

    Args:
      kl: `fixed_kl(...)` or `adaptive_kl(...)`; None: no KL, and no reference is needed.
      kind: the estimator of the KL, as in `funrl.algos.losses.kl`.
    """
    return to_last_token() if kl is None else chain(to_last_token(), kl_in_reward(kl, kind))
