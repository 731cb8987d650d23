"""GDPO: GRPO for several reward functions, each normalised separately in its group.

The sum is divided by its deviation over the batch's rows. Its mean is already 0 in every group, so no mean is
subtracted, and a group of equal rewards keeps exactly 0.

References: Liu et al., 2026, https://arxiv.org/abs/2601.05242.
verl: mean and deviation of the last step are over tokens, which moves the zeros of equal groups; its default trainer
  does not pass on the separate rewards.
TRL: multi_objective_aggregation="normalize_then_sum", over rows, eps 1e-4.
"""

from collections.abc import Sequence

from funrl.algos.advantages.baselines import batch_scale
from funrl.algos.advantages.several_rewards import decoupled_groups, parse_weights
from funrl.algos.advantages.shaping import to_tokens
from funrl.algos.compose import with_regularizers
from funrl.algos.core import Algorithm, chain, reduce
from funrl.algos.losses.clipped import clipped_surrogate
from funrl.algos.losses.reductions import sequence_mean


def gdpo(
    reward_weights: str | Sequence[float] | None = None,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    deviation: bool = True,
    kl_coef: float = 0.0,
    entropy_coef: float = 0.0,
) -> Algorithm:
    """Group reward-decoupled normalisation policy optimisation.

    Args:
      reward_weights: one number per reward function, or their text on the command line; None: all 1.
      clip_low, clip_high: how far the ratio of a token may fall below and rise above 1.
      deviation: divide each reward function's scores by their deviation in the group; False: centre them only.
      kl_coef: factor of the KL in the loss, in units of advantage per nat; 0: none, and no reference.
      entropy_coef: factor of the entropy bonus, in units of advantage per nat.

    Raises:
      ValueError: the text is not numbers separated by commas.
    """
    weights = parse_weights(reward_weights) if isinstance(reward_weights, str) else reward_weights
    surrogate = clipped_surrogate(clip_low, clip_high)
    return Algorithm(
        advantage=chain(decoupled_groups(weights, deviation=deviation), batch_scale(), to_tokens()),
        losses={"policy": reduce(with_regularizers(surrogate, kl_coef, entropy_coef), sequence_mean())},
    )
