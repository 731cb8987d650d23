"""Lite PPO: centred rewards of a group over the deviation of the whole batch, and a token mean.

References: Liu et al., 2025, https://arxiv.org/abs/2508.08221.
verl: no estimator divides by the batch's deviation without whitening over tokens. ROLL: norm_mean_type group,
  norm_std_type batch. TRL: scale_rewards="batch" with loss_type dapo; eps 1e-4.
"""

from funrl.algos.advantages.baselines import batch_scale, group_center
from funrl.algos.advantages.shaping import to_tokens
from funrl.algos.compose import with_regularizers
from funrl.algos.core import Algorithm, chain, reduce
from funrl.algos.losses.clipped import clipped_surrogate
from funrl.algos.losses.reductions import token_mean


def lite_ppo(clip_low: float = 0.2, clip_high: float = 0.2, entropy_coef: float = 0.0) -> Algorithm:
    """PPO's loss without a critic and with only two tricks: one deviation for all prompts, one mean over all tokens.

    Args:
      clip_low, clip_high: how far the ratio of a token may fall below and rise above 1.
      entropy_coef: factor of the entropy bonus, in units of advantage per nat.
    """
    surrogate = clipped_surrogate(clip_low, clip_high)
    return Algorithm(
        advantage=chain(batch_scale(), group_center(), to_tokens()),  # the deviation is that of the raw rewards
        losses={"policy": reduce(with_regularizers(surrogate, 0.0, entropy_coef), token_mean())},
    )
