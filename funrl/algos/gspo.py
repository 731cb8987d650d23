"""GSPO: GRPO with the ratio of the whole sequence, normalised by its length.

References: Zheng et al., 2025, https://arxiv.org/abs/2507.18071.
verl: clamps the log-ratio at 10 from above; forces the sequence mean in some versions. TRL: importance_sampling_level
  "sequence" under whatever loss_type is set, with clips of 0.2 unless told otherwise.
"""

from __future__ import annotations

from funrl.algos.advantages import group_center, group_scale
from funrl.algos.compose import policy
from funrl.algos.core import Algorithm, chain, reduce
from funrl.algos.reductions import sequence_mean
from funrl.algos.shaping import to_tokens
from funrl.algos.terms import clipped_surrogate, sequence_ratio


def gspo(
    low: float = 3e-4, high: float = 4e-4, per_token: bool = False, kl_loss: float = 0.0, entropy: float = 0.0
) -> Algorithm:
    """Group sequence policy optimisation.

    Args:
      low, high: how far the sequence's ratio may fall below and rise above 1.
      per_token: GSPO-token, for advantages that differ by token.
      kl_loss: factor of the KL (k3) in the loss, in units of advantage per nat; 0: none, and no reference.
      entropy: factor of the entropy bonus, in units of advantage per nat.
    Needs: score, group, old_logp, and ref_logp where there is a KL.
    """
    return Algorithm(
        advantage=chain(group_center(), group_scale(), to_tokens()),
        policy_loss=reduce(
            policy(clipped_surrogate(low, high, ratio=sequence_ratio(per_token)), kl_loss, entropy), sequence_mean()
        ),
    )
