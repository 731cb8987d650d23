"""GRPO: no critic; a completion is judged against the others of its prompt.

References: Shao et al., 2024, https://arxiv.org/abs/2402.03300.
verl: token-mean by default, KL factor 0.001, k3 clamped to +-10, a singleton group keeps its raw reward.
TRL: no KL by default, loss_type dapo (token mean), eps 1e-4 below the advantage.
"""

from __future__ import annotations

from funrl.algos.advantages import group_center, group_scale
from funrl.algos.compose import policy
from funrl.algos.core import Algorithm, chain, reduce
from funrl.algos.reductions import sequence_mean
from funrl.algos.shaping import to_tokens
from funrl.algos.terms import clipped_surrogate


def grpo(
    low: float = 0.2, high: float = 0.2, dual: float | None = None, kl_loss: float = 0.04, entropy: float = 0.0
) -> Algorithm:
    """Group relative policy optimisation, as published.

    Args:
      low, high: how far the ratio may fall below and rise above 1.
      dual: the largest ratio that counts where the advantage is negative; None: no bound.
      kl_loss: factor of the KL (k3) in the loss, in units of advantage per nat; 0: none, and no reference.
      entropy: factor of the entropy bonus, in units of advantage per nat.
    Needs: score, group, old_logp, and ref_logp where there is a KL.
    """
    return Algorithm(
        advantage=chain(group_center(), group_scale(), to_tokens()),
        policy_loss=reduce(policy(clipped_surrogate(low, high, dual), kl_loss, entropy), sequence_mean()),
    )
