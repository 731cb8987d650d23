"""Policy terms that gate the ratio in other ways than the clipped surrogate.

CISPO, SAPO, GPG, DPPO, TOPR, DRO and CFPO use them.

| term | loss per token, A the advantage, r = pi / pi_old, sg stops the gradient | of |
|---|---|---|
| `policy_gradient` | -A log pi | REINFORCE, GPG |
| `surrogate` | -A r | TRPO without its constraint |
| `clipped_importance` | -A sg(clip(r)) log pi | CISPO |
| `masked_importance` | -A sg(r [1 - l < r < 1 + h]) log pi | GLM-5 |
| `tapered` | -A log pi where A >= 0, else -A sg(min(r, 1)) log pi | TOPR |
| `soft_gate` | -A sigmoid(tau (r - 1)) 4 / tau | SAPO |
| `divergence_mask` | -A sg(min(r, cap) [near]) log pi | DPPO |
| `direct_reward` | -(A log pi - beta/2 log(r)^2) | DRO |
| `quadratic_surrogate` | -(A r - abs(A) (r - 1)^2 / (2 clip)) | CFPO |
"""

from __future__ import annotations

import torch
from torch import Tensor

from funrl.algos.losses.ratios import Ratio, bounded_exp, either, log_ratio, or_token_ratio, product_ratio
from funrl.algos.terms import Term
from funrl.batch import Batch


def policy_gradient() -> Term:
    """-A log pi: the plain policy gradient, for on-policy data.

    Needs: advantage [B, T].
    Returns: a term; loss [B, T] in the advantage's unit times nats.
    References: Williams, 1992; GPG, Chu et al., 2025, https://arxiv.org/abs/2504.02546
    """
    return lambda logp_BT, batch: (-batch.advantage * logp_BT, {})


def surrogate(ratio: Ratio | None = None) -> Term:
    """-A r, without a clip.

    Args:
      ratio: how the ratio is taken; None is `token_ratio()`.
    Needs: old_logp, advantage [B, T].
    Returns: a term; loss [B, T] in the advantage's unit; metric "actor/ppo_kl" (nats).
    """
    ratio = or_token_ratio(ratio)

    def term(logp_BT: Tensor, batch: Batch):
        loss_BT = -batch.advantage * ratio(logp_BT, batch)
        return loss_BT, {"actor/ppo_kl": -log_ratio(logp_BT, batch)}

    return term


def clipped_importance(clip_low: float | None = None, clip_high: float = 0.2, ratio: Ratio | None = None) -> Term:
    """-A sg(clip(r, 1 - clip_low, 1 + clip_high)) log pi: the clip bounds the weight, and each token keeps a gradient.

    Args:
      clip_low: how far the weight may fall below 1, 0 to 1; None: to 0.
      clip_high: how far it may rise above 1, at least 0.
      ratio: how the ratio is taken; None is `token_ratio()`.
    Needs: old_logp, advantage [B, T].
    Returns: a term; loss [B, T]; metrics "actor/pg_clipfrac" (the weight was bounded), "actor/ppo_kl".

    Raises:
      ValueError: a clip is outside its bounds.
    References: CISPO, MiniMax, 2025, https://arxiv.org/abs/2506.13585

    Warning: in TRL epsilon_high is the upper bound itself, 1 + clip_high here; ScaleRL's 5 is clip_high=4.
    """
    if clip_high < 0 or not 0 <= (clip_low or 0) <= 1:
        raise ValueError(
            f"clipped_importance(clip_low={clip_low}, clip_high={clip_high}): the weight's bounds 1 - clip_low and "
            "1 + clip_high must be at least 0 and at least 1: clip_low is from 0 to 1, clip_high at least 0"
        )
    ratio = or_token_ratio(ratio)

    def term(logp_BT: Tensor, batch: Batch):
        r_BT = ratio(logp_BT, batch).detach()
        weight_BT = r_BT.clamp(None if clip_low is None else 1 - clip_low, 1 + clip_high)
        return -batch.advantage * weight_BT * logp_BT, {
            "actor/pg_clipfrac": (weight_BT != r_BT).to(r_BT.dtype),
            "actor/ppo_kl": -log_ratio(logp_BT, batch),
        }

    return term


