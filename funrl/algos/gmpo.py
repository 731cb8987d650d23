"""GMPO: GRPO with the geometric mean of a sequence's token ratios, each clipped in the log.

References: Zhao et al., 2025, https://arxiv.org/abs/2507.20673.
verl: a plain mean over the rows of each micro-batch, so the loss grows with the number of micro-batches.
TRL: in its experimental trainers, with clips of the ratio.
"""

from __future__ import annotations

from funrl.algos.advantages import group_center, group_scale
from funrl.algos.compose import policy
from funrl.algos.core import Algorithm, chain, reduce
from funrl.algos.reductions import sequence_mean
from funrl.algos.shaping import to_tokens
from funrl.algos.terms_sequence import geometric_mean


def gmpo(low: float = 0.4, high: float = 0.4, kl_loss: float = 0.0, entropy: float = 0.0) -> Algorithm:
    """Geometric-mean policy optimisation.

    Args:
      low, high: how far a token's log-ratio may fall below and rise above 0, in nats.
      kl_loss: factor of the KL (k3) in the loss, in units of advantage per nat; 0: none, and no reference.
      entropy: factor of the entropy bonus, in units of advantage per nat.
    Needs: score, group, old_logp, and ref_logp where there is a KL.
    """
    return Algorithm(
        advantage=chain(group_center(), group_scale(), to_tokens()),
        policy_loss=reduce(policy(geometric_mean(low, high), kl_loss, entropy), sequence_mean()),
    )
