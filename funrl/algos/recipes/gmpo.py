"""GMPO: GRPO with the geometric mean of a sequence's token ratios, with log-ratios clipped.

References: Zhao et al., 2025, https://arxiv.org/abs/2507.20673.
verl: a plain mean over the rows of each micro-batch, so the loss grows with the number of micro-batches.
TRL: in its experimental trainers; it clips the log-ratio, as here.
"""

from funrl.algos.advantages.baselines import group_center, group_scale
from funrl.algos.advantages.shaping import to_tokens
from funrl.algos.compose import with_regularizers
from funrl.algos.core import Algorithm, chain, reduce
from funrl.algos.losses.reductions import sequence_mean
from funrl.algos.losses.sequence_terms import geometric_mean


def gmpo(clip_low: float = 0.4, clip_high: float = 0.4, kl_coef: float = 0.0, entropy_coef: float = 0.0) -> Algorithm:
    """Geometric-mean policy optimisation.

    Args:
      clip_low, clip_high: how far a token's log-ratio may fall below and rise above 0, in nats.
      kl_coef: factor of the KL in the loss, in units of advantage per nat; 0: none, and no reference.
      entropy_coef: factor of the entropy bonus, in units of advantage per nat.
    """
    mean = geometric_mean(clip_low, clip_high)
    return Algorithm(
        advantage=chain(group_center(), group_scale(), to_tokens()),
        losses={"policy": reduce(with_regularizers(mean, kl_coef, entropy_coef), sequence_mean())},
    )
