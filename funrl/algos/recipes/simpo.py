"""SimPO: DPO on mean-token log-likelihoods with a target margin and no reference.

References: Meng et al., 2024, https://arxiv.org/abs/2405.14734.
verl: none in its main tree. TRL: CPOTrainer with loss_type="simpo", whose simpo_gamma is `margin`, with cpo_alpha=0.
"""

from funrl.algos.core import Algorithm, reduce
from funrl.algos.losses.pair_losses import sigmoid_pairs
from funrl.algos.losses.preference import log_likelihood, preference
from funrl.algos.losses.reductions import sequence_mean


def simpo(beta: float = 2.0, margin: float = 1.0) -> Algorithm:
    """Simple preference optimisation.

    Args:
      beta: scale of the mean log-likelihood, per nat.
      margin: target for beta times the difference.
    """
    contrast = preference(sigmoid_pairs(beta, margin=margin), log_likelihood(per_token=True))
    return Algorithm(None, {"policy": reduce(contrast, sequence_mean())}, example="pair")
