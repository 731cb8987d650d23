"""A teacher's opinion of each token as a reward."""

from __future__ import annotations

from torch import Tensor

from funrl.algos.core import Advantage, stateless
from funrl.algos.losses.kl import kl_estimate
from funrl.algos.masks import where_masked
from funrl.batch import Batch


def teacher_advantage(kind: str = "k1") -> Advantage:
    """Replace the reward by -KL(pi_old || pi_teacher) per token.

    Whatever `signal.x` was is added to it, token by token, where it is [B, T]. Outcomes [B] are dropped, with what
    pieces before have made of them: to learn from scores too, put `to_last_token` or `to_tokens` before.

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
