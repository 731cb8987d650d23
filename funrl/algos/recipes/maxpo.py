"""MaxPO: GRPO for the best of k completions, with advantages that add up to 0 in each group.

References: Takashiro et al., 2026, https://arxiv.org/abs/2606.06080. Its abstract was read. The advantage was derived
  here: the mean marginal gain of a row in sets of k, less the mean of the same over the other rows, each without the
  row (leave two out), is the difference of means in `max_at_k`; tests/algos/test_max_at_k.py proves both by all sets.
verl: its grpo_passk gives the best row alone an advantage, as `best_of_group` does. TRL: none found in 1.16.

Give --samples_per_prompt above --best_of.
"""

from funrl.algos.advantages.baselines import max_at_k
from funrl.algos.advantages.shaping import to_tokens
from funrl.algos.compose import with_regularizers
from funrl.algos.core import Algorithm, chain, reduce
from funrl.algos.losses.clipped import clipped_surrogate
from funrl.algos.losses.reductions import token_mean


def maxpo(
    best_of: int = 4,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    kl_coef: float = 0.0,
    entropy_coef: float = 0.0,
) -> Algorithm:
    """Policy optimisation of the expected best of k completions.

    Args:
      best_of: k, completions of which the best counts.
      clip_low, clip_high: how far the ratio of a token may fall below and rise above 1.
      kl_coef: factor of the KL in the loss, in units of advantage per nat; 0: none, and no reference.
      entropy_coef: factor of the entropy bonus, in units of advantage per nat.
    """
    surrogate = clipped_surrogate(clip_low, clip_high)
    return Algorithm(
        advantage=chain(max_at_k(best_of), to_tokens()),
        losses={"policy": reduce(with_regularizers(surrogate, kl_coef, entropy_coef), token_mean())},
    )
