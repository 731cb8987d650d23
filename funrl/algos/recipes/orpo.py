"""ORPO: the chosen completions' likelihood and an odds ratio, without a reference.

References: Hong et al., 2024, https://arxiv.org/abs/2403.07691.
verl: none. TRL: ORPOTrainer, whose likelihood covers the prompt too; here it covers the mask.
"""

from funrl.algos.core import Algorithm, reduce, sum_losses
from funrl.algos.losses.preference import chosen_likelihood, odds_ratio
from funrl.algos.losses.reductions import sequence_mean


def orpo(beta: float = 0.1) -> Algorithm:
    """Odds ratio preference optimisation.

    Args:
      beta: weight of the odds ratio's loss; the likelihood's is 1.
    """
    return Algorithm(
        None, {"policy": sum_losses(chosen_likelihood(), reduce(odds_ratio(beta), sequence_mean()))}, example="pair"
    )
