"""CISPO: GRPO that clips the importance weight, not the update, so that every token keeps a gradient.

References: MiniMax, 2025, https://arxiv.org/abs/2506.13585; ScaleRL, Khatri et al., 2025,
  https://arxiv.org/abs/2510.13786, with high=4.
verl: the lower clip is 10, which has no effect. TRL: epsilon_high is the bound itself, 1 + high here.
"""

from funrl.algos.advantages.baselines import group_center, group_scale
from funrl.algos.advantages.shaping import to_tokens
from funrl.algos.compose import with_regularizers
from funrl.algos.core import Algorithm, chain, reduce
from funrl.algos.losses.reductions import token_mean
from funrl.algos.losses.token_terms import clipped_importance


def cispo(
    clip_low: float | None = None,
    clip_high: float = 0.2,
    kl_coef: float = 0.0,
    entropy_coef: float = 0.0,
    kl_bias_corrected: bool = False,
    std_eps: float = 1e-6,
) -> Algorithm:
    """Clipped importance sampling policy optimisation.

    Args:
      clip_low: how far the weight of a token may fall below 1; None: to 0.
      clip_high: how far it may rise above 1.
      kl_coef: factor of the KL in the loss, in units of advantage per nat; 0: none, and no reference.
      entropy_coef: factor of the entropy bonus, in units of advantage per nat.
      kl_bias_corrected: weigh the KL of each token by its importance ratio, as TRL does by default.
      std_eps: added to the deviation that a group's rewards are divided by; 1e-4 in TRL.
    """
    weighed = clipped_importance(clip_low, clip_high)
    term = with_regularizers(weighed, kl_coef, entropy_coef, kl_bias_corrected=kl_bias_corrected)
    return Algorithm(
        advantage=chain(group_center(), group_scale(std_eps), to_tokens()),
        losses={"policy": reduce(term, token_mean())},
    )
