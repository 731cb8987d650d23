"""REINFORCE++ with a group baseline: rewards minus their group's mean, whitened over the tokens of the batch.

Whitening is over tokens: where completions differ in length, a group of equal rewards, or a row that is alone in its
group, gets minus the mean over the batch's tokens instead of 0.

References: Hu et al., 2025, https://arxiv.org/abs/2501.03262.
verl: the same estimator. OpenRLHF: divides by n, not n - 1, in the variance. TRL has none.
"""

from funrl.algos.advantages.baselines import group_center
from funrl.algos.advantages.returns import whiten
from funrl.algos.advantages.shaping import to_tokens
from funrl.algos.compose import with_regularizers
from funrl.algos.core import Algorithm, chain, reduce
from funrl.algos.losses.clipped import clipped_surrogate
from funrl.algos.losses.reductions import token_mean


def reinforce_plus_plus_baseline(
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    kl_coef: float = 0.01,
    kl_kind: str = "k2",
    entropy_coef: float = 0.0,
) -> Algorithm:
    """REINFORCE++ on rewards minus their group's mean, with the KL in the loss.

    Args:
      clip_low, clip_high: how far the ratio of a token may fall below and rise above 1.
      kl_coef: factor of the KL in the loss, in units of advantage per nat; 0: none, and no reference.
      kl_kind: estimator of that KL: k1, k2, k3, abs, or one of them with + for the gradient of k2.
      entropy_coef: factor of the entropy bonus, in units of advantage per nat.

    Warning: advantages of a group of equal rewards, or of one row, are not 0: see the head of this file.
    """
    surrogate = clipped_surrogate(clip_low, clip_high)
    return Algorithm(
        advantage=chain(group_center(), to_tokens(), whiten()),
        losses={"policy": reduce(with_regularizers(surrogate, kl_coef, entropy_coef, kl_kind=kl_kind), token_mean())},
    )
