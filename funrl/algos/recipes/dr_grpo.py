"""Dr. GRPO: GRPO without its two biases, the division by the deviation and the division by the length.

References: Liu et al., 2025, https://arxiv.org/abs/2503.20783.
verl: norm_adv_by_std_in_grpo=False with seq-mean-token-sum-norm, which divides by the padded width unless a constant is
  given. TRL: loss_type dr_grpo divides by max_completion_length and counts empty rows too.
"""

from funrl.algos.advantages.baselines import group_center
from funrl.algos.advantages.shaping import to_tokens
from funrl.algos.compose import with_regularizers
from funrl.algos.core import Algorithm, chain, reduce
from funrl.algos.losses.clipped import clipped_surrogate
from funrl.algos.losses.reductions import constant_mean


def dr_grpo(
    max_new_tokens: int = 1024, clip_low: float = 0.2, clip_high: float = 0.2, entropy_coef: float = 0.0
) -> Algorithm:
    """GRPO done right.

    Args:
      max_new_tokens: the longest completion allowed; every sequence's sum is divided by it.
      clip_low, clip_high: how far the ratio of a token may fall below and rise above 1.
      entropy_coef: factor of the entropy bonus, in units of advantage per nat.
    """
    surrogate = clipped_surrogate(clip_low, clip_high)
    return Algorithm(
        advantage=chain(group_center(), to_tokens()),
        losses={"policy": reduce(with_regularizers(surrogate, 0.0, entropy_coef), constant_mean(max_new_tokens))},
    )
