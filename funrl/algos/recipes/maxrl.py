"""MaxRL: GRPO with advantages relative to the group's mean, so that hard prompts count as in maximum likelihood.

The gradient of log p, where p is the probability of solving a prompt, is 1 / p times that of p: rarely solved prompts
count more.

References: Tajwar et al., 2026, https://arxiv.org/abs/2602.02710.
verl: in the authors' fork, 1e-6 is added to the mean and a singleton group keeps its raw reward; SkyRL has the same
  estimator. prime-rl: as here. TRL has none.
"""

from funrl.algos.advantages.baselines import relative_to_mean
from funrl.algos.advantages.shaping import to_tokens
from funrl.algos.compose import with_regularizers
from funrl.algos.core import Algorithm, chain, reduce
from funrl.algos.losses.clipped import clipped_surrogate
from funrl.algos.losses.reductions import token_mean


def maxrl(
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    kl_coef: float = 0.0,
    entropy_coef: float = 0.0,
) -> Algorithm:
    """Maximum likelihood reinforcement learning, for rewards that are at least 0.

    Args:
      clip_low, clip_high: how far the ratio of a token may fall below and rise above 1.
      kl_coef: factor of the KL in the loss, in units of advantage per nat; 0: none, and no reference.
      entropy_coef: factor of the entropy bonus, in units of advantage per nat.
    """
    surrogate = clipped_surrogate(clip_low, clip_high)
    return Algorithm(
        advantage=chain(relative_to_mean(), to_tokens()),
        losses={"policy": reduce(with_regularizers(surrogate, kl_coef, entropy_coef), token_mean())},
    )
