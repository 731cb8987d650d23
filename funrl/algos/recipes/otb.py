"""OTB: the reward to go minus the baseline of least variance at each token position of the group.

References: Li et al., 2026, https://arxiv.org/abs/2602.07078.
verl: optimal_token_baseline and, with turns=True, tir_optimal_token_baseline; its default trainer does not pass on
  sum_pi_squared, and its tail keeps the raw return. TRL has none.
"""

from funrl.algos.advantages.returns import reward_to_go
from funrl.algos.advantages.shaping import token_rewards
from funrl.algos.advantages.token_baselines import optimal_token_baseline
from funrl.algos.compose import kl_controller, with_regularizers
from funrl.algos.core import Algorithm, chain, reduce
from funrl.algos.losses.clipped import clipped_surrogate
from funrl.algos.losses.reductions import token_mean


def otb(
    turns: bool = False,
    raw_tail: bool = False,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    kl_coef: float = 0.0,
    kl_target: float | None = None,
    entropy_coef: float = 0.0,
) -> Algorithm:
    """Optimal token baseline.

    Args:
      turns: compare the n-th sampled tokens of rows instead of those equally far from the first one.
      raw_tail: a token whose position no other row of the group reaches keeps its reward to go; otherwise it gets 0.
      clip_low, clip_high: how far the ratio of a token may fall below and rise above 1.
      kl_coef: reward subtracted per nat of KL to the reference; 0: none, and no reference.
      kl_target: target KL in nats per token, to which the coefficient adapts; None: the coefficient is constant.
      entropy_coef: factor of the entropy bonus, in units of advantage per nat.
    """
    rewards = token_rewards(kl_controller(kl_coef, kl_target))
    surrogate = clipped_surrogate(clip_low, clip_high)
    return Algorithm(
        advantage=chain(rewards, reward_to_go(), optimal_token_baseline(turns, raw_tail)),
        losses={"policy": reduce(with_regularizers(surrogate, 0.0, entropy_coef), token_mean())},
    )