def masked_importance(clip_low: float = 0.2, clip_high: float = 0.2, sampled_by: str = "rollout_logp") -> Term:
    """-A sg(r [1 - clip_low < r < 1 + clip_high]) log pi: a token outside the range has no gradient at all.

    r is the ratio to the policy that sampled. One test then bounds both the gap between engine and trainer and the
    policy's own movement.

    Args:
      clip_low: how far the ratio may fall below 1, 0 to 1.
      clip_high: how far it may rise above 1, at least 0.
      sampled_by: "rollout_logp", the engine, as published, without `importance_weights`, which would count the gap
        twice; or "old_logp".
    Needs: advantage and `sampled_by` [B, T].
    Returns: a term; loss [B, T]; metrics "actor/pg_clipfrac" (out of range), "actor/ppo_kl" (nats, to the sampler).

    Raises:
      ValueError: a clip is outside its bounds.
    References: GLM-5, section 4.1.2, 2026, https://arxiv.org/abs/2602.15763; SkyRL's rollout_is.

    Warning: the token stays in the denominator, as in SkyRL. `reject_ratio` with `importance_weights` removes it, and
    tests only the policy before the update.
    """
    if clip_high < 0 or not 0 <= clip_low <= 1:
        raise ValueError(
            f"masked_importance(clip_low={clip_low}, clip_high={clip_high}): clip_low is from 0 to 1, clip_high at "
            "least 0"
        )

    def term(logp_BT: Tensor, batch: Batch):
        moved_BT = logp_BT.detach() - getattr(batch, sampled_by)
        r_BT = bounded_exp(moved_BT)
        inside_BT = (r_BT > 1 - clip_low) & (r_BT < 1 + clip_high)
        weight_BT = torch.where(inside_BT, r_BT, torch.zeros_like(r_BT))
        return -batch.advantage * weight_BT * logp_BT, {
            "actor/pg_clipfrac": (~inside_BT).to(r_BT.dtype),
            "actor/ppo_kl": -moved_BT,
        }

    return term


def tapered(ratio: Ratio | None = None) -> Term:
    """-A log pi where A >= 0, -A sg(min(r, 1)) log pi elsewhere.

    Good completions are imitated, even off-policy; bad ones count less as the policy becomes less likely to write them.

    Args:
      ratio: how the ratio is taken; None is `product_ratio()`, of the whole sequence, as published.
    Needs: old_logp, advantage [B, T].
    Returns: a term; loss [B, T] in the advantage's unit times nats; metrics "actor/pg_clipfrac" (the weight is below
      its ratio), "actor/ppo_kl" (nats).
    References: TOPR, Le Roux et al., 2025, https://arxiv.org/abs/2503.14286

    Warning: ROLL takes the ratio of each token, `ratio=token_ratio()`, and separates good from bad by the raw score.
    """
    ratio = product_ratio() if ratio is None else or_token_ratio(ratio)

    def term(logp_BT: Tensor, batch: Batch):
        a_BT = batch.advantage
        r_BT = ratio(logp_BT, batch).detach()
        weight_BT = torch.where(a_BT < 0, r_BT.clamp(max=1), torch.ones_like(r_BT))
        return -a_BT * weight_BT * logp_BT, {
            "actor/pg_clipfrac": ((a_BT < 0) & (r_BT > 1)).to(r_BT.dtype),
            "actor/ppo_kl": -log_ratio(logp_BT, batch),
        }

    return term


def soft_gate(positive: float = 1.0, negative: float = 1.05, ratio: Ratio | None = None) -> Term:
    """-A sigmoid(tau (r - 1)) 4 / tau: the clip's smooth form; its slope in r is -A at r = 1 and fades on both sides.

    Args:
      positive: tau where A > 0, above 0; larger fades sooner.
      negative: tau elsewhere, above 0.
      ratio: how the ratio is taken; None is `token_ratio()`.
    Needs: old_logp, advantage [B, T].
    Returns: a term; loss [B, T] in the advantage's unit; metric "actor/ppo_kl".

    Raises:
      ValueError: a tau is not above 0.
    References: SAPO, Gao et al., 2025, https://arxiv.org/abs/2511.20347
    """
    if positive <= 0 or negative <= 0:
        raise ValueError(f"soft_gate(positive={positive}, negative={negative}): both temperatures must be above 0")
    ratio = or_token_ratio(ratio)

    def term(logp_BT: Tensor, batch: Batch):
        a_BT = batch.advantage
        tau_BT = either(a_BT > 0, positive, negative, like=a_BT)
        gate_BT = torch.sigmoid(tau_BT * (ratio(logp_BT, batch) - 1)) * 4 / tau_BT
        return -a_BT * gate_BT, {"actor/ppo_kl": -log_ratio(logp_BT, batch)}

    return term


TRUST_REGIONS = {"tv": 0.15, "kl": 0.05}  # the bounds of the paper's scripts


