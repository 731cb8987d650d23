"""SFT: the mean negative log-likelihood of demonstrations; and DFT, which gives improbable tokens less weight.

References: DFT, Wu et al., 2025, https://arxiv.org/abs/2508.05629.
verl: the token mean. TRL: the token mean; loss_type="dft" is `dynamic`.
"""

from funrl.algos.core import Algorithm, reduce, weighted
from funrl.algos.losses.likelihood import dynamic_likelihood, negative_log_likelihood
from funrl.algos.losses.reductions import sequence_mean, token_mean


def sft(dynamic: bool = False, per_sequence: bool = False) -> Algorithm:
    """Supervised fine-tuning on the tokens of the mask, times `batch.weight` where it is given.

    The denominator counts tokens whatever their weights.

    Args:
      dynamic: DFT: give improbable tokens less weight.
      per_sequence: give every demonstration the same weight, whatever its length.
    """
    term = weighted(dynamic_likelihood() if dynamic else negative_log_likelihood())
    return Algorithm(None, {"policy": reduce(term, sequence_mean() if per_sequence else token_mean())})
