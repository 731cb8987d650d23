"""CPO: DPO without a reference, plus the likelihood of the chosen completions.

References: Xu et al., 2024, https://arxiv.org/abs/2401.08417.
verl: none. TRL: CPOTrainer, whose cpo_alpha is `likelihood_coef`.
"""

from funrl.algos.core import Algorithm, reduce, sum_losses
from funrl.algos.losses.pair_losses import sigmoid_pairs
from funrl.algos.losses.preference import chosen_likelihood, log_likelihood, preference
from funrl.algos.losses.reductions import sequence_mean


def cpo(beta: float = 0.1, likelihood_coef: float = 1.0) -> Algorithm:
    """Contrastive preference optimisation.

    Args:
      beta: scale of a completion's log-likelihood, per nat.
      likelihood_coef: loss per nat of the chosen completions' negative log-likelihood.
    """
    contrast = reduce(preference(sigmoid_pairs(beta), log_likelihood()), sequence_mean())
    return Algorithm(None, {"policy": sum_losses(contrast, chosen_likelihood(likelihood_coef))}, example="pair")
