"""CISPO: GRPO that clips the importance weight, not the update, so that every token keeps a gradient.

References: MiniMax, 2025, https://arxiv.org/abs/2506.13585; ScaleRL, Khatri et al., 2025,
  https://arxiv.org/abs/2510.13786, with high=4.
verl: the lower clip is 10, which is none. TRL: epsilon_high is the bound itself, 1 + high here.
"""

from __future__ import annotations

from funrl.algos.advantages import group_center, group_scale
from funrl.algos.compose import policy
from funrl.algos.core import Algorithm, chain, reduce
from funrl.algos.reductions import token_mean
from funrl.algos.shaping import to_tokens
from funrl.algos.terms_token import clipped_importance


def cispo(low: float | None = None, high: float = 0.2, kl_loss: float = 0.0, entropy: float = 0.0) -> Algorithm:
    """Clipped importance sampling policy optimisation.

    Args:
      low: how far the weight may fall below 1; None: to 0.
      high: how far it may rise above 1.
      kl_loss: factor of the KL (k3) in the loss, in units of advantage per nat; 0: none, and no reference.
      entropy: factor of the entropy bonus, in units of advantage per nat.
    Needs: score, group, old_logp, and ref_logp where there is a KL.
    """
    return Algorithm(
        advantage=chain(group_center(), group_scale(), to_tokens()),
        policy_loss=reduce(policy(clipped_importance(low, high), kl_loss, entropy), token_mean()),
    )
