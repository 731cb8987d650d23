"""RLOO: REINFORCE with the mean of the other completions of the prompt as a baseline.

References: Ahmadian et al., 2024, https://arxiv.org/abs/2402.14740.
verl: token mean; a singleton group keeps its raw reward. TRL: `per_sequence`, and `normalize` if its
  normalize_advantages is set; subtracts the KL of the sequence after clipping the reward, as `clip_reward` before this
  chain would.
"""

from funrl.algos.advantages.baselines import batch_scale, leave_one_out
from funrl.algos.advantages.shaping import kl_in_reward, to_tokens
from funrl.algos.compose import kl_controller, with_regularizers
from funrl.algos.core import Algorithm, chain, reduce
from funrl.algos.losses.clipped import clipped_surrogate
from funrl.algos.losses.ratios import sequence_ratio
from funrl.algos.losses.reductions import sequence_mean, sequence_sum_mean


def rloo(
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    kl_coef: float = 0.01,
    kl_target: float | None = None,
    entropy_coef: float = 0.0,
    per_sequence: bool = False,
    normalize: bool = False,
) -> Algorithm:
    """REINFORCE leave-one-out; the clip matters only from the second update on a batch.

    Args:
      clip_low, clip_high: how far the ratio of a token may fall below and rise above 1.
      kl_coef: reward subtracted per nat of a completion's KL to the reference; 0: none, and no reference.
      kl_target: target KL in nats per token, to which the coefficient adapts; None: the coefficient is constant.
      entropy_coef: factor of the entropy bonus, in units of advantage per nat.
      per_sequence: clip one ratio per completion, the product of its tokens' ratios, instead of one per token.
      normalize: divide by the deviation of all rows plus 1e-4; a row that is alone in its group does not count.
    """
    controller = kl_controller(kl_coef, kl_target)
    penalty = () if controller is None else (kl_in_reward(controller),)
    compared = (leave_one_out(), batch_scale(1e-4, alone=False)) if normalize else (leave_one_out(),)
    ratio = sequence_ratio(mean=False) if per_sequence else None
    term = with_regularizers(clipped_surrogate(clip_low, clip_high, ratio=ratio), 0.0, entropy_coef)
    return Algorithm(
        advantage=chain(*penalty, *compared, to_tokens()),
        losses={"policy": reduce(term, sequence_mean() if per_sequence else sequence_sum_mean())},
    )
