"""Terms that learn from preferences: DPO and its family, ORPO's odds ratio, AOT, KTO.

See `funrl.algos.losses.pairs` for the layout of pairs. The loss of a pair is placed on every token of both its
sequences, so `sequence_mean` gives exactly the mean over pairs, also under micro-batches, packing and data parallelism.
Metrics are means over pairs; rewards and margins are multiplied by beta, as TRL reports them.

    DPO      preference(sigmoid_pairs(0.1), reference_log_ratio())
    f-DPO    preference(sigmoid_pairs(0.1), reference_log_ratio(divergence="forward_kl"))
    LD-DPO   preference(sigmoid_pairs(0.1), reference_log_ratio(length_alpha=0.5))
    WPO      preference(sigmoid_pairs(0.1), reference_log_ratio(), on_policy_weight())
    IPO      preference(ipo_pairs(0.1), reference_log_ratio(per_token=True)); with sigmoid_pairs TRL's sigmoid_norm
    SimPO    preference(sigmoid_pairs(2.0, margin=1.0), log_likelihood(per_token=True))
    AlphaPO  preference(sigmoid_pairs(2.5, margin=0.1), log_likelihood(per_token=True, alpha=0.25))
    CPO      preference(sigmoid_pairs(0.1), log_likelihood()) and `chosen_likelihood(1.0)`
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from funrl.algos.core import Loss, reduce, scale
from funrl.algos.losses.likelihood import negative_log_likelihood, restrict
from funrl.algos.losses.pair_losses import PairLoss, check_beta, smoothed
from funrl.algos.losses.pairs import chosen, gold, pair_metrics, pair_sums, pairs_present, to_pair_tokens
from funrl.algos.losses.ratios import bounded_exp, either, sum_of_sequence
from funrl.algos.losses.reductions import token_mean
from funrl.algos.masks import rounding, sequence_sums, to_own_tokens, where_masked
from funrl.algos.metrics import Mean, token_mean_of
from funrl.algos.terms import Term
from funrl.batch import Batch

PairReward = Callable[[Tensor, Batch], tuple[Tensor, Tensor]]
PairWeight = Callable[[Tensor, Batch], Tensor]

F_DIVERGENCES = ("reverse_kl", "forward_kl", "js", "alpha")


def reference_log_ratio(
    per_token: bool = False,
    divergence: str = "reverse_kl",
    divergence_alpha: float = 0.5,
    length_alpha: float = 1.0,
) -> PairReward:
    """f'(u) of a completion, u = pi / pi_ref: log u = sum_t log(pi / pi_ref) for the reverse KL, which is DPO's.

    | divergence | f'(u), up to a constant |
    |---|---|
    | reverse_kl | log u |
    | forward_kl | -1 / u |
    | js | log(2 u / (1 + u)) |
    | alpha | (1 - u^-alpha) / alpha |

    Args:
      per_token: log u is the mean over the completion's tokens instead of the sum.
      divergence: the divergence that keeps the policy near its reference.
      divergence_alpha: parameter of "alpha", in (0, 1).
      length_alpha: factor of the tokens beyond the length of the pair's shorter completion, 0 to 1; below 1 is LD-DPO.
    Needs: ref_logp [B, T].

    Raises:
      ValueError: the divergence is unknown, or a factor is outside its bounds.
    References: f-DPO, Wang et al., 2023, https://arxiv.org/abs/2309.16240; LD-DPO, Liu et al., 2024,
      https://arxiv.org/abs/2409.06411

    Warning: TRL's alpha is 1 - divergence_alpha (f_alpha_divergence_coef, 0.5 by default). With its ipo and
    sigmoid_norm it divides f' of the summed log-ratio by the length, so that a constant added to f' changes the loss;
    here f' is of the mean log-ratio.
    """
    if divergence not in F_DIVERGENCES:
        raise ValueError(f"divergence is {divergence!r}; there are {list(F_DIVERGENCES)}")
    if not 0 < divergence_alpha < 1:
        raise ValueError(f"divergence_alpha is {divergence_alpha}: it must be above 0 and below 1")
    if not 0 <= length_alpha <= 1:
        raise ValueError(f"length_alpha is {length_alpha}: it must be from 0 to 1")

    def of_ratio(h_P: Tensor) -> Tensor:
        if divergence == "forward_kl":
            return -bounded_exp(-h_P)
        if divergence == "js":
            return math.log(2) + logsigmoid(h_P)
        return alpha_reward(h_P, divergence_alpha) if divergence == "alpha" else h_P

    def reward(logp_BT: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        moved_BT = logp_BT - batch.ref_logp
        if length_alpha < 1:
            moved_BT = torch.where(beyond_shorter(batch), length_alpha * moved_BT, moved_BT)
        chosen_P, rejected_P = of_completions(moved_BT, batch, per_token)
        return of_ratio(chosen_P), of_ratio(rejected_P)

    return reward


def log_likelihood(per_token: bool = False, alpha: float = 0.0) -> PairReward:
    """log u with u = prod_t pi(t) of a completion, or (1 - u^-alpha) / alpha. No reference is needed.

    Args:
      per_token: log u is the mean over the completion's tokens instead of the sum.
      alpha: AlphaPO's shape of the reward; 0 is log u.
    References: AlphaPO, Gupta et al., 2025, https://arxiv.org/abs/2501.03884
    """

    def reward(logp_BT: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        chosen_P, rejected_P = of_completions(logp_BT, batch, per_token)
        return alpha_reward(chosen_P, alpha), alpha_reward(rejected_P, alpha)

    return reward


def alpha_reward(h: Tensor, alpha: float) -> Tensor:
    """(1 - exp(-alpha h)) / alpha, elementwise; h where alpha is 0."""
    return (1 - bounded_exp(-alpha * h)) / alpha if alpha else h


def of_completions(x_BT: Tensor, batch: Batch, per_token: bool) -> tuple[Tensor, Tensor]:
    """The sums, or means where `per_token`, of x over the chosen and over the rejected completions."""
    chosen_P, rejected_P = pair_sums(x_BT, batch)
    if not per_token:
        return chosen_P, rejected_P
    chosen_length_P, rejected_length_P = pair_sums(torch.ones_like(x_BT), batch)
    return chosen_P / chosen_length_P.clamp_min(1), rejected_P / rejected_length_P.clamp_min(1)


def beyond_shorter(batch: Batch) -> Tensor:
    """[B, T] bool, the tokens of a completion beyond the length of the shorter one of its pair."""
    mask_BT = batch.mask
    segments_BT = batch.get("segments")
    ones_BT = torch.ones_like(mask_BT, dtype=torch.float32)
    shorter_BT = to_pair_tokens(torch.minimum(*pair_sums(ones_BT, batch)), batch)
    lengths_BS = sequence_sums(ones_BT, mask_BT, segments_BT)
    before_BT = to_own_tokens(lengths_BS.cumsum(1) - lengths_BS, mask_BT, segments_BT)  # tokens of earlier sequences
    return mask_BT & (mask_BT.cumsum(1) - before_BT > shorter_BT)


def on_policy_weight(bound: float | None = 1.0) -> PairWeight:
    """Weight of a pair: how likely the policy itself is to write both completions, a constant.

    w = exp(m(chosen) + m(rejected)), m the mean over a completion's tokens of log(pi(t) / sum_v pi(v)^2).

    Args:
      bound: the largest weight; None: none.
    Needs: sum_pi_squared [B, T].
    Returns: (logp, batch) -> [P].

    Raises:
      ValueError: the bound is not above 0.
    References: WPO, Zhou et al., 2024, https://arxiv.org/abs/2406.11827

    Warning: the paper's equation has no bound; its authors' code and TRL's first version cap the weight at 1, which is
    the default here; TRL 1.16 has no bound. sum_v pi(v)^2 comes from the policy before the first update on the batch,
    log pi from the current one. TRL's use_weighting takes both from the current one, which is the same with one update
    a batch.
    """
    if bound is not None and bound <= 0:
        raise ValueError(f"on_policy_weight(bound={bound}): the largest weight must be above 0, or None for no bound")

    def weight(logp_BT: Tensor, batch: Batch) -> Tensor:
        relative_BT = logp_BT.detach() - batch.sum_pi_squared.log()
        chosen_P, rejected_P = of_completions(relative_BT, batch, per_token=True)
        weight_P = (chosen_P + rejected_P).exp()
        return weight_P if bound is None else weight_P.clamp(max=bound)

    return weight


def preference(loss: PairLoss, reward: PairReward, weight: PairWeight | None = None) -> Term:
    """Loss of a pair, given the implicit rewards of both completions.

    Several losses with weights: `add(scale(0.8, preference(a, reward)), scale(0.2, preference(b, reward)))`.

    Args:
      loss: one of `funrl.algos.losses.pair_losses`.
      reward: `reference_log_ratio(...)` or `log_likelihood(...)`.
      weight: `on_policy_weight()`; None: every pair weighs the same.
    Needs: what reward and weight need.
    Returns: a term; loss [B, T], the same on all tokens of a pair; metrics "preference/accuracy" (share of pairs whose
      chosen reward is higher; a tie, a difference within rounding, counts one half), "preference/chosen",
      "preference/rejected" and "preference/margin" (rewards times beta), "preference/weight" if there is a weight.
    """

    def term(logp_BT: Tensor, batch: Batch):
        chosen_P, rejected_P = reward(logp_BT, batch)
        loss_P = loss(chosen_P, rejected_P)
        metrics = pair_metrics(
            loss.beta * chosen_P,
            loss.beta * rejected_P,
            batch,
            rounding_P=loss.beta * reward_rounding(reward, logp_BT, batch),
        )
        if weight is not None:
            weight_P = weight(logp_BT, batch)
            present_P = pairs_present(batch)
            loss_P = weight_P * loss_P
            metrics["preference/weight"] = Mean(
                where_masked(weight_P, present_P).sum(), present_P.sum().to(weight_P.dtype)
            )
        return to_pair_tokens(loss_P, batch), metrics

    return term


def reward_rounding(reward: PairReward, logp_BT: Tensor, batch: Batch) -> Tensor:
    """Difference of a pair's rewards [P] that rounding of the log-probabilities alone can cause."""
    with torch.no_grad():
        exact_2P = torch.stack(reward(logp_BT, batch))
        moved_2P = torch.stack(reward(logp_BT + rounding(logp_BT), batch))
        return (moved_2P - exact_2P).abs().sum(0)


