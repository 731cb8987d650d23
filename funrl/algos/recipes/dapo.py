"""DAPO: GRPO with a higher upper clip, a token mean, prompts resampled until their rewards differ, and no KL.

References: Yu et al., 2025, https://arxiv.org/abs/2503.14476.
verl: its recipe adds a dual clip of 10. TRL: loss_type dapo is the token mean alone; the filter and the penalty are not
  part of it.
"""

from funrl.algos.advantages.baselines import group_center, group_scale
from funrl.algos.advantages.shaping import overlong_penalty, to_tokens
from funrl.algos.compose import with_regularizers
from funrl.algos.core import Algorithm, chain, reduce
from funrl.algos.filters.by_group import unequal_scores
from funrl.algos.losses.clipped import clipped_surrogate
from funrl.algos.losses.reductions import token_mean


def dapo(
    clip_low: float = 0.2,
    clip_high: float = 0.28,
    dual_clip: float | None = None,
    max_new_tokens: int | None = None,
    overlong_buffer: int | None = None,
    overlong_coef: float = 1.0,
    entropy_coef: float = 0.0,
) -> Algorithm:
    """Decoupled clip and dynamic sampling policy optimisation.

    Args:
      clip_low, clip_high: how far the ratio of a token may fall below and rise above 1.
      dual_clip: the largest ratio that counts where the advantage is negative; None: no bound.
      max_new_tokens: the longest completion allowed, for the overlong penalty; None: no penalty.
      overlong_buffer: number of tokens before that limit over which the penalty grows; None: a fifth of the limit.
      overlong_coef: the penalty at the limit, in units of reward; 0: none.
      entropy_coef: factor of the entropy bonus, in units of advantage per nat.
    """
    penalty = ()
    if max_new_tokens is not None and overlong_coef:
        penalty = (overlong_penalty(max_new_tokens, overlong_buffer or max(max_new_tokens // 5, 1), overlong_coef),)
    surrogate = clipped_surrogate(clip_low, clip_high, dual_clip)
    return Algorithm(
        advantage=chain(*penalty, group_center(), group_scale(), to_tokens()),
        losses={"policy": reduce(with_regularizers(surrogate, 0.0, entropy_coef), token_mean())},
        filter=unequal_scores(),
    )
