"""From outcomes to rewards: where an outcome lands, and what is added to it or taken off before advantages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from funrl.algos.core import (
    Advantage,
    Fraction,
    Signal,
    chain,
    check_rank,
    sequence_sums,
    stateless,
    token_fraction,
    where_masked,
)
from funrl.algos.kl import kl_estimate
from funrl.batch import Batch


def to_tokens() -> Advantage:
    """Gives every sampled token of a row the row's number: [B] -> [B, T]. Needs: score [B]."""

    def spread(x_B: Tensor, batch: Batch) -> Tensor:
        return where_masked(x_B[:, None].expand(batch.mask.shape), batch.mask)

    return stateless(spread, "score", per="row")


def to_last_token() -> Advantage:
    """Turns outcomes [B] into token rewards [B, T]: the outcome at the last sampled token, plus `token_reward`.

    Needs: score [B]; adds batch.token_reward [B, T] where it is given. A row without sampled tokens gets none.
    """

    def place(x_B: Tensor, batch: Batch) -> Tensor:
        at_end_BT = torch.where(last_of(batch.mask), x_B[:, None], torch.zeros_like(x_B[:, None]))
        return at_end_BT if batch.token_reward is None else at_end_BT + where_masked(batch.token_reward, batch.mask)

    return stateless(place, "score", per="row")


def last_of(mask_BT: Tensor) -> Tensor:
    """[B, T] bool, true on the last true position of each row."""
    position = torch.arange(mask_BT.shape[1], device=mask_BT.device)
    last_B1 = torch.where(mask_BT, position, position.new_full((), -1)).amax(1, keepdim=True)
    return position == last_B1


class Controller(NamedTuple):
    """How strong the KL penalty is, as a state.

    Attributes:
      init: () -> coefficient, 0-dim float64, in reward per nat.
      update: (coefficient, KL in nats, rows) -> the next coefficient.
    """

    init: Callable[[], Tensor]
    update: Callable[[Tensor, Tensor, int], Tensor]


def fixed_kl(coefficient: float) -> Controller:
    """A coefficient that stays as it is, in reward per nat."""
    return Controller(lambda: torch.tensor(coefficient, dtype=torch.float64), lambda beta, kl, rows: beta)


def adaptive_kl(coefficient: float, target: float, horizon: float = 10_000) -> Controller:
    """A coefficient that steers the KL to a target: beta *= 1 + clip(KL / target - 1, -0.2, 0.2) rows / horizon.

    Args:
      coefficient: at the start, in reward per nat.
      target: KL in nats per token.
      horizon: rows.
    Raises:
      ValueError: target or horizon is not above 0.
    References: Ziegler et al., 2019, https://arxiv.org/abs/1909.08593. There the KL is of a whole sequence; here, as
      in verl, it is the mean over tokens, then over rows.
    """
    if target <= 0 or horizon <= 0:
        raise ValueError(f"adaptive_kl(target={target}, horizon={horizon}): both must be above 0")

    def update(beta: Tensor, kl: Tensor, rows: int) -> Tensor:
        return beta * (1 + (kl / target - 1).clamp(-0.2, 0.2) * rows / horizon)

    return Controller(lambda: torch.tensor(coefficient, dtype=torch.float64), update)


def kl_in_reward(controller: Controller, kind: str = "k1") -> Advantage:
    """Takes beta KL(old || ref) off the rewards: token by token on [B, T], summed over the row on [B].

    x[t] - beta kl(old_logp[t], ref_logp[t]), or x - beta sum_t kl. The state is beta; the controller moves it after
    the batch.

    Args:
      controller: `fixed_kl(...)` or `adaptive_kl(...)`.
      kind: the estimator of the KL, as in `funrl.algos.kl`.
    Needs: old_logp, ref_logp [B, T].
    Metrics: "actor/reward_kl_penalty" in nats per token, "actor/reward_kl_penalty_coeff".
    """

    def update(signal: Signal, beta: Tensor, batch: Batch) -> tuple[Signal, Tensor]:
        assert batch.old_logp is not None and batch.ref_logp is not None
        mask_BT = signal.mask
        old_BT, ref_BT = where_masked(batch.old_logp, mask_BT), where_masked(batch.ref_logp, mask_BT)
        kl_BT = where_masked(kl_estimate(kind)(old_BT, ref_BT), mask_BT).to(signal.x.dtype)
        lengths_B1 = mask_BT.sum(1, keepdim=True)
        rows = (lengths_B1 > 0).sum()
        kl = (sequence_sums(kl_BT, mask_BT) / lengths_B1.clamp_min(1)).sum() / rows.clamp_min(1)
        metrics = {
            "actor/reward_kl_penalty": token_fraction(kl_BT, mask_BT),
            "actor/reward_kl_penalty_coeff": Fraction(beta, torch.ones_like(beta)),
        }
        penalty = sequence_sums(kl_BT, mask_BT)[:, 0] if signal.x.dim() == 1 else kl_BT
        after = controller.update(beta, kl.to(beta), batch.mask.shape[0])
        return signal._replace(x=signal.x - beta.to(penalty) * penalty, metrics=signal.metrics | metrics), after

    return Advantage(controller.init, update, frozenset({"old_logp", "ref_logp"}))