def aot(beta: float = 0.1, smoothing: float = 0.0, paired: bool = True) -> Term:
    """Preferences between distributions: the i-th smallest of one side against the i-th smallest of the other.

    paired: sorts log pi(chosen) / pi(rejected) against the same under pi_ref. Unpaired: sorts log pi/pi_ref of the
    chosen against that of the rejected completions. Either difference goes through DPO's smoothed sigmoid.

    Args:
      beta: in 1 / nats.
      smoothing: probability that a label is wrong.
      paired: which of the two forms.
    Needs: ref_logp [B, T].
    Returns: a term; loss [B, T], on the tokens of the pair that gives the policy side (paired) or the chosen side;
      metrics as those of `preference`.
    References: Melnyk et al., 2024, https://arxiv.org/abs/2406.05882

    Warning: sorting is over the rows of one call. The loss is that of the mini-batch only if it is not split; with
    micro-batches or data ranks it is the mean of their separate losses, as in TRL.
    """
    check_beta(beta)

    def term(logp_BT: Tensor, batch: Batch):
        present_P = pairs_present(batch)
        policy = pair_sums(logp_BT, batch)
        reference = pair_sums(batch.ref_logp, batch)
        chosen_P = policy[0] - reference[0]
        rejected_P = policy[1] - reference[1]
        if paired:
            upper_P = policy[0] - policy[1]
            lower_P = reference[0] - reference[1]
        else:
            upper_P = chosen_P
            lower_P = rejected_P
        last_P = torch.full_like(upper_P, torch.inf)
        rank_P = torch.where(present_P, upper_P, last_P).argsort(stable=True).argsort(stable=True)
        sorted_P = torch.where(present_P, lower_P, last_P).sort(stable=True).values
        gap_P = upper_P - torch.where(present_P, sorted_P[rank_P], torch.zeros_like(upper_P))
        loss_BT = to_pair_tokens(smoothed(beta * gap_P, smoothing), batch)
        rounding_P = beta * sum(pair_sums(rounding(logp_BT), batch))
        return loss_BT, pair_metrics(beta * chosen_P, beta * rejected_P, batch, rounding_P=rounding_P)

    return term


