"""M2PO: GRPO on stale rows; instead of clipping, it drops the farthest tokens until the second moment is small.

References: Zheng et al., 2025, https://arxiv.org/abs/2510.01161.
verl: the authors' fork, which counts the tokens that an update would move further, and clips instead of dropping them.
  AReaL: m2_threshold, as here. TRL has none.

It is for rows that an older policy sampled, as with --new_tokens_per_step; on fresh rows nothing is dropped.
"""

from funrl.algos.advantages.baselines import group_center, group_scale
from funrl.algos.advantages.shaping import to_tokens
from funrl.algos.compose import with_regularizers
from funrl.algos.core import Algorithm, chain, reduce
from funrl.algos.corrections.rejection import reject_second_moment
from funrl.algos.losses.ratios import token_ratio
from funrl.algos.losses.reductions import token_mean
from funrl.algos.losses.token_terms import surrogate


def m2po(second_moment: float = 0.04, harmful: bool = False, entropy_coef: float = 0.0) -> Algorithm:
    """Second-moment trust policy optimisation: the ratio to the engine without clips, on tokens that are near enough.

    Args:
      second_moment: the largest mean of squared log-ratios to the engine, in squared nats.
      harmful: count and drop only the tokens that the update would move further away.
      entropy_coef: factor of the entropy bonus, in units of advantage per nat.

    Warning: the ratio to the engine already includes its gap to the trainer: do not add `importance_weights`.
    """
    near = reject_second_moment(second_moment, harmful)
    term = surrogate(token_ratio("rollout_logp"))
    return Algorithm(
        advantage=chain(group_center(), group_scale(), to_tokens(), near),
        losses={"policy": reduce(with_regularizers(term, 0.0, entropy_coef), token_mean())},
    )
