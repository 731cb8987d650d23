"""Policy terms whose ratio or loss is of a whole sequence, placed on each of its tokens: reduce by `sequence_mean`.

GSPO is `clipped_surrogate(ratio=sequence_ratio())` under `sequence_mean`; LUSPO is the same under `sequence_sum_mean`,
which weighs a sequence by its length (Liu et al., 2026, https://arxiv.org/abs/2602.05261).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from funrl.algos.losses.pair_losses import check_beta
from funrl.algos.losses.ratios import (
    LOG_RATIO_BOUND,
    bounded_exp,
    either,
    log_ratio,
    mean_of_sequence,
    sum_of_sequence,
)
from funrl.algos.masks import where_masked
from funrl.algos.scan import reverse_linear_scan
from funrl.algos.terms import Term, run_term
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
    importance weights in as a geometric mean; here the reduction is separate, and `weighted` multiplies token by token.
    """
    if clip_low < 0 or clip_high < 0:
        raise ValueError(f"geometric_mean(clip_low={clip_low}, clip_high={clip_high}): both must be at least 0")

    def term(logp_BT: Tensor, batch: Batch):
        a_BT = batch.advantage
        x_BT = log_ratio(logp_BT, batch)
        sign_BT = torch.sign(a_BT)
        open_BT = sign_BT * x_BT
        clipped_BT = sign_BT * x_BT.clamp(-clip_low, clip_high)
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
      sampled_by: "rollout_logp", the engine, as published: w includes the gap between engine and trainer, so
        `importance_weights` in the chain and `weighted` around this would count that gap twice. Or "old_logp": w covers
        the updates only.
    Needs: advantage and `sampled_by` [B, T].
    Returns: a term; loss [B, T]; metrics "actor/vespo_weight", "actor/ppo_kl" (nats, to the sampler). w is clamped to
      [1e-8, exp(20)].
    References: VESPO, Shen et al., 2026, https://arxiv.org/abs/2602.10693

    Warning: TRL multiplies pi / pi_old by its truncated or rejected importance weights; here there is one ratio, to the
    policy that sampled.
    """

    def term(logp_BT: Tensor, batch: Batch):
        a_BT = batch.advantage
        moved_BT = logp_BT.detach() - getattr(batch, sampled_by)
        log_w_BT = sum_of_sequence(moved_BT.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND), batch)
        log_w_BT = log_w_BT.clamp(math.log(SMALLEST_WEIGHT), LOG_RATIO_BOUND)
        k_BT = either(a_BT >= 0, positive[0], negative[0], like=a_BT)
        lam_BT = either(a_BT >= 0, positive[1], negative[1], like=a_BT)
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

    Warning: the published loss regresses on eta (P - 1/2); verl's recipe uses the raw score instead of P - 1/2.
    """

    def term(logp_BT: Tensor, batch: Batch):
        moved_BT = log_ratio(logp_BT, batch)
        target_BT = eta * mean_of_sequence(batch.advantage, batch)
        return (sum_of_sequence(moved_BT, batch) - target_BT).square(), {"actor/ppo_kl": -moved_BT}

    return term


def log_ratio_regression(beta: float = 0.1, against: str = "old_logp") -> Term:
    """(beta sum_t log(pi / pi') - A)^2: the implicit reward of a sequence is regressed on its advantage.

    The loss is 0 for pi = pi' exp(A / beta), which is the optimal policy at KL price beta if A = r - v*.

    Args:
      beta: in units of the advantage per nat, above 0.
      against: field of the log-probabilities of pi': "old_logp", or "ref_logp" for the reference.
    Needs: advantage (the mean over the sequence's tokens is taken) and `against` [B, T].
    Returns: a term; loss [B, T] in squared units of the advantage, the same on all tokens of a sequence; metric
      "actor/regression_error" (its square root).

    Raises:
      ValueError: beta is not above 0.
    References: A*-PO, Brantley et al., 2025, https://arxiv.org/abs/2505.20686; GVPO, Zhang et al., 2025,
      https://arxiv.org/abs/2504.19599
    """
    check_beta(beta)

    def term(logp_BT: Tensor, batch: Batch):
        moved_BT = sum_of_sequence(logp_BT - getattr(batch, against), batch)
        error_BT = beta * moved_BT - mean_of_sequence(batch.advantage, batch)
        return error_BT.square(), {"actor/regression_error": error_BT.abs()}

    return term


def flow_balance(clip_low: float = 0.2, clip_high: float = 0.28) -> Term:
    """w (mean_t log(pi / pi_ref) - A)^2 with w = sg(clip(exp(mean_t log(pi / pi_old)), 1 - clip_low, 1 + clip_high)).

    Args:
      clip_low, clip_high: how far w may fall below and rise above 1, at least 0.
    Needs: old_logp, ref_logp [B, T]; advantage [B, T], of `flow_targets` (its mean over the sequence is taken).
    Returns: a term; loss [B, T] in squared nats, the same on all tokens of a sequence; metrics "actor/flow_gap" (nats
      per token, the root without w), "actor/ppo_kl".

    Raises:
      ValueError: a clip is below 0.
    References: FlowRL, Zhu et al., 2025, https://arxiv.org/abs/2509.15207

    Warning: the paper's w is the product of the ratios; here their geometric mean, as in the authors' later code.
    """
    if clip_low < 0 or clip_high < 0:
        raise ValueError(f"flow_balance(clip_low={clip_low}, clip_high={clip_high}): both must be at least 0")

    def term(logp_BT: Tensor, batch: Batch):
        moved_BT = log_ratio(logp_BT.detach(), batch)
        gap_BT = mean_of_sequence(logp_BT - batch.ref_logp - batch.advantage, batch)
        weight_BT = bounded_exp(mean_of_sequence(moved_BT, batch)).clamp(1 - clip_low, 1 + clip_high)
        return weight_BT * gap_BT.square(), {"actor/flow_gap": gap_BT.abs(), "actor/ppo_kl": -moved_BT}

    return term


