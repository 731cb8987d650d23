"""REINFORCE++: PPO without a critic; token rewards to go, whitened over the whole batch.

References: Hu et al., 2025, https://arxiv.org/abs/2501.03262.
verl: the same estimator. OpenRLHF: divides by n, not n - 1, in the variance. TRL has none.
"""

from funrl.algos.advantages.returns import reward_to_go, whiten
from funrl.algos.advantages.shaping import token_rewards
from funrl.algos.compose import kl_controller, with_regularizers
from funrl.algos.core import Algorithm, chain, reduce
from funrl.algos.losses.clipped import clipped_surrogate
from funrl.algos.losses.reductions import token_mean


def reinforce_plus_plus(
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    gamma: float = 1.0,
    kl_coef: float = 0.01,
    kl_target: float | None = None,
    entropy_coef: float = 0.0,
) -> Algorithm:
    """REINFORCE with the clip, the token KL and the whitening of PPO.

    Args:
      clip_low, clip_high: how far the ratio of a token may fall below and rise above 1.
      gamma: discount of a reward, per token.
      kl_coef: reward subtracted per nat of KL to the reference; 0: none, and no reference.
      kl_target: target KL in nats per token, to which the coefficient adapts; None: the coefficient is constant.
      entropy_coef: factor of the entropy bonus, in units of advantage per nat.
    """
    surrogate = clipped_surrogate(clip_low, clip_high)
    return Algorithm(
        advantage=chain(token_rewards(kl_controller(kl_coef, kl_target)), reward_to_go(gamma), whiten()),
        losses={"policy": reduce(with_regularizers(surrogate, 0.0, entropy_coef), token_mean())},
    )
