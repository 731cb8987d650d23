"""OTB: the reward to go less the baseline of least variance at each token position of the group.

References: Li et al., 2026, https://arxiv.org/abs/2602.07078.
verl: optimal_token_baseline and, with turns=True, tir_optimal_token_baseline; its default trainer does not carry
  sum_pi_squared, and its tail keeps the raw return. TRL has none.
"""

from __future__ import annotations

from funrl.algos.advantages import reward_to_go
from funrl.algos.compose import policy
from funrl.algos.core import Algorithm, chain, reduce
from funrl.algos.reductions import token_mean
from funrl.algos.shaping import Controller, token_rewards
from funrl.algos.terms import clipped_surrogate
from funrl.algos.token_baselines import optimal_token_baseline


def otb(
    turns: bool = False,
    raw_tail: bool = False,
    low: float = 0.2,
    high: float = 0.2,
    kl_reward: Controller | None = None,
    entropy: float = 0.0,
) -> Algorithm:
    """Optimal token baseline.

    Args:
      turns, raw_tail: of `optimal_token_baseline`.
      low, high: how far the ratio may fall below and rise above 1.
      kl_reward: `fixed_kl(...)` or `adaptive_kl(...)` takes a KL off the rewards; None: none, and no reference.
      entropy: factor of the entropy bonus, in units of advantage per nat.
    Needs: score, group, old_logp, sum_pi_squared, and ref_logp where there is a KL.
    """
    return Algorithm(
        advantage=chain(token_rewards(kl_reward), reward_to_go(), optimal_token_baseline(turns, raw_tail)),
        policy_loss=reduce(policy(clipped_surrogate(low, high), 0.0, entropy), token_mean()),
    )
