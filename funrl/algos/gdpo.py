"""GDPO: GRPO for several reward functions, each normalised in its group by itself.

The sum is divided by its deviation over the batch's rows. Its mean over them is 0, since every group's is, so nothing
is taken off, and a group of equal rewards keeps exactly 0.

References: Liu et al., 2026, https://arxiv.org/abs/2601.05242.
verl: mean and deviation of the last step are over tokens, which moves the zeros of equal groups; its default trainer
  does not carry the single rewards.
TRL: multi_objective_aggregation="normalize_then_sum", over rows, eps 1e-4.
"""

from __future__ import annotations

from collections.abc import Sequence

from funrl.algos.advantages import batch_scale
from funrl.algos.baselines import decoupled_groups, parse_weights
from funrl.algos.compose import policy
from funrl.algos.core import Algorithm, chain, reduce
from funrl.algos.reductions import sequence_mean
from funrl.algos.shaping import to_tokens
from funrl.algos.terms import clipped_surrogate


def gdpo(
    reward_weights: str | Sequence[float] | None = None,
    low: float = 0.2,
    high: float = 0.2,
    kl_loss: float = 0.0,
    entropy: float = 0.0,
) -> Algorithm:
    """Group reward-decoupled normalisation policy optimisation.

    Args:
      reward_weights: one number a reward function, or the text of them that the command line has; None: all 1.
      low, high: how far the ratio may fall below and rise above 1.
      kl_loss: factor of the KL (k3) in the loss, in units of advantage per nat; 0: none, and no reference.
      entropy: factor of the entropy bonus, in units of advantage per nat.
    Needs: score, scores, group, old_logp, and ref_logp where there is a KL.
    Raises:
      ValueError: the text is not of numbers with commas between.
    """
    weights = parse_weights(reward_weights) if isinstance(reward_weights, str) else reward_weights
    return Algorithm(
        advantage=chain(decoupled_groups(weights), batch_scale(), to_tokens()),
        policy_loss=reduce(policy(clipped_surrogate(low, high), kl_loss, entropy), sequence_mean()),
    )
