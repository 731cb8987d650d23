"""PRIME: outcomes plus dense rewards of an implicit process model that is trained alongside, on outcomes only.

References: Cui et al., 2025, https://arxiv.org/abs/2502.01456.
verl: in a recipe, both rewards times 5, whitened. Its baseline of the process rewards is not leave-one-out: a token
  gets q n / (n - 1) minus sum_j mean_t q[j, t] / (n - 1), its own row included. Bounds on a group's accuracy are
  inclusive. TRL has none.

Whitening is over tokens: where completions differ in length, a group of equal outcomes and process rewards, or a row
that is alone in its group, gets minus the mean over the batch's tokens instead of 0.
"""

from funrl.algos.advantages.baselines import leave_one_out
from funrl.algos.advantages.returns import reward_to_go, whiten
from funrl.algos.advantages.shaping import to_last_token
from funrl.algos.advantages.token_baselines import implicit_rewards, label_outcomes
from funrl.algos.compose import with_regularizers
from funrl.algos.core import Algorithm, chain, reduce
from funrl.algos.filters.by_group import mean_between
from funrl.algos.losses.clipped import clipped_surrogate
from funrl.algos.losses.implicit_reward import implicit_reward_loss
from funrl.algos.losses.reductions import token_mean


def prime(
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    beta: float = 0.05,
    process_coef: float = 1.0,
    easiest: float = 0.8,
    hardest: float = 0.2,
    entropy_coef: float = 0.0,
) -> Algorithm:
    """Process reinforcement through implicit rewards.

    Args:
      clip_low, clip_high: how far the ratio of a token may fall below and rise above 1.
      beta: reward per nat between the implicit reward model and the reference.
      process_coef: weight of the process rewards; the outcome's is 1.
      easiest, hardest: keep prompts whose mean score, 0 to 1, is strictly between these two.
      entropy_coef: factor of the entropy bonus, in units of advantage per nat.

    Warning: advantages of a group of equal rewards, or of one row, are not 0: see the head of this file.
    """
    rewards = chain(label_outcomes(), leave_one_out(), to_last_token(), implicit_rewards(beta, process_coef))
    surrogate = clipped_surrogate(clip_low, clip_high)
    return Algorithm(
        advantage=chain(rewards, reward_to_go(), whiten()),
        losses={
            "implicit_reward": implicit_reward_loss(beta),
            "policy": reduce(with_regularizers(surrogate, 0.0, entropy_coef), token_mean()),
        },
        filter=mean_between(hardest, easiest),
    )
