"""GSPO: GRPO with the ratio of the whole sequence, normalised by its length.

References: Zheng et al., 2025, https://arxiv.org/abs/2507.18071.
verl: clamps the log-ratio at 10 from above; any reduction, the token mean by default (its docs: the sequence mean).
TRL: importance_sampling_level="sequence" under any loss_type, by default dapo's token mean; clips of 0.2.
"""

from funrl.algos.advantages.baselines import group_center, group_scale
from funrl.algos.advantages.shaping import to_tokens
from funrl.algos.compose import with_regularizers
from funrl.algos.core import Algorithm, chain, reduce
from funrl.algos.losses.clipped import clipped_surrogate
from funrl.algos.losses.ratios import sequence_ratio
from funrl.algos.losses.reductions import sequence_mean


def gspo(
    clip_low: float = 3e-4,
    clip_high: float = 4e-4,
    per_token: bool = False,
    kl_coef: float = 0.0,
    entropy_coef: float = 0.0,
    std_eps: float = 1e-6,
) -> Algorithm:
    """Group sequence policy optimisation.

    Args:
      clip_low, clip_high: how far the ratio of a completion may fall below and rise above 1.
      per_token: GSPO-token, for advantages that differ by token.
      kl_coef: factor of the KL in the loss, in units of advantage per nat; 0: none, and no reference.
      entropy_coef: factor of the entropy bonus, in units of advantage per nat.
      std_eps: added to the deviation that a group's rewards are divided by; 1e-4 in TRL.
    """
    surrogate = clipped_surrogate(clip_low, clip_high, ratio=sequence_ratio(per_token))
    return Algorithm(
        advantage=chain(group_center(), group_scale(std_eps), to_tokens()),
        losses={"policy": reduce(with_regularizers(surrogate, kl_coef, entropy_coef), sequence_mean())},
    )
