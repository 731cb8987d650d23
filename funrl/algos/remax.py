"""ReMax: REINFORCE with the reward of a greedy completion of the prompt as a baseline.

References: Li et al., 2024, https://arxiv.org/abs/2310.10505.
verl: token mean; keeps the baseline at tool tokens; its default trainer does not carry the greedy reward. TRL has none.
"""

from __future__ import annotations

from funrl.algos.advantages import reward_to_go
from funrl.algos.baselines import greedy_baseline
from funrl.algos.compose import policy
from funrl.algos.core import Algorithm, chain, reduce
from funrl.algos.reductions import sequence_sum_mean
from funrl.algos.shaping import Controller, token_rewards
from funrl.algos.terms import clipped_surrogate


def remax(low: float = 0.2, high: float = 0.2, kl_reward: Controller | None = None, entropy: float = 0.0) -> Algorithm:
    """REINFORCE with an argmax baseline; the clip matters only from the second update on a batch.

    Args:
      low, high: how far the ratio may fall below and rise above 1.
      kl_reward: `fixed_kl(...)` or `adaptive_kl(...)` takes a KL off the rewards; None: none, and no reference.
      entropy: factor of the entropy bonus, in units of advantage per nat.
    Needs: score, greedy_score, old_logp, and ref_logp where there is a KL.
    """
    return Algorithm(
        advantage=chain(greedy_baseline(), token_rewards(kl_reward), reward_to_go()),
        policy_loss=reduce(policy(clipped_surrogate(low, high), 0.0, entropy), sequence_sum_mean()),
    )
