"""GKD: directly minimise the divergence from the teacher over the whole vocabulary, on the student's own samples.

References: Agarwal et al., 2023, https://arxiv.org/abs/2306.13649.
verl: estimates from the sampled token, or the teacher's top tokens. TRL: GKDTrainer, over the whole vocabulary,
  with logits of both models in memory; it mixes in completions of the dataset by lmbda and divides by their tokens; its
  beta is the same. Its DistillationTrainer computes the divergence in tiles of the logits.

The step computes the teacher's hidden states in the same micro-batch and the divergence in chunks of the vocabulary: no
[tokens, vocabulary] tensor is materialised, and no output of the teacher is stored.
"""

from funrl.algos.core import Algorithm, Divergence, add, reduce
from funrl.algos.losses.clipped import entropy_bonus
from funrl.algos.losses.reductions import token_mean
from funrl.algos.losses.teacher import divergence_to_teacher


def gkd(beta: float = 0.5, temperature: float = 1.0, entropy_coef: float = 0.0) -> Algorithm:
    """Generalised knowledge distillation.

    Args:
      beta: 0 is KL(teacher || student), 1 is KL(student || teacher), in between the generalised Jensen-Shannon
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
