"""GPG: the plain policy gradient on centred rewards, rescaled for the groups without a signal.

References: Chu et al., 2025, https://arxiv.org/abs/2504.02546.
verl: rescales by the rows whose reward is not 0, instead of the rows of groups with unequal rewards. TRL has none.

Run it with --minibatches=1 and one epoch. There is no ratio in the loss: from the second update on a batch the samples
come from an older policy, without a correction.
"""

from funrl.algos.advantages.baselines import group_center, informative_rescale
from funrl.algos.advantages.shaping import to_tokens
from funrl.algos.compose import with_regularizers
from funrl.algos.core import Algorithm, chain, reduce
from funrl.algos.losses.reductions import token_mean
from funrl.algos.losses.token_terms import policy_gradient


def gpg(entropy_coef: float = 0.0) -> Algorithm:
    """Group policy gradient: one update a batch (--minibatches=1), no ratio, no clip, no KL.

    Args:
      entropy_coef: factor of the entropy bonus, in units of advantage per nat.
    """
    return Algorithm(
        advantage=chain(group_center(), informative_rescale(), to_tokens()),
        losses={"policy": reduce(with_regularizers(policy_gradient(), 0.0, entropy_coef), token_mean())},
    )