def clip_reward(low: float, high: float) -> Advantage:
    """Clips to [low, high], on [B] or [B, T]. Needs: score [B]."""
    if low > high:
        raise ValueError(f"clip_reward({low}, {high}): low is above high")
    return stateless(lambda x, batch: x.clamp(low, high), "score")


def overlong_penalty(limit: int, buffer: int, factor: float = 1.0) -> Advantage:
    """Takes off a penalty that grows over the last `buffer` tokens before the limit, on [B].

    x + min(0, -factor (length - (limit - buffer)) / buffer), where length is the number of sampled tokens, those
    included that a correction has rejected.

    Args:
      limit: the longest completion allowed, tokens.
      buffer: over how many tokens the penalty grows, > 0.
      factor: the penalty at the limit, in units of reward.
    Needs: score [B].
    References: DAPO, Yu et al., 2025, https://arxiv.org/abs/2503.14476

    Warning: verl counts the tokens that a tool wrote too; TRL's soft overlong punishment is this one with factor 1,
    and -1 beyond the limit.
    """
    if not 0 < buffer <= limit:
        raise ValueError(f"overlong_penalty: buffer {buffer} must be above 0 and at most the limit {limit}")

    def update(signal: Signal, state: Any, batch: Batch) -> tuple[Signal, Any]:
        check_rank(signal, "row")
        beyond_B = (batch.mask.sum(1) - (limit - buffer)).clamp_min(0)
        return signal._replace(x=signal.x - factor * beyond_B.to(signal.x.dtype) / buffer), state

    return Advantage(lambda: (), update, frozenset({"score"}))


def stop_properly(coefficient: float) -> Advantage:
    """What a completion that ran into the length limit gets, on [B].

    Args:
      coefficient: from 0 to 1, its score is multiplied by it; below 0, its score becomes it.
    Needs: score [B], truncated [B].
    References: ProRL, Liu et al., 2025, https://arxiv.org/abs/2505.24864, as in OpenRLHF.
    """
    if coefficient > 1:
        raise ValueError(f"stop_properly({coefficient}): give a factor from 0 to 1, or a reward below 0")

    def punish(x_B: Tensor, batch: Batch) -> Tensor:
        assert batch.truncated is not None
        instead_B = coefficient * x_B if coefficient >= 0 else torch.full_like(x_B, coefficient)
        return torch.where(batch.truncated, instead_B, x_B)

    return stateless(punish, "score", "truncated", per="row")


def running_normalise(eps: float = 1e-8) -> Advantage:
    """Mean 0 and deviation 1 by all rows seen so far, this batch included, on [B]: (x - mean) / sqrt(var + eps).

    The state is (rows, mean, sum of squared deviations) in float64, carried from step to step and merged batch by batch
    without loss (Chan et al., 1983). The variance has n below.

    Args:
      eps: in the squared unit of the score.
    Needs: score [B].
    """

    def update(signal: Signal, state: tuple[Tensor, Tensor, Tensor], batch: Batch):
        rows, mean, squares = state
        x_B = signal.x.to(mean)
        new, new_mean = x_B.numel(), x_B.mean()
        total, step = rows + new, new_mean - mean
        mean = mean + step * new / total
        squares = squares + (x_B - new_mean).square().sum() + step.square() * rows * new / total
        scaled_B = (x_B - mean) / (squares / total + eps).sqrt()
        return signal._replace(x=scaled_B.to(signal.x)), (total, mean, squares)

    return Advantage(lambda: (torch.zeros((), dtype=torch.float64),) * 3, update, frozenset({"score"}))


def token_rewards(kl: Controller | None = None, kind: str = "k1") -> Advantage:
    """`to_last_token`, and `kl_in_reward` where there is a controller: what a chain on token rewards begins with.

    Args:
      kl: `fixed_kl(...)` or `adaptive_kl(...)`; None: no KL, and no reference is needed.
      kind: the estimator of the KL, as in `funrl.algos.kl`.
    """
    return to_last_token() if kl is None else chain(to_last_token(), kl_in_reward(kl, kind))
