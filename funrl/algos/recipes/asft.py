"""ASFT: DFT, anchored to the initial model by a KL over the whole vocabulary.

References: Zhu et al., 2025, https://arxiv.org/abs/2509.23753.
verl: none. LLaMA-Factory: use_asft_loss, asft_alpha 0.1; logits of both models in memory. TRL has none: its dft has no
  anchor.
"""

from funrl.algos.core import Algorithm, Divergence, add, reduce, scale, weighted
from funrl.algos.losses.likelihood import dynamic_likelihood
from funrl.algos.losses.reductions import token_mean
from funrl.algos.losses.teacher import divergence_to_teacher


def asft(kl_coef: float = 0.1, per_policy: bool = False) -> Algorithm:
    """Anchored supervised fine-tuning on the tokens of the mask.

    Args:
      kl_coef: loss per nat of KL(reference || policy), at every token that is trained.
      per_policy: take KL(policy || reference) instead.
    """
    term = add(weighted(dynamic_likelihood()), scale(kl_coef, divergence_to_teacher()))
    anchor = Divergence(beta=1.0 if per_policy else 0.0, role="reference")
    return Algorithm(None, {"policy": reduce(term, token_mean())}, divergence=anchor)
