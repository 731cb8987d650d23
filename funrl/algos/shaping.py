"""From outcomes to rewards: where an outcome lands, and what is added to it or taken off before advantages."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from funrl.algos.core import Advantage, Fraction, Signal, sequence_sums, stateless, token_fraction, where_masked
from funrl.algos.kl import kl_estimate
from funrl.batch import Batch


def to_tokens() -> Advantage:
    """Gives every sampled token of a row the row's number: [B] -> [B, T]. Needs: score [B]."""
    return stateless(lambda x_B, batch: where_masked(x_B[:, None].expand(batch.mask.shape), batch.mask), "score")


def to_last_token() -> Advantage:
    """Turns outcomes [B] into token rewards [B, T]: the outcome at the last sampled token, plus `token_reward`.

    Needs: score [B]; adds batch.token_reward [B, T] where it is given. A row without sampled tokens gets none.
    """

    def place(x_B: Tensor, batch: Batch) -> Tensor:
        at_end_BT = torch.where(last_of(batch.mask), x_B[:, None], torch.zeros_like(x_B[:, None]))
        return at_end_BT if batch.token_reward is None else at_end_BT + where_masked(batch.token_reward, batch.mask)

    return stateless(place, "score")


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
    References: Ziegler et al., 2019, https://arxiv.org/abs/1909.08593. There the KL is of a whole sequence; here, as
      in verl, it is the mean over tokens, then over rows.
    """

    def update(beta: Tensor, kl: Tensor, rows: int) -> Tensor:
        return beta * (1 + (kl / target - 1).clamp(-0.2, 0.2) * rows / horizon)

    return Controller(lambda: torch.tensor(coefficient, dtype=torch.float64), update)


def kl_in_reward(controller: Controller, kind: str = "k1") -> Advantage:
    """Takes beta KL(old || ref) off every token's reward; works on [B, T].

    r[t] = x[t] - beta kl(old_logp[t], ref_logp[t]). The state is beta; the controller moves it after the batch.

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
        x_BT = signal.x - beta.to(kl_BT) * kl_BT
        after = controller.update(beta, kl.to(beta), batch.mask.shape[0])
        return signal._replace(x=x_BT, metrics=signal.metrics | metrics), after

    return Advantage(controller.init, update, frozenset({"old_logp", "ref_logp"}))
