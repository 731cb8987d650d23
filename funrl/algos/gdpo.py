"""GDPO: GRPO for several reward functions, each normalised in its group by itself.

References: Liu et al., 2026, https://arxiv.org/abs/2601.05242.
verl: the same estimator, statistics in float32; its default trainer does not carry the single rewards.
TRL: multi_objective_aggregation="normalize_then_sum", eps 1e-4.
"""

from __future__ import annotations

from collections.abc import Sequence

from funrl.algos.advantages import whiten
from funrl.algos.baselines import decoupled_groups
from funrl.algos.compose import policy
from funrl.algos.core import Algorithm, chain, reduce
from funrl.algos.reductions import sequence_mean
from funrl.algos.shaping import to_tokens
from funrl.algos.terms import clipped_surrogate


def gdpo(
    weights: Sequence[float] | None = None,
    low: float = 0.2,
    high: float = 0.2,
    kl_loss: float = 0.0,
    entropy: float = 0.0,
) -> Algorithm:
    """Group reward-decoupled normalisation policy optimisation.

    Args:
      weights: one number a reward function; None: all 1.
      low, high: how far the ratio may fall below and rise above 1.
      kl_loss: factor of the KL (k3) in the loss, in units of advantage per nat; 0: none, and no reference.
      entropy: factor of the entropy bonus, in units of advantage per nat.
    Needs: score, scores, group, old_logp, and ref_logp where there is a KL.
    """
    return Algorithm(
        advantage=chain(decoupled_groups(weights), to_tokens(), whiten()),
        policy_loss=reduce(policy(clipped_surrogate(low, high), kl_loss, entropy), sequence_mean()),
    )
