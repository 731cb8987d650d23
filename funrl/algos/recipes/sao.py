"""SAO: one completion a prompt, a critic instead of a group, and no token that is far from the policy that sampled it.

References: Hou et al., 2026, https://arxiv.org/abs/2607.07508 (GLM-5.2). Its abstract was read, and what the ports of
  Lego-RL (whose range of ratios, 0.2 to 4, is the default here), Molt and TorchTrade say of it.
verl: by options, but for the parts of the critic that do not learn. TRL: asked for in trl#6473.

Run it with --samples_per_prompt=1, --critic_updates=2, --freeze=critic:attention and --staleness; the paper also learns
a critic before, as --critic_warmup_steps does.
"""

from funrl.algos.advantages.returns import gae, length_adaptive
from funrl.algos.advantages.shaping import to_last_token
from funrl.algos.compose import with_regularizers
from funrl.algos.core import Algorithm, chain, reduce
from funrl.algos.losses.reductions import token_mean
from funrl.algos.losses.token_terms import masked_importance
from funrl.algos.losses.value_loss import clipped_value_loss


def sao(
    clip_low: float = 0.8,
    clip_high: float = 3.0,
    alpha: float = 0.05,
    value_clip: float | None = None,
    entropy_coef: float = 0.0,
) -> Algorithm:
    """Single-rollout asynchronous optimisation.

    Args:
      clip_low, clip_high: how far the ratio to the engine may fall below and rise above 1; tokens beyond have no
        gradient.
      alpha: lambda of the policy is 1 - 1 / (alpha length), and 0 up to a length of 1 / alpha; that of the critic is 1.
      value_clip: how far a value may move in one step, in units of reward; None: any distance.
      entropy_coef: factor of the entropy bonus, in units of advantage per nat.

    Warning: the ratio to the engine already includes its gap to the trainer: do not add `importance_weights`.
    """
    term = masked_importance(clip_low, clip_high)
    return Algorithm(
        advantage=chain(to_last_token(), gae(1.0, length_adaptive(alpha), critic_lambda=1.0)),
        losses={
            "critic": reduce(clipped_value_loss(value_clip), token_mean()),
            "policy": reduce(with_regularizers(term, 0.0, entropy_coef), token_mean()),
        },
    )
