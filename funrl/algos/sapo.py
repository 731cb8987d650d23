"""SAPO: GRPO with a soft gate in the place of the clip, steeper for negative advantages.

References: Gao et al., 2025, https://arxiv.org/abs/2511.20347.
verl: ignores the aggregation that is asked for and takes this one. TRL: the same loss, empty rows counted.
"""

from __future__ import annotations

from funrl.algos.advantages import group_center, group_scale
from funrl.algos.compose import policy
from funrl.algos.core import Algorithm, chain, reduce
from funrl.algos.reductions import sequence_mean
from funrl.algos.shaping import to_tokens
from funrl.algos.terms_token import soft_gate


def sapo(positive: float = 1.0, negative: float = 1.05, kl_loss: float = 0.0, entropy: float = 0.0) -> Algorithm:
    """Soft adaptive policy optimisation.

    Args:
      positive, negative: temperature of the gate where the advantage is positive, and where it is not.
      kl_loss: factor of the KL (k3) in the loss, in units of advantage per nat; 0: none, and no reference.
      entropy: factor of the entropy bonus, in units of advantage per nat.
    Needs: score, group, old_logp, and ref_logp where there is a KL.
    """
    return Algorithm(
        advantage=chain(group_center(), group_scale(), to_tokens()),
        policy_loss=reduce(policy(soft_gate(positive, negative), kl_loss, entropy), sequence_mean()),
    )
