"""GVPO: in each group, centred implicit rewards are regressed on centred rewards.

References: Zhang et al., 2025, https://arxiv.org/abs/2504.19599.
verl: in a recipe, against the policy before the step, the sum of a group divided by n - 1. TRL has none.

The group's mean of the implicit rewards comes from the policy before the step, which is exact at the first update on a
batch: run it with --minibatches=1, or accept a mean that lags by less than a step.
"""

from funrl.algos.advantages.baselines import group_center, group_log_ratio
from funrl.algos.advantages.shaping import to_tokens
from funrl.algos.compose import with_regularizers
from funrl.algos.core import Algorithm, chain, reduce, scale
from funrl.algos.losses.reductions import sequence_mean
from funrl.algos.losses.sequence_terms import log_ratio_regression


def gvpo(beta: float = 0.1, to_reference: bool = False, entropy_coef: float = 0.0) -> Algorithm:
    """Group variance policy optimisation.

    Args:
      beta: price of KL, in units of reward per nat.
      to_reference: stay near the reference instead of the policy before the step.
      entropy_coef: factor of the entropy bonus, in squared units of reward per nat.
    """
    against = "ref_logp" if to_reference else "old_logp"
    term = scale(0.5, log_ratio_regression(beta, against))
    lead = (group_center(), group_log_ratio(beta, against)) if to_reference else (group_center(),)
    return Algorithm(
        advantage=chain(*lead, to_tokens()),
        losses={"policy": reduce(with_regularizers(term, 0.0, entropy_coef), sequence_mean())},
    )