def divergence_mask(
    kind: str = "tv",
    low: float | None = None,
    high: float | None = None,
    cap: float = 20.0,
    sampled_by: str = "rollout_logp",
) -> Term:
    """-A sg(min(r, cap) [near]) log pi: masks by the distance of probabilities, not by their ratio.

    With p = pi(t), q = pi_sampler(t), r = p / q: a token gets no gradient if the update would move p further beyond the
    bound. tv: near = p - q <= high where A > 0, p - q >= -low elsewhere. kl: with the divergence of the two-way choice
    "this token or another", D = q log(q / p) + (1 - q) log((1 - q) / (1 - p)): near = D <= high or p <= q where A > 0,
    D <= low or p >= q elsewhere.

    Args:
      kind: "tv" (bounds in probability) or "kl" (bounds in nats).
      low, high: the bounds for falling and rising probabilities, at least 0; None: 0.15 for "tv" and 0.05 for "kl".
      cap: the largest importance weight, above 0.
      sampled_by: the policy to stay near: "rollout_logp", the engine's, as published, which includes the gap between
        engine and trainer (do not add `importance_weights`, which would count it twice); or "old_logp".
    Needs: advantage and `sampled_by` [B, T].
    Returns: a term; loss [B, T]; metrics "actor/pg_clipfrac" (not near), "actor/ppo_kl" (nats, to the sampler).

    Raises:
      ValueError: the kind is unknown, a bound is below 0, or the cap is not above 0.
    References: DPPO, Qi et al., 2026, https://arxiv.org/abs/2602.04879

    Warning: verl caps the weight by the dual clip's constant, 3.0 by default, and takes the distance from old_logp
    unless rollout_correction.bypass_mode is on, as in its DPPO script.
    """
    if kind not in TRUST_REGIONS:
        raise ValueError(f"kind is {kind!r}; there are 'tv' and 'kl'")
    below, above = (TRUST_REGIONS[kind] if bound is None else bound for bound in (low, high))
    if below < 0 or above < 0 or cap <= 0:
        raise ValueError(
            f"divergence_mask(low={low}, high={high}, cap={cap}): the bounds must be at least 0 and the cap above 0"
        )

    def term(logp_BT: Tensor, batch: Batch):
        a_BT = batch.advantage
        old_BT = getattr(batch, sampled_by)
        now_BT = logp_BT.detach()
        p_BT = now_BT.exp()
        q_BT = old_BT.exp()
        if kind == "tv":
            rising_BT = p_BT - q_BT <= above
            falling_BT = p_BT - q_BT >= -below
        else:
            other_BT = (1 - q_BT) * ((1 - q_BT + 1e-8) / (1 - p_BT + 1e-8)).log()
            divergence_BT = q_BT * (old_BT - now_BT) + other_BT
            rising_BT = (divergence_BT <= above) | (p_BT <= q_BT)
            falling_BT = (divergence_BT <= below) | (p_BT >= q_BT)
        near_BT = torch.where(a_BT > 0, rising_BT, falling_BT)
        weight_BT = torch.where(near_BT, bounded_exp(now_BT - old_BT).clamp(max=cap), torch.zeros_like(a_BT))
        metrics = {"actor/pg_clipfrac": (~near_BT).to(a_BT.dtype), "actor/ppo_kl": old_BT - now_BT}
        return -a_BT * weight_BT * logp_BT, metrics

    return term


def direct_reward(beta: float = 0.1) -> Term:
    """-(A log pi - beta/2 (log pi - log pi_old)^2): a policy gradient with a quadratic penalty; also off-policy.

    Args:
      beta: strength of the penalty, in the advantage's unit per nat, above 0.
    Needs: old_logp, advantage [B, T].
    Returns: a term; loss [B, T]; metric "actor/ppo_kl".

    Raises:
      ValueError: beta is not above 0.
    References: DRO, Richemond et al., 2024, https://arxiv.org/abs/2405.19107
    """
    if beta <= 0:
        raise ValueError(f"beta is {beta}: it must be above 0")

    def term(logp_BT: Tensor, batch: Batch):
        moved_BT = log_ratio(logp_BT, batch)
        return 0.5 * beta * moved_BT.square() - batch.advantage * logp_BT, {"actor/ppo_kl": -moved_BT}

    return term


def quadratic_surrogate(clip: float = 0.2, ratio: Ratio | None = None) -> Term:
    """-(A r - abs(A) (r - 1)^2 / (2 clip)): a quadratic penalty instead of the clip.

    It is convex in r, and has its minimum where the clip of the surrogate begins: at 1 + clip where A > 0, at 1 - clip
    where A < 0. Beyond, the gradient pulls the ratio back instead of vanishing.

    Args:
      clip: distance of the minimum from 1, above 0.
      ratio: how the ratio is taken; None is `token_ratio()`.
    Needs: old_logp, advantage [B, T].
    Returns: a term; loss [B, T] in the advantage's unit; metrics "actor/pg_clipfrac" (the ratio is beyond the minimum),
      "actor/ppo_kl".

    Raises:
      ValueError: clip is not above 0.
    References: CFPO, Cagatan et al., 2026, https://arxiv.org/abs/2601.22801; SPO, Xie et al., 2024,
      https://arxiv.org/abs/2401.16025
    """
    if clip <= 0:
        raise ValueError(f"quadratic_surrogate(clip={clip}): it must be above 0")
    ratio = or_token_ratio(ratio)

    def term(logp_BT: Tensor, batch: Batch):
        a_BT = batch.advantage
        moved_BT = ratio(logp_BT, batch) - 1
        loss_BT = a_BT.abs() * moved_BT.square() / (2 * clip) - a_BT * (1 + moved_BT)
        return loss_BT, {
            "actor/pg_clipfrac": (a_BT.sign() * moved_BT > clip).to(a_BT.dtype),
            "actor/ppo_kl": -log_ratio(logp_BT, batch),
        }

    return term
