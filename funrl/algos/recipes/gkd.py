"""GKD: the student's own samples, and the divergence from the teacher over the whole vocabulary, minimised directly.

References: Agarwal et al., 2023, https://arxiv.org/abs/2306.13649.
verl: estimates from the sampled token, or the teacher's top tokens. TRL: GKDTrainer, over the whole vocabulary,
  with logits of both models in memory; it mixes samples of the data set in by lmbda, divides by the tokens of the
  data's completions, and beta is this one. Its DistillationTrainer computes the divergence in tiles of the logits.

The step computes hidden states of the teacher in the same micro-batch and the divergence in chunks of the vocabulary:
nothing of [tokens, vocabulary] is whole, and nothing of the teacher is stored.
"""

from __future__ import annotations

from funrl.algos.core import Algorithm, Divergence, add, reduce
from funrl.algos.losses.clipped import entropy_bonus
from funrl.algos.losses.reductions import token_mean
from funrl.algos.losses.teacher import divergence_to_teacher


def gkd(beta: float = 0.5, temperature: float = 1.0, entropy_coef: float = 0.0) -> Algorithm:
    """Generalised knowledge distillation.

    Args:
      beta: 0 is KL(teacher || student), 1 is KL(student || teacher), between them the generalised Jensen-Shannon
        divergence.
      temperature: of both distributions.
      entropy_coef: factor of the entropy bonus.

    Raises:
      ValueError: beta is not from 0 to 1, or the temperature is not above 0.
    """
    term = divergence_to_teacher()
    if entropy_coef:
        term = add(term, entropy_bonus(entropy_coef))
    return Algorithm(None, {"policy": reduce(term, token_mean())}, divergence=Divergence(beta, temperature))
