"""MOPD: a teacher for each domain scores every token, beside the rewards of the domain.

References: Xiao et al., 2026, https://arxiv.org/abs/2601.02780 (MiMo-V2-Flash), and Ma et al., 2026,
  https://arxiv.org/abs/2606.30406. Their abstracts were read, and what readers of the first say of its loss: the mean
  over a completion's tokens of -w A log pi with w = pi / pi_engine, 0 outside of a range.
verl: one teacher. TRL: none found in 1.16. NeMo-RL, slime: teachers by domain. NeMo-RL has no rewards beside the
  teacher's, alpha=0 here; its w is that of the policy before the updates on a batch, here of the policy of now.

Run it with --teacher=DIR@math,DIR@chat; with one --teacher it is on-policy distillation with rewards.
"""

from funrl.algos.advantages.baselines import group_center, group_scale
from funrl.algos.advantages.shaping import to_tokens
from funrl.algos.advantages.teacher_rewards import teacher_advantage
from funrl.algos.compose import with_regularizers
from funrl.algos.core import Algorithm, chain, reduce
from funrl.algos.losses.reductions import sequence_mean
from funrl.algos.losses.token_terms import masked_importance


def mopd(
    alpha: float = 1.0,
    clip_low: float = 0.5,
    clip_high: float = 1.0,
    entropy_coef: float = 0.0,
    std_eps: float = 1e-6,
) -> Algorithm:
    """Multi-teacher on-policy distillation.

    Args:
      alpha: factor of GRPO's advantage beside the teacher's, its log-probability less the policy's; 0: no rewards.
      clip_low, clip_high: how far the ratio to the engine may fall below and rise above 1; tokens beyond have no
        gradient.
      entropy_coef: factor of the entropy bonus, in units of advantage per nat.
      std_eps: added to the deviation that a group's rewards are divided by.

    Warning: the ratio to the engine already includes its gap to the trainer: do not add `importance_weights`.
    """
    rewards = (group_center(), group_scale(std_eps), to_tokens()) if alpha else ()
    term = with_regularizers(masked_importance(clip_low, clip_high), 0.0, entropy_coef)
    return Algorithm(
        advantage=chain(*rewards, teacher_advantage("k1", alpha)), losses={"policy": reduce(term, sequence_mean())}
    )
