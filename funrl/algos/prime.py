"""PRIME: outcomes and the dense rewards of an implicit process model that is trained along, on outcomes alone.

References: Cui et al., 2025, https://arxiv.org/abs/2502.01456.
verl: in a recipe, both rewards times 5, whitened. Its baseline of the process rewards is not leave-one-out: a token
  gets q n / (n - 1) less sum_j mean_t q[j, t] / (n - 1), its own row included. Bounds on a group's accuracy are
  inclusive. TRL has none.

Whitening is over tokens: where completions differ in length, a group of equal outcomes and process rewards, or a row
that is alone, does not get 0 but minus the mean over the batch's tokens.
"""

from __future__ import annotations

from funrl.algos.advantages import reward_to_go, whiten
from funrl.algos.baselines import leave_one_out
from funrl.algos.compose import policy
from funrl.algos.core import Algorithm, chain, reduce
from funrl.algos.filters import mean_between
from funrl.algos.reductions import token_mean
from funrl.algos.shaping import to_last_token
from funrl.algos.terms import clipped_surrogate
from funrl.algos.token_baselines import implicit_reward_loss, implicit_rewards, label_outcomes


def prime(
    beta: float = 0.05,
    process: float = 1.0,
    low: float = 0.2,
    high: float = 0.2,
    easiest: float = 0.8,
    hardest: float = 0.2,
    entropy: float = 0.0,
) -> Algorithm:
    """Process reinforcement through implicit rewards.

    Args:
      beta: of the implicit rewards, reward per nat.
      process: weight of the process rewards beside the outcome's 1.
      low, high: how far the ratio may fall below and rise above 1.
      easiest, hardest: prompts are kept whose mean score lies strictly between.
      entropy: factor of the entropy bonus, in units of advantage per nat.
    Needs: score in 0 to 1, group, old_logp, reward_logp, ref_logp. Filter: groups of middling scores.

    Warning: advantages of a group of equal rewards, or of one row, are not 0: see the head of this file.
    """
    rewards = chain(label_outcomes(), leave_one_out(), to_last_token(), implicit_rewards(beta, process))
    return Algorithm(
        advantage=chain(rewards, reward_to_go(), whiten()),
        policy_loss=reduce(policy(clipped_surrogate(low, high), 0.0, entropy), token_mean()),
        reward_loss=implicit_reward_loss(beta),
        keep=mean_between(hardest, easiest),
    )
