"""PPO: a critic, generalised advantage estimation, a clipped surrogate.

References: Schulman et al., 2017, https://arxiv.org/abs/1707.06347; on language models, Ouyang et al., 2022,
  https://arxiv.org/abs/2203.02155.
verl: gamma = lambda = 1, no KL, whitening that leaves advantages at tool tokens; its dual clip (3) is always on.
TRL: its PPOTrainer, no longer in 1.16, had a KL of 0.05 in the reward, lambda 0.95, value clip 0.2, no dual clip, and
  its own end-of-text penalty.
"""

from funrl.algos.advantages.returns import gae, whiten
from funrl.algos.advantages.shaping import token_rewards
from funrl.algos.compose import kl_controller, with_regularizers
from funrl.algos.core import Algorithm, chain, reduce
from funrl.algos.losses.clipped import clipped_surrogate
from funrl.algos.losses.reductions import token_mean
from funrl.algos.losses.value_loss import clipped_value_loss


def ppo(
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = 3.0,
    value_clip: float | None = 0.5,
    gamma: float = 1.0,
    gae_lambda: float = 0.95,
    kl_coef: float = 0.01,
    kl_target: float | None = None,
    entropy_coef: float = 0.0,
) -> Algorithm:
    """Proximal policy optimisation with a critic.

    Args:
      clip_low, clip_high: how far the ratio of a token may fall below and rise above 1.
      dual_clip: the largest ratio that counts where the advantage is negative; None: no bound.
      value_clip: how far a value may move in one step, in units of reward; None: any distance.
      gamma: discount of a reward, per token.
      gae_lambda: trust in sampled rewards over the critic, per token; 1 uses rewards alone.
      kl_coef: reward subtracted per nat of KL to the reference; 0: none, and no reference.
      kl_target: target KL in nats per token, to which the coefficient adapts; None: the coefficient is constant.
      entropy_coef: factor of the entropy bonus, in units of advantage per nat.
    """
    return Algorithm(
        advantage=chain(token_rewards(kl_controller(kl_coef, kl_target)), gae(gamma, gae_lambda), whiten()),
        losses={
            "critic": reduce(clipped_value_loss(value_clip), token_mean()),
            "policy": reduce(
                with_regularizers(clipped_surrogate(clip_low, clip_high, dual_clip), 0.0, entropy_coef), token_mean()
            ),
        },
    )
