"""REINFORCE++: no critic; token rewards to go, whitened over the whole batch; and its form with a group baseline.

References: Hu et al., 2025, https://arxiv.org/abs/2501.03262.
verl: the same two estimators. OpenRLHF: divides by n, not n - 1, in the variance. TRL has neither.

Whitening is over tokens. With the group baseline, a group of equal rewards or a row that is alone therefore does not
get 0 where completions differ in length, but minus the mean over the batch's tokens.
"""

from __future__ import annotations

from funrl.algos.advantages import group_center, reward_to_go, whiten
from funrl.algos.compose import policy
from funrl.algos.core import Algorithm, chain, reduce
from funrl.algos.reductions import token_mean
from funrl.algos.shaping import Controller, to_tokens, token_rewards
from funrl.algos.terms import clipped_surrogate


def reinforce_plus_plus(
    low: float = 0.2,
    high: float = 0.2,
    gamma: float = 1.0,
    kl_reward: Controller | None = None,
    entropy: float = 0.0,
) -> Algorithm:
    """REINFORCE with the clip, the token KL and the whitening of PPO.

    Args:
      low, high: how far the ratio may fall below and rise above 1.
      gamma: discount per sampled token.
      kl_reward: takes a KL off the rewards, in the paper `fixed_kl(0.01)`; None: none, and no reference.
      entropy: factor of the entropy bonus, in units of advantage per nat.
    Needs: score, old_logp, and ref_logp where there is a KL.
    """
    return Algorithm(
        advantage=chain(token_rewards(kl_reward), reward_to_go(gamma), whiten()),
        policy_loss=reduce(policy(clipped_surrogate(low, high), 0.0, entropy), token_mean()),
    )


def reinforce_plus_plus_baseline(
    low: float = 0.2, high: float = 0.2, kl_loss: float = 0.01, entropy: float = 0.0
) -> Algorithm:
    """REINFORCE++ on rewards less their group's mean, with the KL (k2) in the loss.

    Args:
      low, high: how far the ratio may fall below and rise above 1.
      kl_loss: factor of the KL, in units of advantage per nat; 0: none, and no reference.
      entropy: factor of the entropy bonus, in units of advantage per nat.
    Needs: score, group, old_logp, and ref_logp where there is a KL.

    Warning: advantages of a group of equal rewards, or of one row, are not 0: see the head of this file.
    """
    return Algorithm(
        advantage=chain(group_center(), to_tokens(), whiten()),
        policy_loss=reduce(policy(clipped_surrogate(low, high), kl_loss, entropy, "k2"), token_mean()),
    )
