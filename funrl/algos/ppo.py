"""PPO: a critic, generalised advantage estimation, a clipped surrogate.

References: Schulman et al., 2017, https://arxiv.org/abs/1707.06347; on language models, Ouyang et al., 2022,
  https://arxiv.org/abs/2203.02155.
verl: gamma = lam = 1, no KL, whitening that leaves advantages at tool tokens; its dual clip (3) is always on.
TRL: KL of 0.05 in the reward, lam 0.95, value clip 0.2, no dual clip, an end-of-text penalty of its own.
"""

from __future__ import annotations

from funrl.algos.advantages import gae, whiten
from funrl.algos.compose import policy
from funrl.algos.core import Algorithm, chain, reduce
from funrl.algos.reductions import token_mean
from funrl.algos.shaping import Controller, token_rewards
from funrl.algos.terms import clipped_surrogate
from funrl.algos.value import clipped_value_loss


def ppo(
    low: float = 0.2,
    high: float = 0.2,
    dual: float | None = None,
    value_clip: float | None = 0.5,
    gamma: float = 1.0,
    lam: float = 0.95,
    kl_reward: Controller | None = None,
    kl_loss: float = 0.0,
    entropy: float = 0.0,
) -> Algorithm:
    """Proximal policy optimisation with a critic.

    Args:
      low, high: how far the ratio may fall below and rise above 1.
      dual: the largest ratio that counts where the advantage is negative; None: no bound.
      value_clip: how far a value may move in one step, in units of reward; None: any distance.
      gamma, lam: of `gae`, per sampled token.
      kl_reward: `fixed_kl(...)` or `adaptive_kl(...)` takes a KL off the rewards; None: none, and no reference.
      kl_loss: factor of the KL (k3) in the loss, in units of advantage per nat.
      entropy: factor of the entropy bonus, in units of advantage per nat.
    Needs: score, value, old_logp, and ref_logp where there is a KL.
    """
    return Algorithm(
        advantage=chain(token_rewards(kl_reward), gae(gamma, lam), whiten()),
        policy_loss=reduce(policy(clipped_surrogate(low, high, dual), kl_loss, entropy), token_mean()),
        value_loss=reduce(clipped_value_loss(value_clip), token_mean()),
    )