def odds_ratio(beta: float = 0.1) -> Term:
    """-beta log s(log odds(chosen) - log odds(rejected)), odds(p) = p / (1 - p), p the mean-token probability of each.

    Args:
      beta: weight of the loss, which ORPO adds to the likelihood of the chosen completion.
    Returns: a term; loss [B, T], the same on all tokens of a pair; metrics as those of `preference`, per token.
    References: ORPO, Hong et al., 2024, https://arxiv.org/abs/2403.07691
    """
    check_beta(beta)
    reward = log_likelihood(per_token=True)

    def term(logp_BT: Tensor, batch: Batch):
        chosen_P, rejected_P = reward(logp_BT, batch)
        odds_P = _log_odds(chosen_P) - _log_odds(rejected_P)
        rounding_P = beta * reward_rounding(reward, logp_BT, batch)
        metrics = pair_metrics(beta * chosen_P, beta * rejected_P, batch, rounding_P=rounding_P)
        return to_pair_tokens(-beta * logsigmoid(odds_P), batch), metrics

    return term


def _log_odds(logp_P: Tensor) -> Tensor:
    logp_P = logp_P.clamp(max=-1e-6)
    return logp_P - (-torch.expm1(logp_P)).log()


def chosen_likelihood(coef: float = 1.0) -> Loss:
    """coef times the mean of -log pi over the tokens of the chosen completions; add it with `sum_losses`."""
    return restrict(reduce(scale(coef, negative_log_likelihood()), token_mean()), chosen)


