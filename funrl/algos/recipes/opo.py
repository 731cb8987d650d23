"""OPO: exactly on-policy REINFORCE with the length-weighted baseline that has the least variance.

References: Hao et al., 2025, https://arxiv.org/abs/2505.23585.
verl: its estimator under the clipped loss and a token mean; a singleton group keeps its raw reward. TRL has none.

Run it with --minibatches=1 and one epoch. There is no ratio in the loss: from the second update on a batch the samples
come from an older policy, without a correction.
"""

from funrl.algos.advantages.baselines import length_weighted_center
from funrl.algos.advantages.shaping import to_tokens
from funrl.algos.compose import with_regularizers
from funrl.algos.core import Algorithm, chain, reduce
from funrl.algos.losses.reductions import sequence_sum_mean
from funrl.algos.losses.token_terms import policy_gradient


def opo(entropy_coef: float = 0.0) -> Algorithm:
    """On-policy RL with the optimal reward baseline: one update a batch (--minibatches=1), no clip, no KL.

    Args:
      entropy_coef: factor of the entropy bonus, in units of advantage per nat.
    """
    return Algorithm(
        advantage=chain(length_weighted_center(), to_tokens()),
        losses={"policy": reduce(with_regularizers(policy_gradient(), 0.0, entropy_coef), sequence_sum_mean())},
    )
