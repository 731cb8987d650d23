"""Policy terms whose ratio or loss is of a whole sequence, placed on each of its tokens: reduce by `sequence_mean`.

GSPO is `clipped_surrogate(ratio=sequence_ratio())` under `sequence_mean`; LUSPO is the same under `sequence_sum_mean`,
which weighs a sequence by its length (Liu et al., 2026, https://arxiv.org/abs/2602.05261).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from funrl.algos.core import Term, run_term
from funrl.algos.losses.ratios import (
    LOG_RATIO_BOUND,
    bounded_exp,
    either,
    log_ratio,
    mean_of_sequence,
    sum_of_sequence,
)
from funrl.batch import Batch

SMALLEST_WEIGHT = 1e-8


def geometric_mean(clip_low: float = 0.4, clip_high: float = 0.4) -> Term:
    """-mean_t(A) exp(mean_t d), the clipped geometric mean of the token ratios, times the sequence's advantage.

    d = s min(s x, s clip(x, -clip_low, clip_high)) with x = log(pi / pi_old) and s = sign(A), per token.

    Args:
      clip_low, clip_high: how far a log-ratio may fall below and rise above 0, in nats, at least 0.
    Needs: old_logp, advantage [B, T].
    Returns: a term; loss [B, T], the same on all tokens of a sequence; metrics "actor/pg_clipfrac", "actor/ppo_kl".
    Raises:
      ValueError: a clip is below 0.
    References: GMPO, Zhao et al., 2025, https://arxiv.org/abs/2507.20673

    Warning: verl takes the mean over the sequences of a micro-batch, so its loss grows with their number, and folds
    importance weights in as a geometric mean; here the reduction is apart, and `weighted` multiplies token by token.
    """

    if clip_low < 0 or clip_high < 0:
        raise ValueError(f"geometric_mean(clip_low={clip_low}, clip_high={clip_high}): both must be at least 0")

    def term(logp_BT: Tensor, batch: Batch):
        a_BT, x_BT = batch.advantage, log_ratio(logp_BT, batch)
        sign_BT = torch.sign(a_BT)
        open_BT, clipped_BT = sign_BT * x_BT, sign_BT * x_BT.clamp(-clip_low, clip_high)
        d_BT = sign_BT * torch.minimum(open_BT, clipped_BT)
        loss_BT = -mean_of_sequence(a_BT, batch) * bounded_exp(mean_of_sequence(d_BT, batch))
        return loss_BT, {"actor/pg_clipfrac": (clipped_BT < open_BT).to(a_BT.dtype), "actor/ppo_kl": -x_BT}

    return term


def gamma_weighted(
    positive: tuple[float, float] = (2.0, 3.0),
    negative: tuple[float, float] = (3.0, 2.0),
    sampled_by: str = "rollout_logp",
) -> Term:
    """-A sg(phi(w)) log pi with phi(w) = w^k exp(c (1 - w)) and w = prod_t pi / pi_sampler of the sequence.

    phi(1) = 1, and it falls to 0 smoothly for sequences that have become much more or much less likely.

    Args:
      positive: (k, c) where A >= 0.
      negative: (k, c) where A < 0.
      sampled_by: "rollout_logp", the engine, as published: w holds the gap between engine and trainer. Then
        `importance_weights` in the chain and `weighted` around this would count that gap twice. Or "old_logp", for a
        w of the updates alone.
    Needs: advantage and `sampled_by` [B, T].
    Returns: a term; loss [B, T]; metrics "actor/vespo_weight", "actor/ppo_kl" (nats, to the sampler). w is held
      between 1e-8 and exp(20).
    References: VESPO, Shen et al., 2026, https://arxiv.org/abs/2602.10693

    Warning: TRL multiplies pi / pi_old by its importance weights, truncated or rejected as they are; here there is one
    ratio, to the policy that sampled.
    """

    def term(logp_BT: Tensor, batch: Batch):
        a_BT, moved_BT = batch.advantage, logp_BT.detach() - getattr(batch, sampled_by)
        log_w_BT = sum_of_sequence(moved_BT.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND), batch)
        log_w_BT = log_w_BT.clamp(math.log(SMALLEST_WEIGHT), LOG_RATIO_BOUND)
        k_BT = either(a_BT >= 0, positive[0], negative[0], a_BT)
        lam_BT = either(a_BT >= 0, positive[1], negative[1], a_BT)
        phi_BT = (lam_BT + k_BT * log_w_BT - lam_BT * log_w_BT.exp()).exp()
        return -a_BT * phi_BT * logp_BT, {"actor/vespo_weight": phi_BT, "actor/ppo_kl": -moved_BT}

    return term


def self_play_regression(eta: float = 1.0) -> Term:
    """(sum_t log pi - sum_t log pi_old - eta A)^2: the log-ratio of a sequence is regressed on its advantage.

    Args:
      eta: nats per unit of the advantage.
    Needs: old_logp, advantage [B, T] (the mean over the sequence's tokens is taken; SPPO's is the win rate less 1/2).
    Returns: a term; loss [B, T] in squared nats, the same on all tokens of a sequence; metric "actor/ppo_kl".
    References: SPPO, Wu et al., 2024, https://arxiv.org/abs/2405.00675

    Warning: the published loss regresses on eta (P - 1/2); verl's recipe puts the raw score instead of P - 1/2.
    """

    def term(logp_BT: Tensor, batch: Batch):
        moved_BT = log_ratio(logp_BT, batch)
        target_BT = eta * mean_of_sequence(batch.advantage, batch)
        return (sum_of_sequence(moved_BT, batch) - target_BT).square(), {"actor/ppo_kl": -moved_BT}

    return term


def mask_off_policy(term: Term, threshold: float, sampled_by: str = "old_logp") -> Term:
    """The term's loss, 0 on sequences with A < 0 whose policy has moved: mean_t(log pi_sampler - log pi) > threshold.

    The tokens still count in the reduction's denominator.

    Args:
      term: what is masked; keep a KL term outside.
      threshold: nats per token.
      sampled_by: "old_logp", or "rollout_logp" to see also the gap between engine and trainer.
    Needs: advantage and `sampled_by` [B, T].
    Returns: a term; its metrics and "actor/off_policy_masked".
    References: DeepSeek-V3.2, 2025, https://arxiv.org/abs/2512.02556
    """

    def masked(logp_BT: Tensor, batch: Batch):
        loss_BT, metrics = run_term(term, logp_BT, batch)
        gap_BT = getattr(batch, sampled_by) - logp_BT.detach()
        drop_BT = (mean_of_sequence(gap_BT, batch) > threshold) & (batch.advantage < 0)
        loss_BT = torch.where(drop_BT, torch.zeros_like(loss_BT), loss_BT)
        return loss_BT, metrics | {"actor/off_policy_masked": drop_BT.to(loss_BT.dtype)}

    return masked
