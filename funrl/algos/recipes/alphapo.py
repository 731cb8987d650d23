"""AlphaPO: SimPO with a reward shaped by alpha, so that likelihoods fall less.

References: Gupta et al., 2025, https://arxiv.org/abs/2501.03884.
verl: none. TRL: CPOTrainer with loss_type="alphapo" and alpha; its simpo_gamma is `margin`.
"""

from funrl.algos.core import Algorithm, reduce
from funrl.algos.losses.pair_losses import sigmoid_pairs
from funrl.algos.losses.preference import log_likelihood, preference
from funrl.algos.losses.reductions import sequence_mean


def alphapo(beta: float = 2.5, alpha: float = 0.25, margin: float = 0.1) -> Algorithm:
    """Preference optimisation with the reward (1 - u^-alpha) / alpha, u the mean-token probability of a completion.

    Args:
      beta: scale of that reward.
      alpha: the reward's shape; 0 is SimPO.
      margin: target for beta times the difference.
    """
    contrast = preference(sigmoid_pairs(beta, margin=margin), log_likelihood(per_token=True, alpha=alpha))
    return Algorithm(None, {"policy": reduce(contrast, sequence_mean())}, example="pair")
