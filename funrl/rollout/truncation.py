"""Truncation by top-k, top-p and min-p with a threshold on the probability, without sorting the vocabulary.

Tokens are ordered by probability, ties by token id. Each of the three keeps the first n tokens, so together they keep
the first min(n). Probabilities are converted to `mass`, integer multiples of 2^-60, whose sums are exact: which tokens
are kept depends neither on the order of a sum, nor on the number of candidates, nor on the device.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from funrl.rollout.sampling_parameters import Sampling

ONE = 1 << 60  # mass of probability 1
SHORT_TOKENS = 64  # most probable tokens examined first if only top-p or min-p is given
LONGEST = 8192  # a smaller top-k uses a list of that many tokens, a larger one digits
GROUP_TOKENS = 64  # neighbouring tokens whose maximum decides whether they are examined
DIGIT_BITS = 10  # bits of a probability that are determined at a time


class Shortlist(NamedTuple):
    """The most probable tokens of each row, ordered by token id.

    Attributes:
      ids_RC: int64.
      mass_RC: int64, 0 for tokens that are not kept.
      open_R: bool, the list does not determine which tokens the row keeps: it is too short, or ends within a tie.
    """

    ids_RC: Tensor
    mass_RC: Tensor
    open_R: Tensor


def shortlist(prob_RV: Tensor, sampling: Sampling) -> Shortlist | None:
    """Lists that hold, for most rows, all tokens that are kept.

    None where lists would not pay: with a large top-k, and on devices where the host would have to wait to find the
    open rows. A tensor without data, such as a cost estimate's, is treated as one on such a device.
    """
    k = _top_k(prob_RV, sampling)
    count = 1 + (k or SHORT_TOKENS)
    if type(prob_RV) is not Tensor or prob_RV.device.type != "cpu" or count > LONGEST:
        return None
    vocab = prob_RV.shape[1]
    if count >= vocab:
        value_RC, ids_RC = prob_RV.sort(dim=1, descending=True, stable=True)
    else:
        value_RC, ids_RC = _largest(prob_RV, count)
    n_R1 = _kept_count(value_RC, k, sampling)
    kept_RC = torch.arange(value_RC.shape[1]) < n_R1
    if count >= vocab:
        open_R = torch.zeros(len(prob_RV), dtype=torch.bool)
    else:
        last_R1 = value_RC.gather(1, n_R1 - 1)
        next_R1 = value_RC.gather(1, n_R1.clamp_max(count - 1))  # the last one itself, where all are kept
        open_R = ~(next_R1 < last_R1).squeeze(1)
    ids_RC, order_RC = ids_RC.sort(1)
    mass_RC = mass_of(value_RC).masked_fill_(~kept_RC, 0).gather(1, order_RC)
    return Shortlist(ids_RC, mass_RC, open_R)


def kept_mass(prob_RV: Tensor, sampling: Sampling) -> Tensor:
    """Mass of every token, 0 for tokens that are not kept. Shapes are static, and the host does not wait.

    Args:
      prob_RV: probabilities, float32 or float64.
      sampling: top_k, top_p, min_p.

    Returns: [R, V] int64.
    """
    mass_RV = mass_of(prob_RV)
    k = _top_k(prob_RV, sampling)
    if 0 < k < LONGEST:  # then top-p and min-p are settled among these
        value_RC = prob_RV.topk(k).values
        n_R1 = _kept_count(value_RC, k, sampling)
        last_R1 = value_RC.gather(1, n_R1 - 1)
        return _first(prob_RV, mass_RV, last_R1, ties_R1=n_R1 - (value_RC > last_R1).sum(1, keepdim=True))
    if k:
        wanted_R1 = torch.full_like(mass_RV[:, :1], k)
        mass_RV = _first(prob_RV, mass_RV, *threshold(prob_RV, torch.ones_like(mass_RV), wanted_R1))
    if sampling.top_p < 1:
        total_R1 = mass_RV.sum(1, keepdim=True) if k else torch.full_like(mass_RV[:, :1], ONE)
        last_R1, wanting_R1 = threshold(prob_RV, mass_RV, _share(sampling.top_p, total_R1))
        each_R1 = mass_of(last_R1).clamp_min_(1)
        mass_RV = _first(prob_RV, mass_RV, last_R1, ties_R1=(wanting_R1 + each_R1 - 1) // each_R1)
    if sampling.min_p > 0:
        mass_RV = mass_RV.masked_fill(prob_RV < sampling.min_p * prob_RV.amax(1, keepdim=True), 0)
    return mass_RV


def threshold(prob_RV: Tensor, weight_RV: Tensor, wanted_R1: Tensor) -> tuple[Tensor, Tensor]:
    """Probability of the last token needed for the most probable tokens' weights to add up to `wanted_R1`.

    The bits of that probability are determined digit by digit, from sums of the weights for each value of a digit.

    Args:
      prob_RV: from 0 to 1, float32 or float64.
      weight_RV: int64, at least 0.
      wanted_R1: int64, at least 1.

    Returns: the probability [R, 1], 0 where all weights together are less than wanted; `wanted_R1` minus the weights of
      the more probable tokens [R, 1].
    """
    integer, bits = {torch.float32: (torch.int32, 30), torch.float64: (torch.int64, 62)}[prob_RV.dtype]
    key_RV = prob_RV.view(integer)  # ordered as the probabilities, which are not negative
    prefix_R1 = torch.zeros_like(key_RV[:, :1])
    wanting_R1 = wanted_R1
    for shift in range(bits - DIGIT_BITS, -DIGIT_BITS, -DIGIT_BITS):
        values = 1 << min(DIGIT_BITS, DIGIT_BITS + shift)
        shift = max(shift, 0)
        prefix_R1 = prefix_R1 * values
        digit_RV = (key_RV >> shift).sub_(prefix_R1).clamp_(-1, values)  # beyond the digits: what is known to differ
        sums_RD = wanted_R1.new_zeros(len(key_RV), values + 2)
        sums_RD.scatter_add_(1, digit_RV.neg_().add_(values).long(), weight_RV)  # the most probable first
        upto_RD = sums_RD.cumsum(1)
        found_R1 = (upto_RD < wanted_R1).sum(1, keepdim=True).clamp_max_(values)
        wanting_R1 = wanted_R1 - (upto_RD - sums_RD).gather(1, found_R1)
        prefix_R1 = prefix_R1 + (values - found_R1).to(integer)
    return prefix_R1.view(prob_RV.dtype), wanting_R1


def mass_of(prob: Tensor) -> Tensor:
    """Probabilities in integer multiples of 2^-60, int64."""
    return (prob * float(ONE)).to(torch.int64)


def _kept_count(value_RC: Tensor, k: int, sampling: Sampling) -> Tensor:
    """Number of the most probable tokens that are kept, [R, 1], at least 1.

    Args:
      value_RC: the largest probabilities, descending, at least the first k.
      k: that of top-k; 0: none.
    """
    kept_RC = (torch.arange(value_RC.shape[1], device=value_RC.device) < (k or value_RC.shape[1])).expand_as(value_RC)
    if sampling.top_p < 1:
        mass_RC = mass_of(value_RC) * kept_RC
        # The list has not all tokens where there is no top-k; together they are 1, but for rounding.
        total_R1 = mass_RC.sum(1, keepdim=True) if k else torch.full_like(mass_RC[:, :1], ONE)
        kept_RC = kept_RC & (mass_RC.cumsum(1) - mass_RC < _share(sampling.top_p, total_R1))
    if sampling.min_p > 0:
        kept_RC = kept_RC & (value_RC >= sampling.min_p * value_RC[:, :1])
    return kept_RC.sum(1, keepdim=True).clamp_min_(1)


def _share(top_p: float, total_R1: Tensor) -> Tensor:
    """Smallest mass that is at least this share of a total."""
    return (total_R1.double() * top_p).ceil().to(torch.int64).clamp_min_(1)


def _first(prob_RV: Tensor, mass_RV: Tensor, last_R1: Tensor, ties_R1: Tensor) -> Tensor:
    """Mass of the tokens above a probability, and of the first few tokens that have it; 0 elsewhere."""
    tie_RV = (prob_RV == last_R1) & (mass_RV > 0)
    kept_RV = (prob_RV > last_R1) | (tie_RV & (tie_RV.cumsum(1, dtype=torch.int32) <= ties_R1))
    return mass_RV.masked_fill(~kept_RV, 0)


def _largest(prob_RV: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Largest probabilities of each row, descending, and their token ids.

    They are in the groups of tokens with the largest maxima: a group with one of them has a maximum at least as large.
    """
    groups, rest = divmod(prob_RV.shape[1], GROUP_TOKENS)
    if count * GROUP_TOKENS * 2 > prob_RV.shape[1]:
        return prob_RV.topk(count)
    most_RG = prob_RV[:, : groups * GROUP_TOKENS].unflatten(1, (groups, GROUP_TOKENS)).amax(-1)
    group_RC1 = most_RG.topk(count, sorted=False).indices.unsqueeze(2)
    ids_RN = (group_RC1 * GROUP_TOKENS + torch.arange(GROUP_TOKENS)).flatten(1)
    if rest:
        ids_RN = torch.cat([ids_RN, torch.arange(groups * GROUP_TOKENS, prob_RV.shape[1]).expand(len(ids_RN), -1)], 1)
    value_RC, at_RC = prob_RV.gather(1, ids_RN).topk(count)
    return value_RC, ids_RN.gather(1, at_RC)


def _top_k(prob_RV: Tensor, sampling: Sampling) -> int:
    """Number of tokens that top-k keeps; 0: all."""
    return sampling.top_k if sampling.top_k < prob_RV.shape[1] else 0
