"""SPO: one completion a prompt, compared with what the prompt's earlier samples let expect, normalised over the batch.

References: Xu and Ding, 2025, https://arxiv.org/abs/2509.13232. Its abstract was read. Its tracker forgets by the KL
  between the policies; here each new sample halves the weight of the earlier ones.
verl: none found in 0.9. TRL: none found in 1.16.

Run it with --samples_per_prompt=1. Prompts are drawn by uncertainty with a --curriculum that takes `pass_rates`
(docs/algorithms.md). A prompt without a sample has the mean of the others, so the first pass over the prompts compares
each with the batch.
"""

from funrl.algos.advantages.baselines import batch_center, batch_scale, prompt_baseline
from funrl.algos.advantages.shaping import to_tokens
from funrl.algos.compose import with_regularizers
from funrl.algos.core import Algorithm, chain, reduce
from funrl.algos.losses.clipped import clipped_surrogate
from funrl.algos.losses.reductions import token_mean


def spo(
    clip_low: float = 0.2,
    clip_high: float = 0.28,
    kl_coef: float = 0.0,
    entropy_coef: float = 0.0,
    std_eps: float = 1e-6,
) -> Algorithm:
    """Single-stream policy optimisation.

    Args:
      clip_low, clip_high: how far the ratio of a token may fall below and rise above 1.
      kl_coef: factor of the KL in the loss, in units of advantage per nat; 0: none, and no reference.
      entropy_coef: factor of the entropy bonus, in units of advantage per nat.
      std_eps: added to the deviation that the batch's advantages are divided by.
    """
    term = with_regularizers(clipped_surrogate(clip_low, clip_high), kl_coef, entropy_coef)
    return Algorithm(
        advantage=chain(prompt_baseline(), batch_center(), batch_scale(std_eps), to_tokens()),
        losses={"policy": reduce(term, token_mean())},
    )
