"""DPPO: GRPO with a trust region on probabilities instead of ratios.

References: Qi et al., 2026, https://arxiv.org/abs/2602.04879. Bounds and `sampled_by` are those of its script in verl,
  which uses Dr. GRPO's advantage and reduction: no division by the group's deviation, sums over a constant. Here it
  uses GRPO's advantage and the token mean, so that recipes of this family differ in the term alone.
verl: loss modes dppo_tv and dppo_kl; the cap is the dual clip's constant, 3.0 by default; the distance is from old_logp
  unless bypass_mode is on. TRL 1.16 has none.
"""

from funrl.algos.advantages.baselines import group_center, group_scale
from funrl.algos.advantages.shaping import to_tokens
from funrl.algos.compose import with_regularizers
from funrl.algos.core import Algorithm, chain, reduce
from funrl.algos.losses.reductions import token_mean
from funrl.algos.losses.token_terms import divergence_mask


def dppo(
    kind: str = "tv",
    low: float | None = None,
    high: float | None = None,
    cap: float = 20.0,
    sampled_by: str = "rollout_logp",
    kl_coef: float = 0.0,
    entropy_coef: float = 0.0,
) -> Algorithm:
    """Divergence proximal policy optimisation.

    Args:
      kind: tv, bounds in probability, or kl, bounds in nats.
      low, high: the bounds for tokens that become less and more likely; None: 0.15 for tv and 0.05 for kl.
      cap: the largest importance weight.
      sampled_by: the policy to stay near: rollout_logp, the engine's, or old_logp, the trainer's before the update.
      kl_coef: factor of the KL in the loss, in units of advantage per nat; 0: none, and no reference.
      entropy_coef: factor of the entropy bonus, in units of advantage per nat.

    Warning: with rollout_logp the weight min(r, cap) already includes the gap between engine and trainer: do not add
    `importance_weights`.
    """
    near = divergence_mask(kind, low, high, cap=cap, sampled_by=sampled_by)
    return Algorithm(
        advantage=chain(group_center(), group_scale(), to_tokens()),
        losses={"policy": reduce(with_regularizers(near, kl_coef, entropy_coef), token_mean())},
    )
