"""ScaleRL: CISPO to the engine, advantages scaled by the batch, and a loss in which each prompt weighs the same.

References: Khatri et al., 2025, https://arxiv.org/abs/2510.13786. Its abstract was read, and what SkyRL's issue 495 and
  pull request 1719 say of it. Other parts of it are flags: --staleness, and logits in float32, which funrl has anyway.
verl: loss mode cispo; no aggregation is a mean over prompts. TRL: loss_type cispo, and no mean over prompts.
SkyRL: cispo with prompt_mean, which counts the tokens of each mini-batch.

The paper leaves out prompts whose rewards are equal and samples no others in their place, as --max_refills=1 does.
"""

from funrl.algos.advantages.baselines import batch_scale, group_center
from funrl.algos.advantages.shaping import to_tokens
from funrl.algos.advantages.token_selection import count_prompt_tokens
from funrl.algos.compose import with_regularizers
from funrl.algos.core import Algorithm, chain, reduce
from funrl.algos.filters.by_group import unequal_scores
from funrl.algos.losses.ratios import token_ratio
from funrl.algos.losses.reductions import prompt_mean
from funrl.algos.losses.token_terms import clipped_importance


def scalerl(clip_high: float = 4.0, kl_coef: float = 0.0, entropy_coef: float = 0.0) -> Algorithm:
    """The loss of ScaleRL: truncated importance weights to the engine, and the mean over prompts.

    Args:
      clip_high: how far the weight of a token may rise above 1.
      kl_coef: factor of the KL in the loss, in units of advantage per nat; 0: none, and no reference.
      entropy_coef: factor of the entropy bonus, in units of advantage per nat.

    Warning: the ratio to the engine already includes its gap to the trainer: do not add `importance_weights`.
    """
    term = clipped_importance(None, clip_high, token_ratio("rollout_logp"))
    return Algorithm(
        advantage=chain(group_center(), batch_scale(), to_tokens(), count_prompt_tokens()),
        losses={"policy": reduce(with_regularizers(term, kl_coef, entropy_coef), prompt_mean())},
        filter=unequal_scores(),
    )
