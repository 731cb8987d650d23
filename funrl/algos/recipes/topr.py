"""TOPR: off-policy REINFORCE that imitates good completions and tapers bad ones by a truncated ratio.

References: Le Roux et al., 2025, https://arxiv.org/abs/2503.14286.
verl: none. ROLL: pg_variant topr, with ratios per token, good and bad separated by the raw score, and any advantage.
TRL has none.
"""

from funrl.algos.advantages.baselines import constant_baseline
from funrl.algos.advantages.shaping import to_tokens
from funrl.algos.compose import with_regularizers
from funrl.algos.core import Algorithm, chain, reduce
from funrl.algos.losses.ratios import product_ratio, token_ratio
from funrl.algos.losses.reductions import sequence_sum_mean
from funrl.algos.losses.token_terms import tapered


def topr(baseline: float = 0.5, per_token: bool = False, entropy_coef: float = 0.0) -> Algorithm:
    """Tapered off-policy REINFORCE.

    Args:
      baseline: number subtracted from the rewards: 0.5 for rewards of 0 and 1, 0 for the paper's -1 and 1. With a
        higher one, bad completions count more relative to good ones.
      per_token: truncate the ratio of each token instead of the whole completion's.
      entropy_coef: factor of the entropy bonus, in units of advantage per nat.
    """
    term = tapered(token_ratio() if per_token else product_ratio())
    return Algorithm(
        advantage=chain(constant_baseline(baseline), to_tokens()),
        losses={"policy": reduce(with_regularizers(term, 0.0, entropy_coef), sequence_sum_mean())},
    )
