"""GSPO: GRPO with the ratio of the whole sequence, normalised by its length.

References: Zheng et al., 2025, https://arxiv.org/abs/2507.18071.
verl: clamps the log-ratio at 10 from above; any reduction, the sequence mean by default. TRL: importance_sampling_level
  "sequence" under whatever loss_type is set, with clips of 0.2 unless told otherwise.
"""

from __future__ import annotations

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
) -> Algorithm:
    """Group sequence policy optimisation.

    Args:
      clip_low, clip_high: how far the ratio of a completion may fall below and rise above 1.
      per_token: GSPO-token, for advantages that differ by token.
      kl_coef: factor of the KL in the loss, in units of advantage per nat; 0: none, and no reference.
      entropy_coef: factor of the entropy bonus, in units of advantage per nat.
    """
    surrogate = clipped_surrogate(clip_low, clip_high, ratio=sequence_ratio(per_token))
    return Algorithm(
        advantage=chain(group_center(), group_scale(), to_tokens()),
        losses={"policy": reduce(with_regularizers(surrogate, kl_coef, entropy_coef), sequence_mean())},
    )
