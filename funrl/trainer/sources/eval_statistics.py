"""Statistics of an evaluation with N samples of each of P prompts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

Z = 1.959963984540054  # 95 % of a normal distribution is within this many standard deviations


class Interval95(NamedTuple):
    """A 95 % confidence interval."""

    low: float
    high: float


def best_at(values_PN: np.ndarray, k: int) -> np.ndarray:
    """Expected maximum over k distinct samples of each prompt, [P]; for verdicts (0 or 1) this is pass@k.

    The exact mean over all subsets of k samples, sum_i C(i - 1, k - 1) / C(N, k) x_(i) with x_(i) the i-th smallest.
    For verdicts, c of N right, it is 1 - C(N - c, k) / C(N, k). N counts the prompt's samples that have a value.

    Args:
      values_PN: reward of each sample; NaN: it has none.
      k: from 1 (the mean) to N (the largest).

    Returns: NaN where fewer than k samples of a prompt have a value.

    >>> best_at(np.array([[0.0, 0.0, 1.0, 0.0]]), 2)
    array([0.5])

    References: Chen et al., 2021, https://arxiv.org/abs/2107.03374
    """
    counts_P = (~np.isnan(values_PN)).sum(1)
    sorted_PN = np.sort(values_PN, 1)  # NaN last
    best_P = np.full(len(values_PN), np.nan)
    for count in np.unique(counts_P[counts_P >= k]).tolist():
        share_N = np.array([math.comb(i, k - 1) / math.comb(count, k) for i in range(count)])
        rows = counts_P == count
        best_P[rows] = sorted_PN[rows, :count] @ share_N
    return best_P


def mean_over_samples(values_PN: np.ndarray) -> np.ndarray:
    """The mean of each prompt's samples that have a value, [P]; NaN where none has."""
    scored_PN = ~np.isnan(values_PN)
    counts_P = scored_PN.sum(1)
    if scored_PN.all():
        return values_PN.mean(1)
    return np.where(counts_P > 0, np.where(scored_PN, values_PN, 0).sum(1) / np.maximum(counts_P, 1), np.nan)


def majority_at(answers: Sequence[str], values_N: np.ndarray, k: int) -> float:
    """Expected value of the most frequent answer among k samples of one prompt.

    The mean over N // k blocks of k samples. The first of equally frequent answers wins, and has the value of its
    first sample. A sample without a value is not among the N; with fewer than k, the result is NaN.

    Args:
      answers: of the samples.
      values_N: value of each sample; NaN: it has none.
    """
    kept = [i for i in range(len(answers)) if not math.isnan(values_N[i])]
    answers = [answers[i] for i in kept]
    values_N = values_N[kept]
    if len(kept) < k:
        return math.nan
    values = []
    for begin in range(0, len(answers) // k * k, k):
        block = list(answers[begin : begin + k])
        chosen = max(block, key=block.count)  # max returns the first of equals
        values.append(values_N[begin + block.index(chosen)])
    return float(np.mean(values))


def interval(values_P: np.ndarray, verdicts: bool) -> Interval95 | None:
    """95 % confidence interval of the mean over prompts. Prompts are independent; samples of one prompt are not.

    With mean m and standard error s / sqrt(P), m +- 1.96 s / sqrt(P). For numbers between 0 and 1 (verdicts and shares
    of them) it is Wilson's interval for the number of trials that would have this error, m (1 - m) P / s^2, or P if
    s is 0: it stays between 0 and 1, and has a width even if all prompts have the same value.

    Args:
      values_P: one number a prompt.
      verdicts: whether each is from 0 to 1.

    Returns: None for a single prompt, whose spread is unknown.

    References: Wilson, 1927, https://doi.org/10.1080/01621459.1927.10502953; Miller, 2024,
      https://arxiv.org/abs/2411.00640 (errors clustered by prompt)
    """
    count = len(values_P)
    mean = float(values_P.mean())
    variance = float(values_P.var(ddof=1)) / count if count > 1 else 0.0
    if not verdicts:
        return None if count < 2 else Interval95(mean - Z * math.sqrt(variance), mean + Z * math.sqrt(variance))
    trials = mean * (1 - mean) / variance if variance > 0 and 0 < mean < 1 else count
    centre = (mean + Z * Z / (2 * trials)) / (1 + Z * Z / trials)
    reach = Z / (1 + Z * Z / trials) * math.sqrt(mean * (1 - mean) / trials + Z * Z / (4 * trials * trials))
    return Interval95(max(0.0, centre - reach) if mean > 0 else 0.0, min(1.0, centre + reach) if mean < 1 else 1.0)


def sample_counts(samples: int) -> list[int]:
    """The k of pass@k: powers of two below the number of samples, and that number; none for one sample.

    >>> sample_counts(12)
    [2, 4, 8, 12]
    """
    powers = [2**n for n in range(1, samples.bit_length()) if 2**n < samples]
    return [*powers, samples] if samples > 1 else []
