"""Learning from preferences: DPO and its family, ORPO, CPO, SimPO, KTO.

How pairs lie in a batch, either of:
- side by side: a row holds segment 1, the chosen completion with its prompt, and segment 2, the rejected one (then 3
  and 4, and so on). Rows may be split and ordered at will, so this is what the trainer takes; `side_by_side` makes it.
- interleaved: rows 2i and 2i + 1 are the chosen and the rejected completion of pair i; `segments` is None. Whoever
  splits such a batch keeps pairs together.
`mask` is true on the completions. Every sequence of a pair has at least one masked token.

The loss of a pair stands on every token of both its sequences, so `sequence_mean` gives the mean over pairs, exactly,
under micro-batches, packing and data parallelism. Metrics are means over pairs.

    DPO    reduce(preference(sigmoid_pairs(0.1), reference_log_ratio()), sequence_mean())
    IPO    ipo_pairs(0.1), reference_log_ratio(per_token=True); so with sigmoid_pairs TRL's sigmoid_norm
    SimPO  sigmoid_pairs(2.0, margin=1.0), log_likelihood(per_token=True)
    CPO    sigmoid_pairs(0.1), log_likelihood(), and chosen_likelihood(1.0)
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, pad

from funrl.algos.core import (
    Fraction,
    Loss,
    Term,
    needs,
    needs_of,
    reduce,
    scale,
    sequence_sums,
    to_own_tokens,
    together,
)
from funrl.algos.pair_losses import PairLoss, check_beta, sigmoid_pairs, smoothed
from funrl.algos.reductions import sequence_mean, token_mean
from funrl.algos.supervised import negative_log_likelihood, restrict
from funrl.algos.terms import constant, either, kept
from funrl.algos.terms import sequence_sum as own_sum
from funrl.batch import Batch

PairReward = Callable[[Tensor, Batch], tuple[Tensor, Tensor]]


def pair_sums(x_BT: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
    """The sums of x over the masked tokens of the chosen and of the rejected sequences.

    Returns: two tensors [P]; in packed rows P counts every pair that would fit, those that are not there sum to 0.
    Raises:
      ValueError: an odd number of interleaved rows.
    """
    table = sequence_sums(x_BT, batch.mask, batch.segments)
    if batch.segments is not None:
        table = table[:, 1 : 1 + batch.mask.shape[1] // 2 * 2]
    elif table.shape[0] % 2:
        raise ValueError(f"{table.shape[0]} rows are no pairs: chosen and rejected rows must alternate")
    pairs_P2 = table.reshape(-1, 2)
    return pairs_P2[:, 0], pairs_P2[:, 1]


def to_pair_tokens(x_P: Tensor, batch: Batch) -> Tensor:
    """Gives every masked token the number of its own pair: from [P], as of `pair_sums`, to [B, T]."""
    both_P2 = x_P[:, None].expand(-1, 2)
    if batch.segments is None:
        return to_own_tokens(both_P2.reshape(-1, 1), batch.mask)
    rows, width = batch.mask.shape
    table = pad(both_P2.reshape(rows, width // 2 * 2), (1, width % 2))
    return to_own_tokens(table, batch.mask, batch.segments)


def pairs_present(batch: Batch) -> Tensor:
    """[P] bool, the pairs that have tokens."""
    chosen_P, rejected_P = pair_sums(torch.ones_like(batch.mask, dtype=torch.float32), batch)
    return (chosen_P > 0) & (rejected_P > 0)


def chosen(batch: Batch) -> Tensor:
    """Bool that broadcasts to [B, T], the tokens of chosen sequences; for `restrict`."""
    if batch.segments is not None:
        return batch.segments % 2 == 1
    return (torch.arange(batch.mask.shape[0], device=batch.mask.device) % 2 == 0)[:, None]


def side_by_side(batch: Batch, chosen_P: Tensor, rejected_P: Tensor) -> Batch:
    """Puts the two rows of each pair into one row of twice the width, as segments 1 and 2.

    Args:
      batch: rows that are single sequences; `length` says where padding begins, None: nowhere.
      chosen_P, rejected_P: [P] int64, row numbers.
    Returns: P rows; what is known of a row and not of its tokens is the chosen row's.
    """
    rows, width = batch.mask.shape
    place_T = torch.arange(width, device=batch.mask.device)
    full_B = torch.full((rows,), width, device=batch.mask.device)
    length_B = full_B if batch.length is None else batch.length
    real_BT = (place_T < length_B[:, None]).long()
    positions_BT = place_T.expand(rows, width) if batch.positions is None else batch.positions

    def join(name: str, x: Tensor) -> Tensor:
        of_tokens = x.dim() > 1 and name != "scores"
        return torch.cat((x[chosen_P], x[rejected_P]), 1) if of_tokens else x[chosen_P]

    known = {name: x for name, x in batch._replace(positions=positions_BT)._asdict().items() if x is not None}
    joined = Batch(**{name: join(name, x) for name, x in known.items()})
    segments = torch.cat((real_BT[chosen_P], 2 * real_BT[rejected_P]), 1)
    return joined._replace(segments=segments, length=width + length_B[rejected_P])


def best_and_worst(score_B: Tensor, group_B: Tensor) -> tuple[Tensor, Tensor]:
    """The rows of the highest and the lowest score of each group; groups of equal scores are left out.

    Of equal scores the first row is taken.

    Returns: two tensors [P] int64, row numbers, groups in ascending order.
    """
    by_score = score_B.argsort(stable=True)
    lowest = by_score[group_B[by_score].argsort(stable=True)]
    by_score = score_B.argsort(stable=True, descending=True)
    highest = by_score[group_B[by_score].argsort(stable=True)]
    group = group_B[highest]
    first = torch.ones_like(group, dtype=torch.bool)
    first[1:] = group[1:] != group[:-1]
    best_G, worst_G = highest[first], lowest[first]
    differ = score_B[best_G] > score_B[worst_G]
    return best_G[differ], worst_G[differ]


def online_pairs(batch: Batch) -> Batch:
    """Pairs of the policy's own samples, side by side: with the loss of DPO this is online DPO.

    Needs: score, group [B], and what the loss needs; rows are single sequences.
    References: Guo et al., 2024, https://arxiv.org/abs/2402.04792

    Warning: TRL samples two completions a prompt and lets a judge or reward model choose; a tie is a pair there.
    """
    assert batch.score is not None and batch.group is not None
    return side_by_side(batch, *best_and_worst(batch.score, batch.group))


def reference_log_ratio(per_token: bool = False) -> PairReward:
    """sum_t log(pi / pi_ref) of a completion, in nats; its mean over tokens where `per_token`. Needs: ref_logp."""

    @needs("ref_logp")
    def reward(logp_BT: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        return _scored(kept(logp_BT, batch.mask) - constant(batch.ref_logp, batch.mask), batch, per_token)

    return reward


def log_likelihood(per_token: bool = False) -> PairReward:
    """sum_t log pi of a completion, in nats; its mean over tokens where `per_token`. No reference is needed."""

    @needs()
    def reward(logp_BT: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        return _scored(kept(logp_BT, batch.mask), batch, per_token)

    return reward


def _scored(x_BT: Tensor, batch: Batch, per_token: bool) -> tuple[Tensor, Tensor]:
    chosen_P, rejected_P = pair_sums(x_BT, batch)
    if not per_token:
        return chosen_P, rejected_P
    chosen_length_P, rejected_length_P = pair_sums(torch.ones_like(x_BT), batch)
    return chosen_P / chosen_length_P.clamp_min(1), rejected_P / rejected_length_P.clamp_min(1)


def preference(loss: PairLoss, reward: PairReward) -> Term:
    """The loss of a pair given the implicit rewards of its two completions.

    Several losses with weights: `add(scale(0.8, preference(a, reward)), scale(0.2, preference(b, reward)))`.

    Args:
      loss: one of `funrl.algos.pair_losses`.
      reward: `reference_log_ratio(...)` or `log_likelihood(...)`.
    Needs: what the reward needs.
    Returns: a term; loss [B, T], the same on all tokens of a pair; metrics "preference/accuracy" (the chosen one's
      reward is higher; a tie counts one half), "preference/chosen", "preference/rejected" and "preference/margin"
      (rewards, before beta).
    """

    @needs(*needs_of(reward))
    def term(logp_BT: Tensor, batch: Batch):
        chosen_P, rejected_P = reward(logp_BT, batch)
        return to_pair_tokens(loss(chosen_P, rejected_P), batch), pair_metrics(chosen_P, rejected_P, batch)

    return term


def pair_metrics(chosen_P: Tensor, rejected_P: Tensor, batch: Batch) -> dict[str, Fraction]:
    """Means over pairs of the rewards, their difference, and how often the chosen one's is higher.

    A tie counts one half, so a policy that is its reference has an accuracy of 1/2.
    """
    present_P = pairs_present(batch)
    chosen_P, rejected_P = chosen_P.detach(), rejected_P.detach()

    def mean(x_P: Tensor) -> Fraction:
        return Fraction(kept(x_P, present_P).sum(), present_P.sum().to(x_P.dtype))

    return {
        "preference/accuracy": mean((1 + (chosen_P - rejected_P).sign()) / 2),
        "preference/chosen": mean(chosen_P),
        "preference/rejected": mean(rejected_P),
        "preference/margin": mean(chosen_P - rejected_P),
    }


def aot(beta: float = 0.1, smoothing: float = 0.0, paired: bool = True) -> Term:
    """Preferences between distributions: the i-th smallest of one side against the i-th smallest of the other.

    paired: of log pi(chosen) / pi(rejected) against the same of pi_ref; otherwise of log pi/pi_ref of the chosen
    against that of the rejected ones. Either difference goes through DPO's smoothed sigmoid.

    Args:
      beta: in 1 / nats.
      smoothing: probability that a label is wrong.
      paired: which of the two.
    Needs: ref_logp [B, T].
    Returns: a term; loss [B, T]: it stands on the tokens of the pair whose policy side (paired) or chosen one is meant.
    References: Melnyk et al., 2024, https://arxiv.org/abs/2406.05882

    Warning: the order is that of the rows the term is given. The loss is a mini-batch's only where the mini-batch is
    not split; with micro-batches or data ranks it is the mean of their own losses, as in TRL.
    """
    check_beta(beta)

    @needs("ref_logp")
    def term(logp_BT: Tensor, batch: Batch):
        present_P = pairs_present(batch)
        policy, reference = (
            pair_sums(kept(logp_BT, batch.mask), batch),
            pair_sums(constant(batch.ref_logp, batch.mask), batch),
        )
        chosen_P, rejected_P = policy[0] - reference[0], policy[1] - reference[1]
        if paired:
            upper_P, lower_P = policy[0] - policy[1], reference[0] - reference[1]
        else:
            upper_P, lower_P = chosen_P, rejected_P
        last_P = torch.full_like(upper_P, torch.inf)
        rank_P = torch.where(present_P, upper_P, last_P).argsort(stable=True).argsort(stable=True)
        sorted_P = torch.where(present_P, lower_P, last_P).sort(stable=True).values
        gap_P = upper_P - torch.where(present_P, sorted_P[rank_P], torch.zeros_like(upper_P))
        loss_BT = to_pair_tokens(smoothed(beta * gap_P, smoothing), batch)
        return loss_BT, pair_metrics(chosen_P, rejected_P, batch)

    return term


def odds_ratio(beta: float = 0.1) -> Term:
    """-beta log s(log odds(chosen) - log odds(rejected)), odds(p) = p / (1 - p), p the mean-token probability of each.

    Args:
      beta: weight of the loss, which ORPO adds to the chosen one's likelihood.
    Returns: a term; loss [B, T], the same on all tokens of a pair; metrics as those of `preference`, per token.
    References: ORPO, Hong et al., 2024, https://arxiv.org/abs/2403.07691
    """
    reward = log_likelihood(per_token=True)

    @needs()
    def term(logp_BT: Tensor, batch: Batch):
        chosen_P, rejected_P = reward(logp_BT, batch)
        odds_P = _log_odds(chosen_P) - _log_odds(rejected_P)
        return to_pair_tokens(-beta * logsigmoid(odds_P), batch), pair_metrics(chosen_P, rejected_P, batch)

    return term


def _log_odds(logp_P: Tensor) -> Tensor:
    logp_P = logp_P.clamp(max=-1e-6)
    return logp_P - (-torch.expm1(logp_P)).log()


def chosen_likelihood(weight: float = 1.0) -> Loss:
    """weight times the mean of -log pi over the tokens of the chosen completions; add it with `together`."""
    return restrict(reduce(scale(weight, negative_log_likelihood()), token_mean()), chosen)


def dpo(beta: float = 0.1, smoothing: float = 0.0) -> Loss:
    """Direct preference optimisation: `preference(sigmoid_pairs(beta, smoothing), reference_log_ratio())` per pair.

    Needs: ref_logp [B, T].
    References: Rafailov et al., 2023, https://arxiv.org/abs/2305.18290
    """
    return reduce(preference(sigmoid_pairs(beta, smoothing), reference_log_ratio()), sequence_mean())


def simpo(beta: float = 2.0, gamma: float = 1.0) -> Loss:
    """SimPO: DPO on mean-token log-likelihoods with a target margin and no reference.

    References: Meng et al., 2024, https://arxiv.org/abs/2405.14734
    """
    return reduce(preference(sigmoid_pairs(beta, margin=gamma), log_likelihood(per_token=True)), sequence_mean())


def cpo(beta: float = 0.1, alpha: float = 1.0) -> Loss:
    """CPO: DPO without a reference, and the chosen completions' likelihood.

    References: Xu et al., 2024, https://arxiv.org/abs/2401.08417
    """
    contrast = reduce(preference(sigmoid_pairs(beta), log_likelihood()), sequence_mean())
    return together(contrast, chosen_likelihood(alpha))


def orpo(beta: float = 0.1) -> Loss:
    """ORPO: the chosen completions' likelihood and an odds ratio, without a reference.

    References: Hong et al., 2024, https://arxiv.org/abs/2403.07691

    Warning: in TRL the likelihood covers the prompt too; here it covers the mask.
    """
    return together(chosen_likelihood(), reduce(odds_ratio(beta), sequence_mean()))


def kto(beta: float = 0.1, desirable: float = 1.0, undesirable: float = 1.0, baseline: bool = True) -> Term:
    """Kahneman-Tversky: w (1 - s(+-beta (h - z))), h = sum_t log pi/pi_ref of the sequence, + where it is desirable.

    Args:
      beta: in 1 / nats.
      desirable, undesirable: w of either kind of sequence.
      baseline: take z from the batch; without it z = 0, which is APO-zero for unpaired data.
    Needs: ref_logp, label [B, T] (above 1/2: desirable); kl_baseline [B, T] (z, see `reference_point`) if baseline.
    Returns: a term; loss [B, T], the same on all tokens of a sequence: reduce by `sequence_mean`; metric
      "preference/kto_reward" (h, in nats, a mean over tokens).
    References: Ethayarajh et al., 2024, https://arxiv.org/abs/2402.01306

    Warning: TRL takes z anew in every micro-batch, from mismatched completions; here z is a constant of the batch.
    """
    check_beta(beta)

    @needs("ref_logp", "label", *(("kl_baseline",) if baseline else ()))
    def term(logp_BT: Tensor, batch: Batch):
        moved_BT = kept(logp_BT, batch.mask) - constant(batch.ref_logp, batch.mask)
        h_BT = own_sum(moved_BT, batch.mask, batch.segments)
        gain_BT = beta * (h_BT - constant(batch.kl_baseline, batch.mask) if baseline else h_BT)
        good_BT = constant(batch.label, batch.mask) > 0.5
        weight_BT = either(good_BT, desirable, undesirable, h_BT)
        loss_BT = weight_BT * torch.sigmoid(torch.where(good_BT, -gain_BT, gain_BT))
        return loss_BT, {"preference/kto_reward": h_BT.detach()}

    return term


def reference_point(logp_BT: Tensor, batch: Batch) -> Tensor:
    """KTO's z: the mean over sequences of sum_t log pi/pi_ref, at least 0, as `kl_baseline` [B, T].

    Args:
      logp_BT: nats, of completions that were put behind other prompts than their own, over the whole mini-batch.
      batch: those completions. Needs: ref_logp.
    Returns: [B, T], the same number everywhere; no gradient.
    """
    moved_BT = constant(logp_BT, batch.mask) - constant(batch.ref_logp, batch.mask)
    sums, lengths = (sequence_sums(x, batch.mask, batch.segments) for x in (moved_BT, torch.ones_like(moved_BT)))
    mean = sums.sum() / (lengths > 0).sum().clamp_min(1)
    return mean.clamp_min(0).expand(batch.mask.shape)
