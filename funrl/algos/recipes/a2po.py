"""A*-PO: the implicit reward of a completion is regressed on its reward minus the optimal value of its prompt.

References: Brantley et al., 2025, https://arxiv.org/abs/2505.20686.
verl: the authors' fork takes the optimal value over samples of the reference before training, and then needs one sample
  a prompt; here it is taken over each batch's own group, so use several samples a prompt.
TRL: A2POTrainer, likewise with 8 samples of the reference; drops prompts that the reference never solves.
"""

from funrl.algos.advantages.baselines import optimal_value_baseline
from funrl.algos.advantages.shaping import to_tokens
from funrl.algos.compose import with_regularizers
from funrl.algos.core import Algorithm, chain, reduce
from funrl.algos.losses.reductions import sequence_mean
from funrl.algos.losses.sequence_terms import log_ratio_regression


def a2po(value_beta: float = 0.5, beta: float = 0.001, entropy_coef: float = 0.0) -> Algorithm:
    """Optimal advantage regression.

    Args:
      value_beta: price of KL in the optimal value, in units of reward per nat.
      beta: price of KL in the regression, in units of reward per nat.
      entropy_coef: factor of the entropy bonus, in squared units of reward per nat.
    """
    term = log_ratio_regression(beta, "ref_logp")
    return Algorithm(
        advantage=chain(optimal_value_baseline(value_beta), to_tokens()),
        losses={"policy": reduce(with_regularizers(term, 0.0, entropy_coef), sequence_mean())},
    )
