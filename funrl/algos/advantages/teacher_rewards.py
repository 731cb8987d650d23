"""Rewards per token from a teacher's log-probabilities."""

from __future__ import annotations

from torch import Tensor

from funrl.algos.core import Advantage, stateless
from funrl.algos.losses.kl import kl_estimate
from funrl.algos.masks import where_masked
from funrl.batch import Batch


def teacher_advantage(kind: str = "k1") -> Advantage:
    """Replace the reward by -KL(pi_old || pi_teacher) per token.

    If `signal.x` is already [B, T], it is added. Outcomes [B] are dropped, including all changes by earlier pieces: to
    learn from scores too, put `to_last_token` or `to_tokens` before.

    Args:
      kind: the estimator of the KL, as in `funrl.algos.kl`.
    Needs: old_logp, teacher_logp [B, T].
    References: Lu and Thinking Machines, 2025, https://thinkingmachines.ai/blog/on-policy-distillation
    """
    estimate = kl_estimate(kind)

    def reward(x: Tensor, batch: Batch) -> Tensor:
        kl_BT = where_masked(estimate(batch.old_logp, batch.teacher_logp), batch.mask)
        return -kl_BT if x.dim() == 1 else where_masked(x, batch.mask) - kl_BT

    return stateless(reward)
