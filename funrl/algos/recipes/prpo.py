"""PRPO: rewards minus the mean of the batch, over its deviation; one completion a prompt is enough.

References: rLLM, 2026, https://rllm-project.com/post.html?post=continual_learning.md.
verl: reinforce_plus_plus whitens over tokens instead of rows. rLLM: variance over n; here over n - 1. TRL has none.
"""

from funrl.algos.advantages.baselines import batch_center, batch_scale
from funrl.algos.advantages.shaping import to_tokens
from funrl.algos.compose import with_regularizers
from funrl.algos.core import Algorithm, chain, reduce
from funrl.algos.losses.clipped import clipped_surrogate
from funrl.algos.losses.reductions import token_mean


def prpo(
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    kl_coef: float = 0.0,
    entropy_coef: float = 0.0,
) -> Algorithm:
    """Advantages of whole batches: all prompts are one group.

    Args:
      clip_low, clip_high: how far the ratio of a token may fall below and rise above 1.
      kl_coef: factor of the KL in the loss, in units of advantage per nat; 0: none, and no reference.
      entropy_coef: factor of the entropy bonus, in units of advantage per nat.

    Warning: a group of equal rewards has nonzero advantages, since it is compared with other prompts.
    """
    surrogate = clipped_surrogate(clip_low, clip_high)
    return Algorithm(
        advantage=chain(batch_center(), batch_scale(), to_tokens()),
        losses={"policy": reduce(with_regularizers(surrogate, kl_coef, entropy_coef), token_mean())},
    )
