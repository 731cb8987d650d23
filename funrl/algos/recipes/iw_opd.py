"""IW-OPD: on-policy distillation in which early tokens count more, before the policy has drifted from the teacher.

References: Xie et al., 2026, https://arxiv.org/abs/2606.22600. Its abstract and TRL's trainer were read.
verl: none found in 0.9. TRL 1.16: an experimental trainer with the same weights, and gamma 0.5; its loss is -w A log pi
  without a ratio or a clip, so gradients agree at the first update on a batch.
"""

from funrl.algos.advantages.teacher_rewards import teacher_advantage, weigh_early_tokens
from funrl.algos.compose import with_regularizers
from funrl.algos.core import Algorithm, chain, reduce
from funrl.algos.losses.clipped import clipped_surrogate
from funrl.algos.losses.reductions import token_mean


def iw_opd(gamma: float = 0.5, clip_low: float = 0.2, clip_high: float = 0.2, entropy_coef: float = 0.0) -> Algorithm:
    """Importance-weighted on-policy distillation.

    Args:
      gamma: how much more the first token counts than one after all differences, as a share; 0: `distillation`.
      clip_low, clip_high: how far the ratio of a token may fall below and rise above 1.
      entropy_coef: factor of the entropy bonus, in units of advantage per nat.

    Raises:
      ValueError: gamma is below 0.

    Warning: scores are ignored.
    """
    term = with_regularizers(clipped_surrogate(clip_low, clip_high), 0.0, entropy_coef)
    return Algorithm(
        advantage=chain(teacher_advantage("k1"), weigh_early_tokens(gamma)),
        losses={"policy": reduce(term, token_mean())},
    )
