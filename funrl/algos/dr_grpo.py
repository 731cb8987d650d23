"""Dr. GRPO: GRPO without its two biases, the division by the deviation and the division by the length.

References: Liu et al., 2025, https://arxiv.org/abs/2503.20783.
verl: norm_adv_by_std_in_grpo=False with seq-mean-token-sum-norm, which divides by the padded width unless told a
  constant. TRL: loss_type dr_grpo divides by max_completion_length and counts empty rows too.
"""

from __future__ import annotations

from funrl.algos.advantages import group_center
from funrl.algos.compose import policy
from funrl.algos.core import Algorithm, chain, reduce
from funrl.algos.reductions import constant_mean
from funrl.algos.shaping import to_tokens
from funrl.algos.terms import clipped_surrogate


def dr_grpo(length: float = 1024, low: float = 0.2, high: float = 0.2, entropy: float = 0.0) -> Algorithm:
    """GRPO done right.

    Args:
      length: what every sequence's sum is divided by, tokens; usually the longest completion allowed.
      low, high: how far the ratio may fall below and rise above 1.
      entropy: factor of the entropy bonus, in units of advantage per nat.
    Needs: score, group, old_logp.
    """
    return Algorithm(
        advantage=chain(group_center(), to_tokens()),
        policy_loss=reduce(policy(clipped_surrogate(low, high), 0.0, entropy), constant_mean(length)),
    )
