"""DPPO: GRPO whose trust region is a distance of probabilities, not of ratios.

References: Qi et al., 2026, https://arxiv.org/abs/2602.04879.
verl: loss modes dppo_tv and dppo_kl; the cap is the dual clip's constant, 3.0 unless told otherwise. TRL has none.
"""

from __future__ import annotations

from funrl.algos.advantages import group_center, group_scale
from funrl.algos.compose import policy
from funrl.algos.core import Algorithm, chain, reduce
from funrl.algos.reductions import token_mean
from funrl.algos.shaping import to_tokens
from funrl.algos.terms_token import divergence_mask


def dppo(
    kind: str = "tv",
    low: float = 0.2,
    high: float = 0.2,
    cap: float = 20.0,
    kl_loss: float = 0.0,
    entropy: float = 0.0,
) -> Algorithm:
    """Divergence proximal policy optimisation.

    Args:
      kind: "tv", bounds in probability, or "kl", bounds in nats.
      low, high: the bounds for tokens that become less and more likely.
      cap: the largest importance weight.
      kl_loss: factor of the KL (k3) in the loss, in units of advantage per nat; 0: none, and no reference.
      entropy: factor of the entropy bonus, in units of advantage per nat.
    Needs: score, group, old_logp, and ref_logp where there is a KL.
    """
    return Algorithm(
        advantage=chain(group_center(), group_scale(), to_tokens()),
        policy_loss=reduce(policy(divergence_mask(kind, low, high, cap), kl_loss, entropy), token_mean()),
    )
