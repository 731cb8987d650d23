"""RLOO: REINFORCE with the mean of the other completions of the prompt as a baseline.

References: Ahmadian et al., 2024, https://arxiv.org/abs/2402.14740.
verl: token mean; a singleton group keeps its raw reward. TRL: one ratio for the summed log-probabilities of a sequence;
  takes the KL of the sequence off after clipping the reward, as `clip_reward` before this chain would.
"""

from __future__ import annotations

from funrl.algos.baselines import leave_one_out
from funrl.algos.compose import policy
from funrl.algos.core import Algorithm, chain, reduce
from funrl.algos.reductions import sequence_sum_mean
from funrl.algos.shaping import Controller, kl_in_reward, to_tokens
from funrl.algos.terms import clipped_surrogate


def rloo(low: float = 0.2, high: float = 0.2, kl_reward: Controller | None = None, entropy: float = 0.0) -> Algorithm:
    """REINFORCE leave-one-out; the clip matters only from the second update on a batch.

    Args:
      low, high: how far the ratio may fall below and rise above 1.
      kl_reward: `fixed_kl(...)` or `adaptive_kl(...)` takes the sequence's KL off its reward; None: none.
      entropy: factor of the entropy bonus, in units of advantage per nat.
    Needs: score, group, old_logp, and ref_logp where there is a KL.
    """
    penalty = () if kl_reward is None else (kl_in_reward(kl_reward),)
    return Algorithm(
        advantage=chain(*penalty, leave_one_out(), to_tokens()),
        policy_loss=reduce(policy(clipped_surrogate(low, high), 0.0, entropy), sequence_sum_mean()),
    )