def gold_likelihood(coef: float = 1.0) -> Loss:
    """coef times the mean of -log pi over the tokens of the third texts of triples; add it with `sum_losses`.

    References: TPO, Saeidi et al., 2024, https://arxiv.org/abs/2405.16681
    """
    return restrict(reduce(scale(coef, negative_log_likelihood()), token_mean()), gold)


def kto_loss(beta: float = 0.1, desirable: float = 1.0, undesirable: float = 1.0, baseline: bool = True) -> Term:
    """Kahneman-Tversky: w (1 - s(+-beta (h - z))), h = sum_t log pi/pi_ref of the sequence, + where it is desirable.

    Args:
      beta: in 1 / nats.
      desirable, undesirable: w of each kind of sequence.
      baseline: take z from the batch; without it z = 0, which is APO-zero for unpaired data.
    Needs: ref_logp, label [B, T] (above 1/2: desirable); kl_baseline [B, T] (z, of `reference_point`) if baseline.
    Returns: a term; loss [B, T], the same on all tokens of a sequence: reduce by `sequence_mean`;
      metrics "preference/chosen" and "preference/rejected" (beta h of the desirable and of the other sequences, means
      over tokens).
    References: Ethayarajh et al., 2024, https://arxiv.org/abs/2402.01306
    """
    check_beta(beta)

    def term(logp_BT: Tensor, batch: Batch):
        h_BT = sum_of_sequence(logp_BT - batch.ref_logp, batch)
        gain_BT = beta * (h_BT - batch.kl_baseline if baseline else h_BT)
        good_BT = batch.label > 0.5
        weight_BT = either(good_BT, desirable, undesirable, like=h_BT)
        loss_BT = weight_BT * torch.sigmoid(torch.where(good_BT, -gain_BT, gain_BT))
        kinds = {"chosen": batch.mask & good_BT, "rejected": batch.mask & ~good_BT}
        return loss_BT, {f"preference/{name}": token_mean_of(beta * h_BT, of) for name, of in kinds.items()}

    return term
