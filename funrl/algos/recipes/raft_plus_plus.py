"""RAFT++: rejection sampling with PPO's clipped ratio; the best completions of each prompt are imitated.

References: Xiong et al., 2025, https://arxiv.org/abs/2504.11343.
verl: the authors' fork, plus a KL of factor 0.001. ROLL: GRPO's estimator without mean and deviation, so that a row
  with reward 0 has a loss of 0 but still counts in the denominator. TRL has none.
"""

from funrl.algos.advantages.shaping import to_tokens
from funrl.algos.compose import with_regularizers
from funrl.algos.core import Algorithm, chain, reduce
from funrl.algos.corrections.rejection import keep_best
from funrl.algos.losses.clipped import clipped_surrogate
from funrl.algos.losses.reductions import sequence_mean


def raft_plus_plus(
    threshold: float = 0.0, clip_high: float = 0.2, kl_coef: float = 0.0, entropy_coef: float = 0.0
) -> Algorithm:
    """Reward-ranked fine-tuning with an importance ratio.

    Args:
      threshold: the best completions of a prompt are imitated if their reward is above it.
      clip_high: how far the ratio of a token may rise above 1. A lower clip would have no effect: no advantage is below
        0.
      kl_coef: factor of the KL in the loss, in units of advantage per nat; 0: none, and no reference.
      entropy_coef: factor of the entropy bonus, in units of advantage per nat.
    """
    surrogate = clipped_surrogate(clip_high=clip_high)
    return Algorithm(
        advantage=chain(keep_best(threshold), to_tokens()),
        losses={"policy": reduce(with_regularizers(surrogate, kl_coef, entropy_coef), sequence_mean())},
    )
