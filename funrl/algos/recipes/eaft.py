"""EAFT: supervised fine-tuning gated by entropy: tokens where the model is confident are learned less.

References: Diao et al., 2026, https://arxiv.org/abs/2601.02151.
verl: none. LLaMA-Factory: use_eaft_loss; the entropy is that of the 20 most probable tokens. TRL has none.
"""

from funrl.algos.core import Algorithm, reduce, weighted
from funrl.algos.losses.likelihood import entropy_gated_likelihood
from funrl.algos.losses.reductions import token_mean


def eaft(alpha: float = 1.0, scale: float = 3.0) -> Algorithm:
    """Entropy-adaptive fine-tuning on the tokens of the mask.

    Args:
      alpha: exponent of the gate; 0 is supervised fine-tuning.
      scale: nats of entropy at which a token counts fully.
    """
    return Algorithm(None, {"policy": reduce(weighted(entropy_gated_likelihood(alpha, scale)), token_mean())})
