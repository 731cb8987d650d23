"""SAPO: GRPO with a soft gate instead of the clip, steeper for negative advantages.

References: Gao et al., 2025, https://arxiv.org/abs/2511.20347.
verl: ignores the configured aggregation and uses this one. TRL: the same loss, but empty rows count.
"""

from funrl.algos.advantages.baselines import group_center, group_scale
from funrl.algos.advantages.shaping import to_tokens
from funrl.algos.compose import with_regularizers
from funrl.algos.core import Algorithm, chain, reduce
from funrl.algos.losses.reductions import sequence_mean
from funrl.algos.losses.token_terms import soft_gate


def sapo(
    positive: float = 1.0,
    negative: float = 1.05,
    kl_coef: float = 0.0,
    entropy_coef: float = 0.0,
    kl_bias_corrected: bool = False,
    std_eps: float = 1e-6,
) -> Algorithm:
    """Soft adaptive policy optimisation.

    Args:
      positive, negative: temperature of the gate where the advantage is positive, and where it is not.
      kl_coef: factor of the KL in the loss, in units of advantage per nat; 0: none, and no reference.
      entropy_coef: factor of the entropy bonus, in units of advantage per nat.
      kl_bias_corrected: weigh the KL of each token by its importance ratio, as TRL does by default.
      std_eps: added to the deviation that a group's rewards are divided by; 1e-4 in TRL.
    """
    gated = soft_gate(positive, negative)
    term = with_regularizers(gated, kl_coef, entropy_coef, kl_bias_corrected=kl_bias_corrected)
    return Algorithm(
        advantage=chain(group_center(), group_scale(std_eps), to_tokens()),
        losses={"policy": reduce(term, sequence_mean())},
    )
