"""MT-GRPO: GRPO with an advantage for each turn, of what the turn earned and of the outcome.

References: Zeng et al., 2025, https://arxiv.org/abs/2505.11821.
verl: none. TRL: none; the authors' code is for two turns, the first of which calls a tool.

Without an environment there is one turn, and this is GRPO.
"""

from funrl.algos.advantages.baselines import group_center, group_scale
from funrl.algos.advantages.steps import turn_length_penalty, turn_relative
from funrl.algos.compose import with_regularizers
from funrl.algos.core import Algorithm, chain, reduce
from funrl.algos.losses.clipped import clipped_surrogate
from funrl.algos.losses.reductions import sequence_mean


def mt_grpo(
    outcome_coef: float = 1.0,
    turn_limit: int | None = None,
    turn_coef: float = 1.0,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    kl_coef: float = 0.01,
) -> Algorithm:
    """Multi-turn GRPO.

    Args:
      outcome_coef: weight of the outcome's advantage in turns before the last; that of the turn's own reward is 1.
      turn_limit: tokens of a turn in whose last fifth its episode is penalised, more and more; None: no penalty.
      turn_coef: the penalty of a turn at the limit, in units of reward.
      clip_low, clip_high: how far the ratio of a token may fall below and rise above 1.
      kl_coef: factor of the KL in the loss, in units of advantage per nat; 0: none, and no reference.
    """
    penalty = ()
    if turn_limit is not None:
        penalty = (turn_length_penalty(turn_limit, max(turn_limit // 5, 1), turn_coef),)
    surrogate = with_regularizers(clipped_surrogate(clip_low, clip_high), kl_coef)
    return Algorithm(
        advantage=chain(*penalty, group_center(), group_scale(), turn_relative(outcome_coef)),
        losses={"policy": reduce(surrogate, sequence_mean())},
    )
