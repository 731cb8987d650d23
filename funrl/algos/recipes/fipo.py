"""FIPO: DAPO's loss with tokens weighted by how the update changes the tokens after them.

References: Ma et al., 2026, https://arxiv.org/abs/2603.19835.
verl: in the authors' fork. ms-swift: loss_type fipo, whose weight is from 1 to 1.2 by default. TRL has none.

The weight is 1 at the first update on a batch: use --minibatches or --epochs of 2 or more.
"""

from funrl.algos.advantages.baselines import group_center, group_scale
from funrl.algos.advantages.shaping import to_tokens
from funrl.algos.compose import with_regularizers
from funrl.algos.core import Algorithm, chain, reduce
from funrl.algos.filters.by_group import unequal_scores
from funrl.algos.losses.clipped import clipped_surrogate
from funrl.algos.losses.reductions import token_mean
from funrl.algos.losses.sequence_terms import future_weighted


def fipo(
    clip_low: float = 0.2,
    clip_high: float = 0.28,
    dual_clip: float | None = 10.0,
    half_life: float = 32.0,
    future_low: float = 0.2,
    future_high: float = 0.2,
    safe_ratio: float | None = 3.0,
    entropy_coef: float = 0.0,
) -> Algorithm:
    """Future-KL influenced policy optimisation.

    Args:
      clip_low, clip_high: how far the ratio of a token may fall below and rise above 1.
      dual_clip: the largest ratio that counts where the advantage is negative, and in the weights of earlier tokens;
        None: no bound.
      half_life: distance in tokens at which a later token counts half.
      future_low, future_high: how far the weight of a token may fall below and rise above 1.
      safe_ratio: tokens with a negative advantage and a larger ratio have a weight of at most 1; None: no bound.
      entropy_coef: factor of the entropy bonus, in units of advantage per nat.
    """
    surrogate = clipped_surrogate(clip_low, clip_high, dual_clip)
    term = future_weighted(
        surrogate, half_life, future_low, high=future_high, most_ratio=dual_clip, safe_ratio=safe_ratio
    )
    return Algorithm(
        advantage=chain(group_center(), group_scale(), to_tokens()),
        losses={"policy": reduce(with_regularizers(term, 0.0, entropy_coef), token_mean())},
        filter=unequal_scores(),
    )
