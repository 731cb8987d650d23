"""TPO: triple preferences; imitate the best text, and learn a preference between two others without a reference.

    TPO      tpo()                     TPO-L    tpo(beta=2.0, per_token=True, margin=0.5)

References: Saeidi et al., 2024, https://arxiv.org/abs/2405.16681.
verl: none. TRL: TPOTrainer, whose tpo_alpha is `likelihood_coef` and whose tpo-l is `per_token` with tpo_l_gamma as
  `margin`; its column "reference" is the text to imitate, as here.
"""

from funrl.algos.core import Algorithm, reduce, sum_losses
from funrl.algos.losses.likelihood import restrict
from funrl.algos.losses.pair_losses import sigmoid_pairs
from funrl.algos.losses.pairs import compared
from funrl.algos.losses.preference import gold_likelihood, log_likelihood, preference
from funrl.algos.losses.reductions import sequence_mean


def tpo(beta: float = 0.01, likelihood_coef: float = 1.0, per_token: bool = False, margin: float = 0.0) -> Algorithm:
    """Triple preference optimisation.

    Args:
      beta: scale of a completion's log-likelihood, per nat.
      likelihood_coef: loss per nat of the negative log-likelihood of the text to imitate.
      per_token: take the mean over a completion's tokens instead of the sum; TPO-L.
      margin: target for beta times the difference of the log-likelihoods; TPO-L.
    """
    contrast = reduce(preference(sigmoid_pairs(beta, margin=margin), log_likelihood(per_token)), sequence_mean())
    imitation = gold_likelihood(likelihood_coef)
    return Algorithm(None, {"policy": sum_losses(restrict(contrast, compared), imitation)}, example="triple")