def classification(tau: float = 0.5) -> Term:
    """log(n + exp(-s / tau)) for good rows, log(m + exp(s / tau)) for the others, with s = mean_t log(pi / pi_old).

    n and m are the numbers of rows of each class, which `class_sizes` gives with a sign. The weight of a good row in
    the gradient is 1 / (tau (1 + n exp(s / tau))): it is bounded, and grows as the row becomes less probable. A row of
    class 0 has a loss of 0.

    Args:
      tau: nats per token over which a weight changes, above 0.
    Needs: old_logp [B, T]; advantage [B, T], of `class_sizes`.
    Returns: a term; loss [B, T] in nats, the same on all tokens of a sequence; metric "actor/ppo_kl" (nats).

    Raises:
      ValueError: tau is not above 0.
    References: REAL, Zhai et al., 2026, https://arxiv.org/abs/2602.05630

    Warning: the paper's loss of a group is log(1 + sum_i exp(-s_i / tau)) over its good rows, and likewise over the
    others. The gradients agree if the other rows of the group are as before the update (s_i = 0), which holds exactly
    at the first update on a batch. In return a row does not need the others in its micro-batch. ms-swift takes the mean
    over groups; a mean over rows is smaller by a factor of the group's size.
    """
    if tau <= 0:
        raise ValueError(f"classification(tau={tau}): the temperature must be above 0")

    def term(logp_BT: Tensor, batch: Batch):
        moved_BT = log_ratio(logp_BT, batch)
        class_BT = mean_of_sequence(batch.advantage, batch)
        odds_BT = bounded_exp(-class_BT.sign() * mean_of_sequence(moved_BT, batch) / tau)
        return (class_BT.abs() + odds_BT).log(), {"actor/ppo_kl": -moved_BT}

    return term


def future_weighted(
    term: Term,
    half_life: float = 32.0,
    low: float = 0.2,
    high: float = 0.2,
    most_ratio: float | None = 10.0,
    safe_ratio: float | None = 3.0,
) -> Term:
    """The term's loss times f = sg(clip(exp(F), 1 - low, 1 + high)), F[t] = sum_{k >= t} gamma^(k - t) log r[k].

    F says whether the update so far makes what follows a token more or less likely; gamma = 2^(-1 / half_life), per
    sampled token. At the first update on a batch all r are 1, and f is 1.

    Args:
      term: what is weighted; a KL term stays outside.
      half_life: distance in tokens at which a log-ratio counts half, above 0.
      low, high: how far f may fall below and rise above 1, at least 0.
      most_ratio: tokens with a larger r are left out of F; None: no bound.
      safe_ratio: where A < 0 and r is larger than this, f is at most 1; None: no such bound.
    Needs: old_logp, and advantage [B, T] with a `safe_ratio`; what the term needs.
    Returns: a term; its metrics, and "actor/future_weight" (f).

    Raises:
      ValueError: half_life is not above 0, or low or high is below 0.
    References: FIPO, Ma et al., 2026, https://arxiv.org/abs/2603.19835

    Warning: ms-swift defaults to low=0 and safe_ratio=4; the values here are those of its published script. It measures
    the distance between tokens in positions; here it is in sampled tokens, so that a tool's output does not fade what
    follows it.
    """
    if half_life <= 0 or low < 0 or high < 0:
        raise ValueError(
            f"future_weighted(half_life={half_life}, low={low}, high={high}): half_life must be above 0, low and high "
            "at least 0"
        )

    def of_future(logp_BT: Tensor, batch: Batch):
        loss_BT, metrics = run_term(term, logp_BT, batch)
        moved_BT = log_ratio(logp_BT.detach(), batch)
        r_BT = bounded_exp(moved_BT)
        counted_BT = moved_BT if most_ratio is None else torch.where(r_BT > most_ratio, 0.0, moved_BT)
        future_BT = _discounted_rest(counted_BT, 2 ** (-1 / half_life), batch)
        f_BT = bounded_exp(future_BT).clamp(1 - low, 1 + high)
        if safe_ratio is not None:
            f_BT = torch.where((batch.advantage < 0) & (r_BT > safe_ratio), f_BT.clamp(max=1), f_BT)
        return f_BT * loss_BT, metrics | {"actor/future_weight": f_BT}

    return of_future


def _discounted_rest(x_BT: Tensor, gamma: float, batch: Batch) -> Tensor:
    """sum_{k >= t} gamma^(k - t) x[k] over the masked tokens of each token's own sequence."""
    mask_BT = batch.mask
    segments_BT = batch.get("segments")
    carry_BT = either(mask_BT, gamma, 1.0, like=x_BT)
    if segments_BT is not None:
        after_BT = torch.nn.functional.pad(segments_BT[:, 1:], (0, 1))
        carry_BT = torch.where(segments_BT == after_BT, carry_BT, torch.zeros_like(carry_BT))
    return where_masked(reverse_linear_scan(where_masked(x_BT, mask_BT), carry_BT), mask_BT)


def mask_off_policy(term: Term, threshold: float, sampled_by: str = "old_logp") -> Term:
    """The term's loss, but 0 on sequences with A < 0 and mean_t(log pi_sampler - log pi) > threshold.

    The tokens still count in the reduction's denominator.

    Args:
      term: what is masked; keep a KL term outside.
      threshold: nats per token.
      sampled_by: "old_logp", or "rollout_logp" to include the gap between engine and trainer.
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
