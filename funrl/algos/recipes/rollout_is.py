"""GLM-5's loss for agents: GRPO with a hard mask on the ratio to the engine that sampled.

References: GLM-5, 2026, https://arxiv.org/abs/2602.15763.
verl: none as a loss; rollout_correction masks by the policy before the update. SkyRL: policy_loss_type rollout_is,
  clips of 0.2. TRL has none.
"""

from funrl.algos.advantages.baselines import group_center, group_scale
from funrl.algos.advantages.shaping import to_tokens
from funrl.algos.compose import with_regularizers
from funrl.algos.core import Algorithm, chain, reduce
from funrl.algos.losses.reductions import token_mean
from funrl.algos.losses.token_terms import masked_importance


def rollout_is(
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    sampled_by: str = "rollout_logp",
    kl_coef: float = 0.0,
    entropy_coef: float = 0.0,
) -> Algorithm:
    """Policy gradient with importance weights to the engine, masked where they leave a range.

    Args:
      clip_low, clip_high: how far the ratio of a token may fall below and rise above 1; tokens beyond have no gradient.
      sampled_by: the policy that the ratio is taken to: rollout_logp, the engine's, or old_logp, the trainer's before
        the update.
      kl_coef: factor of the KL in the loss, in units of advantage per nat; 0: none, and no reference.
      entropy_coef: factor of the entropy bonus, in units of advantage per nat.

    Warning: with rollout_logp the weight already includes the gap between engine and trainer: do not add
    `importance_weights`.
    """
    term = masked_importance(clip_low, clip_high, sampled_by)
    return Algorithm(
        advantage=chain(group_center(), group_scale(), to_tokens()),
        losses={"policy": reduce(with_regularizers(term, kl_coef, entropy_coef), token_mean())},
    )
