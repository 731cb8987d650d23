"""DAPO: GRPO with a higher upper clip, a token mean, prompts resampled until their rewards differ, and no KL.

References: Yu et al., 2025, https://arxiv.org/abs/2503.14476.
verl: its recipe adds a dual clip of 10. TRL: loss_type dapo is the token mean alone; the filter and the penalty are not
  part of it.
"""

from __future__ import annotations

from funrl.algos.advantages import group_center, group_scale
from funrl.algos.compose import policy
from funrl.algos.core import Algorithm, chain, reduce
from funrl.algos.filters import unequal_scores
from funrl.algos.reductions import token_mean
from funrl.algos.shaping import overlong_penalty, to_tokens
from funrl.algos.terms import clipped_surrogate


def dapo(
    low: float = 0.2,
    high: float = 0.28,
    dual: float | None = None,
    limit: int | None = None,
    buffer: int | None = None,
    factor: float = 1.0,
    entropy: float = 0.0,
) -> Algorithm:
    """Decoupled clip and dynamic sampling policy optimisation.

    Args:
      low, high: how far the ratio may fall below and rise above 1.
      dual: the largest ratio that counts where the advantage is negative; None: no bound.
      limit: the longest completion allowed, tokens, for the overlong penalty; None: no penalty.
      buffer: over how many tokens before the limit the penalty grows; None: a fifth of the limit.
      factor: the penalty at the limit, in units of reward.
      entropy: factor of the entropy bonus, in units of advantage per nat.
    Needs: score, group, old_logp. Filter: groups whose scores differ.
    """
    penalty = () if limit is None else (overlong_penalty(limit, buffer or max(limit // 5, 1), factor),)
    return Algorithm(
        advantage=chain(*penalty, group_center(), group_scale(), to_tokens()),
        policy_loss=reduce(policy(clipped_surrogate(low, high, dual), 0.0, entropy), token_mean()),
        keep=unequal_scores(),
    )
