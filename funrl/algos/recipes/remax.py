"""ReMax: REINFORCE with the reward of a greedy completion of the prompt as a baseline.

References: Li et al., 2024, https://arxiv.org/abs/2310.10505.
verl: token mean; keeps the return without baseline at tool tokens; its default trainer does not pass on the greedy
  reward. TRL has none.
"""

from funrl.algos.advantages.baselines import greedy_baseline
from funrl.algos.advantages.returns import reward_to_go
from funrl.algos.advantages.shaping import token_rewards
from funrl.algos.compose import kl_controller, with_regularizers
from funrl.algos.core import Algorithm, chain, reduce
from funrl.algos.losses.clipped import clipped_surrogate
from funrl.algos.losses.reductions import sequence_sum_mean


def remax(
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    kl_coef: float = 0.01,
    kl_target: float | None = None,
    entropy_coef: float = 0.0,
) -> Algorithm:
    """REINFORCE with an argmax baseline; the clip matters only from the second update on a batch.

    Args:
      clip_low, clip_high: how far the ratio of a token may fall below and rise above 1.
      kl_coef: reward subtracted per nat of KL to the reference; 0: none, and no reference.
      kl_target: target KL in nats per token, to which the coefficient adapts; None: the coefficient is constant.
      entropy_coef: factor of the entropy bonus, in units of advantage per nat.
    """
    surrogate = clipped_surrogate(clip_low, clip_high)
    return Algorithm(
        advantage=chain(greedy_baseline(), token_rewards(kl_controller(kl_coef, kl_target)), reward_to_go()),
        losses={"policy": reduce(with_regularizers(surrogate, 0.0, entropy_coef), sequence_sum_mean())},
    )
